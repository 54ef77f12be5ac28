"""Principal kernels and sub-models of low rank: decomposition, sampling, and the masked full model that defines a sub-model."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.models.cascade import Blueprint, Cascade, initial_state
from piecework.models.kernels import compose, decompose, effective_rank, sample
from piecework.models.low_rank import PaddedNorm, Pair, factors, find_computed, is_place, low_rank
from piecework.models.zoo import build_blueprint
from piecework.strategies.low_rank.prism.client import LowRankModel, frobenius, low_rank_loss
from piecework.training.loop import PieceModel, classification_loss, load_for_device, start
from piecework.training.sgd import TrainingConfig

SHAPES = {"lstm-imdb": (6,), "cnn-femnist": (1, 28, 28), "lenet5": (1, 28, 28), "convnet": (1, 8, 8)}
ELIGIBLE = [
    "cnn-femnist", "cnn3", "conv4", "convnet", "deit-tiny", "lenet5", "lstm-imdb", "preresnet20", "resnet18",
    "resnet18-preact", "vgg11",
]  # fmt: skip


def blueprint_of(name: str, width: float = 0.25) -> Blueprint:
    return build_blueprint(
        name, num_classes=10, input_shape=SHAPES.get(name, (3, 32, 32)), width=width, batch_norm="batch"
    )


def inputs_of(blueprint: Blueprint, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if blueprint.vocabulary:
        return torch.randint(blueprint.vocabulary, (count, *blueprint.input_shape), generator=generator)
    return torch.rand(count, *blueprint.input_shape, generator=generator)


def factored(blueprint: Blueprint) -> dict[str, np.ndarray]:
    """The initial model in its orthogonal space, by the names of a sub-model."""
    arrays = {name: value.numpy() for name, value in initial_state(blueprint, 3)}
    for layer in factors(low_rank(blueprint, 1.0)):
        _, arrays[layer.v], arrays[layer.u] = decompose(arrays.pop(layer.weight))
        if layer.bias:
            arrays[layer.bias[0]] = arrays.pop(layer.bias[1])
    return arrays


def loaded(blueprint: Blueprint, arrays: dict[str, np.ndarray]) -> Cascade:
    """A model, double precision, with the leading entries of arrays; batch norms take the batch's statistics."""
    model = Cascade(blueprint)
    state = {n: torch.from_numpy(arrays[n][tuple(map(slice, v.shape))].copy()) for n, v in model.state_dict().items()}
    model.load_state_dict(state)
    return model.double().eval()


def as_input(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


# ---- kernels


def test_a_matrix_by_hand() -> None:
    weight = np.array([[3.0, 0, 0], [0, 0, -2], [0, 1, 0]], dtype=np.float32)
    sigma, v, u = decompose(weight)
    assert sigma.tolist() == pytest.approx([3, 2, 1])
    roots = np.sqrt([3, 2, 1])
    np.testing.assert_allclose(u, np.diag(roots), atol=1e-6)  # the largest entry of each u is positive
    np.testing.assert_allclose(v, [[roots[0], 0, 0], [0, 0, -roots[1]], [0, roots[2], 0]], atol=1e-6)
    np.testing.assert_allclose(compose(v, u), weight, atol=1e-6)
    np.testing.assert_allclose(compose(v[[0, 2]], u[:, [0, 2]]), [[3, 0, 0], [0, 0, 0], [0, 1, 0]], atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 3, 3, 3), (32, 2, 3, 3), (5, 7), (9, 4)])
def test_a_refresh_leaves_the_weight_as_it_is(shape: tuple[int, ...]) -> None:
    weight = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    sigma, v, u = decompose(weight)
    rank = min(shape[0], weight[0].size)
    assert (v.shape, u.shape[:2], len(sigma)) == ((rank, *shape[1:]), (shape[0], rank), rank)
    assert (np.diff(sigma) <= 0).all()
    np.testing.assert_allclose(compose(v, u), weight, atol=1e-5)
    again = decompose(compose(v, u))
    for one, other in zip((sigma, v, u), again, strict=True):  # the same kernels in the same order, with the same signs
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_zero_weight() -> None:
    sigma, v, u = decompose(np.zeros((2, 3), dtype=np.float32))
    assert not sigma.any() and not compose(v, u).any() and np.isfinite(v).all()
    assert effective_rank(sigma) == 0
    assert len(sample(sigma, 1, 2.5, np.random.default_rng(0))) == 1


def test_the_effective_rank_by_hand() -> None:
    assert effective_rank(np.ones(8)) == pytest.approx(8)
    assert effective_rank(np.array([5.0, 0, 0])) == pytest.approx(1)
    assert effective_rank(np.array([2.0, 1, 1])) == pytest.approx(2**1.5)  # 1/2 x 1 + 2 x 1/4 x 2 bits


def chances(weights: list[float], kept: int) -> dict[tuple[int, ...], float]:
    """Of every choice, by drawing one after the other without replacement."""
    found: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(weights)), kept):
        chance, left = 1.0, sum(weights)
        for i in order:
            chance, left = chance * weights[i] / left, left - weights[i]
        found[tuple(sorted(order))] = found.get(tuple(sorted(order)), 0.0) + chance
    return found


@pytest.mark.parametrize(
    ("sampling", "weights"),
    [
        ("importance", [4.0**1.5, 2.0**1.5, 1.0, 0.5**1.5]),
        ("uniform", [1.0, 1.0, 1.0, 1.0]),
        ("softmax", [np.e**4, np.e**2, np.e, np.e**0.5]),
    ],
)
def test_kernels_are_drawn_one_after_the_other(sampling: Any, weights: list[float]) -> None:
    sigma, rng, draws = np.array([4.0, 2.0, 1.0, 0.5]), np.random.default_rng(0), 20_000
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        chosen = tuple(int(i) for i in sample(sigma, 2, 1.5, rng, sampling))
        seen[chosen] = seen.get(chosen, 0) + 1
    for choice, chance in chances(weights, 2).items():
        spread = (chance * (1 - chance) / draws) ** 0.5
        assert abs(seen.get(choice, 0) / draws - chance) < 4.5 * spread


def test_the_top_kernels_are_not_drawn() -> None:
    assert sample(np.array([3.0, 2, 1]), 2, 1.0, np.random.default_rng(0), "top").tolist() == [0, 1]


# ---- sub-models


def test_a_block_by_hand() -> None:
    thin = low_rank(blueprint_of("resnet18", 1.0), 0.4)
    block: Any = thin.build_unit("atoms.3")  # 64 -> 128 channels; ceil(51.2) = 52 of its kernels
    assert block.conv1.v.weight.shape == (52, 64, 3, 3)  # residual sums have all channels
    assert block.conv1.u.weight.shape == (52, 52, 1, 1)
    assert block.conv1.v.stride == (2, 2)
    assert (block.conv1.v.bias, block.conv1.u.bias) == (None, None)
    assert block.conv2.v.weight.shape == (52, 52, 3, 3)
    assert block.downsample[0].weight.shape == (128, 64, 1, 1)
    assert (block.bn1.num_features, block.bn2.num_features, block.bn2.channels) == (52, 52, 128)
    assert thin.atoms[3].shape == (128, 16, 16)
    assert thin.build_unit("atoms.0").conv1.weight.shape == (64, 3, 3, 3)


def test_a_chain_by_hand() -> None:
    thin = low_rank(blueprint_of("cnn-femnist", 1.0), 0.2)
    conv: Any = thin.build_unit("atoms.1")  # 32 -> 64 channels, the last atom
    assert conv.conv.v.weight.shape == (13, 32, 5, 5)
    assert conv.conv.u.weight.shape == (13, 13, 1, 1)
    assert conv.conv.u.bias.shape == (13,)
    assert thin.atoms[1].shape == (64, 7, 7)  # with zeros, for the head
    vgg = low_rank(blueprint_of("vgg11", 1.0), 0.5)
    third: Any = vgg.build_unit("atoms.2")  # 128 -> 256: what the second does not make is not read
    assert third.conv.v.weight.shape == (128, 64, 3, 3)
    assert vgg.atoms[1].shape == (64, 8, 8)


def test_layers_that_keep_their_outputs_by_hand() -> None:
    encoder: Any = low_rank(blueprint_of("deit-tiny", 1.0), 0.4).build_unit("atoms.1")  # ceil(0.4 x 192) = 77
    assert (encoder.fc1.v.weight.shape, encoder.fc1.u.weight.shape) == ((77, 192), (768, 77))
    assert (encoder.fc2.v.weight.shape, encoder.fc2.u.weight.shape) == ((77, 768), (192, 77))
    assert encoder.qkv.weight.shape == (576, 192)
    lstm: Any = low_rank(blueprint_of("lstm-imdb", 1.0), 0.2).build_unit("atoms.1")  # 64 -> 256
    assert (lstm.lstm.ih.v.weight.shape, lstm.lstm.ih.u.weight.shape) == ((13, 64), (1024, 13))
    assert (lstm.lstm.hh.v.weight.shape, lstm.lstm.hh.u.weight.shape) == ((52, 256), (1024, 52))
    fedhm: Any = low_rank(blueprint_of("resnet18", 1.0), 0.4, narrow=False).build_unit("atoms.3")
    assert (fedhm.conv2.v.weight.shape, fedhm.conv2.u.weight.shape) == ((52, 128, 3, 3), (128, 52, 1, 1))
    assert fedhm.bn2.num_features == 128


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("name", ELIGIBLE)
def test_with_all_kernels_it_is_the_full_model(name: str, narrow: bool) -> None:
    blueprint = blueprint_of(name)
    whole = Cascade(blueprint)
    whole.load_state_dict(dict(initial_state(blueprint, 3)))
    x = inputs_of(blueprint)
    torch.testing.assert_close(
        loaded(low_rank(blueprint, 1.0, narrow=narrow), factored(blueprint))(as_input(x)),
        whole.double().eval()(as_input(x)),
        atol=1e-4,
        rtol=1e-4,
    )


def mask_of(rows: np.ndarray) -> Callable[..., Tensor]:
    """A hook that sets what a layer makes in other channels than these to zero."""

    def mask(_: nn.Module, __: object, out: Tensor) -> Tensor:
        kept = torch.zeros(out.shape[1], dtype=torch.float64)
        kept[rows] = 1
        return out * kept.view(-1, *[1] * (out.dim() - 2))

    return mask


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", ELIGIBLE)
def test_a_sub_model_is_the_masked_full_model(name: str, scattered: bool) -> None:
    """Outputs and gradients: kernels that were not drawn are zero, and channels that are not computed, after the norm."""
    blueprint, rng = blueprint_of(name), np.random.default_rng(2)
    arrays, small = factored(blueprint), low_rank(blueprint, 0.4, scattered=scattered)
    thin = Cascade(small)
    made = find_computed(small)
    widths = {layer.weight: arrays[layer.u].shape[0] for layer in factors(small)}
    kept = {layer.weight: thin.get_parameter(layer.u).shape[0] for layer in factors(small)}
    rows = {
        w: np.sort(rng.choice(n, kept[w], replace=False)) if scattered else np.arange(kept[w])
        for w, n in widths.items()
    }

    def entries(name: str, array: np.ndarray) -> np.ndarray:
        """Those of channels that are computed."""
        for axis, weight in enumerate(made.get(name, ())):
            array = array.take(rows[weight], axis) if weight else array
        return array

    masked_state = dict(arrays)
    thin_state = {name: entries(name, array) for name, array in arrays.items()}
    thin_state |= {name: rows[weight] for name, (weight, *_) in made.items() if is_place(name)}
    chosen: dict[str, np.ndarray] = {}
    for layer in factors(small):
        rank = thin.get_parameter(layer.v).shape[0]
        index = chosen[layer.v] = np.sort(rng.choice(len(arrays[layer.v]), rank, replace=False))
        thin_state[layer.v] = entries(layer.v, arrays[layer.v])[index]
        thin_state[layer.u] = entries(layer.u, arrays[layer.u])[:, index]
        for key, axis in ((layer.v, 0), (layer.u, 1)):
            masked_state[key] = arrays[key].copy()
            np.moveaxis(masked_state[key], axis, 0)[np.setdiff1d(np.arange(len(arrays[layer.v])), index)] = 0
    thin, full = loaded(small, thin_state), loaded(low_rank(blueprint, 1.0), masked_state)
    thinned = dict(thin.named_modules())
    for path, module in full.named_modules():
        other = thinned.get(path)
        if isinstance(module, nn.BatchNorm2d) and isinstance(other, PaddedNorm):
            module.register_forward_hook(mask_of(rows[made[f"{path}.weight"][0]]))
        if isinstance(module, Pair) and isinstance(other, Pair) and isinstance(other.u, nn.Conv2d):
            module.register_forward_hook(mask_of(rows[made[f"{path}.u.weight"][0]]))
    x, y = as_input(inputs_of(blueprint, 4)), torch.tensor([0, 3, 9, 3])
    ours, theirs = thin(x), full(x)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    for logits in (ours, theirs):
        classification_loss(logits, y).backward()
    for key, parameter in thin.named_parameters():
        gradient = full.get_parameter(key).grad
        assert gradient is not None and parameter.grad is not None
        if key in chosen:
            gradient = gradient[chosen[key]]
        elif (v := key.replace(".u.weight", ".v.weight")) in chosen:
            gradient = gradient[:, chosen[v]]
        gradient = torch.from_numpy(entries(key, gradient.numpy()))
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_a_model_without_anything_to_factorise_says_so() -> None:
    blueprint = blueprint_of("convnet")
    with pytest.raises(ValueError, match="convnet cannot be cut by rank: atom 'conv1' is its only one"):
        low_rank(replace(blueprint, atoms=blueprint.atoms[:1]), 0.4)


def test_no_full_weight_is_ever_allocated() -> None:
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.device.type == "cpu":
                made.append(out.numel())
            return out

    thin = low_rank(blueprint_of("vgg11", 1.0), 0.2)
    with Watch():
        thin.build_unit("atoms.7")  # 512 x 512 x 3 x 3
    assert max(made) == 103 * 103 * 9


# ---- decay


def a_piece(decay: float) -> tuple[LowRankModel, Any, Any]:
    blueprint = low_rank(blueprint_of("convnet"), 0.5)
    state = dict(initial_state(blueprint, 4))

    def fill(unit: str, module: nn.Module) -> None:
        module.load_state_dict({n[len(unit) + 1 :]: v for n, v in state.items() if n.startswith(f"{unit}.")})

    piece = LowRankModel(blueprint, range(5), "head", load_for_device(blueprint, fill))
    training_config = TrainingConfig(lr=0.5, momentum=0.0, weight_decay=decay, batch_size=4, epochs=1)
    return piece, *start([piece], training_config, low_rank_loss(decay))


def test_the_gradient_of_the_decay_is_exact() -> None:
    piece, *_ = a_piece(0.1)
    for pair in piece.pairs():
        u, v = pair.u.weight.flatten(1), pair.v.weight.flatten(1)
        value = frobenius(pair)
        assert float(value.detach()) == pytest.approx(float((u @ v).square().sum().detach()), rel=1e-4)
        by_u, by_v = torch.autograd.grad(value / 2, [pair.u.weight, pair.v.weight])
        torch.testing.assert_close(by_u.flatten(1), u @ v @ v.T, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(by_v.flatten(1), u.T @ u @ v, atol=1e-5, rtol=1e-4)


def test_factors_do_not_decay_one_by_one() -> None:
    """A step at a loss of nothing but decay: factors move by Eq. 6, everything else by weight decay."""
    piece, _, optimiser = a_piece(0.1)
    before = {id(p): p.detach().clone() for p in piece.parameters()}
    loss = sum(0.1 / 2 * frobenius(pair) for pair in piece.pairs()) + 0 * sum(p.sum() for p in piece.parameters())
    loss.backward()
    gradients = {id(p): p.grad.clone() for p in piece.parameters()}
    optimiser.step()
    factors_of = {id(p) for p in piece.list_undecayed()}
    assert len(factors_of) == 8
    for p in piece.parameters():
        moved = 0.5 * gradients[id(p)] if id(p) in factors_of else 0.5 * 0.1 * before[id(p)]
        torch.testing.assert_close(before[id(p)] - p.detach(), moved, atol=1e-6, rtol=1e-4)


def test_a_long_gradient_is_cut() -> None:
    layer = nn.Linear(2, 1, bias=False)
    blueprint = blueprint_of("convnet")
    piece = PieceModel(blueprint, (), "head", lambda unit: layer)
    training_config = TrainingConfig(lr=1.0, momentum=0.0, weight_decay=0.5, batch_size=2, epochs=1, clip_norm=5.0)
    _, optimiser = start([piece], training_config, lambda pieces: lambda z, y: z.sum())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 4.0]]))
    layer.weight.grad = torch.tensor([[30.0, 40.0]])
    optimiser.step()  # the gradient becomes (3, 4); weight decay, (1, 2), comes after
    torch.testing.assert_close(layer.weight.detach(), torch.tensor([[-2.0, -2.0]]), atol=1e-5, rtol=0)
