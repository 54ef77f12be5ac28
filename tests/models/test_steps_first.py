"""Modules whose tensors have time steps along the first axis, as torch's transformers and recurrent layers have by default."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import TRIO, clients_of, fleet_json, run_local
from torch import Tensor, nn

from piecework.models.cascade import Cascade, unset_weights
from piecework.models.imported.atoms import cut
from piecework.models.imported.module import Source, make
from piecework.models.zoo import build_blueprint

DIGIT, STEPS, WIDTH = (1, 8, 8), 8, 16


class Encoders(nn.Module):
    """Three of torch's encoders, on rows of pixels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, classes)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.squeeze(1).permute(1, 0, 2))
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(0))


class Folded(nn.Module):
    """Folds time steps into its examples, as windows of attention are."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.embed(x.reshape(-1, 8)).relu()).relu()
        return self.out(x.reshape(-1, STEPS, WIDTH).mean(1))


def encoders(num_classes: int, input_shape: Any) -> nn.Module:
    return Encoders(num_classes)


def folded(num_classes: int, input_shape: Any) -> nn.Module:
    return Folded(num_classes)


@pytest.mark.parametrize(
    ("function", "names", "shapes"),
    [
        ("encoders", ("embed", "layers_0", "layers_1", "layers_2"), 4 * ((STEPS, WIDTH),)),
        ("folded", ("embed",), ((STEPS, WIDTH),)),
    ],
)
def test_what_crosses_has_its_examples_along_the_first_axis(
    function: str, names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
) -> None:
    found = cut(Source(f"{__file__}:{function}", 10, DIGIT, "running"))
    assert (found.names, found.shapes) == (names, shapes)
    z = torch.zeros(5, *DIGIT, device="meta")
    for part, shape in zip(found.parts, found.shapes, strict=False):
        z = part(z)
        assert z.shape == (5, *shape)


@pytest.mark.parametrize("function", ["encoders", "folded"])
def test_the_cut_computes_and_learns_what_the_module_does(function: str) -> None:
    name = f"{__file__}:{function}"
    whole = make(Source(name, 10, DIGIT, "running"))
    with unset_weights():
        cascade = Cascade(build_blueprint(name, num_classes=10, input_shape=DIGIT, batch_norm="running"))
    arrays = whole.state_dict()
    own = {n: n.partition(".")[2] if n.startswith("head") else n.split(".", 2)[2] for n in cascade.state_dict()}
    cascade.load_state_dict({n: arrays[origin] for n, origin in own.items()})
    x, y = torch.randn(7, *DIGIT, generator=torch.Generator().manual_seed(0)), torch.arange(7)
    for module in (cascade, whole):
        nn.functional.cross_entropy(module(x), y).backward()
    assert torch.equal(cascade(x), whole(x))
    of_module = dict(whole.named_parameters())
    for n, parameter in cascade.named_parameters():
        assert torch.equal(parameter.grad, of_module[own[n]].grad), n


def test_pieces_are_trained_on_the_features_of_their_examples(tmp_path: Path) -> None:
    """A batch of another size than the number of steps: the features of each example are read with its label."""
    settings = {"model": f"{__file__}:encoders", "strategy": "fedepth", "num_rounds": 1, "training__batch_size": 6}
    run = run_local(tmp_path, **TRIO | settings | {"fleet": fleet_json(poor=0.5)})
    trained = clients_of(run)
    assert all(client["status"] == "ok" and len(client["pieces"]) > 1 for client in trained)
    assert all(0 < client["measured_peak"] <= client["predicted_peak"] <= client["budget"] for client in trained)
