"""`piecework settings` and `piecework strategies`: nothing is missing, and what is listed is what holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.settings_list import setting_rows
from piecework.commands.strategies_list import strategy_rows
from piecework.training.methods import METHODS
from piecework.training.settings import Settings, SettingsError

ROOT = Path(__file__).resolve().parents[2]


OF_MOST = ["architecture.norm", "training.optimiser", "training.momentum", "training.optimiser-state", "memory.fit"]


def keys(word: str = "") -> list[str]:
    return [row["key"] for row in setting_rows(word)]


def test_every_setting_is_listed_with_its_default() -> None:
    assert {row["key"]: row["default"] for row in setting_rows()} == Settings().to_run_config()


def test_the_settings_of_one_strategy() -> None:
    assert {"fedprophet.dma", "fedprophet.apa-step", "fedprophet.stage-patience"} <= set(keys("fedprophet"))
    assert not {"training.lr", "prism.kappa"} & set(keys("fedprophet"))
    assert keys("depthfl") == [*OF_MOST, "depthfl.distillation-rounds", "depthfl.feddyn-alpha"]
    (kappa,) = [row for row in setting_rows("prism") if row["key"] == "prism.kappa"]
    assert kappa["belongs"] == "strategy = prism with prism.kernel-sampling = importance"
    assert (kappa["default"], kappa["allowed"]) == (2.5, "number >= 0")


def test_settings_about_a_word() -> None:
    assert {"training.lr", "training.lr-schedule", "feddf.server-lr"} <= set(keys("lr"))
    (row,) = [row for row in setting_rows("precision") if row["key"] == "training.precision"]
    assert row["allowed"] == "float32 | bfloat16"
    with pytest.raises(SettingsError, match="no setting is about 'momentm': piecework settings lists all"):
        setting_rows("momentm")
    assert keys("fedavg") == [*OF_MOST, "faults.accept-late", "fedavg.client-weights", "fedavg.fine-tuning-epochs"]


def test_every_strategy_is_listed() -> None:
    rows = {row["strategy"]: row for row in strategy_rows()}
    assert set(rows) == set(METHODS)
    assert all(row["about"].endswith(".") and row["family"] for row in rows.values())
    assert rows["fedprophet"]["paper"] == "https://arxiv.org/abs/2409.08372"
    assert rows["fedprophet"]["needs"] == "images, which it attacks in training"
    assert rows["feddf"]["caveat"] == "small devices train other models; needs public data"
    assert rows["prism"]["family"] == "low_rank"
    assert "jfat-caltech" in rows["jfat"]["presets"]
    assert "profl-vgg11-cifar10 --set strategy=depthfl" in rows["depthfl"]["presets"]  # which has no preset of its own


@pytest.mark.parametrize("words", [["settings", "profl"], ["strategies"], ["settings", "--json"]])
def test_what_people_see(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert {"settings": "profl.movement-window", "strategies": "fedprophet"}[words[0]] in done.output


@pytest.mark.parametrize("call", [["settings", "fedprophet"], ["presets"], ["clean"]])
def test_lists_are_quick_because_they_do_not_import_torch(tmp_path: Path, call: list[str]) -> None:
    script = (
        "import sys\nfrom piecework.cli import app\n"
        f"app({call!r}, standalone_mode=False)\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    assert done.stdout
    assert done.stderr.splitlines()[-1] == "False"
