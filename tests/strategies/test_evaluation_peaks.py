"""Evaluation on clients in every system: no more memory than was predicted, and none at all where too little is allowed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import TRIO, a_blueprint, a_client, fleet_json, run_local, tiny_settings

from piecework.client_app.validation import evaluate_whole
from piecework.device_profiles.memory import MemoryBudgetExceededError
from piecework.device_profiles.profile import DeviceState
from piecework.planning.assignment import Context
from piecework.planning.costs import cost_model_for
from piecework.planning.cut import Cut
from piecework.planning.evaluation_cost import choose_step, evaluation_steps, sizes
from piecework.plans.plan_evaluation import evaluation_row, evaluation_warning
from piecework.server_app.records import RunDir
from piecework.strategies import find_method
from piecework.training.evaluation_step import EvaluationStep
from piecework.training.messages import Task
from piecework.training.methods import METHODS

RUNNING = {"architecture__batch_norm": "running"}
ATTACK = {"attack__steps": 1, "evaluation__attack_steps": 1}
FAMILY = {
    "model": "resnet10",
    "architecture__width": 0.125,
    "feddf__family": "cnn3",
    "data__public_fraction": 0.2,
    "feddf__server_iterations": 1,
    "feddf__server_batch_size": 8,
}
FEW = 8_000  # bytes, with which no client evaluates
# The bytes of a client that is short of memory, and the settings. Of those without bytes, clients evaluate what they train.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fedavg": (180_000, {}),
    "cocofl": (180_000, {}),
    "feddf": (80_000, FAMILY | RUNNING),
    "fedet": (40_000, FAMILY | RUNNING),
    "fedepth": (180_000, RUNNING),
    "m-fedepth": (180_000, RUNNING),
    "fedpm": (0, {"training__weight_decay": 0.0}),
    "fedprophet": (
        60_000,
        ATTACK | {"fedprophet__stage_rounds": 1, "fedprophet__validation_clients": "all", "num_rounds": 2},
    ),
    "orthdrop": (205_000, RUNNING),
    "prism": (150_000, RUNNING),
    "splitmix": (40_000, {"splitmix__width_ratio": 0.25}),
    "allsmall": (0, {}),
    "depthfl": (0, {}),
    "exclusivefl": (0, {}),
    "feddrop": (0, {}),
    "fedprox": (0, {}),
    "fedrolex": (0, {}),
    "fjord": (0, {}),
    "heterofl": (0, {}),
    "local": (0, {}),
    "origdrop": (0, {}),
    "profl": (0, {"profl__stage_rounds": 1}),
    "slt": (0, {}),
    "spafl": (0, {}),
}
UNENFORCED = ("fedrbn", "jfat")  # their devices swap


def peaks_of(run: RunDir) -> list[tuple[str, dict[str, int]]]:
    """What each client's evaluation, query or measurement took, by kind; where it was refused, nothing was allocated."""
    found = []
    for record in run.rounds():
        for kind in ("query", "evaluation", "statistics"):
            account = record[kind] or {"peaks": [], "others": []}
            assert {each["client"] for each in account["peaks"]} & {
                each["client"] for each in account["others"]
            } == set()
            found += [(kind, each) for each in account["peaks"]]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_evaluation_takes_what_was_predicted(tmp_path: Path, strategy: str) -> None:
    tight, further = CASES[strategy]
    short = {"tight": tight, "poor": FEW} if tight else {}
    settings = TRIO | {"clients": 1 + len(short), "strategy": strategy}
    settings |= {"faults__allow_untrained": True, "data__validation_fraction": 0.4}
    if strategy not in ("local", "spafl"):
        settings |= {"evaluation__on_clients_every": 1}
    run = run_local(tmp_path, **settings | {"fleet": fleet_json(rich=10**8, **short)} | further)
    found, budgets = peaks_of(run), [10**8, *short.values()]
    assert {each["client"] for kind, each in found if kind == "evaluation"} == ({0, 1} if short else {0})
    for _, each in found:
        assert 0 < each["measured"] <= each["predicted"] <= budgets[each["client"]]
    assert run.summary()["max_peak_over_budget"] <= 1
    for record in run.rounds():
        for client in record["clients"]:
            own = [each for each in record["evaluation"]["peaks"] if each["client"] == client["client"]]
            assert [client["evaluation_peak"]] == ([each["measured"] for each in own] or [0])
            assert [client["evaluation_predicted"]] == ([each["predicted"] for each in own] or [0])
        if short:
            assert FEW not in [client["budget"] for client in record["clients"] if client["status"] == "ok"]
            refusals = [each["reason"] for each in record["evaluation"]["others"]]
            assert len(refusals) == 1
            assert "the budget allows 8,000" in refusals[0]


def test_every_system_is_looked_at() -> None:
    assert {*CASES, *UNENFORCED} == set(METHODS)


def test_one_byte_less_is_refused(tmp_path: Path) -> None:
    """The smallest step computes one example at once; a client that may use just its bytes evaluates."""
    settings = tiny_settings(strategy="fedavg", architecture__batch_norm="running")
    model = a_blueprint(batch_norm="running")
    cut = find_method("fedavg").make_cut(model, cost_model_for(settings, model), settings)
    (least,) = evaluation_steps(cut, model, tuple(range(5)), "head", 0, 22)
    assert least.examples == 1
    assert evaluation_steps(cut, model, tuple(range(5)), "head", least.bytes, 22) == [least]
    fleet = fleet_json(rich=10**8, least=least.bytes, less=least.bytes - 1)
    further = {"fleet": fleet, "data__validation_fraction": 0.4, "evaluation__on_clients_every": 1}
    (record,) = run_local(tmp_path, **TRIO | RUNNING | {"strategy": "fedavg"} | further).rounds()
    by_client = {each["client"]: each for each in record["evaluation"]["peaks"]}
    assert by_client.keys() == {0, 1}
    assert 0.9 * least.bytes < by_client[1]["measured"] <= by_client[1]["predicted"] == least.bytes
    (refused,) = record["evaluation"]["others"]
    assert refused["reason"] == (
        f"evaluating the model, one atom at a time, needs {least.bytes:,} bytes of training memory, "
        f"the budget allows {least.bytes - 1:,}"
    )


@pytest.mark.parametrize("at_once", [1, 7])
def test_fewer_examples_at_once_give_the_same_result(tmp_path: Path, at_once: int) -> None:
    client = a_client(tmp_path, tiny_settings(**RUNNING), blueprint=a_blueprint(batch_norm="running"))
    task, found = Task("e", 1, 0, "fedavg", 10**9, 10**9, 0.1, ""), []
    for examples in (0, at_once):
        found.append(evaluate_whole(replace(task, evaluation=[EvaluationStep(123, examples)]), client))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert (found[0]["val-examples"], found[0]["predicted-peak"]) == (20, 123)


def test_how_many_examples_are_computed_at_once() -> None:
    """Whole batches first, then whole batches of a client with few examples, then halves."""
    assert list(sizes(16, 40, 1)) == [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)]
    assert list(sizes(16, 11, 3)) == [(0, 16), (0, 11), (5, 5), (3, 3)]
    assert list(sizes(16, 16, 16)) == [(0, 16)]
    assert list(sizes(16, 5, 16)) == [(0, 16), (0, 5)]


@pytest.mark.parametrize(
    ("norm", "fit", "smallest"),
    [("running", "", 1), ("batch", "", 0), ("batch", "micro-batch", 3), ("measured", "", 0)],
)
def test_batches_are_cut_where_results_do_not_depend_on_it(norm: str, fit: str, smallest: int) -> None:
    """Where batch norms use the statistics of the examples computed together, only `memory.fit` cuts batches."""
    settings = tiny_settings(strategy="fedavg", architecture__batch_norm=norm, memory__fit=fit)
    model = a_blueprint(batch_norm="batch" if norm == "measured" else norm)
    cut = find_method("fedavg").make_cut(model, cost_model_for(settings, model), settings)
    costs = {16: 900, 11: 800, 5: 500, 3: 400, 2: 300, 1: 200}

    def found(allowed: int, examples: int = 11) -> EvaluationStep:
        needed = {"all": 0, "one": -50}
        (step,) = choose_step(
            cut, model, lambda _, size, held: costs[size] + needed[held], allowed, examples, ways=[*needed]
        )
        return step

    assert found(900) == EvaluationStep(900, 0, "all")
    assert found(899) == EvaluationStep(850, 0, "one")
    assert found(849) == EvaluationStep(800, 0, "all")
    assert (found(0).examples, found(0).held) == (found(100).examples, found(100).held) == (smallest, "one")
    assert found(0, examples=0) == EvaluationStep(0)


def test_a_step_that_fits_is_chosen() -> None:
    task = Task(
        "e", 1, 0, "fedavg", 1000, 1000, 0.1, "", evaluation=[EvaluationStep(900, 0, "a"), EvaluationStep(500, 4)]
    )
    assert Task.from_record(task.to_record()) == task
    assert task.choose_evaluation(900, "it") == EvaluationStep(900, 0, "a")
    assert task.choose_evaluation(899, "it") == EvaluationStep(500, 4)
    with pytest.raises(MemoryBudgetExceededError, match="it needs 500 bytes of training memory, the budget allows 499"):
        task.choose_evaluation(499, "it")
    assert replace(task, enforced=False).choose_evaluation(1, "it") == EvaluationStep(900, 0, "a")
    assert replace(task, enforced=False, evaluation=[]).choose_evaluation(1, "it") == EvaluationStep(0)
    with pytest.raises(MemoryBudgetExceededError, match="it needs 1,000 bytes"):
        replace(task, evaluation=[]).choose_evaluation(10**9, "it")


@pytest.mark.parametrize("strategy", ["fedepth", "fedprophet"])
def test_a_plan_says_who_trains_but_cannot_evaluate(strategy: str) -> None:
    settings = tiny_settings(strategy=strategy, architecture__batch_norm="batch", evaluation__on_clients_every=1)
    model = a_blueprint()
    cut = find_method(strategy).make_cut(model, cost_model_for(settings, model, 1), settings).with_smallest(600_000)
    needed = cut.evaluation_bytes(20)
    assert evaluation_row(cut, {0: needed, 1: 10**9}, 20) is None
    found = evaluation_row(cut, {0: needed - 1, 1: needed - 2, 2: needed}, 20)
    assert found == {"clients": 2, "of": 3, "needed": needed, "least": needed - 2}
    assert "2 of 3 clients that train have no memory to evaluate the model" in evaluation_warning(found)
    assert (
        evaluation_row(cut, {}, 20) is evaluation_row(find_method("fedavg").make_cut(*vars_of(cut)), {0: 1}, 20) is None
    )


def vars_of(cut: Cut) -> tuple[Any, ...]:
    """What another cut is made of."""
    return cut.blueprint, cut.cost_model, cut.settings


def test_a_client_that_measures_its_memory_gets_the_smallest_step_too() -> None:
    settings = tiny_settings(strategy="fedavg", **RUNNING)
    model = a_blueprint(batch_norm="running")
    cut = find_method("fedavg").make_cut(model, cost_model_for(settings, model), settings)
    device = DeviceState("board", 10**9, 1e9, 1e6, 1e7)
    method, found = find_method("fedavg")(cut), []
    for measures in (False, True):
        ctx = Context(device, measures_itself=measures)
        found.append([step.examples for step in method.assign_evaluation(ctx, method.assign(ctx), 22).steps])
    assert found == [[0], [0, 1]]
