"""The units of arrays: those of the model, and of arrays that are sent beside it."""

import pytest

from piecework.models.cascade import unit_of


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
