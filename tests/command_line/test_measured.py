"""What advice says was measured: the nearest case of the claims' records, and who is ahead there."""

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from benchmarks.claims.definition import Row
from benchmarks.claims.evidence import document, plain_rows
from benchmarks.claims.reading import names
from piecework.plans.measured import FILE, Case, Situation, ahead_of, evidence, near, nearest, read_cases, situate
from piecework.plans.question import ask
from piecework.plans.suggest_view import evidence_tables
from piecework.training.settings import Settings

SLOW, FAST = 2e7, 2e9
WEAK = Situation(adversarial=False, poorest=0.25, richest=0.25, kept=0.2, disk=SLOW)
MIXED = replace(WEAK, poorest=0.2, richest=1.0)


def row(name: str, strategy: str, accuracy: float, fit: str = "") -> dict[str, Any]:
    seconds = {"sd": 100 * accuracy, "nvme": accuracy}
    return {
        "name": name,
        "strategy": strategy,
        "fit": fit,
        "accuracy": accuracy,
        "seeds": 1,
        "rounds": 60,
        "participation": 100.0,
        "seconds": seconds,
        "plain": True,
        "advice": {},
    }


def a_case(situation: Situation, name: str, *rows: dict[str, Any], ahead: str = "FeDepth") -> Case:
    times = (
        {"storage": "sd", "bandwidth": 45e6, "seconds": 90.0, "row": ahead, "accuracy": 30.0},
        {"storage": "nvme", "bandwidth": 1.3e9, "seconds": 9.0, "row": rows[0]["name"], "accuracy": 30.0},
    )
    lead = {
        "points": rows[0]["accuracy"] - rows[1]["accuracy"],
        "seeds": 1,
        "verdict": "undecided",
        "next": rows[1]["name"],
    }
    return Case("budgets", name, "a model on data", situation, lead, rows, (), (), times)


ROWS = (
    row("FeDepth", "fedepth", 48.0),
    row("FedAvg, auto", "fedavg", 47.0, fit="auto"),
    row("HeteroFL", "heterofl", 40.0),
    row("FjORD", "fjord", 39.0),
    row("AllSmall", "allsmall", 30.0),
    row("FedAvg", "fedavg", 20.0),
)
CASES = (a_case(WEAK, "weak", *ROWS, ahead="HeteroFL"), a_case(MIXED, "mixed", *ROWS[1:]))
FITTED = {"strategy": "fedavg", "settings": {"strategy": "fedavg", "memory.fit": "auto"}}


def test_the_file_is_what_the_records_give() -> None:
    assert document(names()) == FILE.read_text("utf-8")
    cases = {(case.claim, case.name): case for case in read_cases()}
    weak = cases["budgets", "activations, weak"]
    assert (weak.situation.poorest, weak.situation.richest) == (0.25, 0.25)
    accuracies = [each["accuracy"] for each in weak.rows]
    assert accuracies == sorted(accuracies, reverse=True)
    assert "ExclusiveFL" in weak.idle  # no device holds a quarter of a step


def test_what_is_told_has_most_of_its_rivals() -> None:
    for case in read_cases():
        assert len(case.missing) < len(case.rows) + len(case.idle), (case.name, case.missing)


def test_what_was_run_is_not_said_to_be_missing() -> None:
    """Also where some seeds of a row are: a row is run, cannot train, or is missing."""
    for case in read_cases():
        ran = {each["name"] for each in case.rows}
        assert ran
        assert not set(case.missing) & (ran | set(case.idle)), case.name


@pytest.mark.parametrize(
    ("poorest", "richest", "kept", "name"),
    [(0.25, 0.3, 0.2, "weak"), (0.25, 0.7, 0.2, "mixed"), (0.2, 0.6, 0.9, "weak"), (1.0, 1.0, 0.0, "mixed")],
)
def test_the_nearest_case(poorest: float, richest: float, kept: float, name: str) -> None:
    """By hand for the third: 0.05 + 0.35 + 0.7 from weak, 0 + 0.4 + 0.7 from mixed."""
    asked = replace(WEAK, poorest=poorest, richest=richest, kept=kept)
    found = nearest(asked, CASES)
    assert found is not None
    assert found.name == name
    assert nearest(replace(asked, adversarial=True), CASES) is None


def test_a_case_decides_within_half_a_step_of_it() -> None:
    """0.25 + 0.25 are still near, and 0.3 + 0.25 are not; nor is what has more parameters by more than a quarter of a step."""
    assert near(replace(WEAK, poorest=0.5, richest=0.5), CASES) == CASES[0]
    assert near(replace(WEAK, poorest=0.5, richest=0.55), CASES) is None
    assert near(replace(WEAK, kept=0.45), CASES) == CASES[0]
    assert near(replace(WEAK, kept=0.46), CASES) is None
    assert near(replace(WEAK, adversarial=True), CASES) is None


def test_what_is_said_of_it() -> None:
    found = evidence(WEAK, FITTED, CASES)
    assert [each["name"] for each in found["rows"]] == ["FeDepth", "FedAvg, auto", "HeteroFL", "AllSmall", "FedAvg"]
    assert [(each["behind"], each["seconds"]) for each in found["rows"][:2]] == [(0.0, 4800.0), (1.0, 4700.0)]
    assert found["case"] == {"claim": "budgets", "name": "weak", "distance": 0.0}
    assert found["text"] == (
        "Measured nearest: a model on data (docs/claims/budgets.md, weak). There the devices have 0.25 of a plain step (here "
        "0.25), of which parameters, gradients and the optimiser's state are 0.20 (here 0.20). Highest there after as many "
        "rounds: FeDepth; FedAvg, auto is 1.0 points behind (one seed: undecided). Highest in 1 min 30 s of simulated time, "
        "when half of the systems are through: HeteroFL."
    )
    fast = evidence(replace(WEAK, disk=FAST), FITTED, CASES)
    assert [each["seconds"] for each in fast["rows"][:2]] == [48.0, 47.0]
    assert "Highest in" not in fast["text"]


def test_the_next_row_may_be_ahead_with_the_seeds_that_both_have() -> None:
    """Rows are sorted by all their seeds."""
    lead = {"points": -0.4, "next": "FedAvg, auto", "seeds": 1, "verdict": "undecided"}
    said = evidence(WEAK, FITTED, [replace(CASES[0], lead=lead)])["text"]
    assert (
        "Highest there after as many rounds: FeDepth; FedAvg, auto is 0.4 points ahead of it with the seeds that both have "
        "(one seed: undecided)." in said
    )
    assert "(one seed)." in evidence(WEAK, FITTED, [replace(CASES[0], lead={**lead, "verdict": "behind"})])["text"]


def test_what_is_missing_or_far_is_said() -> None:
    other = {"strategy": "splitmix", "settings": {"strategy": "splitmix"}}
    far = evidence(replace(WEAK, poorest=0.9, richest=0.9), other, CASES)
    assert far["text"].startswith("Nothing near this was measured; the nearest is a model on data")
    assert far["text"].endswith("The recommended system has no finished run there.")
    decided = replace(CASES[0], lead={**CASES[0].lead, "points": 1.25, "seeds": 3, "verdict": "ahead"})
    ahead = "Ahead there after as many rounds: FeDepth, by 1.2 points; FedAvg, auto is next (3 seeds)."
    assert ahead in evidence(WEAK, None, [decided])["text"]
    longer = replace(decided, rows=({**ROWS[0], "rounds": 90}, *ROWS[1:]))
    unlike = "Ahead there: FeDepth (90 rounds), by 1.2 points; FedAvg, auto (60 rounds) is next (3 seeds)."
    assert unlike in evidence(WEAK, None, [longer])["text"]
    partly = replace(CASES[0], idle=("FedAvg, fitted", "ExclusiveFL"), missing=("ProFL",))
    said = " No client can train there: FedAvg, fitted; ExclusiveFL. Not run there yet: ProFL."
    assert said in evidence(WEAK, None, [partly])["text"]
    none = evidence(replace(WEAK, adversarial=True), FITTED, CASES)
    assert none == {
        "text": "Nothing was measured with adversarial training yet (docs/results/index.md).",
        "rows": [],
        "case": None,
    }


def test_the_situation_of_the_demo() -> None:
    """Its boards have 0.53 to 0.95 of a step (demo.toml)."""
    settings = Settings(clients=20)
    found = situate(settings, ask(settings))
    assert not found.adversarial
    assert (found.poorest, found.richest) == (0.53, 0.95)
    attacked = settings.with_values({"training.adversarial": True})
    assert situate(attacked, ask(attacked)).adversarial


def test_accuracies_of_clients_own_data_are_told_of_those_alone() -> None:
    """One model for all has another accuracy there, and another system is ahead; so it is with data that are less skewed."""
    own = replace(WEAK, skew="dirichlet 0.1")
    other = replace(WEAK, skew="dirichlet 1")
    cases = (*CASES, a_case(own, "own data", *ROWS))
    assert (nearest(WEAK, cases), nearest(own, cases), nearest(other, cases)) == (CASES[0], cases[2], cases[2])
    assert (near(own, cases), near(other, cases)) == (cases[2], None)
    assert evidence(own, None, CASES)["text"].startswith(
        "Nothing was measured with clean training and personal evaluation"
    )
    assert "Data are divided otherwise here: dirichlet 1." in evidence(other, None, cases)["text"]
    assert "divided" not in evidence(own, None, cases)["text"]
    settings = Settings(clients=20)
    mine = settings.with_values({"evaluation.mode": "personal", "data.partition-alpha": 0.3})
    assert (situate(settings, ask(settings)).skew, situate(mine, ask(mine)).skew) == ("", "dirichlet 0.3")
    assert {(case.claim, bool(case.situation.skew)) for case in read_cases()} >= {("budgets", False), ("spafl", True)}


def test_a_row_stands_for_its_system_unless_it_is_a_variant() -> None:
    kinds = [("FedProphet", {}), ("AllSmall", {}), ("FedProphet without APA", {"fedprophet.apa": False})]
    rows = [Row(name=name, settings={"strategy": name.split()[0].lower(), **own}) for name, own in kinds]
    narrow = Row(name="FedAvg x 1/6", settings={"strategy": "fedavg", "architecture.width": 0.17})
    small = Row(name="FedAvg, batches of 8", settings={"strategy": "fedavg", "training.batch-size": 8})
    fitted = Row(name="FedAvg, auto", settings={"strategy": "fedavg", "memory.fit": "auto"})
    assert plain_rows([narrow, *rows, small, fitted]) == [*rows[:2], fitted]
    assert {(each["name"], each["plain"]) for case in read_cases() for each in case.rows} >= {
        ("FedProphet", True),
        ("FedProphet without DMA", False),
        ("FedAvg, batches of 8", False),
    }
    variant = {**ROWS[0], "name": "FeDepth, another", "accuracy": 10.0, "plain": False, "ahead_of": {}}
    best = [{**each, "ahead_of": {"FedAvg, auto": 3.0}} if each is ROWS[0] else each for each in ROWS]
    advised = [{"strategy": "fedepth", "fit": ""}, {"strategy": "fedavg", "fit": "auto"}]
    ahead = ahead_of(advised[1], advised, replace(CASES[0], rows=(*best, variant)))
    assert ahead is not None
    assert ahead.row is advised[0]


def test_the_table_of_it() -> None:
    written = StringIO()
    console = Console(file=written, width=100)
    for each in evidence_tables(evidence(WEAK, FITTED, CASES)):
        console.print(each)
    (line,) = (each for each in written.getvalue().splitlines() if each.startswith("FedAvg, auto"))
    assert line.split() == ["FedAvg,", "auto", "47.0%", "1.0", "1", "100%", "1", "h", "18", "min"]
    assert len(evidence_tables(evidence(replace(WEAK, adversarial=True), None, CASES))) == 1


def test_a_row_that_is_as_good_in_no_more_time_is_said() -> None:
    """On SD cards FeDepth took 4800 s. A row that takes longer and is no better is no news."""
    best = CASES[0].rows[0]
    near = {**best, "name": "AllSmall, 4 times", "strategy": "allsmall", "verdict": "undecided"}
    slow = {**near, "seconds": {"sd": 4801.0, "nvme": 48.0}}
    said = evidence(WEAK, FITTED, [replace(CASES[0], longer=(near,))])["text"]
    assert (
        "With more rounds AllSmall, 4 times, cannot be told from FeDepth: 48.0 % in 1 h 20 min against 48.0 % in 1 h 20 min."
        in said
    )
    assert evidence(WEAK, FITTED, [replace(CASES[0], longer=(slow,))]) == evidence(WEAK, FITTED, CASES)
    assert evidence(WEAK, FITTED, [replace(CASES[0], longer=(slow, near))])["text"] == said
    level = {**near, "verdict": "level"}
    assert (
        "4 times, is level with FeDepth: 48.0 %" in evidence(WEAK, FITTED, [replace(CASES[0], longer=(level,))])["text"]
    )
    quick = replace(WEAK, disk=FAST)
    assert "AllSmall, 4 times, cannot" in evidence(quick, FITTED, [replace(CASES[0], longer=(slow,))])["text"]


def test_a_row_that_is_ahead_with_more_rounds_is_said() -> None:
    """However long it takes."""
    longer = {
        **row("AllSmall, 9 times", "allsmall", 60.0),
        "seconds": {"sd": 7200.0, "nvme": 440.0},
        "verdict": "ahead",
    }
    said = evidence(WEAK, FITTED, [replace(CASES[0], longer=(longer,))])["text"]
    assert (
        "With more rounds AllSmall, 9 times, is ahead of FeDepth: 60.0 % in 2 h 0 min against 48.0 % in 1 h 20 min."
        in said
    )
    assert "With more rounds" not in evidence(WEAK, FITTED, CASES)["text"]
    (mixed,) = (case for case in read_cases() if (case.claim, case.name) == ("budgets", "activations, mixed"))
    assert mixed.longer[0]["accuracy"] > mixed.rows[0]["accuracy"]
