"""The vocabulary of a user's module is that of the table which its tokens go to."""

import pytest
import torch
from torch import Tensor, nn

from piecework.models.imported.objects import name_object
from piecework.models.zoo import build_blueprint

LENGTH, TOKENS = 12, 500


class Tables(nn.Module):
    """Registers the table of positions before that of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.token = nn.Embedding(LENGTH, 8), nn.Embedding(TOKENS, 8)
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = self.position(torch.arange(x.size(1), device=x.device))
        tokens = self.token(x.long())
        return self.out(self.inner(places + tokens).mean(1))


@pytest.mark.parametrize("order", ["positions first", "tokens first"])
def test_it_is_not_the_table_of_positions(order: str) -> None:
    module = Tables()
    if order == "tokens first":
        module.position = module._modules.pop("position")
    assert next(iter(module._modules)) == ("position" if order == "positions first" else "token")
    assert build_blueprint(name_object(module), num_classes=3, input_shape=(LENGTH,)).vocabulary == TOKENS
