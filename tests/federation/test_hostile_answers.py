"""Five of six clients answer whatever they like, in every system: the run goes on, and its records hold numbers in range."""

from pathlib import Path

import pytest

from benchmarks.hostile import Target, attack
from piecework.federation import reports
from piecework.federation.registry import ClientRegistry
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.training.methods import METHODS

ANSWERS = 2000  # of all systems together


@pytest.mark.slow
@pytest.mark.parametrize("strategy", METHODS)
def test_no_answer_of_a_client_ends_a_run_or_spoils_its_records(strategy: str, tmp_path: Path) -> None:
    assert attack(strategy, tmp_path, -(-ANSWERS // len(METHODS))) * len(METHODS) >= ANSWERS


def test_the_attack_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the except clause that there was, nested work items end the run; without a range, a record is no JSON."""
    target = Target("fedavg", tmp_path)
    nested, endless = [("field", "done", "[" * 100_000)], [("figure", "mine", 1e300)]
    target.attack(0, [nested, endless])
    assert [client["status"] for client in target.folder.rounds()[-1]["clients"]] == ["rejected"] * 2 + ["ok"] * 4
    monkeypatch.setattr(reports, "UNUSABLE", (ValueError, TypeError, LookupError, ArithmeticError))
    with pytest.raises(RecursionError):
        target.attack(0, [nested])


def test_nodes_agree_on_the_number_of_clients(tmp_path: Path) -> None:
    """A node that says something else than the first one is not admitted; if the run sets `clients`, it does not matter."""
    target = Target("fedavg", tmp_path)
    registry = ClientRegistry(target.run.registry.fleet, 0, 0, target.run.settings.memory)
    for clients, known in ((0, [0, 2, 3, 4, 5]), (6, [0, 1, 2, 3, 4, 5])):
        registry = ClientRegistry(registry.fleet, 0, clients, registry.memory)
        target.grid.due.extend([[], [("figure", "num-partitions", 10**6)]])
        registry.update(target.grid)
        assert sorted(registry.members) == known
        said = "num-partitions is 1000000: the first node that connected has 6; set `clients`, or "
        refused = [(entry["node"], str(entry["reason"]).startswith(said)) for entry in registry.unusable()]
        assert refused == ([] if clients else [(FIRST_NODE + 1, True)])


def test_a_node_that_is_refused_says_nothing_about_the_number_of_clients(tmp_path: Path) -> None:
    target = Target("fedavg", tmp_path)
    registry = ClientRegistry(target.run.registry.fleet, 0, 0, target.run.settings.memory)
    target.grid.due.append([("figure", "num-partitions", 10**6), ("field", "device", "no-such-board")])
    registry.update(target.grid)
    assert (sorted(registry.members), registry.federation) == ([1, 2, 3, 4, 5], 6)
