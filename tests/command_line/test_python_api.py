"""`piecework.plan`, `run`, `compare` and `load`: what they return, that the command line says the same, and their errors."""

import json
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch
from helpers import TINY, few_digits, fleet_json
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import piecework
from piecework.api.keywords import read_keywords
from piecework.api.runs import Run
from piecework.cli import app
from piecework.models.imported import objects
from piecework.models.model_file import ModelFileError
from piecework.training.settings import SettingsError


class Net(nn.Module):
    """Two layers, and one that the forward pass does not use."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(64, hidden), nn.Linear(hidden, 10), nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.two(self.one(x.flatten(1)).relu()) * scale


class Renamed(Net):
    """Net with its layers under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.one
        del self.one


def tiny(folder: Path, **changes: object) -> Run:
    values: dict[str, object] = TINY | {
        "clients": 3,
        "clients-per-round": 0,
        "fleet": "unlimited",
        "strategy": "fedavg",
    }
    values |= {"output-dir": folder, "dataset": f"npz:{few_digits()}", "workers": 1}
    return piecework.run(
        values | {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}, progress=False
    )


def said_by(*words: str) -> dict:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


# ---- settings


def test_settings_are_keywords_or_a_mapping() -> None:
    found = read_keywords(
        {"training.lr": 0.05, "fedprophet": {"apa_step": 0.2}},
        {"num_rounds": 3, "nodes": 4, "memory": {"fit": ("recompute", "micro-batch")}, "data_dir": Path("data")},
    )
    assert found == {
        "training.lr": 0.05,
        "fedprophet.apa-step": 0.2,
        "num-rounds": 3,
        "clients": 4,
        "memory.fit": "recompute,micro-batch",
        "data-dir": "data",
    }
    with pytest.raises(SettingsError, match="num-rounds = 2 contradicts num-rounds = 3: give one of them"):
        read_keywords({"num-rounds": 2}, {"rounds": 3})
    with pytest.raises(SettingsError, match=r"fleet = \{1\}: set is no type of a setting; expected text, a number"):
        read_keywords({}, {"fleet": {1}})
    with pytest.raises(SettingsError, match="unknown setting 'num-rouns': did you mean 'num-rounds'"):
        piecework.plan(num_rouns=3)


def test_importing_the_package_loads_neither_torch_nor_pandas() -> None:
    code = "import piecework, sys; print(sorted({'torch', 'pandas', 'flwr'} & sys.modules.keys()), 'run' in dir(piecework))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] True"
    with pytest.raises(AttributeError, match="module 'piecework' has no attribute 'rum'"):
        _ = piecework.rum  # type: ignore[attr-defined]


class Scaled(Net):
    """Net with a factor, which the recorded calls hold."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * self.factor


def test_modules_that_compute_otherwise_have_other_names() -> None:
    def closed(factor: float) -> nn.Module:
        net = Net()
        net.act = lambda z: z * factor  # type: ignore[assignment]
        return net

    hooked, frozen = Net(), Net()
    hooked.two.register_forward_hook(lambda layer, args, out: out * 0)
    frozen.one.weight.requires_grad_(False)
    modules = [Scaled(1.0), Scaled(0.0), Net(), hooked, frozen, closed(1.0), closed(2.0), Net(8)]
    assert len({objects.name_object(module) for module in modules}) == len(modules)
    assert objects.name_object(Scaled(1.0)) == objects.name_object(Scaled(1.0))


def test_modules_that_cannot_be_trained_are_refused() -> None:
    whole, frozen = Net(), Net().requires_grad_(False)
    whole.register_forward_hook(lambda *_: None)
    for module, said in (
        (Net().double(), "one.weight is torch.float64: parameters are float32"),
        (nn.Sequential(nn.LazyLinear(10)), "0.weight has no shape yet: pass an example through"),
        (frozen, "has no parameter to train"),
        (whole, "has hooks on the whole module"),
    ):
        with pytest.raises(ValueError, match=said):
            piecework.plan(model=module, dataset="digits")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"input_shape": 28, "classes": 10}, "input_shape = 28: expected a tuple of numbers"),
        ({"classes": "ten"}, "classes = 'ten': expected a whole number from 1"),
        ({"budget": 60_000_000}, "budget = 60000000: expected text"),
        ({"examples": -3}, "examples = -3: expected a whole number from 1"),
        ({"model": nn.Linear}, "expected a name or an nn.Module, not its class or a function"),
    ],
)
def test_arguments_of_other_types_are_named(asked: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        piecework.plan(asked.pop("settings", None), **asked)
    with pytest.raises(SettingsError, match="'lenet5': settings are keywords, or a mapping"):
        piecework.plan("lenet5")  # type: ignore[arg-type]
    assert read_keywords({}, {"rounds": np.int64(2)}) == {"num-rounds": 2}
    with pytest.raises(SettingsError, match="restarts = -1: expected a number of times"):
        piecework.run(restarts=-1)
    with pytest.raises(ValueError, match=r"piecework\.compare\(\['a'\]\): expected runs"):
        piecework.compare(["a"])  # type: ignore[arg-type]


# ---- plans


def test_a_plan_is_that_of_the_command_line() -> None:
    found = piecework.plan(model="lenet5", input_shape=(1, 28, 28), classes=10, fleet=fleet_json(rich=2.0, poor=0.4))
    options = ("--model", "lenet5", "--input-shape", "1x28x28", "--classes", "10")
    assert found.record == said_by("plan", *options, "--fleet", fleet_json(rich=2.0, poor=0.4))
    assert 0 < found.participation <= 1
    assert found.full_memory_bytes == found.record["full_memory_bytes"]
    frame = found.to_pandas()
    assert list(frame["device"]) == ["poor", "rich"]
    assert list(found.to_pandas("modules")["memory_bytes"]) == [module["memory_bytes"] for module in found.modules]
    assert str(found).startswith("fedepth on lenet5: ")
    assert found._repr_html_().startswith("<pre>fedepth on lenet5")
    with pytest.raises(ValueError, match=r"to_pandas\('rows'\): expected one of 'devices', 'modules'"):
        found.to_pandas("rows")
    with pytest.raises(SettingsError, match=r"^input_shape 1x28x28 and dataset digits: give one of them"):
        piecework.plan(model="lenet5", input_shape=(1, 28, 28), classes=10, dataset="digits")


def test_advice_gives_the_settings_of_a_run() -> None:
    asked = {"model": "lenet5", "fleet": "unlimited"}
    found = piecework.suggest(asked)
    assert found.record == said_by("plan", "--suggest", "--model", "lenet5", "--fleet", "unlimited")["suggest"] | {
        "recommended": found.record["recommended"]
    }
    assert found.recommended == {"strategy": "fedavg"}
    assert str(found).startswith("Use fedavg. Every device can hold a step")


# ---- runs


def test_a_run_starts_from_a_modules_own_weights_and_gives_its_class_back(tmp_path: Path) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = tiny(tmp_path, model=net, training__lr=1e-9)
    assert (run.status, len(run.rounds), run.settings["training.lr"]) == ("completed", 1, 1e-9)
    assert run.summary == json.loads((run.path / "summary.json").read_text("utf-8"))
    assert repr(run) == f"Run({str(run.path)!r}: completed, 1 rounds, accuracy {run.accuracy:.2%})"
    mine = piecework.load(run.path, into=Net())
    assert not mine.training
    for name in ("one.weight", "one.bias", "two.weight"):
        torch.testing.assert_close(mine.state_dict()[name], before[name], atol=1e-6, rtol=0)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in before.items())
    file = tmp_path / "exits.safetensors"
    with safe_open(run.path / "model.safetensors", framework="pt") as arrays:
        described = json.loads(arrays.metadata()["piecework"]) | {"head": "exits.1"}
        del described["sha256"]
        kept = {name.replace("head.", "exits.1."): arrays.get_tensor(name) for name in arrays.keys()}  # noqa: SIM118
    save_file(
        kept | {"exits.1.own.bias": torch.zeros(1), "exits.0.unused": torch.zeros(1)},
        file,
        metadata={"piecework": json.dumps(described)},
    )
    said = (
        r"fit Net: .* What fedavg trained is another network than the module \(head = 'exits.1', atoms = .*Run.load\(\)"
    )
    with pytest.raises(ModelFileError, match=said):
        piecework.load(file, into=Net())
    loaded = run.load(normalise=False)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(loaded(x), mine(x))

    more = piecework.run(resume_from=run.path, rounds=2, model=Net(), progress=False)
    assert (more.path, len(more.rounds)) == (run.path, 2)
    frame = more.to_pandas("clients")
    assert (len(frame), set(frame["round"])) == (6, {1, 2})
    assert list(more.to_pandas()["round"]) == [1, 2]
    assert piecework.compare(more, run.path).record == said_by("compare", str(run.path))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Renamed(), r"does not fit Renamed: the module has no one\.bias, one\.weight"),
        (Net(8), r"does not fit Net: one\.bias has shape \(16,\) in the file, and \(8,\) in the module"),
        (nn.Sequential(nn.Linear(2, 2)), "does not fit Sequential: the module has no one.bias"),
    ],
)
def test_a_module_that_does_not_fit_keeps_its_weights(run_of_net: Run, module: nn.Module, message: str) -> None:
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ModelFileError, match=message):
        run_of_net.load_into(module)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


@pytest.fixture(scope="module")
def run_of_net(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return tiny(tmp_path_factory.mktemp("runs"), model=Net())


def test_a_model_of_the_zoo_is_not_filled_into_a_module(tmp_path: Path) -> None:
    run = tiny(tmp_path, model="lenet5", data__image_size=28)
    with pytest.raises(
        ModelFileError, match="was trained with model 'lenet5', whose arrays have names of this project"
    ):
        run.load_into(Net())


def test_another_process_is_told_how_to_get_the_weights(run_of_net: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_MODULES", {})
    with pytest.raises(ModelFileError, match=r"a module of a Python process: make such a module here"):
        piecework.load(run_of_net.path)
    with pytest.raises(ValueError, match="and this one does not have it: give it again, as in"):
        piecework.plan(model="object:Net-0123")


def test_a_run_that_fails_says_what_the_command_line_says(tmp_path: Path) -> None:
    fleet = fleet_json(poor=0.5)
    with pytest.raises(piecework.RunFailedError, match="no client trained in round 1: 3 asked, 3 refused") as caught:
        tiny(tmp_path, model="convnet", fleet=fleet)
    run = caught.value.run
    assert (run.status, str(caught.value)) == ("failed", run.summary["reason"])
    assert run.accuracy is not None
    with pytest.raises(SettingsError, match=r"^superlink x: expected HOST:PORT"):
        piecework.run(superlink="x")
    with pytest.raises(ValueError, match=r"piecework\.compare\(\) was given no runs"):
        piecework.compare()


def test_an_engine_of_other_processes_does_not_have_the_module(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is code of your own, and other engines do not have it"):
        tiny(tmp_path, model=Net(), engine="deployment", nodes=3, clients=3)


NOTEBOOK = """
import piecework
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.two(self.one(x.flatten(1)).relu())

run = piecework.run(
    model=Own(), strategy="fedavg", fleet="unlimited", rounds=2, nodes=3, dataset="npz:{data}", output_dir="{folder}", workers=2
)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_notebook_shows_a_bar_and_its_own_class_trains_in_workers(tmp_path: Path) -> None:
    cells = [NOTEBOOK.format(data=few_digits(), folder=tmp_path), "run"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3", resources={}).execute()
    shown = [output["data"]["text/html"] for output in book.cells[0].outputs if output["output_type"] == "display_data"]
    assert len(shown) == 1
    assert '<progress max="2" value="2"></progress> 2 of 2 rounds' in shown[0]
    assert "3/3 clients ok" in shown[0]
    assert "completed, 2 rounds" in book.cells[1].outputs[0]["data"]["text/plain"]
