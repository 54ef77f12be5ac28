"""Evaluation on the server, clean and under PGD, against numbers worked out by hand."""

import ctypes
import math
import subprocess
import sys
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from helpers import a_blueprint, digits, tiny_settings
from torch import Tensor, nn
from torch.nn import functional as F

from piecework.federated_data.datasets import ArrayDataset
from piecework.federation import evaluation
from piecework.federation.evaluation import Evaluation, Evaluator, at_full_speed
from piecework.models.cascade import Atom, Blueprint, Cascade, initial_state, isolate_rng
from piecework.training.attacks import Attack, by_backward, pgd
from piecework.training.examples import normalise
from piecework.training.setup import image_attack

ATTACK = Attack("linf", epsilon=0.1, step=0.05, steps=4, low=0.0, high=1.0, mean=(0.5,), std=(0.25,))


def data_of(pixels: list[list[int]], labels: list[int], classes: int) -> ArrayDataset:
    """Images of one row of pixels, to test with."""
    images = np.array(pixels, dtype=np.uint8)[:, None, :, None]
    return ArrayDataset("rows", images, np.array(labels), classes, ATTACK.mean, ATTACK.std, images, np.array(labels))


def linear(weight: list[list[float]]) -> tuple[Blueprint, ArrayRecord]:
    """Logits that are `weight` times the normalised pixels of an image of one row."""
    classes, pixels = len(weight), len(weight[0])
    shape = (1, 1, pixels)

    def head() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(pixels, classes))

    blueprint = Blueprint("linear", shape, classes, (Atom("pixels", nn.Identity, shape),), head, "batch")
    return blueprint, record({"head.1.weight": torch.tensor(weight), "head.1.bias": torch.zeros(classes)}.items())


def record(values: Iterable[tuple[str, Tensor]]) -> ArrayRecord:
    return ArrayRecord({name: Array(value.numpy()) for name, value in values})


# Class 1 where the first pixel is the brighter one. An attack of 25.5 brings two pixels together by 51.
PAIRS = data_of(
    [[110, 100], [150, 100], [152, 100], [100, 200], [100, 140], [200, 100]],
    [1, 1, 1, 0, 0, 0],  # the last one is labelled otherwise
    2,
)
BRIGHTER = [[0.0, 0.0], [1.0, -1.0]]


def test_linear_model_under_pgd_by_hand() -> None:
    blueprint, arrays = linear(BRIGHTER)
    found = Evaluator(blueprint, PAIRS, 4, ATTACK, 6)(arrays)
    # the second logit: the difference of the pixels over 255 over the standard deviation of 0.25
    second = [(a - b) / 255 / 0.25 for a, b in ((110, 100), (150, 100), (152, 100), (100, 200), (100, 140), (200, 100))]
    losses = [math.log1p(math.exp(-d)) for d in second[:3]] + [math.log1p(math.exp(d)) for d in second[3:]]
    assert found.loss == pytest.approx(sum(losses) / 6, abs=1e-6)
    assert found.accuracy == 5 / 6
    # differences of 10, 50 and 40 are overcome, 52 and 100 are not, and what is wrong stays wrong
    assert found.adversarial_accuracy == 2 / 6
    assert found.attacked == 6


def test_without_attack_there_is_no_adversarial_accuracy() -> None:
    blueprint, arrays = linear(BRIGHTER)
    for evaluate in (Evaluator(blueprint, PAIRS, 4), Evaluator(blueprint, PAIRS, 4, ATTACK, 0)):
        found = evaluate(arrays)
        assert (found.accuracy, found.adversarial_accuracy, found.attacked) == (5 / 6, None, 0)


def test_the_attacked_images_are_a_fixed_choice() -> None:
    blueprint, arrays = linear(BRIGHTER)
    withstood = set()
    for seed in range(4):
        one, other = (Evaluator(blueprint, PAIRS, 4, ATTACK, 3, seed=seed) for _ in range(2))
        found = one(arrays)
        assert found.attacked == 3
        assert found == other(arrays) == one(arrays)
        withstood.add(found.adversarial_accuracy)
    assert len(withstood) > 1  # another seed, other images
    assert Evaluator(blueprint, PAIRS, 4, ATTACK, 5)(arrays).attacked == 5
    assert Evaluator(blueprint, PAIRS, 4, ATTACK, 100)(arrays).attacked == 6  # all there are


def test_more_steps_find_more() -> None:
    data, (blueprint, arrays) = digits(), trained()
    attack = image_attack(tiny_settings(attack__epsilon=0.3, attack__step_size=0.04), data, 1)
    found = [Evaluator(blueprint, data, 100, replace(attack, steps=steps), 120)(arrays) for steps in (1, 4, 12)]
    first, second, third = (one.adversarial_accuracy for one in found)
    assert first is not None
    assert second is not None
    assert third is not None
    assert found[0].accuracy > first > second > third


@cache
def trained() -> tuple[Blueprint, ArrayRecord]:
    """The demo's model after three passes over the digits."""
    data, blueprint = digits(), a_blueprint(batch_norm="running")
    with isolate_rng(3):
        model = Cascade(blueprint)
    for start in [*range(0, 1400, 100)] * 3:
        x, y = normalise(data.inputs[start : start + 100], data), torch.tensor(data.labels[start : start + 100])
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        torch._foreach_add_([p.data for p in model.parameters()], gradients, alpha=-0.1)
    return blueprint, record((name, value.detach()) for name, value in model.state_dict().items())


def with_auxiliary(blueprint: Blueprint, atom: int) -> dict[str, Tensor]:
    """The initial weights, and those of the auxiliary head behind an atom."""
    state = dict(initial_state(blueprint, 5))
    with isolate_rng(6):
        head = blueprint.build_unit(f"aux.{atom}")
    return state | {f"aux.{atom}.{name}": value for name, value in head.state_dict().items()}


@torch.no_grad()
def by_hand(blueprint: Blueprint, state: dict[str, Tensor], units: list[str], batch: int) -> Evaluation:
    """Units one after another over the whole test split."""
    data, modules = digits(), []
    for unit in units:
        module = blueprint.build_unit(unit).eval()
        module.load_state_dict({n[len(unit) + 1 :]: v for n, v in state.items() if n.startswith(f"{unit}.")})
        modules.append(module)
    loss, correct, count = 0.0, 0, len(data.test_labels)
    assert count % batch != 1
    for start in range(0, count, batch):
        z, y = normalise(data.test_inputs[start : start + batch], data), data.test_labels[start : start + batch]
        for module in modules:
            z = module(z)
        loss += float(F.cross_entropy(z, torch.tensor(y), reduction="sum"))
        correct += int((z.argmax(1) == torch.tensor(y)).sum())
    return Evaluation(loss / count, correct / count)


def test_first_modules_with_an_auxiliary_head() -> None:
    blueprint = a_blueprint()
    assert len(blueprint.atoms) > 3
    state = with_auxiliary(blueprint, 1)
    arrays, evaluate = record(state.items()), Evaluator(blueprint, digits(), 100)
    whole = by_hand(blueprint, state, blueprint.units(), 100)
    part = by_hand(blueprint, state, ["atoms.0", "atoms.1", "aux.1"], 100)
    assert whole != part
    for found, expected in (
        (evaluate(arrays), whole),
        (evaluate(arrays, (0, 1), "aux.1"), part),
        (evaluate(arrays, (0, 1), "aux.1"), part),
        (evaluate(arrays), whole),
    ):
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.accuracy == expected.accuracy


def test_a_new_round_brings_new_weights() -> None:
    blueprint, arrays = linear(BRIGHTER)
    evaluate = Evaluator(blueprint, PAIRS, 4)
    assert evaluate(arrays).accuracy == 5 / 6
    assert evaluate(linear([[0.0, 0.0], [-1.0, 1.0]])[1]).accuracy == 1 / 6


def test_one_model_in_memory_at_a_time() -> None:
    """The old model is gone when the first unit of the new one is built."""
    alive: list[int] = []
    built: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def build() -> nn.Module:
        alive.append(len(built))
        module = nn.Conv2d(1, 1, 1)
        built.add(module)
        return module

    atoms = tuple(Atom(f"layer{i}", build, (1, 1, 2)) for i in range(2))
    blueprint = Blueprint("layers", (1, 1, 2), 2, atoms, linear(BRIGHTER)[0].build_head, "batch")
    arrays, evaluate = record(with_auxiliary(blueprint, 0).items()), Evaluator(blueprint, PAIRS, 4)
    alive.clear()
    evaluate(arrays)
    evaluate(arrays)
    assert alive == [0, 1]  # the second round builds nothing
    evaluate(arrays, (0,), "aux.0")
    evaluate(arrays)
    assert alive == [0, 1, 0, 0, 1]


def test_evaluation_leaves_nothing_behind() -> None:
    blueprint, arrays = trained()
    evaluate = Evaluator(blueprint, digits(), 100, replace(ATTACK, mean=digits().mean, std=digits().std), 100)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    first = evaluate(arrays)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert evaluate._model is not None
    for unit, module in evaluate._model.units().items():
        assert not module.training
        for name, value in module.state_dict().items():  # nor did running statistics move
            assert np.array_equal(value.numpy(), arrays[f"{unit}.{name}"].numpy())
        for parameter in module.parameters():
            assert parameter.grad is None
            assert not parameter.requires_grad
    assert evaluate(arrays) == first


def test_pgd_is_that_of_torchattacks() -> None:
    torchattacks: Any = pytest.importorskip("torchattacks")
    data, (blueprint, arrays) = digits(), trained()
    model = Cascade(blueprint)
    model.load_state_dict({name: torch.from_numpy(value.numpy()) for name, value in arrays.items()})
    model.eval().double()  # in float32, rounding turns the sign of some gradients that are almost zero
    x = torch.tensor(data.test_inputs[:50]).permute(0, 3, 1, 2).double().div(255).contiguous()
    y = torch.tensor(data.test_labels[:50])
    attack = Attack("linf", epsilon=0.1, step=0.02, steps=10, low=0.0, high=1.0)
    gradient = by_backward(lambda z, y: F.cross_entropy(model(z), y))
    ours = pgd(gradient, x, y, attack, torch.Generator().manual_seed(7))
    with isolate_rng(7):  # it starts from torch's global generator
        theirs = torchattacks.PGD(model, eps=0.1, alpha=0.02, steps=10)(x, y)
    assert torch.allclose(ours, theirs, atol=1e-12)
    assert (ours - x).abs().max() > 0.0999


def test_evaluation_uses_all_cores_or_as_many_as_the_user_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(wanted: int = 0) -> int:
        with at_full_speed(wanted):
            return torch.get_num_threads()

    monkeypatch.setattr(evaluation, "usable_cpus", lambda: 3)
    before = torch.get_num_threads()
    for said, expected in (("1", 1), ("2,4", 2), ("", 3), ("some", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert (threads(), threads(5)) == (expected, 5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert (threads(), torch.get_num_threads()) == (3, before)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the heap is tuned on glibc only")
def test_the_heap_keeps_what_is_freed_while_the_server_evaluates_and_gives_it_back_after() -> None:
    code = """if True:
        import resource, numpy, psutil
        from piecework.training.memory_cap import keep_heap_tight
        from piecework.federation.evaluation import at_full_speed
        faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        keep_heap_tight(2**30, 2**40)  # as a client in the same process left it
        with at_full_speed():
            numpy.ones(2**23)  # 64 MiB
            before = faults()
            numpy.ones(2**23)
            again, held = faults() - before, psutil.Process().memory_info().rss
        print(again, held - psutil.Process().memory_info().rss)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    again, given_back = map(int, done.stdout.split())
    assert again < 16  # 16,384 pages, or 32 large ones, were they new
    assert given_back > 60 * 2**20


def test_a_single_image_at_the_end_joins_the_batch_before_it() -> None:
    """Nine images in batches of four: the last one is the only one that the model gets right."""
    data = data_of([[255, 0]] * 8 + [[0, 255]], [1] * 9, 2)
    blueprint, arrays = linear([[1.0, 0.0], [0.0, 1.0]])
    assert Evaluator(blueprint, data, batch_size=4)(arrays).accuracy == 1 / 9
