"""Which client trains where: by memory, by predicted time, and by where its state lies."""

from pathlib import Path
from typing import Any

import pytest

from piecework.device_profiles.profile import UNLIMITED
from piecework.engines.cluster.book import FLOOR, HEAD, Node, Want, choose, price_of
from piecework.engines.cluster.shared_arrays import Apart
from piecework.engines.cluster.waiting import Address, Prepared, Waiting
from piecework.models.work_item import WorkItem
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.messages import Task

GB = 10**9


def node(name: str, room: int, workers: int = 2, place: str = "") -> Node:
    """A node whose workers take nothing themselves."""
    return Node(name, room, place or name, {f"{name}{n}": 0 for n in range(workers)})


def names(found: Any) -> tuple[str, str, str] | None:
    return None if found is None else (found[0].identifier, found[1].name, found[2])


def prepared(want: Want) -> Prepared:
    return Prepared(want, Apart(b"", ()), [], Address("", ""), trains=True)


def test_the_longest_begins_first() -> None:
    waiting = Waiting()
    for name, seconds in {"short": 1.0, "long": 9.0, "also long": 9.0, "between": 3.0}.items():
        waiting.add(prepared(Want(name, 0, GB, seconds)))
    wants = [each.want for each in waiting]
    assert [want.identifier for want in wants] == ["long", "also long", "between", "short"]
    assert names(choose(wants, [node("a", 4 * GB)], {})) == ("long", "a", "a0")
    assert waiting.pop("also long").want == wants[1]
    waiting.add(prepared(wants[1]), again=True)  # its worker died: it comes before its equals
    assert [each.want.identifier for each in waiting] == ["also long", "long", "between", "short"]
    assert (len(waiting), "short" in waiting, "none" in waiting) == (4, True, False)


def test_no_more_of_what_waits_is_looked_at_than_needed() -> None:
    """Thousands may wait: a search of all of them for each that begins would take longer than the clients."""
    seen = []
    wants = (seen.append(n) or Want(str(n), n, GB) for n in range(1000))
    machine = node("a", 4 * GB)
    assert names(choose(wants, [machine], {0: "elsewhere"})) == ("1", "a", "a0")
    machine.prices = dict.fromkeys(machine.floors, 0)
    assert choose(wants, [machine], {}) is None
    assert seen == [0, 1]


def test_a_node_is_never_overcommitted() -> None:
    """By clients that are each within budget: 3 + 3 GB do not fit 5 GB, and what waits does not hold up what fits."""
    machine = node("a", 5 * GB)
    large, other, small = Want("large", 0, 3 * GB, 9.0), Want("other", 1, 3 * GB, 8.0), Want("small", 2, 2 * GB, 1.0)
    assert names(choose([large, other, small], [machine], {})) == ("large", "a", "a0")
    machine.prices["a0"] = large.price
    assert machine.free == 2 * GB
    assert choose([other], [machine], {}) is None
    assert names(choose([other, small], [machine], {})) == ("small", "a", "a1")
    machine.prices["a1"] = small.price
    assert (machine.idle, choose([Want("none", 3, 0)], [machine], {})) == ([], None)


def test_floors_of_workers_count() -> None:
    machine = Node("a", 3 * FLOOR, HEAD, {"w": FLOOR, "v": FLOOR})
    assert (machine.free, machine.could_ever_take(2 * FLOOR), machine.could_ever_take(2 * FLOOR + 1)) == (
        FLOOR,
        True,
        False,
    )
    assert choose([Want("x", 0, FLOOR + 1)], [machine], {}) is None
    assert Node("b", FLOOR).could_ever_take(1) is False  # its first worker takes all


def test_a_client_goes_where_its_state_is() -> None:
    """If a worker is free there, before what takes longer; else to any other node."""
    a, b = node("a", 9 * GB, 1), node("b", 9 * GB, 1)
    stateful, long = Want("stateful", 0, GB, 1.0), Want("long", 1, GB, 5.0)
    assert names(choose([long, stateful], [a, b], {0: "b", 1: "elsewhere"})) == ("stateful", "b", "b0")
    b.prices["b0"] = GB
    assert names(choose([stateful], [a, b], {0: "b"})) == ("stateful", "a", "a0")


def test_without_a_state_the_emptier_node_is_taken() -> None:
    nodes = [node("a", 2 * GB), node("b", 3 * GB)]
    assert names(choose([Want("x", 0, GB)], nodes, {})) == ("x", "b", "b0")


def test_what_died_on_a_node_goes_to_another_if_there_is_one() -> None:
    again = Want("x", 0, GB, 1.0, avoided="b")
    assert names(choose([again], [node("a", 2 * GB), node("b", 9 * GB)], {})) == ("x", "a", "a0")
    assert names(choose([again], [node("b", 9 * GB)], {})) == ("x", "b", "b0")
    assert names(choose([again], [node("small", GB // 2), node("b", 9 * GB)], {})) == ("x", "b", "b0")


@pytest.mark.parametrize(
    ("changes", "price"),
    [
        ({}, 700 + 2 * 10),  # the largest of its steps; the message comes and goes
        ({"budget": 500}, 500 + 2 * 10),
        ({"budget": UNLIMITED}, 700 + 2 * 10),
        ({"enforced": False, "budget": 500}, 900 + 2 * 10),  # its costs are no true bytes
        ({"costs": {}}, 900 + 2 * 10),
        ({"costs": {}, "evaluation": [EvaluationStep(300), EvaluationStep(40)]}, 300 + 2 * 10),
    ],
)
def test_prices(tmp_path: Path, changes: dict[str, Any], price: int) -> None:
    values = {"budget": 1000, "costs": {WorkItem((0,), "aux"): 400, WorkItem((1,), "aux"): 700}} | changes
    task = Task("experiment", 1, 0, "any", reference=900, lr=0.1, state_dir=str(tmp_path), **values)
    assert price_of(task, 10) == price
