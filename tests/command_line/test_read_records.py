"""Records that lack something, or have it in another form: reports and comparisons say which file, line and key."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_helpers import make_run, two_rounds
from typer.testing import CliRunner

from piecework.cli import app
from piecework.report.compare import read_run
from piecework.report.read_records import (
    read_coverage,
    read_final,
    read_models,
    read_rounds,
    read_summary,
    with_details,
)
from piecework.report.run_page import write_report
from piecework.server_app.records import CheckpointError, RunDir

WRONG = ("missing", -1, "x", [[]], {"a": {}}, 10**400, 1e308, float("nan"))
FINAL = {
    "accuracy": 0.5,
    "adversarial_accuracy": 0.25,
    "attacked": 100,
    "attack_steps": 20,
    "autoattack": {"images": 10, "accuracy": 0.1, "clean_accuracy": 0.5, "after": {"apgd-ce": 0.1}, "warnings": []},
}
DETAILS = {
    "aggregated": True,
    "examples": 100,
    "trained": [{"part": "conv1", "distilled": False}],
    "lr": 0.1,
    "lr_schedule": "constant",
    "devices": {"small": 2},
}


def full_rounds() -> list[dict[str, Any]]:
    return [record | DETAILS for record in two_rounds(0.5, 0.75, examples=50, trained=["conv1"], pieces=[[0]])]


def with_value(record: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != key} if value == "missing" else record | {key: value}


def taken(
    where: Path, write: Callable[[dict[str, Any]], object], read: Callable[[], object], whole: dict[str, Any]
) -> set[str]:
    """The keys that were read although they were missing or wrong, with what they were; every other error names the key."""
    found = set()
    for key in whole:
        for wrong in WRONG:
            write(with_value(whole, key, wrong))
            try:
                read()
            except CheckpointError as error:
                assert f"{where}" in str(error)
                assert re.search(rf"is damaged.*\b{key}\b", str(error)) or key == "round"
                assert len(str(error)) < 800
            else:
                found.add(f"{key} {'1e400' if wrong == 10**400 else wrong}")
    return found


def test_each_key_of_a_round_and_of_a_client_is_checked(tmp_path: Path) -> None:
    rounds = full_rounds()
    run = make_run(tmp_path / "run", rounds)
    assert read_rounds(run) == rounds

    def write(record: dict[str, Any]) -> None:
        run.rounds_file.write_text(f"{json.dumps(rounds[0])}\n{json.dumps(record)}\n")

    optional = {"simulated_seconds missing", "trained missing", "lr missing", "devices missing"}
    texts = {"stage x", "lr_schedule x"}
    diverged = {f"{key} {value}" for key in ("loss", "train_loss") for value in ("-1", "1e+308", "nan")}
    assert taken(run.path, write, lambda: read_rounds(run), rounds[1]) == optional | texts | diverged | {"lr 1e+308"}

    client, read_by_nobody = rounds[1]["clients"][0], {"bytes_down", "bytes_up", "val_accuracy", "val_examples"}
    checked = {key: value for key, value in client.items() if key not in read_by_nobody}
    accepted = taken(run.path, lambda one: write(rounds[1] | {"clients": [one]}), lambda: read_rounds(run), checked)
    assert accepted == {
        *(f"{key} missing" for key in ("examples", "trained", "pieces")),
        "pieces [[]]",
        "device x",
        "status x",
        "reason x",
    }


def test_each_key_of_the_results_is_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [])
    assert read_final(run) is read_coverage(run) is None
    summary = {"status": "failed", "reason": "", "rounds": 0, "seconds": 1.0}
    for file, read, whole, accepted in (
        ("summary.json", read_summary, summary, {"status x", "reason x"}),
        ("final.json", read_final, FINAL, {"autoattack missing"}),
        ("coverage.json", read_coverage, {"says": ""}, {"says x"}),
        ("models.json", read_models, {"all channels": {"accuracy": 0.5, "clients": 3}}, {"all channels missing"}),
    ):
        path = run.path / file
        path.write_text(json.dumps(whole))
        assert read(run) == whole
        found = taken(path, lambda one, path=path: path.write_text(json.dumps(one)), lambda read=read: read(run), whole)
        assert found == accepted


@pytest.mark.parametrize("content", ["[" * 100_000, "[]", '{"round": 1}', '{"round": 1, "clients": 3}', "\xff"])
def test_a_command_says_it_in_one_sentence(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run", [])
    for file, words in (
        ("rounds.jsonl", "report"),
        ("rounds.jsonl", "compare"),
        ("settings.toml", "report"),
        ("summary.json", "report"),
    ):
        before = (run.path / file).read_text() if (run.path / file).exists() else ""
        (run.path / file).write_bytes(f"{content}\n".encode("latin-1"))
        done = CliRunner().invoke(app, [words, str(run.path)])
        assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.exception
        assert done.output.startswith("error: ")
        assert str(run.path) in done.output
        (run.path / file).write_text(before)


@pytest.mark.parametrize("key", ["evaluation", "query", "statistics"])
@pytest.mark.parametrize("wrong", ["x", [1], {"peak_over_budget": "x"}, {"peak_over_budget": [1]}])
def test_what_is_known_of_answers_is_a_table_with_a_number(tmp_path: Path, key: str, wrong: Any) -> None:
    run_dir = make_run(tmp_path, [record | {key: wrong} for record in full_rounds()])
    for read in (write_report, read_run):
        with pytest.raises(CheckpointError, match=f"line 1, is damaged.*{key}"):
            read(run_dir)


def test_what_a_strategys_own_section_lacks_is_named(tmp_path: Path) -> None:
    for error in (KeyError("alpha"), TypeError("a"), AttributeError("a"), IndexError("a"), OverflowError("a")):
        message = f"{tmp_path}: the run's records or settings .*a"
        with pytest.raises(CheckpointError, match=message), with_details(RunDir(tmp_path)):
            raise error


def test_a_cascade_without_its_figures_is_named(tmp_path: Path) -> None:
    rounds = [
        record | {"stage": f"module {n}", "modules": 2} for n, record in enumerate(two_rounds(0.5, 0.75), start=1)
    ]
    done = CliRunner().invoke(app, ["report", str(make_run(tmp_path / "run", rounds, strategy="fedprophet").path)])
    assert done.exit_code == 2
    assert "run: the run's records or settings have no 'clean_round', which its report needs" in done.output
