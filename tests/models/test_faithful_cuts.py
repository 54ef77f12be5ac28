"""Modules of which a careless cut would compute, or learn, something else than they do."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers import TRIO, clients_of, fleet_json, run_local
from torch import Tensor, nn
from torch.nn import functional as F

import piecework
from piecework.models.cascade import Cascade, unset_weights
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.zoo import build_blueprint

DIGIT, WIDTH = (1, 8, 8), 16
LAYERS = ("embed", "layers_0", "layers_1")


class Rows(nn.Module):
    """Layers on the rows of an image, and something between them."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, classes)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def between(self, x: Tensor) -> Tensor:
        """What happens behind each layer."""
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1))
        for layer in self.layers:
            x = self.between(layer(x).relu())
        return self.out(x.mean(1))


class OnDevice(Rows):
    """Asks where it is, which tensors without values are not."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.device.type == "cpu" else x


class Learning(Rows):
    """Asks whether it learns."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.requires_grad else x


class Typed(Rows):
    """Asks for a type, which another precision changes."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if x.dtype == torch.float32 else x


class Halved(Rows):
    """Pairs each example of one half with one of the other, and uses how many there are."""

    def between(self, x: Tensor) -> Tensor:
        return x / x.chunk(2, 0)[1].size(0)


class Few(Rows):
    """Uses the number of its first four examples."""

    def forward(self, x: Tensor) -> Tensor:
        number = x[:4].size(0)
        return super().forward(x) / number


class Dropping(nn.Module):
    """Leaves half of the rows out in training."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x[:, ::2]


class Patches(Rows):
    """Divides by the number of rows, which is another one in training."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.drop = Dropping()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.embed(x.squeeze(1)))
        number = x.size(1)
        for layer in self.layers:
            x = layer(x).relu()
        return self.out(x.sum(1) / number)


class Depth(nn.Module):
    """Drops nothing, but asks whether it is trained, as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x if not self.training else x * 1.5


class Deep(Rows):
    """Has a module that asks whether it is trained behind each layer."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.depths = nn.ModuleList(Depth() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1))
        for layer, depth in zip(self.layers, self.depths, strict=True):
            x = depth(layer(x).relu())
        return self.out(x.mean(1))


class First(Rows):
    """Does something else in its first pass."""

    first = True

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.first = False
            x = x * 3
        return super().forward(x)


class Catching(Rows):
    """Catches what recording raises."""

    def between(self, x: Tensor) -> Tensor:
        with suppress(Exception):
            if x.size(-1) == WIDTH:
                x = x * 2
        with suppress(Exception):
            if x.sum() > -1e9:
                x = x * 2
        return x


class Precise(Rows):
    """Computes a part in another precision."""

    def between(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (x @ torch.ones(WIDTH, WIDTH)).float() / WIDTH


class Hooked(Rows):
    """Halves the gradients of a module of its own."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.weaken = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.weaken.register_full_backward_hook(lambda module, given, _: (given[0] / 2,))

    def between(self, x: Tensor) -> Tensor:
        return self.weaken(x)


class Turned(Rows):
    """Uses a weight's transpose without its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            turned = self.layers[0].weight.T
        return super().forward(x) + (turned @ self.layers[0].weight).mean()


class Adding(nn.Module):
    """Asks whether it is trained, and changes its second argument."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total.add_(1.0)
        return x + total if self.training else total + x


class Totals(Rows):
    """Lends all layers one tensor, which each changes."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.add = Adding()

    def forward(self, x: Tensor) -> Tensor:
        total, x = torch.zeros(WIDTH), self.embed(x.squeeze(1))
        for layer in self.layers:
            x = self.add(layer(x), total)
        return self.out(x.mean(1))


class Asking(Rows):
    """Asks whether it has a tensor, which recorded values are not."""

    def between(self, x: Tensor) -> Tensor:
        return x * 2 if isinstance(x, Tensor) else x


class Graded(Rows):
    """Asks whether it is evaluated by the usual means."""

    def between(self, x: Tensor) -> Tensor:
        return x if torch.is_grad_enabled() else x * 2


class Sliced(Rows):
    """Has the length of a slice, which is the number of examples in most batches."""

    def forward(self, x: Tensor) -> Tensor:
        x, length = self.embed(x.squeeze(1)), x[:100].size(0)
        for layer in self.layers:
            x = layer(x).relu() * length
        return self.out(x.mean(1))


class Spectral(Rows):
    """Has complex numbers between its layers."""

    def between(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=-1).real


class Coded(Rows):
    """Has whole numbers between its layers."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.codes = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.codes(self.embed(x.squeeze(1)).argmax(-1)).mean(1))


class Viewed(nn.Module):
    """A convolutional net that flattens its maps by `view`, and drops features by a function, as many do."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.out = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.one(x).relu(), 2)
        x = F.max_pool2d(self.two(x).relu(), 2)
        return self.out(F.dropout(x.view(x.size(0), -1), 0.5, training=self.training))


class Counted(Viewed):
    """Branches on the number of examples, so that it stays one atom."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) > 1 else x * 0.5)


class Gate(nn.Module):
    """Weighs channels by views of their maps, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        x = self.inner(x)
        return x * self.fc(x.view(len(x), 8, -1).mean(2))[:, :, None, None]


class Gated(Viewed):
    """Has a part with code of its own between its convolutions."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.two = nn.Sequential(Gate(), self.two)


def maker(kind: Callable[[int], nn.Module]) -> Callable[[int, Any], nn.Module]:
    return lambda num_classes, input_shape: kind(num_classes)


KINDS: dict[type[nn.Module], tuple[str, ...]] = {
    **{OnDevice: ("ondevice",), Learning: ("learning",), Typed: ("typed",), Catching: ("catching",), First: ("first",)},
    **{
        Precise: ("precise",),
        Turned: ("turned",),
        Halved: LAYERS,
        Few: ("few",),
        Patches: ("embed", "layers"),
        Deep: LAYERS,
    },
    **{
        Hooked: ("embed", "layers_0", "weaken"),
        Totals: ("embed",),
        Spectral: LAYERS,
        Coded: ("embed", "codes"),
        Viewed: ("one", "two"),
    },
    **{Asking: ("asking",), Graded: ("graded",), Sliced: ("sliced",)},
    **{Counted: ("counted",), Gated: ("one", "two_0", "two_1")},
}
globals().update({f"make_{kind.__name__.lower()}": maker(kind) for kind in KINDS})


def name_of(kind: type[nn.Module]) -> str:
    return f"{__file__}:make_{kind.__name__.lower()}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_computes_and_learns_what_the_module_does(kind: type[nn.Module]) -> None:
    """Also in atoms of which each gets what the one before returned from a file, for other numbers of examples."""
    source = Source(name_of(kind), 10, DIGIT, "running")
    found = cut(source)
    assert found.names == KINDS[kind], found.reason
    for training in (True, False):
        for number in (8, 2):
            whole = make(source).train(training)
            with unset_weights():
                cascade = Cascade(build_blueprint(source.name, num_classes=10, input_shape=DIGIT, batch_norm="running"))
            arrays, own = whole.state_dict(), {}
            for name in cascade.state_dict():
                own[name] = name.partition(".")[2] if name.startswith("head") else name.split(".", 2)[2]
            cascade.load_state_dict({name: arrays[origin] for name, origin in own.items()})
            cascade.train(training)
            x = torch.randn(number, *DIGIT, generator=torch.Generator().manual_seed(number))
            z = x
            torch.manual_seed(number)
            for part in (*cascade.atoms, cascade.head):
                z = part(z.contiguous())
            torch.manual_seed(number)
            expected = whole(x)
            torch.testing.assert_close(z, expected)
            for logits in (z, expected):
                F.cross_entropy(logits, torch.arange(number)).backward()
            of_module = dict(whole.named_parameters())
            for name, parameter in cascade.named_parameters():
                torch.testing.assert_close(parameter.grad, of_module[own[name]].grad)


@pytest.mark.parametrize("kind, strategy", [(Viewed, "fedepth"), (Counted, "fedavg"), (Gated, "fedepth")])
def test_maps_that_lie_channels_last_are_flattened_by_view(tmp_path: Any, kind: type[nn.Module], strategy: str) -> None:
    settings = {"model": name_of(kind), "strategy": strategy, "num_rounds": 1}
    run = run_local(tmp_path, **TRIO | settings | {"fleet": fleet_json(poor=0.9 + (strategy == "fedavg"), rich=1.5)})
    trained = clients_of(run)
    assert all(client["status"] == "ok" for client in trained)
    assert all(0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"] for client in trained)
    model = piecework.load(run.path, model=name_of(kind))
    assert model(torch.zeros(2, *model.input_shape)).shape == (2, model.num_classes)


@pytest.mark.parametrize(
    "kind, reason",
    [
        (Asking, "its forward pass calls mul((1024, 8, 16), 2) in training but not while it is recorded"),
        (Graded, "its forward pass calls mul((1024, 8, 16), 2) in evaluation but not while it is recorded"),
        (Sliced, "its forward pass calls mul((1024, 8, 16), 100) in training but not while it is recorded"),
    ],
)
def test_a_cut_that_runs_other_operators_names_one(kind: type[nn.Module], reason: str) -> None:
    found = cut(Source(name_of(kind), 10, DIGIT, "running"))
    assert found.reason.startswith(f"{kind.__name__}: {reason}, as code does that asks isinstance(x, torch.Tensor)")
