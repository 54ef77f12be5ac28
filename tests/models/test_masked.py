"""SpaFL's equations by hand: masks, straight-through gradients, bounds, importance; and the compact form."""

from typing import Any

import pytest
import torch
from helpers import a_blueprint, a_training_config
from torch import nn

from piecework.models.cascade import Blueprint, initial_state, isolate_rng
from piecework.models.compact import layout, take, write_back
from piecework.models.masked import MaskedLinear, mask_model, masked_layers, thresholds, update_from_importance
from piecework.models.zoo import build_blueprint
from piecework.strategies.sparse.spafl.forms import SparseModel, sparse_loss
from piecework.training.sgd import SGD


def linear(weight: list[list[float]], tau: list[float], straight_through: str = "paper") -> MaskedLinear:
    """A masked linear layer of these weights and thresholds."""
    with isolate_rng(0):
        layer: Any = nn.Linear(len(weight[0]), len(weight), bias=False)
    layer.__class__ = MaskedLinear
    layer.begin(straight_through)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.tau.copy_(torch.tensor(tau))
    return layer


W = [[0.4, -0.2], [0.1, 0.1], [-0.3, 0.5]]  # means of magnitudes: 0.3, 0.1, 0.4


def test_a_filter_is_masked_where_its_mean_magnitude_is_not_above_its_threshold() -> None:
    """Eq. 1; the step is strict: at its threshold a filter is masked."""
    layer = linear(W, [0.29, 0.1, 0.4])
    assert layer(torch.tensor([[1.0, 10.0]])).tolist() == [[pytest.approx(-1.6), 0.0, 0.0]]
    assert layer.mask().tolist() == [True, False, False]
    assert linear([[0.0, 0.0]], [0.0]).mask().tolist() == [False]


def test_thresholds_get_minus_the_sum_of_g_w_and_weights_the_masked_gradient() -> None:
    """Eq. 9 and 3: z = (1, 2), gradients of the outputs (3, 5, 7), so g_i = (3, 6), (5, 10), (7, 14)."""
    layer = linear(W, [0.2, 0.2, 0.2])
    layer(torch.tensor([[1.0, 2.0]])).backward(torch.tensor([[3.0, 5.0, 7.0]]))
    assert layer.tau.grad is not None
    assert layer.weight.grad is not None
    assert layer.tau.grad.tolist() == pytest.approx([-(3 * 0.4 - 6 * 0.2), -(0.5 + 1.0), -(-2.1 + 7.0)], abs=1e-6)
    assert layer.weight.grad.tolist() == [[3, 6], [0, 0], [7, 14]]


@pytest.mark.parametrize("tau", [0.2, 1.5])
@pytest.mark.parametrize("straight_through", ["flowing", "clipped"])
def test_the_authors_gradient_flows_through_the_mean_too(straight_through: str, tau: float) -> None:
    """w p(|w|) by autograd with the identity for the step; clipped: only where |mu - tau| > 1, as for tau = 1.5."""
    layer = linear(W, [tau, 0.2, 0.2], straight_through)
    z, g = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0, 7.0]])
    layer(z).backward(g)
    weight, threshold = torch.tensor(W, requires_grad=True), torch.tensor([tau, 0.2, 0.2], requires_grad=True)
    above = weight.abs().mean(1) - threshold
    through = above - above.detach()
    if straight_through == "clipped":
        through = through * (above.abs() > 1)
    (z @ (weight * ((above > 0).float() + through)[:, None]).T).backward(g)
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    torch.testing.assert_close(layer.tau.grad, threshold.grad)


def test_a_weight_with_a_threshold_of_its_own() -> None:
    """Eq. 11 and 12, the paper's case of one parameter a threshold: h = -g w; where it is pruned, the weight gets g |w|."""
    layer = linear([[0.4], [-0.3]], [0.5, 0.5], "flowing")
    layer(torch.tensor([[2.0]])).backward(torch.tensor([[3.0, 5.0]]))  # g = 6, 10
    assert layer.weight.grad is not None
    assert layer.tau.grad is not None
    assert layer.weight.grad.flatten().tolist() == pytest.approx([6 * 0.4, 10 * 0.3])
    assert layer.tau.grad.tolist() == pytest.approx([-6 * 0.4, 10 * 0.3])


def test_convolutions_get_the_same_gradients_in_both_memory_formats() -> None:
    blueprint = mask_model(build_blueprint("lenet5", num_classes=10, input_shape=(1, 28, 28)))
    found = []
    for memory in (torch.contiguous_format, torch.channels_last):
        with isolate_rng(3):
            layer: Any = blueprint.build_unit("atoms.1").get_submodule("conv")
            z = torch.randn(4, 20, 12, 12)
        layer.weight.data = layer.weight.data.contiguous(memory_format=memory)
        (layer(z) ** 2).sum().backward()
        found.append((layer.weight.grad.contiguous(), layer.tau.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)
    reference = (
        -(found[0][0] * layer.weight.detach()).flatten(1).sum(1)
    )  # everything is open: g is the weight's gradient
    torch.testing.assert_close(found[0][1], reference, rtol=1e-4, atol=1e-3)


def test_a_step_moves_thresholds_by_their_gradient_and_the_regulariser() -> None:
    """Eq. 6 with momentum 0: tau - lr h + alpha lr exp(-tau); then the bounds."""
    blueprint = mask_model(build_blueprint("lenet5", num_classes=10, input_shape=(1, 16, 16)))
    model = SparseModel(blueprint, range(2), "head", blueprint.build_unit)
    layers = model.layers()
    with torch.no_grad():
        for layer in layers:
            layer.tau.copy_(torch.linspace(0, 0.01, len(layer.tau)))
    with isolate_rng(5):
        z, y = torch.randn(6, 1, 16, 16), torch.randint(0, 10, (6,))
    before = [layer.tau.detach().clone() for layer in layers]
    losses = [sparse_loss(alpha)([model]) for alpha in (0.0, 0.5)]
    h = torch.autograd.grad(losses[0](z, y), [layer.tau for layer in layers])
    value = losses[1](z, y)
    with torch.no_grad():
        added = float(losses[1](z, y) - losses[0](z, y))
    assert added == pytest.approx(0.5 * sum(float((-t).exp().sum()) for t in before), rel=1e-5)
    value.backward()
    SGD(
        model.parameters(), a_training_config(lr=0.01, momentum=0.0, weight_decay=0.0), after_step=[model.after_step]
    ).step()
    for layer, tau, gradient in zip(layers, before, h, strict=True):
        expected = (tau - 0.01 * gradient + 0.5 * 0.01 * (-tau).exp()).clamp(0, 1)
        torch.testing.assert_close(layer.tau.detach(), expected)


def test_after_a_step_weights_and_thresholds_are_within_their_bounds() -> None:
    layer = linear([[1.5, -3.0], [0.5, 0.5]], [-0.2, 0.3])
    layer.after_step()
    assert layer.weight.tolist() == [[1.0, -1.0], [0.5, 0.5]]
    assert layer.tau.tolist() == pytest.approx([0.0, 0.3])


def test_thresholds_that_are_not_clamped_leave_their_bounds() -> None:
    layer = linear([[1.5, -3.0], [0.5, 0.5]], [-0.2, 1.3])
    layer.clamped = False
    layer.after_step()
    assert layer.weight.tolist() == [[1.0, -1.0], [0.5, 0.5]]
    assert layer.tau.tolist() == pytest.approx([-0.2, 1.3])


@pytest.mark.parametrize("clamped", [True, False])
def test_a_masked_model_clamps_all_its_thresholds_or_none(clamped: bool) -> None:
    model = mask_model(a_blueprint(), clamped=clamped)
    layers = [layer for unit in model.units() for _, layer in masked_layers(model.build_unit(unit))]
    assert layers
    assert {layer.clamped for layer in layers} == {clamped}


@pytest.mark.parametrize(("open_filters", "reset"), [(2, False), (1, True), (0, True)])
def test_thresholds_of_a_layer_begin_again_when_a_hundredth_of_it_is_left(open_filters: int, reset: bool) -> None:
    layer = linear([[0.5]] * 100, [0.4] * open_filters + [0.6] * (100 - open_filters))
    layer.after_step()
    assert bool((layer.tau == 0).all()) == reset


@pytest.mark.parametrize(
    ("weights", "change", "moved"),
    [
        ([0.4, -0.2], 0.1, [0.35, -0.25]),  # sum > 0, the threshold rose: less important, towards 0 on the whole
        ([0.4, -0.2], -0.1, [0.45, -0.15]),  # sum > 0, it fell
        ([-0.4, 0.2], 0.1, [-0.35, 0.25]),  # sum < 0, it rose
        ([-0.4, 0.2], -0.1, [-0.45, 0.15]),  # sum < 0, it fell
        ([0.4, -0.4], 0.1, [0.4, -0.4]),  # no dominant sign
        ([0.4, -0.2], 0.0, [0.4, -0.2]),
    ],
)
def test_importance_moves_weights_against_the_dominant_sign_where_the_threshold_rose(
    weights: list[float], change: float, moved: list[float]
) -> None:
    """Eq. 13: by change / n_in, n_in = 2."""
    layer = linear([weights], [0.0])
    update_from_importance(layer, torch.tensor([change]), layer.fan_in)
    assert layer.weight.tolist() == [pytest.approx(moved)]


def test_the_first_weights_are_those_of_the_model_without_thresholds() -> None:
    plain = build_blueprint("conv4", num_classes=10, input_shape=(3, 32, 32))
    with_thresholds = dict(initial_state(mask_model(plain), 7))
    for name, value in initial_state(plain, 7):
        assert torch.equal(value, with_thresholds[name])
    assert sum(len(value) for name, value in with_thresholds.items() if name.endswith(".tau")) == 650


def test_counts_of_the_papers_models() -> None:
    """580 and 4,800; 430,500 and 11,159,232 weights that are masked."""
    for name, classes, shape, taus, weights in (
        ("lenet5", 10, (1, 28, 28), 580, 430_500),
        ("resnet18-preact", 100, (3, 32, 32), 4800, 11_159_232),
    ):
        model = mask_model(build_blueprint(name, num_classes=classes, input_shape=shape))
        assert sum(thresholds(model).values()) == taus
        with torch.device("meta"):
            layers = [layer for unit in model.units() for _, layer in masked_layers(model.build_unit(unit))]
        assert sum(layer.weight.numel() for layer in layers) == weights


def test_what_has_nothing_to_mask_says_so() -> None:
    with pytest.raises(ValueError, match="lstm-imdb has neither convolutions nor linear layers without bias to mask"):
        mask_model(build_blueprint("lstm-imdb", num_classes=2, input_shape=(20,)))


MODELS = {
    "lenet5": (1, 28, 28),
    "conv4": (3, 32, 32),
    "resnet18-preact": (3, 16, 16),
    "resnet18": (3, 16, 16),
    "preresnet20": (3, 16, 16),
    "convnet": (1, 8, 8),
}


def half_masked(name: str, batch_norm: str = "running") -> tuple[Blueprint, Blueprint, SparseModel]:
    """A model, the same with thresholds, and one whose filters are masked by a throw of a coin; its norms have been in use."""
    plain = build_blueprint(name, num_classes=10, input_shape=MODELS[name], width=0.5, batch_norm=batch_norm)
    blueprint = mask_model(plain)
    with isolate_rng(1), torch.no_grad():
        model = SparseModel(blueprint, range(len(blueprint.atoms)), "head", blueprint.build_unit)
        for layer in model.layers():
            mu = layer.weight.abs().flatten(1).mean(1)
            layer.tau.copy_(torch.where(torch.rand(len(mu)) < 0.6, mu * 1.5, mu * 0.5))
        for module in model.units().values():
            for norm in module.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    nn.init.normal_(norm.weight)
                    nn.init.normal_(norm.bias)
                    if norm.running_mean is not None and norm.running_var is not None:
                        nn.init.normal_(norm.running_mean)
                        nn.init.uniform_(norm.running_var, 0.5, 2)
    return plain, blueprint, model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_compact_form_makes_the_same_outputs_and_gradients(name: str, training: bool) -> None:
    plain, blueprint, model = half_masked(name)
    small, compact = model.compact(layout(plain, blueprint))
    with isolate_rng(2):
        z = torch.randn(4, *MODELS[name])
    outputs, states = [], []
    for each in (small, model):  # the arrays that both have are moved by running statistics once more
        each.train(training)
        outputs.append(each.logits(z))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    for each, out in zip((small, model), outputs, strict=True):
        states.append(
            dict(zip(names_of(each), torch.autograd.grad(out.square().sum(), each.parameters()), strict=True))
        )
    for parameter, gradient in states[0].items():
        if not parameter.endswith(".tau"):
            torch.testing.assert_close(
                gradient, take(states[1][parameter], compact.places[parameter]), rtol=1e-3, atol=1e-3
            )
    assert sum(p.numel() for p in small.parameters()) < 0.6 * sum(p.numel() for p in model.parameters())


def names_of(model: SparseModel) -> list[str]:
    return [f"{unit}.{name}" for unit, module in model.units().items() for name, _ in module.named_parameters()]


def test_what_the_compact_form_learned_is_put_where_it_belongs() -> None:
    plain, blueprint, model = half_masked("conv4")
    small, compact = model.compact(layout(plain, blueprint))
    before = {unit: {k: v.clone() for k, v in module.state_dict().items()} for unit, module in model.units().items()}
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(1)
    compact.write_back(model.units())
    moved = 0
    for unit, module in model.units().items():
        for name, value in module.state_dict().items():
            change = value - before[unit][name] if value.is_floating_point() else torch.zeros(1)
            assert set(change.round(decimals=3).flatten().tolist()) <= {0.0, 1.0}
            moved += int(change.sum().round())
    assert moved == sum(p.numel() for p in small.parameters())


def test_a_layer_that_is_pruned_altogether_keeps_a_filter_in_the_compact_form() -> None:
    plain, blueprint, model = half_masked("convnet")
    with torch.no_grad():
        model.layers()[1].tau.fill_(1.0)
    small, _ = model.compact(layout(plain, blueprint))
    z = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for each in (small, model):
        each.train(False)
    torch.testing.assert_close(small.logits(z), model.logits(z))


def test_places_are_put_back_where_they_were_taken() -> None:
    whole = torch.arange(24.0).view(4, 3, 2, 1)
    rows, inputs = torch.tensor([0, 2]), torch.tensor([1])
    for places in ((), (rows,), (None, inputs), (rows, inputs), (rows, None)):
        target = torch.full_like(whole, -1)
        part = take(whole, places)
        write_back(target, part, places)
        assert torch.equal(take(target, places), part)
        assert int((target >= 0).sum()) == part.numel()
