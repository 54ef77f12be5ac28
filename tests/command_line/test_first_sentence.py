"""The sentence that says what a run showed, of each way in which a run may end."""

from typing import Any

import pytest
from report_helpers import client, refused, round_record, two_rounds

from piecework.report.first_sentence import first_sentence

SETTINGS = {"strategy": "fedepth", "model": "convnet", "num-rounds": 2}
PIECES = {"pieces": [[0, 1], [2]], "trained": ["a", "b", "c"], "examples": 5}
FINAL = {"accuracy": 0.75, "adversarial_accuracy": 0.5, "attacked": 100, "attack_steps": 20}
NOT_EVALUATED = "fedepth trained convnet on 2 clients in 2 rounds: its accuracy was not evaluated"
STAYED = "every client stayed within its memory budget (largest peak 90.0% of it)"


def rounds_of(*accuracies: float | None, **changes: Any) -> list[dict[str, Any]]:
    return [round_record(n, a, [client(0), client(1)], **changes) for n, a in enumerate(accuracies, start=1)]


@pytest.mark.parametrize(
    ("rounds", "final", "status", "says"),
    [
        (
            two_rounds(0.5, 0.975),
            None,
            "completed",
            f"fedepth trained convnet on 2 clients in 2 rounds: 97.5% of the test data right after round 2; {STAYED}.",
        ),
        (two_rounds(None, None), None, "completed", f"{NOT_EVALUATED}; {STAYED}."),
        (
            two_rounds(0.5, None),
            None,
            "stopped",
            "fedepth trained convnet on 2 clients in 2 of 2 rounds before the run was stopped: 50.0% of the test data right "
            f"after round 1; {STAYED}.",
        ),
        (
            two_rounds(0.5),
            None,
            "unfinished",
            "fedepth trained convnet on 2 clients in 1 of 2 rounds until now: 50.0% of the test data right after round 1; "
            f"{STAYED}.",
        ),
        (
            two_rounds(0.5),
            FINAL,
            "completed",
            "fedepth trained convnet on 2 clients in 1 round: 75.0% of the test data right at the end, 50.0% under PGD-20 (of "
            f"100); {STAYED}.",
        ),
        (
            rounds_of(0.5, adversarial_accuracy=0.25),
            None,
            "failed",
            "fedepth trained convnet on 2 clients in 1 of 2 rounds before the run failed: 50.0% of the test data right after "
            f"round 1, 25.0% under attack; {STAYED}.",
        ),
        (
            rounds_of(0.5, 0.875, personal=True),
            None,
            "completed",
            "fedepth trained convnet on 2 clients in 2 rounds: the model gets a mean of 87.5% of each client's own test data "
            f"right after round 2; {STAYED}.",
        ),
        (
            rounds_of(None, client_accuracy=0.5),
            None,
            "completed",
            "fedepth trained convnet on 2 clients in 1 round: 50.0% of the clients' validation data right after round 1; "
            f"{STAYED}.",
        ),
        ([], None, "failed", "fedepth has not trained convnet: the run failed before its first round was finished."),
        (
            [round_record(1, 0.1, [refused(0), refused(1)])],
            None,
            "failed",
            "fedepth could not train convnet: no client's update entered the model; all 2 requests failed (memory 2); the run "
            "failed in round 1 of 2.",
        ),
    ],
)
def test_each_ending(rounds: list[dict[str, Any]], final: dict[str, Any] | None, status: str, says: str) -> None:
    assert first_sentence(SETTINGS, rounds, final, status) == says


def test_pieces_failures_and_what_was_never_trained() -> None:
    trained = [{"part": part, "distilled": False} for part in "abcd"]
    clients = [client(0, **PIECES), client(1, **PIECES), refused(2), client(3, status="timeout", reason="late")]
    record = round_record(1, 0.5, clients, devices={"small": 6}, trained=trained, aggregated=True, examples=30)
    assert first_sentence(SETTINGS, [record], None, "completed") == (
        "fedepth trained convnet on 2 of 6 clients, none of which trained it whole at once, in 1 round: 50.0% of the test data "
        f"right after round 1; {STAYED}; never trained: d; 2 of 4 requests failed (memory 1, timeout 1)."
    )
    whole = record | {"clients": [client(0, **PIECES), client(1, **PIECES | {"pieces": [[0, 1, 2]]})]}
    assert "whole at once" not in first_sentence(SETTINGS, [whole], None, "completed")


def test_budgets() -> None:
    over = two_rounds(0.5, measured_peak=1100)
    assert "not every client stayed within its memory budget (largest peak 110.0% of it)" in first_sentence(
        SETTINGS, over, None, "completed"
    )
    free = rounds_of(0.5, enforced=False)
    assert first_sentence(SETTINGS, free, None, "completed").endswith("after round 1; budgets were not enforced.")
    unlimited = [round_record(1, 0.5, [client(0, budget=2**60)])]
    assert first_sentence(SETTINGS, unlimited, None, "completed").endswith("of the test data right after round 1.")


def test_updates_of_a_round_without_a_new_model_do_not_count() -> None:
    assert first_sentence(SETTINGS, rounds_of(0.5, aggregated=False), None, "failed") == (
        "fedepth could not train convnet: no client's update entered the model; the run failed in round 1 of 2."
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "local"}, "each client's own model gets a mean of 50.0% of its own client's test data"),
        (
            {"strategy": "fedavg", "fedavg.fine-tuning-epochs": 1},
            "the model, fine-tuned by each client for 1 epoch, gets a mean of 50.0% of each client's own test data",
        ),
        ({"strategy": "fedavg", "fedavg.fine-tuning-epochs": 0}, "rounds: the model gets a mean of 50.0% of each"),
    ],
)
def test_a_personal_evaluation_says_whose_model_it_was_of(settings: dict[str, Any], says: str) -> None:
    assert says in first_sentence(SETTINGS | settings, rounds_of(0.25, 0.5, personal=True), None, "completed")
