"""The recommendation of advice: what comes first, what was measured ahead of it, and its command."""

import shlex
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from piecework.commands.options import run_command
from piecework.plans.recommend import recommend
from piecework.plans.suggest_view import caveats, fraction_range, table


def row(name: str, part: float, covered: float = 1.0, swapping: float = 0.0, fit: str = "") -> dict[str, Any]:
    figures: dict[str, Any] = {"participation": part, "covered": covered, "swapping": swapping, "min_fraction": covered}
    figures |= {"round_seconds": 60.0 if fit else 40.0, "stages": 1}
    return {"strategy": name, "fit": fit} | figures


FITTED = {"participation": 0.5, "step": "recomputes 3 atoms", "step_bytes": 60_000_000, "plain_bytes": 90_000_000}
FITTED |= {"flops": 1.25, "batch_norms": False, "disk_bytes": 5_000_000}
SIMPLE = {"fits": False, "participation": 0.0, "fitted": FITTED}


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        (
            [row("fedavg", 0.2), row("fedavg", 1.0, fit="auto"), row("fedepth", 1.0)],
            {"strategy": "fedavg", "memory.fit": "auto"},
            "60 MB instead of 90 MB for a step (recomputes 3 atoms), and 1.25 times the FLOPs, and so that much more time to "
            "compute. A step moves 5 MB to and from the disk. A round takes 1 min 0 s; with fedepth, which trains the model in "
            "pieces, 40 s.",
        ),
        (
            [row("fedavg", 0.2), row("fedavg", 0.5, fit="auto"), row("fedepth", 1.0), row("allsmall", 1.0, 0.3)],
            {"strategy": "fedepth"},
            "whole model in pieces that fit it. Federated averaging of the whole model reaches 50% of the clients, and leaves "
            "out the others' data.",
        ),
        (
            [row("fedavg", 0.2), row("fedavg", 0.5, fit="auto"), row("fedepth", 0.9), row("allsmall", 1.0, 0.3)],
            {"strategy": "allsmall"},
            "a narrower model, 30% of the parameters",
        ),
        (
            [row("fedavg", 0.2), row("fedavg", 0.5, fit="auto"), row("jfat", 1.0, swapping=0.9)],
            {"strategy": "fedavg", "memory.fit": "auto"},
            "50% of the clients can train the whole model",
        ),
        (
            [row("fedavg", 0.0), row("fedepth", 0.5), row("allsmall", 1.0, 0.004)],
            {"strategy": "fedepth"},
            "50% of the clients train the whole model in pieces that fit it.",
        ),
    ],
    ids=[
        "whole, in less memory",
        "in pieces",
        "narrower",
        "as many as can, without pretending",
        "not a model of a channel",
    ],
)
def test_the_whole_model_comes_first_by_what_every_device_can(rows: Any, settings: Any, says: str) -> None:
    found = recommend(SIMPLE, rows, attacked=False)
    assert found is not None
    assert found["settings"] == settings
    assert says in found["text"]


def test_times_are_compared_with_pieces_that_as_many_clients_can_train() -> None:
    """The poorest, which a system leaves out, would have been its slowest."""
    rows = [row("fedavg", 0.2), row("fedavg", 1.0, fit="auto"), row("fedepth", 0.67)]
    found = recommend(SIMPLE, rows, attacked=False)
    assert found is not None
    assert "fedepth" not in found["text"]


def test_of_narrow_models_the_widest_comes_first() -> None:
    rows = [row("fedavg", 0.2), row("allsmall", 1.0, 0.3), row("allsmall", 1.0, 0.5, fit="recompute")]
    found = recommend(SIMPLE, rows, attacked=False)
    assert found is not None
    assert found["settings"] == {"strategy": "allsmall", "memory.fit": "recompute"}
    assert found["text"].startswith(
        "Every device can train a narrower model, 50% of the parameters, by steps with memory.fit"
    )


def test_what_was_ahead_in_the_nearest_case_is_recommended_if_every_device_can_do_it() -> None:
    """The whole model stays first before what is level with it, was not run, or cannot be trained by some."""
    rows = [row("fedavg", 0.2), row("fedavg", 1.0, fit="auto"), row("fedepth", 1.0), row("allsmall", 1.0, 0.3)]

    def found(rows: Any, ahead: dict[str, float], **accuracies: float) -> Any:
        fits, leader = {"fedavg": "auto"}, max(accuracies, key=lambda name: accuracies[name])
        ran = [
            {
                "name": name,
                "strategy": name,
                "fit": fits.get(name, ""),
                "accuracy": each,
                "seeds": 1,
                "seconds": {"sd": 60.0},
                "plain": True,
                "advice": {},
                "rate": 0.01,
                "rounds": 60,
            }
            | {"ahead_of": ahead if name == leader else {}}
            for name, each in accuracies.items()
        ]
        case: Any = SimpleNamespace(rows=ran, longer=())
        advice = recommend(SIMPLE, rows, attacked=False, case=case, rate=0.1)
        assert advice is not None
        return advice

    pieces = found(rows, {"fedavg": 2.1, "allsmall": 14.0}, fedepth=44.0, fedavg=42.0, allsmall=30.0)
    assert pieces["settings"] == {"strategy": "fedepth"}
    assert pieces["text"] == (
        "Every device trains the whole model in pieces that fit it. Every device could do fedavg with memory.fit = auto too, "
        "but in what was measured nearest that was 2.1 points of accuracy behind after as many rounds (one seed). A round "
        "takes 40 s here, and 1 min 0 s by fedavg with memory.fit = auto. What was measured nearest had training.lr = 0.01 for "
        "fedepth, and the command has 0.1: compare rates."
    )
    narrow = found(rows, {"fedavg": 5.0, "fedepth": 3.0}, fedepth=44.0, fedavg=42.0, allsmall=47.0)
    assert narrow["settings"] == {"strategy": "allsmall"}
    assert narrow["text"].startswith(
        "Every device can train a narrower model, 30% of the parameters. Every device could do"
    )
    whole = {"strategy": "fedavg", "memory.fit": "auto"}
    assert found(rows, {}, fedepth=44.0, fedavg=42.1)["settings"] == whole
    assert found(rows, {"fedavg": 2.0}, fedepth=44.0)["settings"] == whole
    assert found(rows, {"fedepth": 3.0}, fedepth=44.0, fedavg=47.0)["settings"] == whole
    some = [*rows[:2], row("fedepth", 0.9)]
    assert found(some, {"fedavg": 14.0}, fedepth=44.0, fedavg=30.0)["settings"] == whole
    other_ways = [*rows[:2], row("fedepth", 1.0, fit="recompute")]
    assert found(other_ways, {"fedavg": 14.0}, fedepth=44.0, fedavg=30.0)["settings"] == whole


def test_settings_with_which_it_was_measured_come_with_it() -> None:
    own = {"fedavg.fine-tuning-epochs": 2}
    measured = {"name": "FedAvg", "strategy": "fedavg", "fit": "", "accuracy": 80.0, "seeds": 1, "ahead_of": {}}
    case: Any = SimpleNamespace(rows=[measured | {"plain": True, "advice": own, "seconds": {}}], longer=())
    for nearest, settings in ((case, {"strategy": "fedavg", **own}), (None, {"strategy": "fedavg"})):
        found = recommend(SIMPLE | {"fits": True}, [row("fedavg", 1.0)], attacked=False, nearest=nearest)
        assert found is not None
        assert found["settings"] == settings
        said = "With fedavg.fine-tuning-epochs = 2 it had 80.0 % in what was measured nearest."
        assert found["text"].endswith(said) is (nearest is case)
    less = recommend(SIMPLE, [row("fedavg", 1.0, fit="auto")], attacked=False, nearest=case)
    assert less is not None
    assert less["settings"] == {"strategy": "fedavg", "memory.fit": "auto", **own}


def test_nothing_is_recommended_where_nothing_can_train_and_attacks_are_asked_for() -> None:
    assert recommend(SIMPLE, [row("fedavg", 0.0)], attacked=False) is None
    assert recommend(SIMPLE, [row("allsmall", 1.0, 0.004)], attacked=False) is None
    attacked = recommend(SIMPLE, [row("allsmall", 1.0, 0.3)], attacked=True)
    always = recommend(SIMPLE, [row("fedprophet", 1.0)], attacked=True)
    assert attacked is not None
    assert always is not None
    assert attacked["settings"] == {"strategy": "allsmall", "training.adversarial": True}
    assert always["settings"] == {"strategy": "fedprophet"}


def test_the_command_of_a_recommendation_has_what_has_an_effect() -> None:
    options = {"model": "convnet", "training.batch-size": 8, "strategy": "fedavg", "training.adversarial": True}
    assigned = ["strategy=prism", "data-dir=my data", "prism.kappa=4"]
    command = run_command("spafl-digits", assigned, options | {"dataset": "DATASET"}, nodes=4)
    assert shlex.split(command) == [
        *("piecework", "run", "--preset", "spafl-digits", "--strategy", "fedavg", "--set", "data-dir=my data"),
        *(
            "--model",
            "convnet",
            "--set",
            "training.batch-size=8",
            "--set",
            "training.adversarial=true",
            "--dataset",
            "DATASET",
        ),
        *("--nodes", "4"),
    ]


RATE = "What was measured nearest had training.lr = 0.04 for fedavg, and the command has it too: compare rates."


def test_if_time_counts_a_row_with_more_rounds_is_named() -> None:
    """It took no longer than the best row on any storage, and is another system. If some devices cannot do it, that is said."""
    rows = [row("fedavg", 0.2), row("fedavg", 1.0, fit="auto"), row("allsmall", 1.0, 0.3)]

    def said(rows: Any, name: str, others: Any = (), **seconds: float) -> str:
        best = {"strategy": "fedavg", "fit": "auto", "seconds": {"sd": 100.0, "nvme": 50.0}, "name": "FedAvg, auto"}
        best |= {"accuracy": 50.0, "ahead_of": {}, "rounds": 60, "plain": True, "advice": {}, "rate": 0.04}
        more = {"seconds": seconds, "verdict": "ahead", "rounds": 150, "accuracy": 52.34, "fit": ""}
        longer = [{"strategy": each} | more for each in ("splitmix", name)]
        case: Any = SimpleNamespace(rows=[best], longer=longer)
        advice = recommend(SIMPLE, rows, attacked=False, case=case, others=others, rate=0.04)
        assert advice is not None
        assert advice["settings"] == {"strategy": "fedavg", "memory.fit": "auto"}
        assert RATE in advice["text"]
        return str(advice["text"].partition("If time counts ")[2])

    quick = {**row("allsmall", 1.0, 0.3), "round_seconds": 20.0}
    rows = [*rows[:2], quick]
    one = "(30% of the model, 52.3 % with 150 rounds, 0.8 times the time)"
    then = (
        "in what was measured nearest, that took no longer than 60 rounds of FedAvg, auto (50.0 %). Times are those of your "
        "devices, as multiples of 60 rounds of fedavg with memory.fit = auto."
    )
    hint = f"more than rounds, compare allsmall {one}: {then}"
    both = f"more than rounds, compare splitmix {one} and allsmall {one}: {then}"
    assert said([*rows, {**quick, "strategy": "splitmix"}], "allsmall", sd=100.0, nvme=50.0) == both
    assert said(rows, "allsmall", sd=100.0, nvme=50.0) == hint
    assert said(rows[:2], "allsmall", rows, sd=90.0, nvme=40.0) == hint
    assert said(rows, "allsmall", sd=90.0, nvme=51.0) == ""
    assert said(rows, "fedavg", sd=90.0, nvme=40.0) == ""
    assert (
        said([*rows[:2], row("allsmall", 1.0, 0.3)], "allsmall", sd=90.0, nvme=40.0) == ""
    )  # 150 / 60 * 40 / 60 the time
    some = said([*rows[:2], {**quick, "participation": 0.9}], "allsmall", sd=90.0, nvme=40.0)
    assert some == hint.replace("allsmall (", "allsmall by 90% of the clients (")
    assert said([*rows[:2], row("allsmall", 0.0, 0.3)], "allsmall", sd=90.0, nvme=40.0) == ""
    little = hint.replace("30%", "<1%")
    assert said([*rows[:2], {**quick, "covered": 0.004}], "allsmall", sd=90.0, nvme=40.0) == little
    assert said(rows[:2], "allsmall", sd=90.0, nvme=40.0) == ""


def test_figures_are_whole_at_80_columns() -> None:
    figures = {
        "participation": 1.0,
        "swapping": 0.0,
        "trains": {"poor": 0.58, "rich": 1.0},
        "covered": 1.0,
        "stages": 10,
    }
    figures |= {"bytes_per_round": 894_700_000, "round_seconds": 38 * 60 + 33}
    written = StringIO()
    Console(file=written, width=80).print(table([{"strategy": "exclusivefl", "fit": "auto"} | figures]))
    (line,) = (line for line in written.getvalue().splitlines() if line.startswith("exclusivefl"))
    assert line.split() == [
        "exclusivefl",
        "+fit",
        "100%",
        "58%",
        "-",
        "100%",
        "100%",
        "894.7",
        "MB",
        "38",
        "min",
        "33",
        "s",
        "10",
        "stages",
    ]


@pytest.mark.parametrize(
    ("fractions", "said"), [([0.003, 0.5], "<1% - 50%"), ([0.0], "0%"), ([0.006, 1.0], "1% - 100%"), ([0.02], "2%")]
)
def test_little_is_not_nothing(fractions: list[float], said: str) -> None:
    assert fraction_range(fractions) == said


def test_what_does_not_fit_beside_figures_stands_below() -> None:
    plain = {"swapping": 0.0, "caveat": "", "fit": ""}
    rows = [
        {"strategy": "fedepth"} | plain,
        {"strategy": "splitmix"} | plain | {"caveat": "an ensemble of narrow nets"},
        {"strategy": "jfat"} | plain | {"swapping": 0.9},
        {"strategy": "fedavg"} | plain | {"fit": "auto", "caveat": "no device can"},
        {"strategy": "prism"} | plain | {"caveat": "an ensemble of narrow nets"},
    ]
    assert [text.plain for text in caveats(rows)] == [
        "splitmix, prism: an ensemble of narrow nets",
        "jfat: 90% of the clients pretend to have the memory",
        "fedavg +fit: no device can",
    ]


def test_if_time_counts_what_is_as_good_after_as_many_rounds_is_named() -> None:
    """Also what the recommended one cannot be told from, and what fewer can do; not what a better one is as quick as."""
    rows = [row("fedavg", 1.0, fit="auto"), row("fedepth", 1.0), row("allsmall", 1.0, 0.3, fit="recompute")]
    rows += [row(name, 1.0, 0.3) for name in ("allsmall", "splitmix", "heterofl")]
    measured = {
        "seconds": {"sd": 50.0},
        "plain": True,
        "ahead_of": {},
        "advice": {},
        "rate": 0.04,
        "rounds": 60,
        "fit": "",
    }
    own = measured | {
        "name": "FedAvg, auto",
        "strategy": "fedavg",
        "fit": "auto",
        "accuracy": 49.0,
        "seconds": {"sd": 90.0},
    }
    ran = [measured | {"name": "a", "strategy": "fedepth", "accuracy": 49.5}, own | {"ahead_of": {"d": 10.0}}]
    ran += [measured | {"name": "b", "strategy": "allsmall", "accuracy": 48.0, "fit": "recompute"}]
    ran += [measured | {"name": "c", "strategy": "splitmix", "accuracy": 48.8, "seconds": {"sd": 91.0}}]
    ran += [measured | {"name": "d", "strategy": "heterofl", "accuracy": 39.0}]
    ran += [measured | {"name": "e", "strategy": "splitmix", "accuracy": 48.7, "plain": False}]

    def said(rows: Any) -> str:
        case: Any = SimpleNamespace(rows=ran, longer=())
        advice = recommend(SIMPLE, rows, attacked=False, case=case)
        assert advice is not None
        return str(advice["text"].partition("more than rounds, compare ")[2].partition(": in what")[0])

    pieces = "fedepth (49.5 % with 60 rounds, 0.7 times the time)"
    narrow = "allsmall with memory.fit = recompute (30% of the model, 48.0 % with 60 rounds, {} times the time)"
    assert said(rows) == pieces
    quicker = [each | {"round_seconds": 6.0} if each["fit"] == "recompute" else each for each in rows]
    assert said(quicker) == f"{pieces} and {narrow.format('0.1')}"
    some = [
        each | {"participation": 0.9} if each["strategy"] == "fedepth" else each | {"round_seconds": 60.0}
        for each in rows
    ]
    assert said(some) == "fedepth by 90% of the clients (49.5 % with 60 rounds, 0.7 times the time)"
    slow = [each | {"round_seconds": 90.0} if each["strategy"] != "fedavg" else each for each in rows]
    assert said(slow) == ""


def test_what_more_rounds_gave_the_recommended_system_is_said() -> None:
    own = {"strategy": "allsmall", "fit": "", "seconds": {"sd": 50.0}, "rounds": 60, "accuracy": 50.0}
    plain = own | {"name": "AllSmall", "plain": True, "ahead_of": {}, "advice": {}, "rate": 0.04}
    longer = [own | {"rounds": 120, "accuracy": 55.0}, own | {"rounds": 180, "accuracy": 57.0}]
    longer += [own | {"fit": "recompute", "rounds": 180, "accuracy": 60.0}]
    case: Any = SimpleNamespace(rows=[plain], longer=longer)
    for found, said in ((case, True), (SimpleNamespace(rows=[plain], longer=()), False)):
        advice = recommend(SIMPLE, [row("allsmall", 1.0, 0.3)], attacked=False, case=found)
        assert advice is not None
        many = "Give it many rounds: 180 rounds gave it 57.0 % there, and 60 gave it 50.0."
        assert (many in advice["text"]) is said


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        ({}, "nearest the two cannot be told apart after as many rounds: 50.0 and 49.0 %."),
        ({"P": 3.0}, "In what was measured nearest that was 3.0 points behind after as many rounds."),
    ],
)
def test_pieces_beside_the_whole_model_are_compared_in_accuracy_too(ahead: Any, said: str) -> None:
    plain = {"plain": True, "advice": {}, "rate": 0.0, "seconds": {"sd": 9.0}, "rounds": 60}
    whole = plain | {"name": "W", "strategy": "fedavg", "fit": "auto", "accuracy": 50.0, "ahead_of": ahead}
    pieces = plain | {"name": "P", "strategy": "fedepth", "fit": "", "accuracy": 49.0, "ahead_of": {}}
    case: Any = SimpleNamespace(rows=[whole, pieces], longer=())
    advice = recommend(SIMPLE, [row("fedavg", 1.0, fit="auto"), row("fedepth", 1.0)], attacked=False, case=case)
    assert advice is not None
    assert said in advice["text"]


def test_clients_with_data_of_their_own_get_a_system_that_fits_each_of_them() -> None:
    """One narrow model for all reaches more of them, and was far behind where a system was advised with fine-tuning."""
    tuned = {
        "name": "T",
        "strategy": "fedavg",
        "fit": "",
        "accuracy": 80.0,
        "plain": True,
        "ahead_of": {},
        "seconds": {},
    }
    case: Any = SimpleNamespace(rows=[tuned | {"advice": {"fedavg.fine-tuning-epochs": 2}}], longer=())
    rows = [row("fedavg", 0.5, fit="auto"), row("allsmall", 1.0, 0.3)]
    for nearest, strategy in ((case, "fedavg"), (None, "allsmall")):
        advice = recommend(SIMPLE, rows, attacked=False, nearest=nearest)
        assert advice is not None
        assert advice["strategy"] == strategy
    assert recommend(SIMPLE, rows[1:], attacked=False, nearest=case) is not None
