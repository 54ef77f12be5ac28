"""The profile of a round on real processes, on lines of a trace made by hand, and that the trace finds what it replaces."""

from functools import reduce
from importlib import import_module
from typing import Any

import pytest

from benchmarks.deployment import messages
from benchmarks.deployment_trace import STEPS


def line(pid: int, step: str, began: float, ended: float, node: int = 0, cpu: tuple[float, float] = (0, 0)) -> dict:
    return {
        "pid": pid,
        "step": step,
        "node": node,
        "began": began,
        "ended": ended,
        "cpu_began": cpu[0],
        "cpu_ended": cpu[1],
        "peak": 2048,
    }


TASK = [
    line(9, "fork", 4.5, 4.5),
    line(9, "start", 5, 5, cpu=(0.25, 0.25)),
    line(9, "pull", 5, 6, node=7),
    line(9, "unpack", 6, 6.5),
    line(9, "pack", 8, 8.5),
    line(9, "app", 6, 9),
    line(9, "push", 9, 9.5),
    line(9, "task", 5, 10, cpu=(0.25, 2.25)),
]


def test_the_steps_of_a_message_add_up_to_it() -> None:
    lines = [
        line(1, "send", 1, 2, node=7),
        line(1, "send", 2, 2.5, node=8),  # never answered
        line(2, "receive", 3, 4, node=7),
        *TASK,
        line(2, "answer", 4, 10.5, node=7),
        line(1, "collect", 10, 11),
    ]
    (found,) = messages(sorted(lines, key=lambda each: each["ended"]))
    steps: dict[str, Any] = {"poll": 1, "start": 1.5, "import": 0.5, "pull": 1, "unpack": 0.5, "train": 2}
    steps |= {"pack": 0.5, "push": 0.5, "answer": 1, "collect": 0.5}
    assert {step: found[step] for step in steps} == steps
    assert found["fetch"] == 1  # within `start`
    assert found["message"] == sum(steps.values()) + 1  # the second in which it was sent
    assert (found["cpu import"], found["cpu message"], found["peak"]) == (0.25, 2.25, 2)


@pytest.mark.parametrize(("module", "place"), [(module, place) for module, steps in STEPS.items() for place in steps])
def test_every_step_names_a_function(module: str, place: str) -> None:
    assert callable(reduce(getattr, place.split("."), import_module(module)))
