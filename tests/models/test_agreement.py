"""Modules as people write them, for which a cut has to be the same everywhere, or to be refused."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from piecework.models.cascade import Cascade
from piecework.models.imported.atoms import cut, imported
from piecework.models.imported.module import Source

DIGIT, WIDTH = (1, 8, 8), 16
LAYERS = ["embed", "layers_0", "layers_1"]


class Block(nn.Module):
    """A layer of width 16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()


class Rows(nn.Module):
    """Two blocks on the rows of an image."""

    def __init__(self, classes: int, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, classes)
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1))
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


class Unpacked(Block):
    """Unpacks a tensor, as attention does, and goes through another."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = super().forward(x).unflatten(-1, (2, 8)).movedim(2, 0)
        return torch.cat([row.unsqueeze(1) for row in torch.cat([first, second], -1).transpose(0, 1)], 1)


class Halve(Function):
    """Half of a tensor, and of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class Skipping(Block):
    """Is left out at random. Its own backward pass keeps it from being recorded."""

    def forward(self, x: Tensor) -> Tensor:
        found = Halve.apply(super().forward(x))
        return x if self.training and random.random() < 0.5 else found


class Cooling(Block):
    """Changes an attribute in each pass, and has a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.tau *= 0.9
        return Halve.apply(super().forward(x)) * self.tau


class Frozen(Block):
    """Has a norm whose statistics stay."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class FrozenRoot(Rows):
    """Does not train the norms of its blocks."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, lambda: nn.Sequential(Block(), nn.BatchNorm1d(8)))

    def train(self, mode: bool = True) -> "FrozenRoot":
        super().train(mode)
        for layer in self.layers:
            layer[1].eval()  # type: ignore[index]
        return self


class Growing(Block):
    """Replaces a table by a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.table.shape[0]:
            self.register_buffer("table", torch.ones(x.shape[1], WIDTH, device=x.device), persistent=False)
        return super().forward(x * self.table)


class Averaged(nn.Module):
    """Divides maps by the number of their channels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).relu() / float(x.shape[1])


class Maps(nn.Module):
    """Two convolutions and blocks of maps."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.block, self.out = nn.Conv2d(1, WIDTH, 3), Averaged(), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.stem(x).relu()).mean((2, 3)))


class Instant(Block):
    """Makes layers without arrays in its forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Dropout(0.5)(nn.ReLU()(self.inner(x)))


class Recurrent(nn.Module):
    """Asks what a layer has returned, which a recording does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y[0] if isinstance(y, tuple) else y).relu()


class Either(nn.Module):
    """Has two layers of one size, and records another than the one that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one if isinstance(x, Tensor) else self.other)(x)


class Steps(Block):
    """Counts the passes with gradients, of which no result tells."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.steps[:1].add_(1)
        return super().forward(x)


class Sharing(Rows):
    """Has two buffers in one memory, of a series that is read."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes, Block)
        rates = torch.linspace(0, 1, 8)
        self.largest = rates.tolist()[-1]
        self.register_buffer("rates", rates)
        self.register_buffer("first", rates[:4])


class Unbuilt(nn.Module):
    """Names something whose name has `meta` in it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        raise KeyError("metaformer")


BLOCKS = (Unpacked, Skipping, Cooling, Frozen, Growing, Either, Steps, Instant, Recurrent)


def maker(make: Callable[[int], nn.Module]) -> Callable[[int, Any], nn.Module]:
    return lambda num_classes, input_shape: make(num_classes)


def of_blocks(kind: type[nn.Module]) -> Callable[[int, Any], nn.Module]:
    return maker(lambda classes: Rows(classes, kind))


globals().update({kind.__name__.lower(): of_blocks(kind) for kind in BLOCKS})
globals().update({kind.__name__.lower(): maker(kind) for kind in (FrozenRoot, Maps, Sharing, Unbuilt)})


def source_of(kind: type[nn.Module]) -> Source:
    return Source(f"{__file__}:{kind.__name__.lower()}", 10, DIGIT, "running")


@pytest.mark.parametrize("kind", [Unpacked, Cooling, Frozen])
def test_what_differs_in_no_operator_is_cut(kind: type[nn.Module]) -> None:
    found = cut(source_of(kind))
    assert [name.removesuffix("_inner") for name in found.names] == LAYERS, found.reason


def test_a_part_keeps_its_own_train() -> None:
    part = cut(source_of(Frozen)).parts[1].train()
    norms = [layer for layer in part.modules() if isinstance(layer, nn.BatchNorm1d)]
    assert norms and not any(norm.training for norm in norms)


def test_a_cut_does_not_depend_on_what_is_drawn() -> None:
    digests = set()
    for seed in range(6):
        random.seed(seed)
        before = random.getstate()
        digests.add(cut.__wrapped__(source_of(Skipping)).digest)
        assert random.getstate() == before
    assert len(digests) == 1


def test_a_train_of_the_whole_is_the_reason_for_one_atom() -> None:
    found = cut(source_of(FrozenRoot))
    assert found.names == ("frozenroot",)
    assert "native_batch_norm" in found.reason
    assert found.reason.endswith(", for its own train() changes what its layers do")


def test_a_layer_that_a_pass_makes_is_recorded_as_a_function() -> None:
    found = cut(source_of(Instant))
    assert found.names == ("embed", "layers_0_inner", "layers_1_inner")
    assert (
        "dropout(z, p = 0.5, training = True" in found.parts[2]._recorded_calls
    )  # a layer that is made anew is in training


def test_what_a_recording_takes_for_a_tensor_is_the_reason_for_one_atom() -> None:
    found = cut(source_of(Recurrent))
    assert found.names == ("rows",)
    assert "its recorded calls cannot be run, as of code that asks isinstance(x, tuple): " in found.reason


def test_another_array_of_the_same_size_is_the_reason_for_one_atom() -> None:
    reason = cut(source_of(Either)).reason
    assert "its forward pass calls addmm(layers.0.one.bias (16,), (8192, 16), layers.0.one.weight (16, 16))" in reason
    assert "in training but not while it is recorded" in reason


def test_a_buffer_that_only_a_recording_changes_is_the_reason_for_one_atom() -> None:
    reason = cut(source_of(Steps)).reason
    assert "its forward pass calls add_(layers.0.steps (1,)" in reason
    assert "while it is recorded but not in evaluation" in reason


def test_a_buffer_that_a_pass_makes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"makes the buffer 'table' in its forward pass, so no file has it"):
        cut(source_of(Growing))


def test_a_number_of_channels_in_the_code_keeps_a_model_from_being_narrowed() -> None:
    name = source_of(Maps).name
    whole = imported(name, 10, DIGIT)
    assert [atom.name for atom in whole.atoms] == ["stem", "block_inner"]
    Cascade(whole)(torch.zeros(2, *DIGIT))
    with pytest.raises(ValueError, match=r"in 'block_inner', its code was recorded with the length 16, and has 8 here"):
        imported(name, 10, DIGIT, width=0.5)


def test_buffers_in_the_memory_of_a_series_are_seen_to_share_it() -> None:
    with pytest.raises(ValueError, match="'first' lies in the memory of 'rates'"):
        cut(source_of(Sharing))


def test_an_error_whose_text_has_meta_in_a_word_is_told_as_it_is() -> None:
    with pytest.raises(ValueError, match="cannot be built: KeyError: 'metaformer'"):
        cut(source_of(Unbuilt))
