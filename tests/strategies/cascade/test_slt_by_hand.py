"""SLT's steps and their networks, by hand."""

import numpy as np
import pytest
import torch
from helpers import a_blueprint, tiny_settings
from slt_helpers import filled, network
from torch.nn import functional as F

from piecework.models.cascade import Blueprint, Cascade
from piecework.models.variant import Variant, vary
from piecework.models.width import shapes
from piecework.models.zoo import build_blueprint
from piecework.planning.costs import cost_model_for
from piecework.strategies import find_method
from piecework.strategies.cascade.slt.cut import indices_of
from piecework.strategies.cascade.slt.steps import allot, choose_ratios, round_weights

# ---- the steps, by hand


@pytest.mark.parametrize(
    ("most", "chosen"),  # the largest s in 64ths that fits with n full layers, from n = 1
    [
        ([16, 24, 20, 64], [16, 20, 20, 64]),  # none larger than that of the next step
        ([10, 64, 64], [10, 64]),  # the first step with s = 1 is the last one
        ([64, 64], [64]),
        ([16, 24, 32], [16, 24, 32]),  # the head is never full
        ([16, 24, 0], [16, 24]),  # the last layer stays narrow
        ([16, 0, 64], [0, 64]),
        ([0, 0], [0]),
    ],
)
def test_the_head_is_as_wide_as_fits_and_never_loses_channels(most: list[int], chosen: list[int]) -> None:
    assert choose_ratios(len(most), lambda n, s: s <= most[n - 1]) == chosen


def test_rounds_by_hand() -> None:
    added = round_weights("added", sizes=[10, 30, 70, 100], trained=[10, 25, 60, 40], ratio=0.25)
    assert added == [10, 20, 40, 30]
    # One round each, and of 16 more 1.6, 3.2, 6.4 and 4.8, of which the last and the first are rounded up.
    assert allot(added, 20) == [3, 4, 7, 6]
    trained = round_weights("trained", sizes=[10, 30, 70, 100], trained=[10, 30, 60, 30], ratio=0.25)
    assert trained == [0.25, 0.75 * 30 / 120, 0.75 * 60 / 120, 0.75 * 30 / 120]
    assert [round_weights(rule, [100], [100], 1.0) for rule in ("added", "trained")] == [[100], [1]]
    with pytest.raises(ValueError, match="num-rounds = 3 is too few for slt: pretraining and 3 steps need 4"):
        allot(added, 3)


# ---- the networks, by hand


def cut_out(full: Blueprint, narrow: Blueprint, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random arrays of the full model, and those of the narrow one in it."""
    rng = np.random.default_rng(seed)
    whole = {name: np.asarray(rng.random(shape), np.float32) for name, shape in shapes(full).items()}
    return whole, {
        name: whole[name][np.ix_(*at)] if at else whole[name] for name, at in indices_of(full, narrow).items()
    }


def test_a_chain_of_convolutions_by_hand() -> None:
    """W_1 is whole, W^{1,s} reads all its channels, and the classifier the first channels of 3 x 3 cells."""
    full = build_blueprint("lenet5", num_classes=10, input_shape=(1, 28, 28), layout="caffe")
    narrow = network(full, 1, 0.25)
    whole, own = cut_out(full, narrow)
    w1, w2, fc1, fc2 = (
        whole["atoms.0.conv.weight"],
        whole["atoms.1.conv.weight"],
        whole["head.fc1.weight"],
        whole["head.fc2.weight"],
    )
    cells = fc1.shape[1] // 50
    by_hand = [w1, w2[:12, :20], fc1[:125, : 12 * cells], fc2[:, :125]]
    assert all(np.array_equal(one, other) for one, other in zip(own.values(), by_hand, strict=True))
    x = torch.rand(2, 1, 28, 28)
    z = F.max_pool2d(F.relu(F.conv2d(x, torch.from_numpy(w1))), 2)
    z = F.max_pool2d(F.relu(F.conv2d(z, torch.from_numpy(w2[:12]))), 2).flatten(1)
    expected = F.relu(z @ torch.from_numpy(by_hand[2]).T) @ torch.from_numpy(fc2[:, :125]).T
    torch.testing.assert_close(filled(narrow, own)(x), expected)


@pytest.mark.parametrize("name", ["preresnet20", "resnet18"])
def test_a_shortcut_passes_on_the_first_channels(name: str) -> None:
    """The block behind the stem: an identity, whose input has all channels and whose output has a quarter."""
    full = build_blueprint(name, num_classes=10, input_shape=(3, 32, 32), batch_norm="frozen")
    narrow = network(full, 1, 0.25)
    _, own = cut_out(full, narrow)
    block = filled(narrow, own).atoms[1]
    channels = full.atoms[0].shape[0]
    x = torch.randn(2, channels, 8, 8)
    given = x.clone()
    with torch.no_grad():
        found = block(x)
        if name == "resnet18":
            z = block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x)))))
            expected = F.relu(z + x[:, : channels // 4])
        else:
            expected = block.conv2(F.relu(block.bn2(block.conv1(F.relu(block.bn1(x)))))) + x[:, : channels // 4]
    torch.testing.assert_close(found, expected)
    assert torch.equal(x, given)


def test_an_lstm_has_the_first_units_of_each_gate() -> None:
    full = build_blueprint("lstm-imdb", num_classes=2, input_shape=(20,))
    narrow = network(full, 1, 0.5)
    indices = indices_of(full, narrow)["atoms.1.lstm.weight_ih_l0"]
    assert indices[0].tolist() == [256 * gate + unit for gate in range(4) for unit in range(128)]
    assert indices[1].tolist() == list(range(64))
    assert Cascade(narrow)(torch.zeros(2, 20, dtype=torch.int64)).shape == (2, 1)


def test_behind_all_atoms_the_head_alone_is_narrow() -> None:
    full = build_blueprint("vgg11", num_classes=10, input_shape=(3, 32, 32), width=0.25)
    found, whole = shapes(network(full, 8, 0.5)), shapes(full)
    assert [name for name in whole if found[name] != whole[name]] == [
        f"head.fc{n}.{kind}" for n in (1, 2, 3) for kind in ("weight", "bias") if (n, kind) != (3, "bias")
    ]
    assert found["head.fc1.weight"] == (64, 128)
    assert found["head.fc3.weight"] == (10, 64)


@pytest.mark.parametrize("atoms", [0, 6])
def test_a_message_may_ask_for_no_other_network(atoms: int) -> None:
    with pytest.raises(ValueError, match="full_atoms"):
        vary(a_blueprint(), Variant.from_values({"width": 0.5, "full_atoms": atoms}))


def test_what_passes_its_input_on_is_refused() -> None:
    settings = tiny_settings(strategy="slt", model="vit", num_rounds=20)
    full = build_blueprint("vit", num_classes=10, input_shape=(3, 32, 32))
    cut = find_method("slt").make_cut(full, cost_model_for(settings, full), settings)
    with pytest.raises(
        ValueError,
        match="vit cannot be narrowed behind full atoms: atom 'encoder1' passes on the channels of its input",
    ):
        cut.require_model()
