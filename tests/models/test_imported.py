"""Models outside this project: where they are cut, and that atoms compute, learn and cost what the module does."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, clients_of, fleet_json, model_of, run_local
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import get_model

import piecework
from piecework.client_app.app import require_strategy_of_run
from piecework.models.cascade import Blueprint, Cascade, initial_state, unset_weights
from piecework.models.channels import channel_axes
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.imported.source import find_make
from piecework.models.init_weights import read_pretrained
from piecework.models.model_file import ModelFileError
from piecework.models.trained_model import load_model
from piecework.models.variant import Variant, vary
from piecework.models.width import shapes, sub_indices, take, take_first
from piecework.models.zoo import build_blueprint

OWN = "models.own_modules"
DIGIT = (1, 8, 8)


def name_of(function: str) -> str:
    """The file's name, as a user gives it."""
    return f"{Path(__file__).with_name('own_modules.py')}:{function}"


def blueprint_of(name: str, shape: tuple[int, ...] = DIGIT, batch_norm: str = "running") -> Blueprint:
    return build_blueprint(name, num_classes=10, input_shape=shape, batch_norm=batch_norm)


def original(name: str) -> str:
    """The name that an array has in the module itself."""
    return name.partition(".")[2] if name.startswith("head") else name.split(".", 2)[2]


def pair(name: str, shape: tuple[int, ...]) -> tuple[Cascade, nn.Module]:
    """A cascade and the module with the same weights."""
    whole = make(Source(name, 10, shape, "running"))
    with unset_weights():  # each atom would draw those of the whole module
        cascade = Cascade(blueprint_of(name, shape))
    arrays = whole.state_dict()
    assert {original(n) for n in cascade.state_dict()} == arrays.keys()
    cascade.load_state_dict({n: arrays[original(n)] for n in cascade.state_dict()})
    return cascade, whole


MODELS = {
    name_of("net"): (DIGIT, ["stem_0", "body_0_0", "body_1"]),
    name_of("sequence"): (DIGIT, ["1_0", "2"]),
    name_of("branching"): (DIGIT, ["0_0", "1"]),
    name_of("tied"): (DIGIT, ["first", "twice", "last"]),
    name_of("inputs"): (DIGIT, ["one", "two"]),
    name_of("arguments"): (DIGIT, ["first", "second"]),
    "torchvision:resnet18": ((3, 32, 32), ["conv1", *(f"layer{i}_{j}" for i in (1, 2, 3, 4) for j in (0, 1))]),
    "torchvision:mobilenet_v3_small": ((3, 32, 32), None),
    "torchvision:efficientnet_b0": ((3, 32, 32), None),
    "torchvision:vit_b_16": ((3, 32, 32), None),
    "timm:resnet10t": ((3, 32, 32), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_atoms_compute_and_learn_what_the_module_does(name: str) -> None:
    """Outputs in both modes, gradients and running statistics, bit by bit."""
    shape, atoms = MODELS[name]
    cascade, whole = pair(name, shape)
    if atoms is not None:
        assert [atom.name for atom in blueprint_of(name, shape).atoms] == atoms
    x, y = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    found = []
    for module in (cascade.eval(), whole.eval()):
        outputs = [module(x)]
        module.train()
        torch.manual_seed(1)  # of dropout
        outputs.append(module(x))
        nn.functional.cross_entropy(outputs[-1], y).backward()
        found.append([*outputs, *(p.grad for p in module.parameters()), *module.buffers()])
    ours, theirs = found
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(one, other)
    names = [original(n) for n, _ in cascade.named_parameters()], [n for n, _ in whole.named_parameters()]
    grads = dict(zip(names[1], theirs[2:], strict=False))
    for name, grad in zip(names[0], ours[2:], strict=False):
        assert torch.equal(grad, grads[name]), name
    own, other = cascade.state_dict(), whole.state_dict()
    assert all(torch.equal(own[n], other[original(n)]) for n in own)


def test_a_dropped_atom_frees_its_memory_at_once() -> None:
    """Without the garbage collector, on which no budget can wait."""
    gc.disable()
    try:
        for atom in blueprint_of(name_of("net")).atoms:
            module = atom.build()
            arrays = [weakref.ref(array) for array in module.parameters()]
            del module
            assert all(array() is None for array in arrays)
    finally:
        gc.enable()


def test_shapes_are_those_of_what_crosses() -> None:
    assert [atom.shape for atom in blueprint_of(name_of("net")).atoms] == [(8, 4, 4)] * 3
    assert [atom.shape for atom in blueprint_of("torchvision:resnet18", (3, 32, 32)).atoms][-1] == (512, 1, 1)


def test_what_is_not_cut_is_one_atom_with_the_reason() -> None:
    for function, reason in (
        ("ushaped", "Ushaped: no point is crossed"),
        ("asking", "Asking: its forward pass asks for"),
    ):
        found = cut(Source(name_of(function), 10, DIGIT, "running"))
        assert found.reason.startswith(reason)
        assert len(found.parts) == 2
        cascade, whole = pair(name_of(function), DIGIT)
        x = torch.randn(3, *DIGIT)
        assert torch.equal(cascade.eval()(x), whole.eval()(x))


WRONG = {
    "valued": r"does not take examples of 1x8x8: .*; what depends on values .* \(own_modules\.py, line \d+\)$",
    "global_table": r"must be in its state dict \(register_buffer\), .* without a device \(own_modules\.py, line",
    "global_mask": r"must be in its state dict \(register_buffer\), .* without a device \(own_modules\.py, line",
    "loose": "Loose keeps 'scale' outside its state dict",
    "wrong": r"returns \(2, 11\) for 2 examples: expected logits of shape \(2, 10\)",
    "circular": r"refers to itself, as a layer does that keeps its parent, .*: keep the parent by weakref\.proxy",
    "no_module": "returned a int: expected an nn.Module",
    "nett": "there is no function 'nett' in .*; did you mean 'net'",
}


@pytest.mark.parametrize("function", WRONG)
def test_what_is_wrong_with_a_model(function: str) -> None:
    with pytest.raises(ValueError, match=WRONG[function]):
        blueprint_of(name_of(function))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:make", "'no_such_module_here' cannot be imported"),
        ("no_such_file.py:make", "there is no file 'no_such_file.py'"),
        ("my_net.py", "model = 'my_net.py' is a file: add the function that makes the model, as in my_net.py:make"),
        ("torchvision:resnet19", "torchvision has no such model; did you mean 'resnet1"),
        ("torchvision:resnet18", "does not take examples of 1x8x8"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blueprint_of(name)


def test_no_message_has_a_module_imported() -> None:
    with pytest.raises(ValueError, match="model = 'antigravity:main' is not known"):
        vary(blueprint_of(name_of("net")), Variant(architecture="antigravity:main"))
    assert "antigravity" not in sys.modules
    from flwr.app import Context, RecordDict

    board = Context(1, 1, {"state-dir": "x"}, RecordDict(), {"strategy": "fedavg", "model": "mine:net"})
    with pytest.raises(
        ValueError, match="model 'mine:net' is code outside this project, which a board does not import"
    ):
        require_strategy_of_run("fedavg", board)


@pytest.mark.parametrize(("batch_norm", "kind"), [("group", nn.GroupNorm), ("batch", nn.BatchNorm2d)])
def test_its_norms_follow_the_setting(batch_norm: str, kind: type) -> None:
    norms = [m for m in Cascade(blueprint_of(name_of("net"), DIGIT, batch_norm)).modules() if isinstance(m, kind)]
    assert len(norms) == 2
    assert all(getattr(norm, "running_mean", None) is None for norm in norms)


def test_initial_weights_are_drawn_by_the_module_itself() -> None:
    """A ViT's class token is a parameter that no layer of torch initialises."""
    blueprint = blueprint_of("torchvision:vit_b_16", (3, 32, 32))
    arrays = dict(initial_state(blueprint, 0, units=["atoms.0"]))
    assert arrays["atoms.0.class_token"].abs().sum() == 0
    position: Tensor = arrays["atoms.0.encoder.pos_embedding"]
    assert 0.015 < float(position.std()) < 0.025
    assert get_model("vit_b_16", weights=None, image_size=32).class_token.shape == arrays["atoms.0.class_token"].shape


SYSTEMS: dict[str, dict[str, Any]] = {
    "fedavg": {"fleet": "unlimited"},
    "fedepth": {"fleet": fleet_json(rich=1.6, poor=0.85), "model": name_of("tied")},
    "fedprophet": {"attack__steps": 1, "evaluation__attack_steps": 1, "fedprophet__stage_rounds": 1},
    "depthfl": {"fleet": fleet_json(rich=3.0)},
    "spafl": {"fleet": "unlimited"},
    "profl": {"fleet": "unlimited", "profl__stage_rounds": 1},
    "heterofl": {"fleet": fleet_json(rich=1.2, poor=0.6)},
    "fedrolex": {"fleet": fleet_json(rich=1.2, poor=0.6)},
    "fjord": {"fleet": fleet_json(rich=2.0, poor=0.9)},
    "splitmix": {"fleet": "unlimited"},
    "allsmall": {"fleet": fleet_json(poor=0.6)},
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SYSTEMS)
def test_systems_train_it_within_their_budgets(tmp_path: Path, strategy: str) -> None:
    changes = {"model": name_of("net"), "strategy": strategy, "training__local_iterations": 2, "num_rounds": 1}
    run = run_local(tmp_path, **TRIO | changes | SYSTEMS[strategy])
    trained = [client for client in clients_of(run) if client["status"] == "ok"]
    assert trained
    for client in trained:
        assert 0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"]
        if strategy != "fjord":  # which draws its widths, and is priced by the largest
            assert client["measured_peak"] == client["predicted_peak"]
    assert strategy != "fedepth" or max(len(client["pieces"]) for client in trained) > 1


def test_initial_weights_come_from_a_file_with_the_modules_own_names(tmp_path: Path) -> None:
    whole, file = make(Source(name_of("net"), 10, DIGIT, "running")), tmp_path / "net.safetensors"
    save_file(whole.state_dict() | {"fc.weight": torch.ones(3, 8)}, file)
    arrays, excluded = read_pretrained(file, blueprint_of(name_of("net")))
    assert excluded == ["fc.bias", "fc.weight"]  # of another number of classes
    assert {original(name) for name in arrays} == whole.state_dict().keys() - {"fc.weight", "fc.bias"}
    for name, array in arrays.items():
        assert np.array_equal(array, whole.state_dict()[original(name)].numpy())
    save_file({"other": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"takes these names or the module's own, without atoms\.<i>\. or head\."):
        read_pretrained(file, blueprint_of(name_of("net")))


def test_a_trained_one_is_loaded_with_its_own_names(tmp_path: Path) -> None:
    settings = {"model": name_of("net"), "strategy": "fedavg", "fleet": "unlimited", "num_rounds": 1}
    run = run_local(tmp_path, **TRIO | settings)
    loaded, arrays = load_model(run.path), model_of(run)
    whole = make(Source(name_of("net"), 10, DIGIT, "running")).eval()
    whole.load_state_dict({original(n): torch.from_numpy(array) for n, array in arrays.items()})
    x = torch.rand(5, *DIGIT)
    with torch.no_grad():
        torch.testing.assert_close(loaded.network(x), whole(x))


NARROWED = {
    name_of("net"): DIGIT,
    name_of("sequence"): DIGIT,
    "torchvision:resnet18": (3, 32, 32),
    "torchvision:mobilenet_v3_small": (3, 32, 32),
    "torchvision:convnext_tiny": (3, 64, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROWED)
def test_a_narrow_one_is_a_choice_of_channels(name: str) -> None:
    """Where the full model's other channels are zero behind each layer, the narrow model computes what the full one does."""
    shape = NARROWED[name]
    full = blueprint_of(name, shape)
    small = build_blueprint(name, num_classes=10, input_shape=shape, width=0.5)
    indices = sub_indices(channel_axes(full), shapes(full), shapes(small), take_first)
    with unset_weights():  # each atom would draw those of the whole module
        narrow, wide = Cascade(small), Cascade(full).state_dict()
    narrow.load_state_dict({n: torch.from_numpy(take(wide[n].numpy(), indices[n])) for n in wide})
    assert narrow.eval()(torch.randn(2, *shape)).shape == (2, 10)
    ratio = sum(p.numel() for p in narrow.parameters()) / sum(w.numel() for w in wide.values())
    assert 0.2 < ratio < 0.5


def test_half_of_its_channels_by_hand() -> None:
    """A residual block of 8 channels: 4 of them, 36 weights of a kernel each; 10 classes stay."""
    small = build_blueprint(name_of("net"), num_classes=10, input_shape=DIGIT, width=0.5)
    found = {original(name): shape for name, shape in shapes(small).items()}
    assert found["stem.0.weight"] == (4, 1, 3, 3)
    assert found["body.1.conv1.weight"] == (4, 4, 3, 3)
    assert found["body.1.norm1.running_mean"] == (4,)
    assert found["fc.weight"] == (10, 4)
    assert [atom.shape for atom in small.atoms] == [(4, 4, 4)] * 3


def test_shared_weights_are_named_where_they_stop_a_narrow_model() -> None:
    with pytest.raises(ValueError, match=r"cannot be cut by width: .*weight is shared with another layer"):
        build_blueprint(name_of("shared"), num_classes=10, input_shape=DIGIT, width=0.5)


def test_channels_that_cannot_be_followed_are_named() -> None:
    with pytest.raises(ValueError, match="cannot be cut by width: in atom 'conv_proj', channels cannot be followed"):
        build_blueprint("torchvision:vit_b_16", num_classes=10, input_shape=(3, 32, 32), width=0.5)


def test_a_weight_that_is_used_in_two_ways_stays_in_one_atom() -> None:
    assert [atom.name for atom in blueprint_of(name_of("shares")).atoms] == ["first", "shared"]


@pytest.mark.parametrize("batch_norm", ["running", "batch", "group"])
def test_a_norm_in_two_places_stays_one(batch_norm: str) -> None:
    root = make(Source(name_of("shared_norm"), 10, DIGIT, batch_norm))
    assert root.get_submodule("0.1") is root.get_submodule("1.1")
    first, second = blueprint_of(
        name_of("shared_norm"), DIGIT, batch_norm
    ).atoms  # the first convolution, and all behind it
    kinds = [type(layer).__name__ for layer in second.build().modules() if "Norm" in type(layer).__name__]
    assert [type(layer).__name__ for layer in first.build().children()] == ["Module"]
    assert len(kinds) == 1


def test_random_numbers_are_not_recorded() -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        cut.cache_clear()
        found = cut(Source(name_of("drops"), 10, DIGIT, "running"))
        assert found.reason == "Drops: its forward pass draws random numbers outside torch's layers"


def test_other_code_has_other_costs(tmp_path: Path) -> None:
    """Traces are kept by the digest: the same layers in another order of a forward pass that is called as a whole."""
    digests = []
    for number, factor in enumerate(("", "* x[:, :8]")):
        text = (
            Path(name_of("").rstrip(":"))
            .read_text("utf-8")
            .replace("return self.fc(x) if", f"return self.fc(x) {factor} if")
        )
        (tmp_path / f"m{number}.py").write_text(text, "utf-8")
        digests.append(cut(Source(f"{tmp_path / f'm{number}.py'}:branching", 10, DIGIT, "running")).digest)
    assert digests[0] != digests[1]


def test_a_models_file_has_no_code_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(Path(name_of("").rstrip(":")).read_text("utf-8"), "utf-8")
    settings = {"model": f"{tmp_path / 'mine.py'}:net", "strategy": "fedavg", "fleet": "unlimited", "num_rounds": 1}
    run = run_local(tmp_path / "run", **TRIO | settings)
    (loaded,) = [
        name for name, module in sys.modules.items() if getattr(module, "__file__", "") == str(tmp_path / "mine.py")
    ]
    del sys.modules[loaded]
    find_make.cache_clear()
    with pytest.raises(ModelFileError, match=r"was trained with the model .*mine\.py:net', not with '.*other\.py:net'"):
        piecework.load(run.path, model=f"{tmp_path / 'other.py'}:net")
    with pytest.raises(ValueError, match=r"model = <function .*: expected its name in the run, as in my_net\.py:make"):
        piecework.load(run.path, model=make)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="leave normalise and model out"):
        piecework.load(run.path, model="mine.py:net", into=nn.Linear(1, 1))  # type: ignore[call-overload]
    with pytest.raises(ModelFileError, match=r"and no file can have code run\. If you trust it, give"):
        load_model(run.path)
    model = piecework.load(run.path, model=settings["model"])
    mine = piecework.load(run.path, into=sys.modules[loaded].net(model.num_classes, model.input_shape))
    pixels = torch.randint(256, (3, *model.input_shape), dtype=torch.uint8)
    torch.testing.assert_close(mine((pixels / 255 - model.mean) / model.std), model(pixels), rtol=1e-4, atol=1e-5)


def test_errors_of_a_users_file_name_it(tmp_path: Path) -> None:
    for code, said in (
        ("import helper_not_here", "ModuleNotFoundError: No module named"),
        ("raise SystemExit(2)", r"EndedProcessError: it calls sys.exit\(2\)"),
        ("def net(num_classes, input_shape): raise SystemExit", ""),
    ):
        (tmp_path / "mine.py").write_text(f"{code}\n", "utf-8")
        with pytest.raises(
            ValueError, match=rf"mine.py' cannot be imported: {said}" if said else "cannot be built: Ended"
        ):
            blueprint_of(f"{tmp_path / 'mine.py'}:net")
