"""What benchmarks/fedprophet_time.py counts: a client's round by the clock, its memory by the paper, and by hand."""

import math
import sys
from itertools import chain

import pytest

from benchmarks import fedprophet_time
from benchmarks.fedprophet_rounds import (
    ITERATIONS,
    SETTINGS,
    How,
    batches,
    client_seconds,
    cut_for,
    draw,
    fedprophet,
    fleet_of,
    jfat,
    whole_model,
)
from benchmarks.fedprophet_time import stage_length
from piecework.device_profiles.clock import task_seconds
from piecework.device_profiles.profile import DeviceState

CIFAR10, CALTECH = SETTINGS[0], SETTINGS[2]
VC709 = DeviceState("vc709", 400_000_000, 1e11, math.inf, 1.5e9, 0.17)
SHORT = DeviceState("vc709", 60_000_000, 1e11, math.inf, 1.5e9, 0.17)


def test_a_client_takes_what_the_clock_says_of_its_batches() -> None:
    work = batches(CIFAR10, whole_model(CIFAR10), How(remainder=True))
    for state in (VC709, SHORT):
        one_by_one = task_seconds(state, [batch for batch, count in work for _ in range(count)])
        assert sum(client_seconds(state, work)) == pytest.approx(one_by_one)


def test_a_full_batch_takes_the_memory_of_the_papers_tables() -> None:
    for setting, whole in ((CIFAR10, 301_663_096), (CALTECH, 1_130_521_344)):
        ((batch, count),) = batches(setting, whole_model(setting), How())
        assert (batch.training_bytes, count) == (whole, ITERATIONS)
        for stage in cut_for(setting.flags).stages:
            (module, _), *_ = batches(setting, stage.parts[0].atoms, How())
            cut = cut_for(setting.flags)
            assert module.training_bytes == cut.bytes(cut.item(stage.parts[0].atoms))


def test_the_last_batch_of_an_epoch_is_smaller() -> None:
    # 400 = 6 x 64 + 16: 30 batches are 4 epochs of 7 and two more; 187 = 5 x 32 + 27: 5 epochs of 6
    for setting, sizes in ((CIFAR10, [(64, 26), (16, 4)]), (CALTECH, [(32, 25), (27, 5)])):
        work = batches(setting, whole_model(setting), How(remainder=True))
        image = (cut := cut_for(setting.flags)).part(cut.item((0,))).input_bytes
        assert [(batch.input_bytes // image, count) for batch, count in work] == sizes


def test_jfat_on_one_device_by_hand() -> None:
    """VGG16: 20.1 GMACs a batch of 64 (Table 7 but for auxiliary heads), 15.25 M parameters, 302 MB."""
    work = batches(CIFAR10, whole_model(CIFAR10), How())
    computing, access = client_seconds(VC709, work)
    assert computing == pytest.approx(30 * 2 * 11 * 20.16e9 / 1e11, rel=2e-3)
    assert access == pytest.approx(30 * (0.17 + 64 * 3072 * 4 / 1.5e9) + 4 * 15_253_578 / 1.5e9, rel=1e-6)
    # as in test_clock: 604 MB and 9 accesses for the step, 482 MB and 6 accesses for each of ten attack steps
    computing_short, swapped = client_seconds(SHORT, work)
    assert computing_short == computing
    assert swapped == pytest.approx(30 * (604 / 1500 + 9 * 0.17 + 10 * (482 / 1500 + 6 * 0.17)), rel=1e-3)
    clean, once = client_seconds(SHORT, batches(CIFAR10, whole_model(CIFAR10), How(attack_steps=0)))
    assert clean == pytest.approx(computing / 11)
    assert once == pytest.approx(30 * (604 / 1500 + 9 * 0.17), rel=1e-3)


def test_module_assignment_does_not_make_rounds_longer() -> None:
    """Eq. 15, up to what the authors' count adds to multiply-accumulates; somebody is given more than one module."""
    drawn, cut = draw(fleet_of(CIFAR10, True), (1,), 5), cut_for(CIFAR10.flags)
    slowest = [min(state.flops_per_second for state in states) for states in drawn]
    pieces = {cut.choose_atoms(0, s, minimum) for states, minimum in zip(drawn, slowest, strict=True) for s in states}
    assert pieces - {cut.stages[0].parts[0].atoms}
    pairs = zip(*(fedprophet(CIFAR10, drawn, How(), dma) for dma in (True, False)), strict=True)
    for with_dma, without in chain(*(zip(*pair, strict=True) for pair in pairs)):
        assert sum(without) <= sum(with_dma) * (1 + 1e-9) <= sum(without) * 1.02


def test_rounds_are_those_of_the_slowest_client() -> None:
    drawn = draw(fleet_of(CIFAR10, True), (1, 2), 3)
    assert [len(states) for states in drawn] == [10] * 6
    work = batches(CIFAR10, whole_model(CIFAR10), How())
    assert [sum(r) for r in jfat(CIFAR10, drawn, How())] == [
        max(sum(client_seconds(state, work)) for state in states) for states in drawn
    ]
    assert all(
        sum(r) < sum(s) for r, s in zip(jfat(CIFAR10, drawn, How(mean=True)), jfat(CIFAR10, drawn, How()), strict=True)
    )


def test_the_length_of_stages() -> None:
    assert stage_length(100 * 2 + 200 * 7, adversarial=7, clean=2, warm_up=100) == 300
    assert stage_length(50 * 2, adversarial=7, clean=2, warm_up=100) == 50
    assert stage_length(700, adversarial=7, clean=2, warm_up=0) == 100


@pytest.mark.slow
def test_all_tables_of_one_round(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fedprophet_time, "SETTINGS", (CIFAR10,))
    monkeypatch.setattr(sys, "argv", ["fedprophet_time.py", "--rounds", "1", "--seeds", "1"])
    fedprophet_time.main()
    printed = capsys.readouterr().out
    assert printed.count("\n\n| ") == 7
    assert "| nan" not in printed
