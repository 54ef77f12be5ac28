"""Modules of a user whose masks are kept by functions, files and classes from one pass to the next."""

from functools import cache, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MASKS: dict[int, Tensor] = {}


@cache
def cached_mask(n: int) -> Tensor:
    return torch.triu(torch.full((n, n), float("-inf")), diagonal=1)


def kept_mask(n: int) -> Tensor:
    if n not in MASKS:
        MASKS[n] = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
    return MASKS[n]


class Attention(nn.Module):
    """Attention with a mask that is kept somewhere."""

    tables: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, kept: str, dropping: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.kept, self.dropping = nn.Linear(16, 48), nn.Linear(16, 16), kept, dropping
        self.own: dict[int, Tensor] = {}

    @staticmethod
    @lru_cache(maxsize=8)
    def own_mask(n: int) -> Tensor:
        return torch.triu(torch.full((n, n), float("-inf")), diagonal=1)

    def mask(self, n: int) -> Tensor:
        if self.kept in ("class", "layer"):
            tables = self.tables if self.kept == "class" else self.own
            if n not in tables:
                tables[n] = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
            return tables[n]
        return {"function": cached_mask, "method": self.own_mask, "file": kept_mask}[self.kept](n)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        drop = 0.1 if self.dropping and self.training else 0.0
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1]), dropout_p=drop))


class Net(nn.Module):
    """Rows, two layers of attention, and a classifier."""

    def __init__(self, classes: int, kept: str, dropping: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, classes)
        self.layers = nn.ModuleList([Attention(kept, dropping) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1))
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def function(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, "function", dropping=False)


def function_in_a_whole_layer(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, "function", dropping=True)


def method(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, "method", dropping=True)


def file(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, "file", dropping=True)


def attribute(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, "class", dropping=True)


def layer(num_classes: int, input_shape: Any) -> nn.Module:
    return Net(num_classes, "layer", dropping=True)
