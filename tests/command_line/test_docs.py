"""What the documents say is run: code, plans, fleets."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from document_helpers import pages
from helpers import TRIO, clients_of, fleet_json, run_local
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.commands.new import TEMPLATE
from piecework.device_profiles.fleet import load_fleet
from piecework.models.zoo import MODELS
from piecework.server_app.records import RunDir
from piecework.strategies.whole.fedavg.server import FedAvg
from piecework.training.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_plans_in_the_documents_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ("fedavg", "fedepth", "allsmall", "depthfl")  # advice plans every system; these decide what it says first
    monkeypatch.setattr("piecework.plans.suggest.METHODS", {name: METHODS[name] for name in few})
    text = "".join(
        (ROOT / name).read_text("utf-8") for name in ("README.md", "docs/howto/plan.md", "docs/howto/memory.md")
    )
    commands = re.findall(r"^    piecework plan(.*)$", text.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) >= 6
    recommended = set()
    sixty = tmp_path / "sixty.toml"
    ((code,),) = [re.findall(r"```toml\n# sixty.toml\n(.*?)```", text, re.DOTALL)]
    sixty.write_text(code, encoding="utf-8")
    for command in {" ".join(command.split("#")[0].split()) for command in commands}:
        options = shlex.split(command.replace("sixty.toml", str(sixty)).replace("plan.svg", str(tmp_path / "plan.svg")))
        done = CliRunner().invoke(app, ["plan", *options])
        assert done.exit_code == 0, (command, done.stderr)
        if "--suggest" in options:
            advice = done.stdout.partition("    piecework run")[0]
            said = [line.strip() for line in advice.splitlines()]
            assert all(line in text for line in said), said
            recommended.add(said[0].partition(" Every")[0])
    assert recommended == {"Use fedavg with memory.fit."}
    assert (tmp_path / "plan.svg").stat().st_size > 10_000


def test_the_fleet_in_the_documents_loads(tmp_path: Path) -> None:
    _, mine, devices = re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs" / "howto" / "plan.md").read_text("utf-8"), re.DOTALL
    )
    (tmp_path / "mine.toml").write_text(mine, encoding="utf-8")
    fleet = load_fleet(str(tmp_path / "mine.toml"))
    assert len(fleet.devices) == 7
    assert (fleet.memory_loss, fleet.memory_floor) == ((0.8, 0.9), 60_000_000)
    without = "\n".join(line for line in mine.splitlines() if not line.startswith(("pool", "skew")))
    (tmp_path / "mine.toml").write_text(f"{without}\n{devices}", encoding="utf-8")
    assert [device.name for device in load_fleet(str(tmp_path / "mine.toml")).devices] == ["pi"]


MODULES = (
    *(
        "my_net",
        "my_prox",
        "my_half",
        "my_smooth",
        "my_model",
        "my_data",
        "my_table",
        "my_images",
        "my_study",
        "run_all",
    ),
    "use_net",
)
PROX = "my_prox:Prox"


def python_blocks(name: str) -> list[tuple[str, str]]:
    """The code blocks of both pages that begin with a comment like this name, by the part of it in brackets."""
    text = "".join(page.read_text("utf-8") for page in pages())
    return re.findall(rf"```(?:python|toml)\n# {name}\n(.*?)```", text, re.DOTALL)


def own_method() -> str:
    """The method that docs/howto/extend.md shows and `piecework new` writes, as a module with another name."""
    code = (TEMPLATE / "my_app" / "method.py").read_text("utf-8")
    ((_, shown),) = python_blocks(r"(my_app/method\.py)")
    assert code.endswith(shown)
    return code.replace("my-app", "prox")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the Python files that the documents show, of which the modules can be imported."""
    folder = tmp_path_factory.mktemp("page")
    for name, code in [*python_blocks(r"(\w+\.(?:py|toml))"), ("my_prox.py", own_method())]:
        (folder / name).write_text(code, encoding="utf-8")
    assert {path.stem for path in folder.glob("*.py")} == set(MODULES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        import_module("run_all")
        # again, if these tests began before others and go on after them
        MODELS["two-layers"] = import_module("my_model").two_layers
        yield folder
        MODELS.pop("two-layers")


@pytest.mark.slow
@pytest.mark.processes
def test_a_user_does_what_the_page_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes outside the repository, with workers, which get the strategy from the script."""
    monkeypatch.delenv("PIECEWORK_DATA", raising=False)
    few = [f"--set={text}" for text in ("num-rounds=1", "workers=2", "training.lr=0.5", "run-name=run")]
    subprocess.run([sys.executable, "my_data.py"], cwd=page, check=True)
    call = [sys.executable, "run_all.py", *few]
    done = subprocess.run(call, cwd=page, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^round 1/1 +accuracy \d+", done.stderr, re.MULTILINE)
    assert re.search(r"^status +completed", done.stdout, re.MULTILINE)
    run = RunDir(page / "runs" / "run")
    (record,) = run.rounds()
    assert record["accuracy"] > 0.5  # of three classes
    for client in record["clients"]:
        assert client["status"] == "ok"
        assert client["measured_peak"] <= client["predicted_peak"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_study_in_python_does_what_the_page_says(page: Path) -> None:
    """In one process; that workers get a module is tested with the notebook."""
    code = (page / "my_study.py").read_text("utf-8").replace('"clients": 4', '"clients": 4, "workers": 1')
    assert "workers" in code
    (page / "my_quick_study.py").write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, "my_quick_study.py"], cwd=page, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fedepth on object:Net-")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:4] for row in rows if row[:1] in (["A"], ["B"])][:2] == [
        ["A", "pieces", "1", "2"],
        ["B", "whole", "1", "2"],
    ]
    assert rows[-1][-1] == "requires_grad=True)"


@pytest.mark.slow
def test_a_torch_module_is_planned_and_trained(tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By workers, which load its file by themselves; the run remembers where the file is."""
    monkeypatch.chdir(page)

    def call(words: str) -> Any:
        return CliRunner().invoke(app, words.split())

    planned = call("plan --model my_net.py:make --dataset digits --strategy fedepth --fleet unlimited --json")
    assert json.loads(planned.stdout)["fleet"]["participation"] == 1.0
    few = f"--nodes 2 --output-dir {tmp_path} --set workers=2 --set training.local-iterations=2 --fleet unlimited"
    done = call(f"run {few} --model my_net.py:make --strategy fedavg --set run-name=run --set num-rounds=1")
    assert done.exit_code == 0, done.output
    assert RunDir(tmp_path / "run").settings()["model"] == f"{page / 'my_net.py'}:make"
    other = call("run --model my_net.py:make --engine deployment")
    assert "is code of your own, and other engines do not have it: use engine = local" in " ".join(other.stderr.split())


@pytest.mark.slow
def test_a_strategy_of_ones_own_fits_its_step(tmp_path: Path, page: Path) -> None:
    """The task lists the steps of `memory.fit` with the strategy's own loss: a client that has memory for one trains."""
    asked = TRIO | {"strategy": PROX, "training__local_iterations": 1, "memory__fit": "micro-batch,recompute"}
    for client in clients_of(run_local(tmp_path, fleet=fleet_json(board=1_100_000), **asked)):
        assert (client["status"], client["step"]) == ("ok", "recomputes 4 atoms")
        assert client["measured_peak"] <= client["predicted_peak"] <= 1_100_000


def test_commands_know_a_strategy_of_ones_own(tmp_path: Path, page: Path) -> None:
    """It is priced by its own loss, trains, goes on where it stopped, and its settings are checked and listed."""

    def call(*words: str) -> Any:
        return CliRunner().invoke(app, [word for each in words for word in each.split()])

    plan = "plan --model convnet --dataset digits --json --strategy"
    own, plain = (json.loads(call(plan, name).stdout) for name in (PROX, "fedavg"))
    assert own["reference_bytes"] == plain["reference_bytes"]  # a device's budget is a fraction of FedAvg's step
    assert own["modules"][0]["memory_bytes"] > plain["modules"][0]["memory_bytes"]
    few = f"--nodes 2 --output-dir {tmp_path} --set workers=1 --set training.local-iterations=2 --set fleet=unlimited"
    run = f"run {few} --set strategy={PROX} --set run-name=run --set num-rounds=1 --set prox.mu=0.5"
    assert call(run).exit_code == 0
    found = RunDir(tmp_path / "run")
    assert found.settings()["prox.mu"] == 0.5
    more = "--set num-rounds=2 --set training.lr-rounds=2 --set workers=1"
    assert call(f"run --set resume-from={found.path} {more}").exit_code == 0
    assert len(found.rounds()) == 2
    assert call(f"report {found.path}").exit_code == 0
    assert "prox.mu" in call(f"settings {PROX}").stdout
    for words, said in (
        (run.replace("0.5", "-1"), "setting prox.mu = -1.0: should be greater than or equal to 0"),
        (run.replace(".mu", ".nu"), "unknown setting 'prox.nu'"),
        (run.replace(":Prox", ":Proxy"), "there is no 'Proxy' in"),
        (run.replace("my_prox", "my_other"), "there is no module 'my_other'"),
        (run.replace(":Prox", ":train"), "is no class that derives from Method"),
        (f"{run} --engine ray", "other engines do not have it: use engine = local"),
    ):
        done = call(words)
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (2, True), done.stderr


def test_a_model_reshaped_by_a_cut_is_the_narrower_model(tmp_path: Path, page: Path) -> None:
    """What half of the channels are and cost is FedAvg's at width 0.5."""
    asked = TRIO | {"fleet": "unlimited", "num_rounds": 1, "training__local_iterations": 3}
    half = run_local(tmp_path / "half", strategy="my_half:Half", **asked)
    narrow = run_local(tmp_path / "narrow", strategy="fedavg", architecture__width=0.5, **asked)
    whole = run_local(tmp_path / "whole", strategy="fedavg", **asked)
    for key in ("predicted_peak", "flops"):
        found = [[client[key] for client in clients_of(run)] for run in (half, narrow, whole)]
        assert found[0] == found[1] < found[2]
    sizes = [sum(p.numel() for p in piecework.load(run.path).parameters()) for run in (half, narrow)]
    assert sizes[0] == sizes[1]


def test_a_change_of_ones_own_reaches_clients_and_the_model_file(tmp_path: Path, page: Path) -> None:
    run = run_local(tmp_path, strategy="my_smooth:SmoothAvg", fleet="unlimited", **TRIO)
    assert all(client["status"] == "ok" for client in clients_of(run))
    kinds = {type(layer).__name__ for layer in piecework.load(run.path).modules()}
    assert "GELU" in kinds
    assert "ReLU" not in kinds


def split_at(text: str, *starts: str) -> list[str]:
    """A text in parts, of which each but the first begins with one of the words."""
    places = [0, *(text.index(start) for start in starts), len(text)]
    return [text[first:last] for first, last in pairwise(places)]


IN_THE_COPY = """
import json, sys
from typer.testing import CliRunner
import piecework
from piecework.cli import app
from piecework.commands.new import TEMPLATE
found = [CliRunner().invoke(app, command) for command in json.loads(sys.argv[1])]
print(json.dumps([[done.exit_code, done.stdout, done.stderr] for done in found]))
"""


@pytest.mark.slow
def test_add_a_strategy_and_its_setting_to_the_repository(tmp_path: Path) -> None:
    """In a copy, by touching the files that the page lists."""
    copy = tmp_path / "copy"
    others = shutil.ignore_patterns(".*", "__pycache__", "docs", "tests", "runs")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=others)
    imports, table, loss, train, server = split_at(
        own_method(), "class ProxSettings", "def proximal_loss", "def train", "class ProxCut"
    )
    own = "piecework.strategies.whole.prox"
    found = f"from {own}.settings import ProxSettings\n"
    folder = copy / "strategies/whole/prox"
    folder.mkdir()
    (folder / "settings.py").write_text(f"{imports.splitlines()[-3]}\n{table}")
    (folder / "client.py").write_text(f"{imports}{found}{loss}{train}")
    (folder / "server.py").write_text(f"{imports}{found}from {own}.client import proximal_loss\n{server}")

    def add(file: str, after: str, line: str) -> None:
        text = (copy / file).read_text("utf-8")
        assert after in text
        (copy / file).write_text(text.replace(after, after + line, 1), encoding="utf-8")

    ((_, entry),) = python_blocks(r"(training/methods\.py)")
    add("training/methods.py", "METHODS = {\n", entry)
    add("training/methods.py", "TABLES = {", f'\n    "prox": "{own}.settings:ProxSettings",')
    subprocess.run([sys.executable, "-m", "benchmarks.defaults"], cwd=copy, check=True)
    assert "[tool.flwr.app.config.prox]\nmu = 0.1\n" in (copy / "pyproject.toml").read_text("utf-8")

    run = ["run", "--nodes", "2", "--output-dir", str(tmp_path / "runs"), "--set", "num-rounds=1", "--set", "workers=1"]
    run += ["--set", "fleet=unlimited", "--set", "training.local-iterations=2"]
    commands = [
        ["settings", "prox"],
        [*run, "--set", "strategy=fedavg", "--set", "prox.mu=0.2"],
        [*run, "--set", "strategy=prox", "--set", "prox.mu=-1"],
        [*run, "--set", "strategy=prox", "--set", "prox.mu=0.2", "--set", "run-name=loose"],
        [*run, "--set", "strategy=prox", "--set", "prox.mu=20", "--set", "run-name=tight"],
    ]
    call = [sys.executable, "-c", IN_THE_COPY, json.dumps(commands)]
    done = subprocess.run(call, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed, other, negative, *ran = json.loads(done.stdout.splitlines()[-1])
    assert "prox.mu" in listed[1]
    assert "it belongs to strategy = prox, and strategy is 'fedavg'" in " ".join(other[2].split())
    assert "setting prox.mu = -1" in negative[2]
    assert [each[0] for each in ran] == [0, 0], ran
    loose, tight = (RunDir(tmp_path / "runs" / name) for name in ("loose", "tight"))
    assert (loose.settings()["strategy"], loose.settings()["prox.mu"]) == ("prox", 0.2)
    assert loose.rounds()[0]["train_loss"] < tight.rounds()[0]["train_loss"]  # with the distance


@pytest.mark.slow
def test_a_strategy_of_ones_own_does_what_the_settings_ask(
    tmp_path: Path, page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its proximal term FedProx is FedAvg: also on adversarial examples, and in so many batches."""
    asked = TRIO | {"fleet": "unlimited", "training__local_iterations": 3, "attack__steps": 2, "num_rounds": 1}
    runs = {
        (name, adversarial): run_local(
            tmp_path / f"{name}-{adversarial}", strategy=strategy, training__adversarial=adversarial, **(asked | own)
        )
        for name, strategy, own in (("prox", PROX, {"prox__mu": 0.0}), ("fedavg", "fedavg", {}))
        for adversarial in (False, True)
    }
    losses = {key: [record["train_loss"] for record in run.rounds()] for key, run in runs.items()}
    flops = {key: [client["flops"] for client in clients_of(run)] for key, run in runs.items()}
    for adversarial in (False, True):
        assert losses["prox", adversarial] == losses["fedavg", adversarial]
        assert flops["prox", adversarial] == flops["fedavg", adversarial]
    assert losses["prox", True] > losses["prox", False]
    monkeypatch.setattr(
        FedAvg, "can", replace(FedAvg.can, attack="always")
    )  # a system that does nothing else need not say more
    always = run_local(tmp_path / "always", strategy=PROX, prox__mu=0.0, **asked)
    assert [record["train_loss"] for record in always.rounds()] == losses["fedavg", True]
    assert [client["flops"] for client in clients_of(always)] == flops["fedavg", True]
    assert flops["prox", True] > flops["prox", False]


def test_the_documents_name_the_versions_of_flower_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    allowed = [next(each for each in project["dependencies"] if each.startswith("flwr"))]
    allowed += project["optional-dependencies"]["simulation"]
    (named,) = re.findall(
        r"\| Flower ([\d.]+) or ([\d.]+), the same minor", (ROOT / "docs" / "howto" / "boards.md").read_text("utf-8")
    )
    first, last = ([int(number) for number in version.split(".")] for version in named)
    assert allowed == [f"{package}>=1.{first[1]},<1.{last[1] + 1}" for package in ("flwr", "flwr[simulation]")]
