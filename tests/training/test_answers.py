"""What clients answer is read in one place: fields that are known, text that can be shown, numbers within their ranges."""

from typing import Any

import pytest
from flwr.app import ConfigRecord, MetricRecord
from pydantic import ValidationError

from piecework.device_profiles.profile import ENDLESS, UNLIMITED
from piecework.training.answers import (
    LONGEST,
    MOST_TEXT,
    AnswerError,
    Figures,
    NodeInfo,
    Outcome,
    read_figures,
    read_node,
    read_outcome,
)
from piecework.training.readable import UNUSABLE


def test_what_a_node_says_of_itself_is_text() -> None:
    info = NodeInfo("board-a", "python 3.11.7, torch 2.15.0")
    assert read_node(info.to_record()) == info
    with pytest.raises(AnswerError, match=r"^node device is 7: it must be a valid string$"):
        read_node(ConfigRecord({"device": 7, "software": ""}))
    with pytest.raises(AnswerError, match=r"^node software is missing$"):
        read_node(ConfigRecord({"device": "board-a"}))


def test_an_unknown_outcome() -> None:
    record = Outcome("ok").to_record()
    record["status"] = "great"
    with pytest.raises(AnswerError, match=r"^outcome status is 'great': it must be 'ok', 'memory' or 'failed'$"):
        read_outcome(record)
    with pytest.raises(AnswerError, match=r"^the outcome has no 'mood'$"):
        read_outcome(ConfigRecord({"status": "ok", "mood": "fine"}))


def test_a_clients_text_reaches_no_terminal_as_commands() -> None:
    title, up, hidden = "\x1b]0;owned\x07", "\x1b[2A", "\u202e"
    found = read_outcome(Outcome("failed", reason=f"a{title}b\r\n", note=f"{up}c{hidden}d").to_record())
    assert (found.reason, found.note) == ("a ]0;owned b  ", " [2Ac d")
    assert read_node(NodeInfo("auto\n", "torch\x00 2").to_record()) == NodeInfo("auto ", "torch  2")
    assert len(read_outcome(Outcome("failed", reason="x" * 10**6).to_record()).reason) == LONGEST


def test_nested_work_items_are_among_what_readers_catch() -> None:
    with pytest.raises(UNUSABLE, match="recursion"):
        read_outcome(ConfigRecord({"status": "ok", "done": "[" * 100_000}))


@pytest.mark.parametrize(
    ("name", "most", "above"),
    [
        ("budget", UNLIMITED, UNLIMITED + 1),
        ("measured-peak", ENDLESS, ENDLESS + 1),
        ("num-examples", 10**8, 10**8 + 1),
        ("memory-available", float(ENDLESS), 1e300),
        ("flops-per-second", 1e3, 5e-324),
        ("disk-bandwidth", 1.0, 0.0),
        ("val-accuracy", 1.0, 1.0001),
        ("val-loss", 0.0, -1e-9),
        ("train-loss", -1e30, -1.1e30),
        ("partition-id", 2**20 - 1, 2**20),
        ("num-partitions", 1, 0),
        ("seen", [2**40], [2**40 + 1]),
        ("of-a-strategy", [1e30, -1e30], [0.0, float("nan")]),
        ("of-a-strategy", 10**18, float("inf")),
    ],
)
def test_a_figure_is_within_its_range(name: str, most: Any, above: Any) -> None:
    assert read_figures(MetricRecord({name: most})) == {name: most}
    with pytest.raises(AnswerError, match=rf"^{name} is "):
        read_figures(MetricRecord({name: above}))


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_figures(MetricRecord({"seen": [-1] * 1000})),
        lambda: read_outcome(ConfigRecord({"status": "ok", "missing": [b""] * 1000})),
        lambda: read_outcome(ConfigRecord({"status": "ok", "done": f'[{{"atoms":[{",".join(["-1.5"] * 1000)}]}}]'})),
    ],
    ids=["figures", "hashes", "atoms"],
)
def test_a_list_is_read_up_to_its_first_bad_entry(read: Any) -> None:
    """The errors of a million entries would take a gigabyte."""
    with pytest.raises(AnswerError) as caught:
        read()
    assert isinstance(caught.value.__context__, ValidationError)
    assert caught.value.__context__.error_count() == 1


def test_work_items_are_not_parsed_beyond_a_length() -> None:
    many = ",".join(['{"atoms":[0]}'] * (MOST_TEXT // 10))
    with pytest.raises(AnswerError, match="expected a text of at most 262,144 characters"):
        read_outcome(ConfigRecord({"status": "ok", "done": f"[{many}]"}))


def test_a_device_may_find_no_free_memory_for_a_moment() -> None:
    """A container at its limit answers `memory`; that it has nothing left is no lie."""
    assert read_figures(MetricRecord({"memory-available": 0, "budget": 0})) == {"memory-available": 0, "budget": 0}


def test_a_figure_that_was_not_sent_has_no_value() -> None:
    assert read_figures(MetricRecord({"partition_id": 3, "seconds": 1.5})) == {"partition_id": 3, "seconds": 1.5}


def test_every_declared_figure_has_two_ends() -> None:
    """No number can be declared without a range: an infinite or endless one in a record would be no JSON."""
    for name, field in Figures.model_fields.items():
        inner = field.annotation.__args__[0] if name == "seen" else field  # type: ignore[union-attr]
        held = (
            [type(limit).__name__ for limit in inner.__metadata__[0].metadata]
            if name == "seen"
            else [type(limit).__name__ for limit in field.metadata]
        )
        assert {"Ge", "Gt"} & {*held} and {"Le", "Lt"} & {*held}, name
