"""`piecework presets`: what there is, and what for."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from piecework.cli import app
from piecework.commands.options import read_preset
from piecework.commands.presets import preset_rows
from piecework.training.settings import SettingsError

FILES = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "conf").glob("*.toml"))
BASES = ("robust-caltech", "robust-cifar10", "robust-fmnist")  # which are there to be extended
SHIPPED = [name for name in FILES if name not in BASES]


def test_every_preset_says_what_it_is_for() -> None:
    rows = json.loads(CliRunner().invoke(app, ["presets", "--json"]).stdout)
    assert [row["preset"] for row in rows] == SHIPPED
    assert all(len(row["about"]) > 20 and not row["about"].startswith("#") for row in rows)


def test_a_word_chooses() -> None:
    found = [row["preset"] for row in preset_rows("IMDB")]
    assert found == ["prism-imdb"]
    assert {row["strategy"] for row in preset_rows("spafl")} == {"spafl"}
    shown = CliRunner().invoke(app, ["presets", "m-fedepth"], env={"COLUMNS": "80"}).stdout
    assert shown.splitlines()[0].startswith("m-fedepth-fmnist-fair  ")
    assert [line.strip() for line in shown.splitlines()[1:3]] == [
        "m-FeDepth (own heads) beside fedepth-fmnist-fair",
        "our own comparison, after FeDepth's Table 2 (docs/results/accuracy.md)",
    ]


def test_the_list_has_three_lines_for_each_at_80_columns() -> None:
    shown = CliRunner().invoke(app, ["presets"], env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(shown) == 3 * len(SHIPPED) + 1  # and how to run one
    assert max(map(len, shown)) <= 80
    assert [line.split()[0] for line in shown[:-1:3]] == SHIPPED


def test_a_word_that_no_preset_has() -> None:
    done = CliRunner().invoke(app, ["presets", "librispeech"])
    assert done.exit_code == 2
    assert f"no preset is about 'librispeech': piecework presets lists all {len(SHIPPED)}" in done.stderr
    assert "did you mean 'fedepth'?" in CliRunner().invoke(app, ["presets", "fedephth"]).stderr


# ---- presets that extend another


def test_a_preset_has_the_settings_of_the_one_that_it_extends_and_its_own(tmp_path: Path) -> None:
    """A file beside it comes first, then the shipped ones."""
    (tmp_path / "base.toml").write_text('strategy = "fedavg"\nclients = 7\n[training]\nlr = 0.3\nmomentum = 0.5\n')
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "base"\nclients = 8\n[training]\nlr = 0.4\n')
    assert read_preset(str(mine)) == {"strategy": "fedavg", "clients": 8, "training.lr": 0.4, "training.momentum": 0.5}
    mine.write_text('extends = "spafl-digits"\nseed = 5\n')
    assert read_preset(str(mine)) == read_preset("spafl-digits") | {"seed": 5}


def test_chains_of_presets_are_refused(tmp_path: Path) -> None:
    for name, extended in (("a", "b"), ("b", "c")):
        (tmp_path / f"{name}.toml").write_text(f'extends = "{extended}"\n')
    with pytest.raises(
        SettingsError, match=r"a\.toml: it extends 'b', which extends 'c': a preset may extend only one"
    ):
        read_preset(str(tmp_path / "a.toml"))
    (tmp_path / "c.toml").write_text('extends = "nowhere"\n')
    with pytest.raises(SettingsError, match="preset nowhere: no such file, and no shipped preset; `piecework presets`"):
        read_preset(str(tmp_path / "c.toml"))
    assert all(read_preset(name) for name in FILES)
