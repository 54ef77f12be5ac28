"""What layers share and no example decides does not keep a model from being cut: each atom computes it by itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TRIO, clients_of, fleet_json, model_of, run_local
from own_constants import Causal
from safetensors.torch import save_file
from torch import nn

from piecework.models.cascade import Cascade, unset_weights
from piecework.models.channels import channel_axes
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.imported.own_names import fill_module
from piecework.models.init_weights import read_pretrained
from piecework.models.zoo import build_blueprint

DIGIT = (1, 8, 8)
HIDING = ["operator", "on_view", "transposed", "data", "diagonal", "out", "statistics"]
LAYERS = ["embed", "layers_0", "layers_1", "layers_2"]


def name_of(function: str) -> str:
    """The model's name, as a user gives it."""
    return f"{Path(__file__).with_name('own_constants.py')}:{function}"


def source_of(function: str) -> Source:
    return Source(name_of(function), 10, DIGIT, "running")


def original(name: str) -> str:
    """The name that an array has in the module itself."""
    return name.partition(".")[2] if name.startswith("head") else name.split(".", 2)[2]


def pair(function: str) -> tuple[Cascade, nn.Module]:
    """A cascade and the module with the same weights."""
    whole = make(source_of(function))
    with unset_weights():
        cascade = Cascade(build_blueprint(name_of(function), num_classes=10, input_shape=DIGIT, batch_norm="running"))
    arrays = whole.state_dict()
    assert {original(n) for n in cascade.state_dict()} >= dict(whole.named_parameters()).keys()
    cascade.load_state_dict({n: arrays[original(n)] for n in cascade.state_dict()})
    return cascade, whole


@pytest.mark.parametrize(
    ("function", "atoms"),
    [
        ("causal", LAYERS),
        ("making", LAYERS),
        ("placed", LAYERS),
        ("distant", LAYERS),
        ("counting", ["embed"]),
        ("stepping", LAYERS),
        ("late", LAYERS),
        ("counted", LAYERS),
        ("replacing", ["replacing"]),
        ("measuring", LAYERS),
        ("filling", ["embed"]),
        ("drawing", ["embed"]),
        ("blurred", ["one", "two"]),
        *((change, ["embed"]) for change in HIDING),
        ("measured", ["one"]),
    ],
)
def test_atoms_share_what_nothing_changes(function: str, atoms: list[str]) -> None:
    """What a pass changes, fills or draws is not computed once more in another atom."""
    assert list(cut(source_of(function)).names) == atoms


@pytest.mark.parametrize(
    "function",
    [
        "causal",
        "making",
        "placed",
        "distant",
        "counting",
        "stepping",
        "late",
        "counted",
        "replacing",
        "measuring",
        "filling",
        "measured",
        "blurred",
        *HIDING,
    ],
)
def test_they_compute_and_learn_what_the_module_does(function: str) -> None:
    """Outputs, gradients and buffers of two passes, bit by bit."""
    cascade, whole = pair(function)
    x, y = torch.randn(8, *DIGIT, generator=torch.Generator().manual_seed(0)), torch.arange(8)
    for batch in (x, x[:3]):
        losses = [nn.functional.cross_entropy(module.train()(batch), y[: len(batch)]) for module in (cascade, whole)]
        assert losses[0] == losses[1]
        for loss in losses:
            loss.backward()
    of_module = dict(whole.named_parameters())
    for name, parameter in cascade.named_parameters():
        assert torch.equal(parameter.grad, of_module[original(name)].grad), name
    arrays = whole.state_dict()
    assert all(torch.equal(array, arrays[original(name)]) for name, array in cascade.state_dict().items())


def test_an_axis_that_an_index_adds_is_no_channel() -> None:
    blueprint = build_blueprint(name_of("distant"), num_classes=10, input_shape=DIGIT, batch_norm="running")
    axes = channel_axes(blueprint)
    assert axes["atoms.1.layers.0.out.weight"][0] == axes["atoms.0.embed.weight"][0]


def test_a_mask_that_no_update_may_hold_is_refused_before_a_run() -> None:
    blueprint = build_blueprint(name_of("infinite"), num_classes=10, input_shape=DIGIT, batch_norm="running")
    with pytest.raises(ValueError, match=r"'added' holds values that are not finite"):
        Cascade(blueprint)


def test_a_buffer_that_is_made_anew_is_the_reason_for_one_atom() -> None:
    assert cut(source_of("replacing")).reason.startswith("Replacing: its forward pass assigns 'turns' anew")


@pytest.mark.parametrize("strategy", ["fedavg", "fedepth"])
def test_a_run_leaves_each_copy_as_it_was(tmp_path: Path, strategy: str) -> None:
    settings = {"model": name_of("causal"), "strategy": strategy, "num_rounds": 2, "training__local_iterations": 2}
    settings |= {"fleet": fleet_json(poor=0.6), "memory__fit": "auto" if strategy == "fedavg" else ""}
    run = run_local(tmp_path, **TRIO | settings)
    trained = [client for client in clients_of(run) if client["status"] == "ok"]
    assert all(0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"] for client in trained)
    assert strategy == "fedavg" or max(len(client["pieces"]) for client in trained) > 1
    arrays, begun = model_of(run), make(source_of("causal")).state_dict()
    copies = [name for name in arrays if name.endswith((".mask", ".turns"))]
    assert len(copies) == 6
    for name in copies:
        assert np.array_equal(arrays[name], begun[original(name)].numpy())
    filled = fill_module(Causal(10), run.path).state_dict()
    assert torch.equal(filled["mask"], begun["mask"]) and "turns" not in filled
    assert not torch.equal(filled["out.weight"], begun["out.weight"])


def test_each_copy_is_read_from_a_file(tmp_path: Path) -> None:
    whole, file = make(source_of("causal")), tmp_path / "causal.safetensors"
    whole.turns.mul_(0.5)
    save_file(whole.state_dict(), file)
    blueprint = build_blueprint(name_of("causal"), num_classes=10, input_shape=DIGIT, batch_norm="running")
    arrays, excluded = read_pretrained(file, blueprint)
    assert not excluded
    turns = [array for name, array in arrays.items() if name.endswith("turns")]
    assert len(turns) == 3
    assert all(np.array_equal(array, whole.turns.numpy()) for array in turns)


def test_a_buffer_of_two_names_is_filled_whichever_of_them_persists(tmp_path: Path) -> None:
    settings = {"model": name_of("causal"), "strategy": "fedavg", "num_rounds": 1, "memory__enforce": False}
    run = run_local(tmp_path, **TRIO | settings)
    module = Causal(10)
    module.register_buffer("again", module.turns)
    module.turns.zero_()
    filled = fill_module(module, run.path).state_dict()
    assert torch.equal(filled["again"], Causal(10).turns) and "turns" not in filled
