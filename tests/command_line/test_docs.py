"""What the documents say is run: code, plans, fleets."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import TRIO, clients_of, run_local
from typer.testing import CliRunner

from piecework.cli import app
from piecework.client_app.trainers import TRAINERS
from piecework.device_profiles.fleet import load_fleet
from piecework.models.zoo import MODELS
from piecework.strategies import STRATEGIES
from piecework.strategies.whole.fedavg import FedAvgPolicy

ROOT = Path(__file__).resolve().parents[2]


def test_the_plans_in_the_documents_run(tmp_path: Path) -> None:
    text = "".join((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/plan.md", "docs/memory.md"))
    commands = re.findall(r"^    piecework plan(.*)$", text.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        options = shlex.split(command.split("#")[0].replace("docs/plan.svg", str(tmp_path / "plan.svg")))
        done = CliRunner().invoke(app, ["plan", *options])
        assert done.exit_code == 0, (command, done.stderr)
    assert (tmp_path / "plan.svg").stat().st_size > 10_000


def test_the_fleet_in_the_documents_loads(tmp_path: Path) -> None:
    mine, devices = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "plan.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "mine.toml").write_text(mine, encoding="utf-8")
    fleet = load_fleet(str(tmp_path / "mine.toml"))
    assert len(fleet.devices) == 7
    assert (fleet.memory_loss, fleet.memory_floor) == ((0.8, 0.9), 60_000_000)
    without = "\n".join(line for line in mine.splitlines() if not line.startswith(("pool", "skew")))
    (tmp_path / "mine.toml").write_text(f"{without}\n{devices}", encoding="utf-8")
    assert [device.name for device in load_fleet(str(tmp_path / "mine.toml")).devices] == ["pi"]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The code of docs/extend.md, run block by block in a folder of its own; the names that it leaves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = re.findall(
        r"```python\n# (\w+)\.py\n(.*?)```", (ROOT / "docs" / "extend.md").read_text("utf-8"), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["my_fedprox", "run_fedprox", "my_model", "my_data", "run_all"]
    scope: dict[str, object] = {}
    try:
        for name, code in blocks:
            Path(f"{name}.py").write_text(code, encoding="utf-8")
            exec(compile(code, f"{name}.py", "exec"), scope)
        yield scope
    finally:
        for registry, added in ((TRAINERS, "fedprox"), (STRATEGIES, "fedprox"), (MODELS, "mlp")):
            registry.pop(added, None)
        sys.modules.pop("my_fedprox", None)


def test_add_your_own(tmp_path: Path, page: dict[str, object]) -> None:
    settings = page["settings"]
    assert isinstance(settings, dict)
    changes = {key.replace("-", "_"): value for key, value in settings.items()}
    run_dir = run_local(
        tmp_path, num_rounds=3, clients_per_round=4, training__local_epochs=3, training__batch_size=8, **changes
    )
    last = run_dir.rounds()[-1]
    assert last["accuracy"] > 0.9
    assert all(client["measured_peak"] <= client["predicted_peak"] for client in last["clients"])


def test_a_strategy_of_ones_own_does_what_the_settings_ask(
    tmp_path: Path, page: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its proximal term FedProx is FedAvg: also on adversarial examples, and in so many batches."""
    Path("my_fedprox.py").write_text(Path("my_fedprox.py").read_text().replace("MU = 0.1", "MU = 0.0"))
    asked = TRIO | {"fleet": "unlimited", "training__local_iterations": 3, "attack__steps": 2, "num_rounds": 1}
    runs = {
        (name, adversarial): run_local(
            tmp_path / f"{name}-{adversarial}", strategy=name, training__adversarial=adversarial, **asked
        )
        for name in ("fedprox", "fedavg")
        for adversarial in (False, True)
    }
    losses = {key: [record["train_loss"] for record in run.rounds()] for key, run in runs.items()}
    flops = {key: [client["flops"] for client in clients_of(run)] for key, run in runs.items()}
    for adversarial in (False, True):
        assert losses["fedprox", adversarial] == losses["fedavg", adversarial]
        assert flops["fedprox", adversarial] == flops["fedavg", adversarial]
    assert losses["fedprox", True] > losses["fedprox", False]
    monkeypatch.setattr(FedAvgPolicy, "adversarial", "always")  # a system that does nothing else need not say more
    always = run_local(tmp_path / "always", strategy="fedprox", **asked)
    assert [record["train_loss"] for record in always.rounds()] == losses["fedavg", True]
    assert [client["flops"] for client in clients_of(always)] == flops["fedavg", True]
    assert flops["fedprox", True] > flops["fedprox", False]
