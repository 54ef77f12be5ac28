"""PeakMemory on tensors that can be counted by hand; a float32 is 4 bytes."""

import pytest
import torch
from torch import Tensor

from piecework.device_profiles.memory import MemoryBudgetExceededError, PeakMemory, trace


def test_allocations_frees_views_and_in_place() -> None:
    memory = PeakMemory()
    with memory:
        a = torch.zeros(100)
        assert (memory.live, memory.peak) == (400, 400)
        b = a + 1
        assert (memory.live, memory.peak) == (800, 800)
        view = b[10:].view(9, 10)
        b.add_(1)
        view.mul_(2)
        torch.add(a, b, out=b)
        assert (memory.live, memory.peak) == (800, 800)
        del a
        assert (memory.live, memory.peak) == (400, 800)
        del b  # the view keeps the whole storage
        assert memory.live == 400
        del view
        assert (memory.live, memory.peak) == (0, 800)
        c = torch.zeros(10, dtype=torch.float64) + torch.ones(10, dtype=torch.float64) * 2
        # zeros, ones and ones * 2 live while the sum is made: no, ones is freed before it
        assert (memory.live, memory.peak) == (80, 800)
        assert c.tolist() == [2.0] * 10


def test_the_peak_holds_operands_and_result_at_once() -> None:
    memory = PeakMemory()
    with memory:
        kept = (torch.zeros(100) + 1) * 2  # zeros and its sum; then that sum and its double
    assert (memory.live, memory.peak) == (400, 800)
    assert kept[0] == 2


def test_a_tensor_from_outside_counts_from_its_first_use() -> None:
    outside, never = torch.zeros(50), torch.zeros(1000)
    memory = PeakMemory()
    with memory:
        assert memory.live == 0
        _ = outside.sum()  # 200 bytes read, 4 made
        assert memory.live == 204
        _ = outside[:5] + outside[5:10]  # the old result, 4 bytes, is there until the new one, 20 bytes, takes its name
        assert (memory.live, memory.peak) == (220, 224)
    assert never.numel() == 1000


def test_reentered_what_stays_alive_stays_counted() -> None:
    memory = PeakMemory()
    with memory:
        a = torch.zeros(100)
    outside = torch.zeros(10_000)
    with memory:
        b = torch.zeros(50)
        assert (memory.live, memory.peak) == (600, 600)
    del a  # frees are seen outside too
    assert (memory.live, memory.peak) == (200, 600)
    with memory:
        c = torch.zeros(50)
    assert (memory.live, memory.peak) == (400, 600)
    assert len(b) + len(c) + len(outside) == 10_100


def test_a_storage_that_grows_counts_its_growth() -> None:
    memory = PeakMemory()
    with memory:
        a = torch.zeros(10)
        a.resize_(25)
    assert (memory.live, memory.peak) == (100, 100)


def test_past_the_budget_raises_with_both_figures() -> None:
    memory = PeakMemory(allowed=1000, where="this phase")
    with memory:
        a = torch.zeros(200)
        b = torch.zeros(50)  # 1,000 bytes: exactly what is allowed
        with pytest.raises(MemoryBudgetExceededError) as caught:
            torch.zeros(25)
    assert (caught.value.needed, caught.value.allowed, caught.value.where) == (1100, 1000, "this phase")
    assert str(caught.value) == "this phase needs 1,100 bytes of training memory, the budget allows 1,000"
    assert memory.peak == 1100
    del caught  # its traceback held the tensor that was too much
    assert memory.live == 1000
    assert len(a) + len(b) == 250


def test_past_the_budget_inside_a_backward_pass() -> None:
    w = torch.zeros(100, requires_grad=True)

    def forward() -> Tensor:
        return (w * w).sum()

    def backward() -> None:
        forward().backward()

    whole = PeakMemory()
    with whole:
        value = forward()
    forward_peak = whole.peak
    assert forward_peak == 804  # w, its square, the sum
    del value
    memory = PeakMemory(allowed=1000)
    with memory:
        value = forward()
        with pytest.raises(MemoryBudgetExceededError) as caught:
            value.backward()
    assert caught.value.needed > caught.value.allowed == 1000
    assert w.grad is None
    w.grad = None
    measured = PeakMemory()
    with measured:
        backward()
    assert caught.value.needed <= measured.peak


def test_a_trace_allocates_nothing_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2).tolist()
    torch.manual_seed(3)
    tebi = 2**40
    cost = trace(lambda: torch.rand(tebi // 4) + 1)
    assert cost.peak_bytes == 2 * tebi
    assert torch.rand(2).tolist() == expected


def test_flops_are_two_a_multiply_accumulate() -> None:
    def work() -> None:
        w = torch.zeros(7, 5, requires_grad=True)
        (torch.zeros(3, 5) @ w.T).sum().backward()

    # [3,5] x [5,7] forward; backward the gradient of w alone, [7,3] x [3,5]
    assert trace(work).flops == 2 * 2 * 3 * 5 * 7
