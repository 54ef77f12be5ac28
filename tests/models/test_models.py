"""Every model against counts from papers, torchvision or a recomputation; the rules of a cascade on small tensors."""

import pytest
import torch
from helpers import num_parameters
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import (
    Blueprint,
    Cascade,
    ExitHead,
    fit_features,
    initial_state,
    isolate_rng,
    run_atoms,
    unit_of,
)
from piecework.models.static_norms import batch_norm_names
from piecework.models.torchvision_names import torchvision_name_map
from piecework.models.variant import Variant, vary
from piecework.models.zoo import MODELS, build_blueprint

SMALL_IMAGES = sorted(set(MODELS) - {"cnn4", "lstm-imdb", "vit"})  # those read 28x28; test_zoo.py has the others too
BATCH_NORMED = sorted(set(SMALL_IMAGES) - {"cnn-femnist", "deit-tiny", "lenet5", "mlp"})


def blueprint_of(name: str, shape: tuple[int, ...] = (3, 32, 32), **settings) -> Blueprint:
    return build_blueprint(name, num_classes=settings.pop("num_classes", 10), input_shape=shape, **settings)


def cascade_of(blueprint: Blueprint, seed: int = 0) -> Cascade:
    with isolate_rng(seed):
        return Cascade(blueprint)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stir_norms(model: nn.Module) -> None:
    """Give batch norms weights and statistics that are not the neutral ones, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
                if tensor is not None:
                    tensor.data.uniform_(0.5, 1.5, generator=generator)


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("preresnet20", (3, 32, 32), {}, 272_314),
        ("resnet18", (3, 32, 32), {"stem": "cifar"}, 11_173_962),  # PriSM's
        ("resnet18", (3, 224, 224), {"num_classes": 1000}, 11_689_512),  # torchvision's
        ("vgg16", (3, 32, 32), {}, 15_253_578),  # FedProphet's
        ("vgg16", (3, 32, 32), {"classifier": "prism"}, 14_723_136 + 5_130),  # torchvision's features, linear
        ("vgg11", (3, 32, 32), {"classifier": "profl"}, 9_225_984 + 512 * 4096 + 4096**2 + 4096 * 12 + 10),
        ("lenet5", (1, 28, 28), {"layout": "lecun"}, 61_706),
        # convolutions, pairs of batch norm parameters, linear
        (
            "convnet",
            (1, 8, 8),
            {},
            9 * (16 + 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64) + 2 * (16 + 16 + 32 + 32 + 64) + 256 * 10 + 10,
        ),
    ],
)
def test_parameter_counts(name, shape, options, count):
    assert num_parameters(blueprint_of(name, shape, **options)) == count


@pytest.mark.parametrize(("width", "edges"), [(1, (28, 28)), (1, (32, 32)), (0.5, (32, 28)), (0.01, (28, 28))])
@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_atoms_have_the_shape_they_say_and_leave_their_input_alone(name, edges, width):
    blueprint = blueprint_of(name, (3, *edges), width=width)
    z = images(2, 3, *edges)
    for atom in blueprint.atoms:
        before = z.clone()
        out = atom.build()(z)
        assert tuple(out.shape[1:]) == atom.shape, atom.name
        assert torch.equal(z, before), atom.name
        z = out.detach()
    before = z.clone()
    assert blueprint.build_head()(z).shape == (2, 10)
    assert torch.equal(z, before)


@pytest.mark.parametrize(
    ("name", "edge"), [("convnet", 8), ("convnet", 9), ("resnet18", 64), ("lenet5", 16), ("vgg16", 16)]
)
def test_shapes_at_other_sizes(name, edge):
    blueprint = blueprint_of(name, (1, edge, edge), width=0.25)
    z = images(2, 1, edge, edge)
    for atom in blueprint.atoms:
        z = atom.build()(z)
        assert tuple(z.shape[1:]) == atom.shape, atom.name
    assert blueprint.build_head()(z).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in SMALL_IMAGES), ("preresnet20", {"shortcut_from": "relu"})]
)
def test_every_parameter_gets_a_gradient(name, options):
    model = cascade_of(blueprint_of(name, width=0.25, **options))
    for mode in (True, False):  # in-place layers differ from mode to mode
        model.train(mode).zero_grad()
        model(images(2, 3, 32, 32)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_atom_names_and_maps():
    def maps(name: str, edge: int, **options: str) -> list[tuple[str, int, int]]:
        blueprint = blueprint_of(name, (3, edge, edge), **options)
        return [(atom.name, atom.shape[0], atom.shape[1]) for atom in blueprint.atoms]

    assert maps("preresnet20", 28)[::3] == [("stem", 16, 28), ("block3", 16, 28), ("block6", 32, 14), ("block9", 64, 7)]
    assert [size for *_, size in maps("vgg11", 28)] == [14, 7, 7, 3, 3, 1, 1, 1]
    assert [size for *_, size in maps("vgg11", 32)] == [16, 8, 8, 4, 4, 2, 2, 1]
    assert maps("vgg16", 32)[-1] == ("conv13", 512, 1)
    assert [size for *_, size in maps("resnet18", 32)] == [32, 32, 32, 16, 16, 8, 8, 4, 4]
    assert maps("resnet18", 64)[0] == ("stem", 64, 16)
    lecun = [maps("lenet5", edge, layout="lecun") for edge in (28, 32)]
    assert lecun == 2 * [[("conv1", 6, 14), ("conv2", 16, 5)]]
    assert maps("lenet5", 28) == [("conv1", 20, 12), ("conv2", 50, 4)]
    assert maps("convnet", 8) == [
        ("conv1", 16, 8),
        ("conv2", 16, 8),
        ("conv3", 32, 4),
        ("conv4", 32, 4),
        ("conv5", 64, 4),
    ]


def test_width_scales_channels_and_hidden_layers():
    narrow = blueprint_of("preresnet20", width=1 / 6)
    assert [atom.shape[0] for atom in narrow.atoms[::3]] == [2, 2, 5, 10]
    assert blueprint_of("vgg16", width=0.5).build_head().fc2.weight.shape == (256, 256)
    assert blueprint_of("lenet5", (1, 28, 28), width=0.5, layout="lecun").build_head().fc2.weight.shape == (42, 60)
    assert {atom.shape[0] for atom in blueprint_of("convnet", width=1e-3).atoms} == {1}


def cifar_resnet18(torchvision_models) -> nn.Module:
    model = torchvision_models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


def small_vgg(torchvision_models, layout: str, normed: bool = True) -> nn.Module:
    """torchvision's convolutions under their names in its VGG, without the 120 M parameters of its classifier."""
    hidden = [[nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.5)] for _ in range(2)]
    make_layers, layouts = torchvision_models.vgg.make_layers, torchvision_models.vgg.cfgs
    vgg = nn.Sequential()
    vgg.add_module("features", make_layers(layouts[layout], batch_norm=normed))
    vgg.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
    vgg.add_module("flatten", nn.Flatten())
    vgg.add_module("classifier", nn.Sequential(*hidden[0], *hidden[1], nn.Linear(512, 10)))
    return vgg


@pytest.mark.parametrize(
    ("name", "options", "edge", "oracle"),
    [
        ("resnet18", {}, 64, lambda tv: tv.resnet18(num_classes=10)),
        ("resnet18", {}, 32, cifar_resnet18),
        ("resnet34", {}, 64, lambda tv: tv.resnet34(num_classes=10)),
        ("vgg11", {}, 32, lambda tv: small_vgg(tv, "A")),
        ("vgg13", {}, 32, lambda tv: small_vgg(tv, "B")),
        ("vgg13", {"norm": "none"}, 32, lambda tv: small_vgg(tv, "B", normed=False)),
        ("vgg16", {}, 32, lambda tv: small_vgg(tv, "D")),
    ],
    ids=["resnet18-imagenet", "resnet18-cifar", "resnet34", "vgg11", "vgg13", "vgg13-plain", "vgg16"],
)
def test_same_logits_as_torchvision(name, options, edge, oracle):
    models = pytest.importorskip("torchvision.models")
    with isolate_rng(3):
        theirs = oracle(models).eval()
    stir_norms(theirs)
    weights = theirs.state_dict()
    ours = cascade_of(blueprint_of(name, (3, edge, edge), **options)).eval()
    state = {our: weights.pop(their) for our, their in torchvision_name_map(name, **options).items()}
    # The map has all names but those of VGG's classifier, whose layers are 0, 3, 6 there and fc1, fc2, fc3 here.
    for place, layer in enumerate(("fc1", "fc2", "fc3") if name.startswith("vgg") else ()):
        state |= {
            f"head.{layer}.{entry}": weights.pop(f"classifier.{3 * place}.{entry}") for entry in ("weight", "bias")
        }
    assert not weights
    ours.load_state_dict(state)
    x = images(2, 3, edge, edge)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_torchvision_names_need_a_torchvision_model():
    with pytest.raises(
        ValueError, match="convnet has no torchvision names: known are resnet18, resnet34, vgg11, vgg13, vgg16"
    ):
        torchvision_name_map("convnet")


@pytest.mark.parametrize("batch_norm", ["running", "batch"])
@pytest.mark.parametrize("shortcut_from", ["x", "relu"])
def test_preresnet20_recomputed(shortcut_from, batch_norm):
    model = cascade_of(blueprint_of("preresnet20", batch_norm=batch_norm, shortcut_from=shortcut_from)).eval()
    stir_norms(model)
    p = model.state_dict()

    def norm(z: Tensor, name: str) -> Tensor:
        mean, var = z.mean(dim=(0, 2, 3)), z.var(dim=(0, 2, 3), correction=0)
        if batch_norm == "running":
            mean, var = p[f"{name}.running_mean"], p[f"{name}.running_var"]
        scale = p[f"{name}.weight"] / (var + 1e-5).sqrt()
        return (z - mean[:, None, None]) * scale[:, None, None] + p[f"{name}.bias"][:, None, None]

    x = images(2, 3, 32, 32)
    z = norm(F.conv2d(x, p["atoms.0.conv.weight"], padding=1), "atoms.0.bn")
    for i in range(1, 10):
        stride = 2 if i in (4, 7) else 1
        activated = norm(z, f"atoms.{i}.bn1").clamp(min=0)
        shortcut = z if shortcut_from == "x" else activated
        if stride == 2:
            shortcut = F.conv2d(shortcut, p[f"atoms.{i}.shortcut.weight"], stride=2)
        hidden = F.conv2d(activated, p[f"atoms.{i}.conv1.weight"], stride=stride, padding=1)
        hidden = norm(hidden, f"atoms.{i}.bn2").clamp(min=0)
        z = F.conv2d(hidden, p[f"atoms.{i}.conv2.weight"], padding=1) + shortcut
    features = norm(z, "head.bn").clamp(min=0).mean(dim=(2, 3))
    logits = features @ p["head.fc.weight"].T + p["head.fc.bias"]
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BATCH_NORMED)
def test_batch_norm_kinds(name):
    states = {
        kind: set(Cascade(blueprint_of(name, width=0.1, batch_norm=kind)).state_dict())
        for kind in ("running", "batch", "local")
    }
    buffers = {
        entry for entry in states["running"] if entry.endswith(("running_mean", "running_var", "batches_tracked"))
    }
    assert buffers
    assert states["local"] == states["running"]
    assert states["batch"] == states["running"] - buffers


def test_bad_requests_say_what_is_allowed():
    def message(name="resnet18", shape=(3, 32, 32), **settings) -> str:
        with pytest.raises(ValueError) as error:
            blueprint_of(name, shape, **settings)
        return str(error.value)

    assert (
        message("resnet19")
        == f"model = 'resnet19' is not known: use one of {', '.join(MODELS)}; did you mean 'resnet18'?"
    )
    assert (
        message(batch_norm="layer")
        == "architecture.batch-norm = 'layer' is not known: use one of running, batch, local, group, frozen"
    )
    assert message(classifier="prism") == "resnet18 has no option 'classifier': it has stem"
    assert message("convnet", stem="cifar") == "convnet has no option 'stem': it has none"
    assert message(stem="tiny") == "stem = 'tiny' is not known: use one of auto, cifar, imagenet"
    assert message("vgg11", classifier="big").startswith("classifier = 'big' is not known")
    assert message("preresnet20", shortcut_from="y").startswith("shortcut-from = 'y' is not known")
    assert message(shape=(3, 32)) == "resnet18 reads images: expected an input shape of (C, H, W), got (3, 32)"
    assert "one class and a width above 0, got 10 and 0" in message(width=0)
    assert "one class and a width above 0, got 0 and 1.0" in message(num_classes=0)
    assert message("vgg16", (3, 32, 15)) == "vgg16 needs images of at least 16x16 pixels, got 32x15"
    for name, minimum in {"convnet": 8, "lenet5": 16, "preresnet20": 8, "resnet18": 8, "vgg11": 16}.items():
        blueprint_of(name, (1, minimum, minimum))
        assert name in message(name, (1, minimum - 1, minimum)) and f"{minimum}x{minimum}" in message(
            name, (1, minimum - 1, minimum)
        )
    assert "imagenet stem needs images of at least 32x32" in message(shape=(3, 28, 28), stem="imagenet")


def test_fit_features_subsamples_crops_and_pads():
    z = images(2, 16, 8, 8)
    out = fit_features(z, (64, 2, 2))
    assert out.shape == (2, 64, 2, 2)
    assert torch.equal(out[:, 24:40], z[:, :, ::4, ::4])
    assert not out[:, :24].any() and not out[:, 40:].any()

    row = torch.arange(7.0).reshape(1, 1, 1, 7)
    assert fit_features(row, (1, 1, 5)).flatten().tolist() == [0, 1, 2, 3, 4]  # step 1, then cropped
    assert fit_features(row, (1, 1, 3)).flatten().tolist() == [0, 2, 4]
    assert fit_features(row, (1, 1, 7)) is row
    assert fit_features(row[..., :1], (4, 1, 1)).flatten().tolist() == [0, 0, 0, 0]
    assert fit_features(torch.ones(1, 1, 1, 1), (4, 1, 1)).flatten().tolist() == [
        0,
        1,
        0,
        0,
    ]  # the odd zero comes after
    assert fit_features(torch.ones(1, 2), (5,)).tolist() == [[0, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((16, 9, 8), "space only shrinks"), ((16,), "space only shrinks"), ((15, 8, 8), "channels are only added")],
)
def test_fit_features_does_not_grow_space_or_drop_channels(shape, reason):
    with pytest.raises(ValueError, match=reason):
        fit_features(torch.zeros(1, 16, 8, 8), shape)


def test_run_atoms_runs_all_or_skips_some():
    blueprint = blueprint_of("preresnet20", (3, 28, 28))
    model = cascade_of(blueprint).eval()
    x = images(2, 3, 28, 28)
    with torch.no_grad():
        z = run_atoms(blueprint, range(10), list(model.atoms), x)
        assert torch.equal(model.head(z), model(x))
        stem = model.atoms[0](x)
        skipped = run_atoms(blueprint, (0, 5), [model.atoms[0], model.atoms[5]], x)
        by_hand = torch.zeros(2, 32, 14, 14)
        by_hand[:, 8:24] = stem[:, :, ::2, ::2]
        assert torch.equal(skipped, model.atoms[5](by_hand))


def test_exit_head():
    head = ExitHead((3, 4, 4), 5, "batch")
    z = images(2, 3, 4, 4)
    centred = (z - z.mean(dim=(0, 2, 3), keepdim=True)) / (
        z.var(dim=(0, 2, 3), correction=0, keepdim=True) + 1e-5
    ).sqrt()
    torch.testing.assert_close(head(z), head.fc(centred.mean(dim=(2, 3))))
    assert set(head.state_dict()) == {"norm.weight", "norm.bias", "fc.weight", "fc.bias"}
    flat = ExitHead((3,), 5, "running")
    assert set(flat.state_dict()) == {"fc.weight", "fc.bias"}
    assert torch.equal(flat(z[:, :, 0, 0]), flat.fc(z[:, :, 0, 0]))


def test_units():
    blueprint = blueprint_of("lenet5", (1, 28, 28), layout="lecun")
    assert blueprint.units() == ["atoms.0", "atoms.1", "head"]
    assert blueprint.units(exits=True) == ["atoms.0", "atoms.1", "head", "exits.0"]
    assert blueprint.build_unit("exits.0").fc.in_features == 6
    assert (blueprint.shape_before(0), blueprint.shape_before(1)) == ((1, 28, 28), (6, 14, 14))
    assert blueprint.feature_shape == (16, 5, 5)
    with pytest.raises(ValueError, match="unknown unit 'tail'"):
        blueprint.build_unit("tail")
    assert [unit_of(name) for name in ("atoms.12.conv1.weight", "head.fc.bias", "exits.3.norm.weight")] == [
        "atoms.12",
        "head",
        "exits.3",
    ]


@pytest.mark.parametrize("name", SMALL_IMAGES)
def test_initial_state_names_the_cascade_and_depends_on_the_seed_alone(name):
    blueprint = blueprint_of(name, width=0.1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    state = dict(initial_state(blueprint, 7))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(state) == list(Cascade(blueprint).state_dict())
    torch.manual_seed(6)
    again, other = dict(initial_state(blueprint, 7)), dict(initial_state(blueprint, 8))
    assert all(torch.equal(state[entry], again[entry]) for entry in state)
    assert not torch.equal(next(iter(state.values())), next(iter(other.values())))


def test_kaimings_initial_weights():
    """Of convolutions alone, with a variance of 2 / (outputs k^2): 1.4e-3 for 160 filters of 3 x 3."""
    blueprint = blueprint_of("vgg11", width=0.625, initialisation="kaiming-normal")
    state, default = dict(initial_state(blueprint, 7)), dict(initial_state(blueprint_of("vgg11", width=0.625), 7))
    drawn = state["atoms.2.conv.weight"]
    assert drawn.shape == (160, 80, 3, 3)
    assert drawn.var().item() == pytest.approx(2 / (160 * 9), rel=0.02)
    assert abs(drawn.mean()) < 1e-3
    changed = {entry for entry, value in state.items() if not torch.equal(value, default[entry])}
    assert changed == {f"atoms.{number}.conv.weight" for number in range(8)}
    narrow = vary(blueprint, Variant(width=0.5))
    assert dict(initial_state(narrow, 7))["atoms.2.conv.weight"].var().item() == pytest.approx(2 / (80 * 9), rel=0.05)


def test_initial_state_of_a_unit_does_not_depend_on_the_others():
    both = [dict(initial_state(blueprint_of("vgg11", width=0.1, classifier=c), 7)) for c in ("fedprophet", "prism")]
    atoms = [entry for entry in both[0] if entry.startswith("atoms.")]
    assert atoms and all(torch.equal(both[0][entry], both[1][entry]) for entry in atoms)
    plain, exits = (dict(initial_state(blueprint_of("convnet"), 7, exits=e)) for e in (False, True))
    assert all(torch.equal(plain[entry], exits[entry]) for entry in plain)
    assert {unit_of(entry) for entry in exits.keys() - plain.keys()} == {"exits.0", "exits.1", "exits.2", "exits.3"}


def test_batch_norm_names():
    blueprint = blueprint_of("convnet")
    norm = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert batch_norm_names("atoms.0", blueprint.build_unit("atoms.0")) == {f"atoms.0.bn.{entry}" for entry in norm}
    assert batch_norm_names("atoms.0", nn.BatchNorm2d(2)) == {f"atoms.0.{entry}" for entry in norm}
    assert batch_norm_names("head", blueprint.build_unit("head")) == set()
