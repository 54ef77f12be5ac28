"""Who is drawn for a round, and the mean of what clients that evaluate answer, by hand."""

import pytest
from settings_helpers import settings_with

from piecework.strategies.client_evaluation import mean_verdict
from piecework.strategies.cohort import draw_clients

SETTINGS = settings_with(clients=5, clients_per_round=3, faults__min_clients=2)


def test_clients_whose_processes_died_are_left_out() -> None:
    assert draw_clients([0, 1, 2, 4], {1: 3, 3: 1}, SETTINGS, 7) == ([0, 2, 4], {1: 3})


def test_clients_whose_processes_died_are_better_than_too_few() -> None:
    assert draw_clients([1, 2, 3], {1: 3, 3: 1}, SETTINGS, 7) == ([1, 2, 3], {})
    assert draw_clients([], {1: 3}, SETTINGS, 7) == ([], {})


def test_a_draw_is_a_function_of_the_round() -> None:
    drawn = [draw_clients([*range(5)], {}, SETTINGS, number)[0] for number in range(1, 9)]
    assert drawn == [draw_clients([*range(5)], {}, SETTINGS, number)[0] for number in range(1, 9)]
    assert {len(each) for each in drawn} == {3}
    assert len(set(map(tuple, drawn))) > 1


def test_a_mean_is_over_examples_or_over_clients() -> None:
    verdicts = [(30, {"val-accuracy": 0.5}), (10, {"val-accuracy": 0.9}), (0, {})]
    found = [mean_verdict(verdicts, ("val-accuracy",), personal=personal) for personal in (False, True)]
    assert [each and each["val-accuracy"] for each in found] == [pytest.approx(0.6), pytest.approx(0.7)]
    assert mean_verdict([(0, {})], ("val-accuracy",), personal=False) is None
