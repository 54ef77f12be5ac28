"""Optimiser state in 8 bits and in bfloat16: bitsandbytes is the oracle, and memory is what it is said to be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes
import numpy as np
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise
from helpers import a_client, a_training_config, random_examples, tiny_settings
from zoo_helpers import blueprint_of

from piecework.client_app.momentum import CarriedMomentum
from piecework.device_profiles.memory import PeakMemory, trace
from piecework.planning.page_cost import paged_cost
from piecework.planning.page_plan import finest
from piecework.planning.step_cost import fake_load, piece_cost
from piecework.training.adam import OPTIMISERS
from piecework.training.loop import LocalTrainer, PieceModel, single_loss, start, train_step
from piecework.training.memory_cap import MemoryCap
from piecework.training.optimiser_state import BLOCK, CHUNK, EightBit, bytes_kept, dynamic_codes
from piecework.training.paged import PagedCascade
from piecework.training.pages import PageFiles
from piecework.training.sgd import SGD

SHAPES = [(64, 32, 3, 3), (5000,), (600, 1001)]  # channels-last weights; a part of a block at the end; three chunks


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values


def optimiser_of(parameters: list[torch.Tensor], **changes: Any) -> SGD:
    config = a_training_config(**{"optimiser_state": "8-bit"} | changes)
    return OPTIMISERS[config.optimiser]([p for p in parameters if isinstance(p, torch.nn.Parameter)], config)


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_as_near_as_those_of_bitsandbytes(signed: bool) -> None:
    """bitsandbytes looks codes up in a coarse table first, so that some of its codes are not the nearest."""
    codes, theirs = dynamic_codes(signed=signed), create_dynamic_map(signed)
    torch.testing.assert_close(codes, theirs, rtol=1e-6, atol=0)
    assert 2 * CHUNK < 600 * 1001
    for shape in SHAPES:
        values = random(*shape) if signed else random(*shape).square()
        kept = EightBit(values, codes, signed=signed)
        assert not kept.float().any()
        kept.copy_(values)
        found, order = kept.float(), (0, 2, 3, 1) if len(shape) == 4 else tuple(range(len(shape)))
        assert (found.shape, found.stride()) == (values.shape, values.stride())
        lying = values.permute(order).contiguous()
        expected = dequantize_blockwise(*quantize_blockwise(lying, code=theirs, blocksize=BLOCK))
        ours, bound = (found.permute(order) - lying).abs(), (expected - lying).abs()
        assert (ours <= bound + 1e-6 * lying.abs().max()).all()
        assert torch.isclose(found.permute(order), expected, rtol=1e-5).float().mean() > 0.95
        assert kept.packed.numel() == pytest.approx(values.numel() * bytes_kept("8-bit"), abs=4 + BLOCK)


@pytest.mark.parametrize(
    ("kind", "theirs", "options"),
    [
        ("sgd", bitsandbytes.optim.SGD8bit, {"momentum": 0.9, "weight_decay": 0.1}),
        ("adam", bitsandbytes.optim.Adam8bit, {"weight_decay": 0.0}),
        ("adamw", bitsandbytes.optim.AdamW8bit, {"weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_bitsandbytes(kind: str, theirs: Any, options: dict[str, float]) -> None:
    """Where a value is half-way between two codes either may be taken. It lies 1 % of its own size from both."""
    mine, other, exact = (torch.nn.Parameter(random(40, 125)) for _ in range(3))
    lr = 0.1 if kind == "sgd" else 0.001
    ours, plain = (
        optimiser_of([p], lr=lr, optimiser=kind, optimiser_state=state, **options)
        for p, state in ((mine, "8-bit"), (exact, "float32"))
    )
    reference = theirs([other], lr=lr, **options)
    for step in range(5):
        gradient = random(40, 125, seed=step + 1)
        for parameter, optimiser in ((mine, ours), (other, reference), (exact, plain)):
            parameter.grad = gradient.sign() * (0.3 + gradient.abs())
            optimiser.step()
    moved = (exact - random(40, 125)).abs().mean()
    assert ((mine - other).abs() > 1e-6).float().mean() < 0.02
    assert (mine - other).abs().max() < 0.05 * moved
    assert 0 < (mine - exact).abs().mean() < 0.02 * moved


def test_a_missing_gradient_makes_no_leap() -> None:
    """An average of 1e-4 of its block's largest is kept, but its square, 1e-8 of the largest, is next to 0.

    With 0, the next step would divide by epsilon: m = 0.9 x 1e-5, corrected 4.7e-5, over 1e-8 is a step of 4,700 rates.
    """
    parameter = torch.nn.Parameter(torch.zeros(4096))
    adam = optimiser_of([parameter], lr=0.001, optimiser="adamw", weight_decay=0.0)
    for small in (1e-4, 0.0):
        parameter.grad = torch.ones(4096)
        parameter.grad[::2] = small
        adam.step()
    assert 0.0011 < parameter.abs().max() < 0.0021
    kept = EightBit(parameter, dynamic_codes(signed=False), signed=False)
    kept.copy_(torch.ones(4096).index_fill(0, torch.tensor([0, 1]), 0.0).index_fill(0, torch.tensor([1]), 1e-30))
    assert kept.float()[:3].tolist() == pytest.approx([0.0, 3.25e-7, 1.0])


def test_small_parameters_and_squares_in_bfloat16_stay_float32() -> None:
    small, large = torch.nn.Parameter(torch.ones(4095)), torch.nn.Parameter(torch.ones(4096))
    assert [isinstance(held, EightBit) for held in optimiser_of([small, large]).buffers] == [False, True]
    rounded = optimiser_of([large], optimiser="adam", optimiser_state="bfloat16").state()
    assert [rounded[kind][0].dtype for kind in ("average", "square")] == [torch.bfloat16, torch.float32]
    assert a_training_config(optimiser="adam", optimiser_state="bfloat16").bytes_kept == 2 + 4
    assert a_training_config(optimiser="adam", optimiser_state="8-bit").bytes_kept == 2 * (1 + 4 / 256)
    assert a_training_config(momentum=0.0, optimiser_state="8-bit").bytes_kept == 0


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("state", ["bfloat16", "8-bit"])
def test_what_was_written_goes_on_to_the_bit(tmp_path: Path, kind: str, state: str) -> None:
    def parameters() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(random(*shape)) for shape in ((32, 16, 3, 3), (7,))]

    def step(optimiser: SGD, seed: int) -> None:
        for parameter in optimiser.parameters:
            parameter.grad = random(*parameter.shape, seed=seed)
        optimiser.step()

    straight, paused = (optimiser_of(parameters(), optimiser=kind, optimiser_state=state) for _ in range(2))
    step(straight, 1)
    step(paused, 1)
    paused.save(tmp_path / "state")
    again = optimiser_of(paused.parameters, optimiser=kind, optimiser_state=state)
    again.load(tmp_path / "state")
    step(straight, 2)
    step(again, 2)
    for one, other in zip(straight.parameters, again.parameters, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_what_is_carried_over_rounds_is_float32(tmp_path: Path, kind: str) -> None:
    """The server may average it. What comes back is rounded once more: by 1.5 % at most, or to 1e-6 of the block's largest."""
    client = a_client(tmp_path, tiny_settings())
    atoms = range(len(client.blueprint.atoms))
    pieces = [PieceModel(client.blueprint, atoms, "head", client.load())]
    config = a_training_config(optimiser=kind, optimiser_state="8-bit")
    _, before = start(pieces, config, lambda pieces: lambda z, y: z.sum())
    for seed, parameter in enumerate(before.parameters):
        parameter.grad = random(*parameter.shape, seed=seed)
    before.step()
    CarriedMomentum(client).keep(pieces, before)
    client.commit()
    client.old_state, client._new_state = client.store.newest_state(client.round), None
    _, after = start(pieces, config, lambda pieces: lambda z, y: z.sum())
    CarriedMomentum(client).restore(pieces, after)
    for held, found in zip(before.state().values(), after.state().values(), strict=True):
        for one, other in zip(held, found, strict=True):
            largest = one.float().abs().max()
            torch.testing.assert_close(other.float(), one.float(), rtol=0.015, atol=float(1e-6 * largest))
    assert any(isinstance(held, EightBit) for kept in after.state().values() for held in kept)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_one_parameter_is_in_float32_at_once(kind: str) -> None:
    """Three parameters of 4 MB: a step holds the float32 state of one, and what converts a chunk of it."""
    count = 2**20

    def step(number: int) -> None:
        parameters = [torch.nn.Parameter(torch.zeros(count)) for _ in range(number)]
        optimiser = optimiser_of(parameters, optimiser=kind)
        for parameter in parameters:
            parameter.grad = torch.zeros(count)
        optimiser.step()

    peaks = {}
    for number in (1, 3):
        with (memory := PeakMemory()):
            step(number)
        assert trace(lambda number=number: step(number)).peak_bytes == memory.peak
        peaks[number] = memory.peak
    moments = 1 if kind == "sgd" else 2
    kept = count * (8 + moments * bytes_kept("8-bit"))
    assert peaks[3] - peaks[1] == pytest.approx(2 * kept, abs=64)
    assert 4 * moments * count < peaks[1] - kept < 4 * moments * count + 16 * CHUNK


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("resnet18", "sgd"), ("vgg11", "adamw"), ("deit-tiny", "adam")])
@pytest.mark.parametrize("state", ["bfloat16", "8-bit"])
def test_a_traced_step_is_the_real_one(name: str, kind: str, state: str) -> None:
    blueprint = blueprint_of(name)
    atoms, config = tuple(range(len(blueprint.atoms))), a_training_config(2, optimiser=kind, optimiser_state=state)
    cap = MemoryCap(10**12, enforced=False)
    trainer = LocalTrainer(lambda: [PieceModel(blueprint, atoms, "head", fake_load(blueprint))], config)
    examples = random_examples(2, blueprint.shape_before(0), classes=blueprint.num_classes)
    trainer.epoch(examples, np.random.default_rng(0), cap, "train")
    assert cap.peak_bytes == piece_cost(blueprint, atoms, "head", config).peak_bytes


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("state", ["bfloat16", "8-bit"])
def test_steps_in_less_memory_are_the_plain_step(tmp_path: Path, kind: str, state: str) -> None:
    client = a_client(tmp_path, tiny_settings())
    atoms, examples = range(len(client.blueprint.atoms)), client.local_data(0)
    plain = a_training_config(4, optimiser=kind, optimiser_state=state, lr=0.01)
    paged = replace(plain, pages=finest(len(atoms)))
    batches = np.arange(12).reshape(3, 4)
    found = []
    for config in (plain, replace(plain, in_backward=True)):
        pieces = [PieceModel(client.blueprint, atoms, "head", client.load())]
        loss, optimiser = start(pieces, config, single_loss)
        for rows in batches:
            train_step(loss, optimiser, examples.read(rows), examples.targets(rows))
        found.append(pieces[0].units())
    memory = PeakMemory()
    with memory:
        cascade = PagedCascade(client.blueprint, atoms, "head", client.load(), paged, PageFiles(tmp_path / "pages"))
        for rows in batches:
            cascade.step(examples.read(rows), examples.targets(rows))
    assert memory.peak == paged_cost(client.blueprint, atoms, "head", paged).peak_bytes
    for unit, module in found[0].items():
        others = (found[1][unit], cascade.load_unit(unit))
        for name, array in module.state_dict().items():
            assert all(torch.equal(array, other.state_dict()[name]) for other in others), f"{unit}.{name}"
