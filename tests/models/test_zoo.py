"""The zoo: counts from the papers by hand, outputs against torchvision, torch's own layers or a recomputation, the requests."""

from functools import partial

import pytest
import torch
from helpers import num_parameters
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Blueprint, Cascade, initial_state, isolate_rng
from piecework.models.zoo import MODELS, build_blueprint, is_token_model, model_options, usual_input


def blueprint_of(name: str, shape: tuple[int, ...] | None = None, num_classes: int | None = None, **rest) -> Blueprint:
    usual_shape, usual_classes = usual_input(name)
    return build_blueprint(name, num_classes=num_classes or usual_classes, input_shape=shape or usual_shape, **rest)


def cascade_of(blueprint: Blueprint, seed: int = 0) -> Cascade:
    with isolate_rng(seed):
        return Cascade(blueprint)


def inputs_of(blueprint: Blueprint, batch_size: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if blueprint.vocabulary:
        return torch.randint(blueprint.vocabulary, (batch_size, *blueprint.input_shape), generator=generator)
    return torch.randn(batch_size, *blueprint.input_shape, generator=generator)


def stir_norms(model: nn.Module) -> None:
    """Give norms weights and statistics that are not the neutral ones, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(1)
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(model.get_submodule(name.rpartition(".")[0]), kinds) and tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5, generator=generator)


# ---- parameters, from the facts and by hand

ENCODER = 192 * (3 * 192 + 192 + 2 * 768) + 3 * 192 + 192 + 768 + 192 + 4 * 192
RESNET10_WEIGHTS = 9 * 3 * 64 + 18 * 64 * 64 + sum(9 * n * n // 2 + 9 * n * n + n * n // 2 for n in (128, 256, 512))
PREACT_NORMS = 2 * (64 + 4 * 64 + (64 + 3 * 128) + (128 + 3 * 256) + (256 + 3 * 512))


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        # convolutions with biases, pairs of batch norm parameters, linear
        ("cnn3", {}, 64 * 28 + 128 * (64 * 9 + 1) + 2 * (64 + 128) + 512 * 10 + 10),
        ("cnn4", {}, 64 * (3 * 49 + 1) + 128 * (64 * 49 + 1) + 2 * 192 + (6272 + 1) * 512 + 513 * 256),
        ("cnn-femnist", {}, 246_590),
        ("conv4", {}, 804_800 + 1_280),
        ("lenet5", {}, 430_500),
        ("lenet5", {"layout": "lecun"}, 61_706),
        ("lstm-imdb", {}, 920_385),
        ("mlp", {}, 3073 * 128 + 2 * 129 * 128 + 129 * 10),
        ("mlp", {"shape": (30,), "hidden": "20", "layers": 1, "width": 0.5}, 31 * 10 + 11 * 10),
        ("resnet10", {}, RESNET10_WEIGHTS + 2 * (64 + 2 * 64 + 3 * (128 + 256 + 512)) + 513 * 10),
        ("resnet34", {"num_classes": 256, "shape": (3, 224, 224)}, 21_416_000),
        ("resnet18-preact", {}, 11_159_232 + PREACT_NORMS + 513 * 100),
        ("resnet18-preact", {"width": 0.5}, 2_790_240 + PREACT_NORMS // 2 + 257 * 100),
        ("vgg13", {}, 9_410_880 + 2 * 513 * 512 + 513 * 10),  # torchvision's features
        ("vgg11", {"norm": "none", "classifier": "prism"}, 9_220_480 + 5_130),
        ("vgg16", {"pooling": "profl"}, 15_253_578),  # poolings have no parameters
        ("vit", {"num_classes": 1000}, 5_717_416),  # timm's vit_tiny_patch16_224
        # patches of 3x4x4, class token, 65 positions; 12 encoders; layer norm, linear
        ("deit-tiny", {}, 192 * 49 + 192 + 65 * 192 + 12 * ENCODER + 2 * 192 + 193 * 10),
    ],
)
def test_parameter_counts(name, options, count):
    assert num_parameters(blueprint_of(name, **options)) == count


def test_convolution_weights_of_spafl():
    for width, count in ((1, 11_159_232), (0.5, 2_790_240)):
        model = Cascade(blueprint_of("resnet18-preact", width=width))
        assert sum(p.numel() for p in model.parameters() if p.dim() == 4) == count
    weights = [p for p in Cascade(blueprint_of("conv4")).parameters() if p.dim() > 1]
    assert sum(p.numel() for p in weights) == 804_800
    assert sum(len(p) for p in weights) == 650  # one threshold for each output, as in SpaFL's code


# ---- every model at its usual input


@pytest.mark.parametrize("name", sorted(MODELS))
def test_usual_inputs_give_the_declared_shapes(name):
    blueprint = blueprint_of(name)
    z = inputs_of(blueprint)
    for atom in blueprint.atoms:
        before = z.clone()
        with torch.no_grad():
            out = atom.build()(z)
        assert tuple(out.shape[1:]) == atom.shape, atom.name
        assert torch.equal(z, before), atom.name
        z = out
    before = z.clone()
    with torch.no_grad():
        logits = blueprint.build_head()(z)
    assert logits.shape == (2, 1 if name == "lstm-imdb" else blueprint.num_classes)
    assert torch.equal(z, before)
    assert is_token_model(name) == (blueprint.vocabulary > 0) == (len(blueprint.input_shape) == 1)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_equal_atoms_have_equal_partials(name):
    blueprint = blueprint_of(name)
    for build in (*(atom.build for atom in blueprint.atoms), blueprint.build_head):
        assert isinstance(build, partial) and not build.keywords
        assert "<" not in build.func.__qualname__  # no lambda, no closure
        assert hash(build.args) == hash(tuple(build.args))
    again = blueprint_of(name)
    assert [(a.build.func, a.build.args) for a in again.atoms] == [
        (a.build.func, a.build.args) for a in blueprint.atoms
    ]


@pytest.mark.parametrize(
    ("name", "shape", "width", "shapes"),
    [
        ("cnn3", (3, 32, 32), 0.25, [(16, 32, 32), (32, 2, 2)]),
        ("cnn4", (1, 51, 60), 0.25, [(16, 13, 15), (32, 7, 7)]),
        ("cnn-femnist", (1, 28, 28), 0.5, [(16, 14, 14), (32, 7, 7)]),
        ("conv4", (3, 28, 30), 0.125, [(8, 24, 26), (8, 10, 11), (16, 6, 7), (16, 1, 1)]),
        ("lenet5", (1, 16, 16), 0.5, [(10, 6, 6), (25, 1, 1)]),
        ("lstm-imdb", (7,), 0.125, [(7, 8), (7, 32), (7, 32)]),
        ("resnet10", (3, 8, 8), 0.125, [(8, 8, 8), (8, 8, 8), (16, 4, 4), (32, 2, 2), (64, 1, 1)]),
        ("deit-tiny", (3, 8, 12), 0.5, [(7, 96)] * 13),
        ("vit", (1, 32, 16), 0.01, [(3, 3)] * 13),
    ],
)
def test_widths_and_other_sizes(name, shape, width, shapes):
    blueprint = blueprint_of(name, shape, 5, width=width)
    assert [atom.shape for atom in blueprint.atoms] == shapes
    model = cascade_of(blueprint)
    logits = model(inputs_of(blueprint))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert list(dict(initial_state(blueprint, 7))) == list(model.state_dict())


def test_profl_pools_elsewhere():
    maps = {name: [atom.shape[1] for atom in blueprint_of(name, pooling="profl").atoms] for name in ("vgg11", "vgg16")}
    assert maps["vgg11"] == [32, 16, 16, 8, 8, 4, 4, 2]
    assert maps["vgg16"] == [32, 32, 32, 16, 16, 16, 16, 8, 8, 8, 8, 8, 4]


# ---- the same numbers as an independent model


def assert_same_logits(ours: Cascade, theirs, blueprint: Blueprint) -> None:
    x = inputs_of(blueprint, 3)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def in_order(ours: Cascade, theirs: nn.Module) -> None:
    """Copy weights over where both have the same layers in the same order."""
    values, names = list(ours.state_dict().values()), list(theirs.state_dict())
    theirs.load_state_dict(dict(zip(names, values, strict=True)))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, *, bias: bool = True):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=bias)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


PLAIN = {
    "cnn3": lambda: [
        *convolution(3, 64, 3, 1, 1),
        *convolution(64, 128, 3, 2, 1),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    ],
    "cnn4": lambda: [
        *convolution(3, 64, 7, 2, 3),
        nn.MaxPool2d(2),
        *convolution(64, 128, 7, 2, 3),
        nn.AdaptiveMaxPool2d(7),
        nn.Flatten(),
        *(nn.Linear(6272, 512), nn.ReLU(), nn.Linear(512, 10)),
    ],
    "conv4": lambda: [
        *convolution(3, 64, 5, bias=False),
        *convolution(64, 64, 5, bias=False),
        nn.MaxPool2d(2),
        *convolution(64, 128, 5, bias=False),
        *convolution(128, 128, 5, bias=False),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *(nn.Linear(512, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()),
        nn.Linear(128, 10, bias=False),
    ],
    "cnn-femnist": lambda: [
        *(nn.Conv2d(1, 32, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding="same"), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(3136, 10),
    ],
    "lenet5": lambda: [
        *(nn.Conv2d(1, 20, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5, bias=False), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(800, 500, bias=False), nn.ReLU(), nn.Linear(500, 10, bias=False)),
    ],
}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_small_networks_layer_by_layer(name):
    blueprint = blueprint_of(name, (3, 64, 64) if name == "cnn4" else None, 10)
    ours, theirs = cascade_of(blueprint).eval(), nn.Sequential(*PLAIN[name]()).eval()
    stir_norms(ours)
    in_order(ours, theirs)
    assert_same_logits(ours, theirs, blueprint)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("vgg11", [64, 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M"]),
        ("vgg16", [64, 64, 128, 128, "M", 256, 256, 256, 512, "M", 512, 512, 512, 512, 512, "M"]),
    ],
)
def test_profl_vgg_from_its_layout(name, layout):
    vgg = pytest.importorskip("torchvision.models.vgg")
    features = vgg.make_layers(layout, batch_norm=True)
    theirs = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).eval()
    blueprint = blueprint_of(name, pooling="profl", classifier="prism")
    ours = cascade_of(blueprint).eval()
    stir_norms(ours)
    in_order(ours, theirs)
    assert_same_logits(ours, theirs, blueprint)


def test_lstm_is_torchs_of_two_layers():
    blueprint = blueprint_of("lstm-imdb", (9,))
    ours = cascade_of(blueprint)
    p = ours.state_dict()
    theirs = nn.LSTM(64, 256, num_layers=2, batch_first=True)
    theirs.load_state_dict({name: p[f"atoms.{int(name[-1]) + 1}.lstm.{name[:-1]}0"] for name in theirs.state_dict()})

    def logits(tokens: Tensor) -> Tensor:
        states, _ = theirs(p["atoms.0.weight"][tokens])
        return states[:, 8] @ p["head.fc.weight"].T + p["head.fc.bias"]

    assert_same_logits(ours, logits, blueprint)


@pytest.mark.parametrize(("name", "patch", "shape"), [("deit-tiny", 4, (3, 16, 16)), ("vit", 16, (3, 32, 32))])
def test_transformer_is_torchvisions(name, patch, shape):
    tv = pytest.importorskip("torchvision.models")
    theirs = tv.VisionTransformer(
        image_size=shape[1], patch_size=patch, num_layers=2, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=10
    ).eval()
    blueprint = blueprint_of(name, shape, depth="2")
    ours = cascade_of(blueprint).eval()
    ours.atoms[0].class_token.data.normal_(generator=torch.Generator().manual_seed(4))
    stir_norms(ours)
    p = ours.state_dict()
    state = {
        "class_token": p["atoms.0.class_token"],
        "conv_proj.weight": p["atoms.0.proj.weight"],
        "conv_proj.bias": p["atoms.0.proj.bias"],
        "encoder.pos_embedding": p["atoms.0.positions"],
    }
    for entry in ("weight", "bias"):
        for layer in (1, 2):
            their, our = f"encoder.layers.encoder_layer_{layer - 1}", f"atoms.{layer}"
            state |= {
                f"{their}.ln_1.{entry}": p[f"{our}.norm1.{entry}"],
                f"{their}.self_attention.in_proj_{entry}": p[f"{our}.qkv.{entry}"],
                f"{their}.self_attention.out_proj.{entry}": p[f"{our}.proj.{entry}"],
                f"{their}.ln_2.{entry}": p[f"{our}.norm2.{entry}"],
                f"{their}.mlp.0.{entry}": p[f"{our}.fc1.{entry}"],
                f"{their}.mlp.3.{entry}": p[f"{our}.fc2.{entry}"],
            }
        state |= {f"encoder.ln.{entry}": p[f"head.norm.{entry}"], f"heads.head.{entry}": p[f"head.fc.{entry}"]}
    theirs.load_state_dict(state)
    assert_same_logits(ours, theirs, blueprint)


def test_resnet18_preact_recomputed():
    blueprint = blueprint_of("resnet18-preact", (3, 16, 16), width=0.25)
    model = cascade_of(blueprint).eval()
    stir_norms(model)
    p = model.state_dict()

    def norm_relu(z: Tensor, name: str) -> Tensor:
        entries = (p[f"{name}.{entry}"][:, None, None] for entry in ("running_mean", "running_var", "weight", "bias"))
        mean, var, weight, bias = entries
        return ((z - mean) / (var + 1e-5).sqrt() * weight + bias).clamp(min=0)

    def logits(x: Tensor) -> Tensor:
        z = norm_relu(F.conv2d(x, p["atoms.0.conv1.weight"], padding=1), "atoms.0.bn1")
        for i in range(1, 9):
            stride = 2 if i in (3, 5, 7) else 1
            activated = norm_relu(z, f"atoms.{i}.bn1")
            hidden = F.conv2d(activated, p[f"atoms.{i}.conv1.weight"], stride=stride, padding=1)
            out = F.conv2d(norm_relu(hidden, f"atoms.{i}.bn2"), p[f"atoms.{i}.conv2.weight"], padding=1)
            z = out + (z if stride == 1 else F.conv2d(activated, p[f"atoms.{i}.shortcut.weight"], stride=2))
        return z.mean(dim=(2, 3)) @ p["head.fc.weight"].T + p["head.fc.bias"]

    assert_same_logits(model, logits, blueprint)


# ---- requests


def test_bad_requests_say_what_is_allowed():
    def message(name: str, shape: tuple[int, ...] | None = None, **options) -> str:
        with pytest.raises(ValueError) as error:
            blueprint_of(name, shape, **options)
        return str(error.value)

    assert message("lstm-imdb", (3, 32, 32)) == (
        "lstm-imdb reads tokens: expected an input shape of (length,), got (3, 32, 32)"
    )
    assert (
        message("vit", (500,))
        == "vit reads images: expected an input shape of (C, H, W), got (500,); mlp reads feature vectors, lstm-imdb tokens"
    )
    assert message("lstm-imdb", (0,)).endswith("expected an input shape of (length,), got (0,)")
    assert message("vit", patch="big") == "patch = 'big' is not known: vit needs a whole number there"
    assert message("vit", depth="0") == "depth = 0 is not allowed: use a whole number from 1"
    assert message("vit", (3, 224, 200)) == "vit with patch = 16 needs image sides divisible by it, got 224x200"
    assert message("deit-tiny", (3, 30, 32)) == "deit-tiny with patch = 4 needs image sides divisible by it, got 30x32"
    assert message("deit-tiny", stem="cifar") == "deit-tiny has no option 'stem': it has patch, depth"
    assert message("vgg13", pooling="profl") == (
        "pooling = 'profl' is not defined for vgg13: ProFL has vgg11 and vgg16"
    )
    assert message("vgg16", pooling="max") == "pooling = 'max' is not known: use one of torchvision, profl"
    assert message("vgg16", norm="group") == "norm = 'group' is not known: use one of bn, none"
    assert message("lenet5", layout="keras") == "layout = 'keras' is not known: use one of caffe, lecun"
    assert message("lenet5", (1, 15, 28)) == (
        "lenet5 in the caffe layout needs images of at least 16x16 pixels, got 15x28"
    )
    for name, minimum in {"cnn3": 3, "cnn4": 51, "cnn-femnist": 4, "conv4": 28, "resnet18-preact": 8}.items():
        blueprint_of(name, (1, minimum, minimum))
        assert f"{name} needs images of at least {minimum}x{minimum}" in message(name, (1, minimum - 1, minimum))


def test_options_come_as_text_or_number():
    assert model_options("vgg16") == ("classifier", "norm", "pooling")
    assert model_options("vit") == ("patch", "depth")
    for options in ({"patch": "8", "depth": "3"}, {"patch": 8, "depth": 3}):
        blueprint = blueprint_of("vit", (3, 32, 32), **options)
        assert (len(blueprint.atoms), blueprint.feature_shape) == (4, (17, 192))


def test_two_classes_of_text_have_one_logit():
    counts = {
        classes: blueprint_of("lstm-imdb", num_classes=classes).build_head().fc.out_features for classes in (2, 3)
    }
    assert counts == {2: 1, 3: 3}


def test_the_registered_names():
    names = "cnn3 cnn4 cnn-femnist conv4 convnet deit-tiny lenet5 lstm-imdb mlp preresnet20 resnet10 resnet18"
    names += " resnet18-preact resnet34 vgg11 vgg13 vgg16 vit"
    assert set(MODELS) == set(names.split())
    with pytest.raises(ValueError, match="model = 'vgg19' is not known: use one of"):
        usual_input("vgg19")
