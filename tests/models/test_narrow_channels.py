"""Which channels of a user's module belong together: a narrow model has the same choice of them everywhere, or is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.models.cascade import Cascade
from piecework.models.channels import channel_axes
from piecework.models.imported.objects import name_object
from piecework.models.width import shapes, sub_indices, take
from piecework.models.zoo import build_blueprint

EDGE = 8  # rows, columns and channels alike, so that no size tells them apart
SHAPE = (1, EDGE, EDGE)
Step = Callable[["Block", Tensor], Tensor]


class Block(nn.Module):
    """Some arrays of 8 channels, and what a step makes of them."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(EDGE, EDGE, 3, padding=1) for _ in range(2))
        self.q, self.k = nn.Linear(EDGE, EDGE), nn.Linear(EDGE, EDGE)
        self.kernel = nn.Parameter(torch.randn(EDGE, EDGE, 3, 3) / EDGE)
        self.w, self.slope = nn.Parameter(torch.randn(EDGE, EDGE) / EDGE), nn.Parameter(torch.full((EDGE,), 0.3))
        self.qkv = nn.Linear(EDGE, 3 * EDGE)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, x)


class Maps(nn.Module):
    """Maps of 8 channels, through a step twice."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, EDGE, 3, padding=1), nn.Linear(EDGE, 3)
        self.one, self.two = Block(step), Block(step)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.two(self.one(self.stem(x).relu())).mean((2, 3)))


class Rows(Maps):
    """Eight rows of 8 features, through a step twice."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.stem = nn.Linear(EDGE, EDGE)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.two(self.one(self.stem(x.squeeze(1)).relu())).mean(1))


def attend(s: Block, x: Tensor) -> Tensor:
    return x + (s.q(x) @ s.k(x).transpose(-2, -1)).softmax(-1) @ x


def attend_to_parts(s: Block, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x).chunk(3, -1)
    return x + s.k((q @ k.mT).softmax(-1) @ v)


FOLLOWED: dict[str, tuple[type[Maps], Step]] = {
    "add": (Maps, lambda s, x: torch.add(x, other=s.a(x).relu())),
    "where": (Maps, lambda s, x: torch.where(x > 0.1, input=x, other=s.a(x))),
    "stack": (Maps, lambda s, x: torch.stack([x, s.a(x).relu()]).sum(0)),
    "computed kernel": (Maps, lambda s, x: F.conv2d(x, s.kernel * 0.5, padding=1).relu()),
    "computed weight": (Rows, lambda s, x: F.linear(x, s.w * 0.5).relu()),
    "layer twice": (Maps, lambda s, x: s.a(s.a(x).relu())),
    "attention": (Rows, attend),
    "product": (Rows, lambda s, x: s.q(x @ s.w).relu()),
    "parts": (Rows, attend_to_parts),
    "slopes": (Maps, lambda s, x: F.prelu(s.a(x), s.slope)),
    "rows in another order": (Maps, lambda s, x: s.a(x).flip(2) + torch.roll(s.b(x), (1, 2), (2, 3))),
}


def wide_and_narrow(module: nn.Module) -> tuple[Cascade, Cascade]:
    """A model whose other channels are zero, and the narrow one that has only the rest."""
    name = name_object(module)
    full, small = (build_blueprint(name, num_classes=3, input_shape=SHAPE, width=width) for width in (1.0, 0.5))
    drawn = np.random.default_rng(0)  # so that what is not seen to belong together gets another choice
    choose = lambda channels, kept: np.sort(drawn.choice(channels, kept, replace=False))  # noqa: E731
    indices = sub_indices(channel_axes(full), shapes(full), shapes(small), choose)
    wide, narrow = Cascade(full), Cascade(small)
    kept = {n: torch.from_numpy(take(array.numpy(), indices[n])) for n, array in wide.state_dict().items()}
    narrow.load_state_dict(kept)
    for n, array in wide.named_parameters():
        mask = torch.zeros(array.shape)
        mask[np.ix_(*indices[n])] = 1
        array.data.mul_(mask)
    return wide.eval(), narrow.eval()


@pytest.mark.parametrize("case", FOLLOWED)
def test_a_narrow_model_computes_what_the_wide_one_does_without_the_other_channels(case: str) -> None:
    kind, step = FOLLOWED[case]
    wide, narrow = wide_and_narrow(kind(step))
    counts = [sum(p.numel() for p in model.parameters()) for model in (wide, narrow)]
    assert counts[1] < 0.4 * counts[0]
    x = torch.randn(3, *SHAPE)
    torch.testing.assert_close(narrow(x), wide(x))


REFUSED: dict[str, tuple[type[Maps], Step, str]] = {
    "reversed": (Maps, lambda s, x: s.a(x).flip(1), "through a change of their order"),
    "shifted": (Maps, lambda s, x: torch.roll(s.a(x), 1, 1), "through a change of their order"),
    "summed": (Maps, lambda s, x: s.a(x).cumsum(dim=1), "through a change of their order"),
    "sorted": (Maps, lambda s, x: s.a(x).sort(1)[0], "through sort"),
    "einsum": (Rows, lambda s, x: torch.einsum("bnm,bmd->bnd", s.q(x), x), "through einsum"),
    "split": (Maps, lambda s, x: torch.cat(s.a(x).split(4, 1)[::-1], 1), "through a split of channels"),
    "parts put together": (
        Maps,
        lambda s, x: torch.cat(s.a(x).chunk(2, 1)[::-1], 1),
        "through a concatenation of channels",
    ),
    "unequal parts": (
        Maps,
        lambda s, x: x + s.a(x).chunk(3, 1)[0].mean(1, True),
        "through 3 unequal parts of channels",
    ),
    "slice": (Maps, lambda s, x: x + s.a(x)[:, :1], "through a slice of channels"),
    "scaled": (
        Maps,
        lambda s, x: s.a(x) * torch.ones(EDGE, 1, 1),
        "a call does not work with other numbers of channels: Attempting to broadcast",
    ),
    "assigned": (Maps, lambda s, x: s.a(x).index_fill(1, torch.tensor([0]), 0.0), "through index_fill"),
    "columns as channels": (
        Maps,
        lambda s, x: x + s.a(x).permute(0, 2, 3, 1).reshape(x.shape),
        "puts channels together",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_followed_is_refused_by_name(case: str) -> None:
    kind, step, reason = REFUSED[case]
    name = name_object(kind(step))
    assert build_blueprint(name, num_classes=3, input_shape=SHAPE).atoms
    with pytest.raises(ValueError, match=rf"cannot be cut by width: in .*{reason}"):
        build_blueprint(name, num_classes=3, input_shape=SHAPE, width=0.5)
