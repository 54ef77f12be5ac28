"""The emulated clock, against sums done by hand."""

import dataclasses
import math

import pytest

from piecework.device_profiles.clock import Batch, batch_access_seconds, round_seconds, simulated_seconds, task_seconds
from piecework.device_profiles.profile import DeviceState

STATE = DeviceState(
    "a", 100, flops_per_second=100.0, bandwidth=10.0, disk_bandwidth=5.0, disk_latency=0.25
)  # 100 bytes of memory
# A forward pass takes 4 * (6 + 4) = 40 bytes, a training step 4 * (6 + 3 * 4) = 72.
BATCH = Batch(flops=50.0, input_bytes=10, parameters=4, features=6)


def with_memory(memory: int) -> DeviceState:
    return dataclasses.replace(STATE, budget_bytes=memory)


def test_link_computing_and_disk_add_up() -> None:
    # 20/10 down + 300/100 computing + 15/5 disk + 40/10 up
    assert simulated_seconds(STATE, 300.0, 20, 40, disk_bytes=15) == pytest.approx(2 + 3 + 3 + 4)
    assert simulated_seconds(STATE, 300.0, 20, 40, disk_bytes=15, accesses=6) == pytest.approx(12 + 1.5)
    assert simulated_seconds(STATE, 0, 0, 0) == 0
    # 10/5 written as fast as it is read, or 10/2
    assert simulated_seconds(STATE, 0, 0, 0, disk_bytes=15, disk_written=10) == pytest.approx(3 + 2)
    slow = dataclasses.replace(STATE, disk_write_bandwidth=2.0)
    assert simulated_seconds(slow, 0, 0, 0, disk_bytes=15, disk_written=10) == pytest.approx(3 + 5)
    # 4 reads of 0.25 s, and 2 writes of as much, or of 1.5 s
    assert simulated_seconds(STATE, 0, 0, 0, accesses=6, writes=2) == pytest.approx(1 + 0.5)
    waiting = dataclasses.replace(STATE, disk_write_latency=1.5)
    assert simulated_seconds(waiting, 0, 0, 0, accesses=6, writes=2) == pytest.approx(1 + 3)


@pytest.mark.parametrize(
    ("amounts", "message"),
    [
        ((1.0, -1, 0), "down -1"),
        ((1.0, 0, 0, 0, -2), "accesses -2"),
        ((1.0, 0, 0, 0, 0, -3), "written -3"),
        ((1.0, 0, 0, 0, 0, 0, -4), "writes -4"),
    ],
)
def test_negative_amounts(amounts: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated_seconds(STATE, *amounts)  # type: ignore[arg-type]


def test_a_link_that_is_not_modelled_takes_no_time() -> None:
    wired = dataclasses.replace(STATE, bandwidth=math.inf)
    assert simulated_seconds(wired, 300.0, 10**9, 10**9) == 3.0


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    assert round_seconds([1.0, 3.0, 2.0]) == 3.0
    assert round_seconds([]) == 0.0


def test_what_fits_reads_its_input() -> None:
    # 10/5 + 0.25, down to the very byte
    assert batch_access_seconds(with_memory(72), BATCH) == pytest.approx(2.25)
    attacked = dataclasses.replace(BATCH, attack_steps=10)
    assert batch_access_seconds(with_memory(72), attacked) == pytest.approx(2.25)


def test_a_training_step_that_does_not_fit_is_swapped() -> None:
    # Bytes: 4 * (2*6 + 4*4 + 2*(3-2)*4) = 144; accesses at 71 bytes: ceil(40/71) + ceil(72/71) = 1 + 2
    assert batch_access_seconds(with_memory(71), BATCH) == pytest.approx(144 / 5 + 3 * 0.25)
    # An attack step takes 40 bytes, and fits.
    attacked = dataclasses.replace(BATCH, attack_steps=10)
    assert batch_access_seconds(with_memory(71), attacked) == pytest.approx(144 / 5 + 3 * 0.25)


def test_half_of_what_is_swapped_is_written() -> None:
    """A flash card may write much more slowly than it reads, and its fleet says so."""
    reads = with_memory(39)  # 112 bytes of features and parameters and 32 of the optimiser, in 2 + 2 accesses
    slow = dataclasses.replace(reads, disk_write_bandwidth=2.0, disk_write_latency=1.5)
    assert batch_access_seconds(reads, BATCH) == pytest.approx((112 + 32) / 5 + 4 * 0.25)
    assert batch_access_seconds(slow, BATCH) == pytest.approx(72 / 5 + 2 * 0.25 + 72 / 2 + 2 * 1.5)


def test_attack_steps_that_do_not_fit_are_swapped_too() -> None:
    # At 30 bytes, the training step: 144/5 + (ceil(40/30) + ceil(72/30)) * 0.25 = 28.8 + 5 * 0.25;
    # an attack step: 4 * (2*6 + 4*4) = 112 bytes, ceil(40/30) accesses forward and as many backward.
    attacked = dataclasses.replace(BATCH, attack_steps=3)
    expected = 28.8 + 1.25 + 3 * (112 / 5 + 4 * 0.25)
    assert batch_access_seconds(with_memory(30), attacked) == pytest.approx(expected)


@pytest.mark.parametrize(
    # SGD without momentum: 4 * (6 + 2*4) = 56 bytes of memory, 4 * (2*6 + 4*4) moved;
    # Adam: 4 * (6 + 5*4) = 104, 4 * (2*6 + 4*4 + 2*3*4) moved.
    ("scale", "moved", "accesses"),
    [(2, 112, 2 + 2), (5, 208, 2 + 4)],
)
def test_what_the_optimizer_keeps_is_swapped_with_its_step(scale: int, moved: int, accesses: int) -> None:
    batch = dataclasses.replace(BATCH, optimizer_scale=scale)
    assert batch_access_seconds(with_memory(30), batch) == pytest.approx(moved / 5 + accesses * 0.25)


def test_no_memory_at_all_takes_long_but_not_for_ever() -> None:
    seconds = batch_access_seconds(with_memory(0), BATCH)
    assert seconds == pytest.approx(144 / 5 + (40 + 72) * 0.25)


def test_a_task_reads_its_parameters_once() -> None:
    # Two batches of 50/100 + 2.25; 4 * 4 / 5 for the parameters; the link 20/10 + 40/10.
    assert task_seconds(STATE, [BATCH, BATCH]) == pytest.approx(2 * 2.75 + 3.2)
    assert task_seconds(STATE, [BATCH, BATCH], 20, 40) == pytest.approx(2 * 2.75 + 3.2 + 6)
    assert task_seconds(STATE, []) == 0


def test_a_task_that_is_swapped_reads_its_parameters_with_every_batch() -> None:
    assert task_seconds(with_memory(71), [BATCH, BATCH]) == pytest.approx(2 * (0.5 + 144 / 5 + 3 * 0.25))


def test_a_task_that_fits_takes_what_its_totals_say() -> None:
    """The two ways to the same figure: batch by batch, and from what a report knows of a task."""
    totals = simulated_seconds(STATE, 3 * 50.0, 20, 40, disk_bytes=3 * 10 + 4 * 4, accesses=3)
    assert task_seconds(STATE, [BATCH] * 3, 20, 40) == pytest.approx(totals)


def test_vgg16_on_a_tx2() -> None:
    """FedProphet's jFAT: VGG16 (15.25 M parameters, 302 MB a step of 64) on a TX2 that has 60 MB left."""
    features = round(302e6 / 4 - 3 * 15.25e6)
    batch = Batch(2 * 20.1e9 * 11, 64 * 3072 * 4, 15_250_000, features, attack_steps=10)
    state = DeviceState("tx2", 60_000_000, 1.3e12, math.inf, 1.5e9, 0.17)
    # Computing: 2 * 20.1 * 11 / 1300. Swapped: 4 * (2 * 29.75 + 6 * 15.25) MB = 604 MB and 3 + 6 accesses (180 MB, 302 MB);
    # ten attack steps of 4 * (2 * 29.75 + 4 * 15.25) MB = 482 MB and 2 * 3 accesses.
    expected = 0.3402 + 604 / 1500 + 9 * 0.17 + 10 * (482 / 1500 + 6 * 0.17)
    assert task_seconds(state, [batch]) == pytest.approx(expected, rel=1e-3)
