"""Units: of arrays of the model, and of those sent beside it; and what exit heads answer."""

import pytest

from piecework.models.cascade import outputs, unit_of
from piecework.models.zoo import build_blueprint


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("atoms.3.conv1.weight", "atoms.3"),
        ("head.fc.bias", "head"),
        ("exits.2.fc.bias", "exits.2"),
        ("control_atoms.3.conv1.weight", "control_atoms.3"),
        ("control_head.fc.bias", "control_head"),
        ("thresholds", "thresholds"),
    ],
)
def test_the_unit_of_an_array(name, unit):
    assert unit_of(name) == unit


def test_exit_heads_have_as_many_logits_as_the_head() -> None:
    """A head of two classes may have one logit: heads that teach each other agree on what it means."""
    one = build_blueprint("lstm-imdb", num_classes=2, input_shape=(20,))
    two = build_blueprint("convnet", num_classes=2, input_shape=(1, 8, 8))
    assert [outputs(one.build_unit(unit)) for unit in ("head", "exits.0")] == [1, 1]
    assert [outputs(two.build_unit(unit)) for unit in ("head", "exits.0")] == [2, 2]
