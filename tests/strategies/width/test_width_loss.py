"""The loss of a sub-model: its Scaler, and logits of classes that a client does not have."""

from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import a_blueprint, a_client, first_arrays, model_of, run_local, tiny_settings
from torch import nn
from torch.nn import functional as F
from width_helpers import SMALL

from piecework.federation.aggregation import UpdateRejectedError
from piecework.models.zoo import build_blueprint
from piecework.strategies.width.heterofl.client import classes_of, input_ratios, scale_up, width_loss
from piecework.strategies.width.heterofl.server import classes
from piecework.training.loop import PieceModel


def a_piece() -> PieceModel:
    blueprint = a_blueprint()
    torch.manual_seed(0)
    return PieceModel(blueprint, range(len(blueprint.atoms)), "head", blueprint.build_unit)


def test_the_scaler_divides_all_layers_but_the_last() -> None:
    piece = a_piece()
    layers = [m for unit in piece.units().values() for m in unit.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    made: dict[int, torch.Tensor] = {}
    scale_up(piece, (*[0.25] * (len(layers) - 1), 1.0))
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda layer, x, out, n=number: made.update({n: out / plain(layer, x[0])}))
    piece.train(False)
    piece.logits(torch.randn(4, 1, 8, 8))
    for number in range(len(layers)):
        expected = 1.0 if number == len(layers) - 1 else 4.0
        torch.testing.assert_close(made[number], torch.full_like(made[number], expected), rtol=1e-3, atol=1e-3)


def test_a_layers_ratio_is_that_of_its_inputs() -> None:
    """Images are never cut, and the last layer is not scaled; 1 of 8 channels is what is left of a sixteenth."""
    build = partial(build_blueprint, "convnet", num_classes=10, input_shape=(1, 8, 8))
    ratios = input_ratios(build(width=0.5), build())
    assert ratios == (1.0, *[0.5] * (len(ratios) - 2), 1.0)
    resnet = partial(build_blueprint, "resnet18", num_classes=10, input_shape=(1, 28, 28))
    ratios = input_ratios(resnet(width=0.0625 / 8), resnet(width=0.125))
    assert (ratios[0], ratios[1], ratios[-1]) == (1.0, 1 / 8, 1.0)


def plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a layer makes without hooks."""
    found: torch.Tensor = layer.forward(x)
    return found


def test_logits_of_absent_classes_are_nought() -> None:
    """Classes 0 to 3 are there: loss -z_y + ln(sum_0..3 e^z + 6 e^0), and no gradient on the other rows."""
    piece = a_piece()
    present = tuple(n < 4 for n in range(10))
    loss = width_loss((), present)([piece])
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    z = piece.logits(x).detach()
    by_hand = (-z[range(6), y] + (z[:, :4].exp().sum(1) + 6).log()).mean()
    value = loss(x, y)
    torch.testing.assert_close(value, by_hand)
    value.backward()  # type: ignore[no-untyped-call]
    gradient = next(iter(piece.head.parameters())).grad
    assert gradient is not None
    assert (gradient[4:] == 0).all()
    assert (gradient[:4] != 0).any()
    unmasked = width_loss((), ())([piece])(x, y)
    torch.testing.assert_close(unmasked, F.cross_entropy(z, y))


@pytest.mark.slow
def test_rows_of_absent_classes_stay_as_they_are(tmp_path: Path) -> None:
    """Each client has two of the ten classes; the rows of classes that are no client's are bit-identical."""
    changes = {"data__partition": "pathological", "data__partition_classes": 2, "num_rounds": 1}
    run_dir = run_local(tmp_path, **SMALL | changes)
    settings = tiny_settings(**SMALL | changes | {"dataset": "digits"})
    before, after = first_arrays(settings), model_of(run_dir)
    (name,) = [name for name, array in before.items() if name.startswith("head.") and array.ndim == 2]
    moved = (before[name] != after[name]).any(axis=1).sum()
    assert 2 <= moved <= 6
    unmasked = run_local(tmp_path / "all", **SMALL | changes | {"heterofl__masked_loss": False})
    assert (before[name] != model_of(unmasked)[name]).any(axis=1).sum() == 10


def test_classes_that_make_no_sense() -> None:
    assert classes([3, 1, 3], 4) == [1, 3]
    for told in (None, [], [4], [-1], [True], ["1"], 3, [1.0]):
        with pytest.raises(UpdateRejectedError, match=r"classes is .*: it must list classes from 0 to 3"):
            classes(told, 4)


def test_a_clients_classes(tmp_path: Path) -> None:
    client = a_client(tmp_path, tiny_settings())
    labels = set(client.local_data(0).labels.tolist())
    assert classes_of(client) == tuple(n in labels for n in range(10))
