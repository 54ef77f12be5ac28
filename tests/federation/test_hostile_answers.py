"""Two of three clients answer whatever they like, in every system: the run goes on, and its records hold numbers in range."""

from pathlib import Path

import pytest

from benchmarks.hostile import Target, attack
from piecework.federation import reports
from piecework.strategies import STRATEGIES

ANSWERS = 2000  # of all systems together


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_answer_of_a_client_ends_a_run_or_spoils_its_records(strategy: str, tmp_path: Path) -> None:
    assert attack(strategy, tmp_path, -(-ANSWERS // len(STRATEGIES))) * len(STRATEGIES) >= ANSWERS


def test_the_attack_sees_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the except clause that there was, nested work items end the run; without a range, a record is no JSON."""
    target = Target("fedavg", tmp_path)
    nested, endless = [("field", "done", "[" * 100_000)], [("figure", "mine", 1e300)]
    target.attack(0, [nested, endless])
    assert [client["status"] for client in target.folder.rounds()[-1]["clients"]] == ["rejected"] * 2 + ["ok"] * 4
    monkeypatch.setattr(reports, "UNUSABLE", (ValueError, TypeError, LookupError, ArithmeticError))
    with pytest.raises(RecursionError):
        target.attack(0, [nested])
