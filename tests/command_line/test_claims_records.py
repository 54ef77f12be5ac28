"""What a finished run's folder comes to in the records, and how these are merged."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from claims_helpers import TWO_CASES, a_claim, finish, template

from benchmarks.claims import __main__ as command
from benchmarks.claims import jobs
from benchmarks.claims.collect import collect
from benchmarks.claims.definition import Claim
from benchmarks.claims.jobs import Job, Wanted
from benchmarks.claims.records import Records
from benchmarks.claims.results import run_record
from benchmarks.claims.search import found_rate, search_figures, search_record
from piecework.client_app import disk
from piecework.server_app.records import RunDir
from piecework.studies.notes import Note, processor
from piecework.studies.results import evaluations

WEAK = ("weak", "FeDepth")


@pytest.fixture
def claim(tmp_path: Path) -> Claim:
    return a_claim(tmp_path, TWO_CASES)


def note(job: Job, folder: Path, failed: str = "", *, final: bool = True) -> Note:
    """Write and return the note of a job that was started twice."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    found = Note.of(job).started("abc", "here").started("abd", "here")
    found = Note(**{**vars(found), "failed": failed, "final": bool(failed) and final})
    found.write(folder)
    return found


def search(claim: Claim, out: Path, accuracies: list[float | None], place: tuple[str, str] = WEAK) -> None:
    """Leave the runs of a search, one for each accuracy; those with None have failed."""
    for job, accuracy in zip(jobs.search_jobs(claim, place), accuracies, strict=False):
        note(job, job.folder(out), "" if accuracy else "nobody fits")
        if accuracy:
            finish(job.folder(out), [0.9, accuracy])


def rate_below(claim: Claim, out: Path) -> float | None:
    """Return the rate that the search below `out` has found."""
    return found_rate(claim, WEAK, search_figures(claim, WEAK, out))


def a_run(
    claim: Claim, out: Path, want: Wanted, rate: float | None, accuracies: list[float | None], **more: Any
) -> Path:
    """Leave a run with a seed."""
    job = jobs.job_of(claim, want, rate)
    note(job, job.folder(out))
    finish(job.folder(out), accuracies, **more)
    return job.folder(out)


def test_evaluations_of_rounds_and_of_the_trained_model() -> None:
    rounds = [{"round": n, "accuracy": a} for n, a in ((1, 0.1), (2, None), (3, 0.3))]
    assert evaluations(rounds, None, "accuracy") == [(1, 0.1), (3, 0.3)]
    assert evaluations(rounds, {"accuracy": 0.4}, "accuracy") == [(1, 0.1), (3, 0.4)]
    assert evaluations(rounds, {"adversarial_accuracy": 0.2}, "adversarial_accuracy") == [(3, 0.2)]


def test_the_record_of_a_run_by_hand(claim: Claim, tmp_path: Path) -> None:
    (record,) = template().rounds()
    one = {"bytes_down": 2_000_000, "bytes_up": 1_000_000, "flops": 4e9, "simulated_seconds": 3 + 4 + 1}
    one |= {"budget": 10**6, "measured_peak": 750_000}
    clients = [record["clients"][0] | one, record["clients"][1] | one | {"status": "memory", "simulated_seconds": 0.0}]
    costs = {"clients": clients, "asked": 2, "answered": 1, "failed": 1, "bytes_down": 4_000_000, "bytes_up": 2_000_000}
    folder = a_run(claim, tmp_path, Wanted("weak", "bound", 1, None), None, [0.2, None, 0.6, 0.5], **costs)
    RunDir(folder).write_models({"wide": {"accuracy": 0.9, "clients": 1}, "narrow": {"accuracy": 0.5, "clients": 3}})
    found = run_record(claim, folder, Note.read(folder) or pytest.fail())
    assert (found.case, found.row, found.seed, found.commit, found.machine) == ("weak", "bound", 1, "abc; abd", "here")
    assert (found.status, found.reason, found.rounds) == ("completed", "", 4)
    assert (found.last, found.best, found.best_round, found.mean_last) == (0.5, 0.6, 3, pytest.approx(0.55))
    assert (found.accuracy, found.adversarial, found.autoattack, found.models) == (
        0.5,
        None,
        None,
        {"worst": 0.5, "mean": 0.6},
    )
    assert (found.asked, found.ok, found.participation, found.peak_over_budget) == (8, 4, 0.5, 0.75)
    assert (found.bytes_down, found.bytes_up, found.flops, found.seconds) == (16_000_000, 8_000_000, 32e9, 11.0)
    disk = 1e7  # bytes: one second on the fleet's disk; devices compute 1e9 FLOP/s and send 1e6 bytes a second
    sd, emmc, nvme = (7 + disk / bandwidth for bandwidth in (45.7e6, 281e6, 1362e6))
    assert found.simulated == pytest.approx({"sd": 4 * sd, "emmc": 4 * emmc, "nvme": 4 * nvme})
    expected = [[n, 6.0 * n, n * sd, n * emmc, n * nvme, accuracy] for n, accuracy in ((1, 0.2), (3, 0.6), (4, 0.5))]
    assert [pytest.approx(point) for point in expected] == found.curve


def test_the_density_is_that_of_the_last_round(claim: Claim, tmp_path: Path) -> None:
    folder = a_run(claim, tmp_path, Wanted("weak", "bound", 1, None), None, [0.2, 0.4], density=0.625)
    run_dir = RunDir(folder)
    first, last = run_dir.rounds()
    run_dir.rounds_file.unlink()
    for record in (first | {"density": 0.75}, last):
        run_dir.append_round(record)
    assert run_record(claim, folder, Note.read(folder) or pytest.fail()).density == 0.625
    dense = a_run(claim, tmp_path, Wanted("skew", "bound", 1, None), None, [0.4])
    assert run_record(claim, dense, Note.read(dense) or pytest.fail()).density is None


def test_records_of_before_have_no_density(claim: Claim, tmp_path: Path) -> None:
    a_run(claim, tmp_path / "out", Wanted("weak", "bound", 1, None), None, [0.4])
    new = collect(claim, tmp_path / "out", tmp_path / "docs", lambda _: None)
    path = tmp_path / "docs" / "tiny.json"
    path.write_text(path.read_text("utf-8").replace(', "density": null', ""), "utf-8")
    assert "density" not in path.read_text("utf-8")
    assert Records.read("tiny", tmp_path / "docs").runs[0].density is new.runs[0].density is None


def test_a_run_that_was_refused_before_it_began_is_a_record(claim: Claim, tmp_path: Path) -> None:
    job = jobs.job_of(claim, Wanted("weak", "bound", 1, None), None)
    found = run_record(claim, job.folder(tmp_path), note(job, job.folder(tmp_path), "nobody fits"))
    assert (found.status, found.reason, found.rate, found.rounds) == ("failed", "nobody fits", 0.07, 0)
    assert (found.mean_last, found.participation, found.peak_over_budget, found.curve) == (None, None, None, [])


def test_a_search_ends_with_its_best_rate(claim: Claim, tmp_path: Path) -> None:
    search(claim, tmp_path, [0.5, 0.7])
    assert (rate_below(claim, tmp_path), search_record(claim, WEAK, tmp_path)) == (None, None)
    search(claim, tmp_path, [0.5, 0.7, None])
    found = search_record(claim, WEAK, tmp_path)
    assert found is not None
    assert (found.rates, found.chosen, found.rounds) == ({"0.02": 0.5, "0.05": 0.7, "0.1": None}, 0.05, 3)
    assert found.seconds == 2 * (2 * 2.0 + 3)
    assert rate_below(claim, tmp_path) == 0.05


def test_where_all_rates_fail_the_first_one_is_run(claim: Claim, tmp_path: Path) -> None:
    search(claim, tmp_path, [None, None, None])
    found = search_record(claim, WEAK, tmp_path)
    assert found is not None
    assert (found.chosen, rate_below(claim, tmp_path)) == (None, 0.02)


def test_collected_runs_are_added_and_replaced_and_what_is_not_is_said(claim: Claim, tmp_path: Path) -> None:
    out, docs, said = tmp_path / "out", tmp_path / "docs", list[str]()
    search(claim, out, [0.5, 0.7, 0.6])
    search(claim, out, [0.3], ("weak", "ProFL"))
    first = a_run(claim, out, Wanted(*WEAK, 1, WEAK), 0.05, [0.4, 0.8])
    a_run(claim, out, Wanted(*WEAK, 2, WEAK), 0.02, [0.4, 0.8])
    a_run(claim, out, Wanted("skew", "FeDepth", 1, WEAK), 0.05, [0.4], status="")
    strange = out / "tiny" / "weak" / "fedepth" / "mine"
    strange.mkdir()
    found = collect(claim, out, docs, said.append)
    assert (len(found.runs), len(found.searches)) == (1, 1)
    assert said == [
        "added     tiny: weak: FeDepth: search: rate 0.05",
        "left out  tiny: weak: ProFL: search: not all of its runs have ended",
        "left out  tiny: skew: FeDepth: seed 1: not ended, after round 1",
        f"left out  tiny: {strange}: nothing notes beside it which run it is",
        "added     tiny: weak: FeDepth: seed 1: 60.00%",
        "left out  tiny: weak: FeDepth: seed 2: its rate is not the 0.05 that the search has found",
    ]
    said.clear()
    before = (docs / "tiny.json").read_text("utf-8")
    collect(claim, out, docs, said.append)
    assert [line for line in said if not line.startswith("left out")] == []
    assert (docs / "tiny.json").read_text("utf-8") == before
    finish(first, [0.4, 0.9])
    collect(claim, out, docs, said.append)
    assert "replaced  tiny: weak: FeDepth: seed 1: 65.00%" in said


def test_a_failure_does_not_replace_what_has_completed(claim: Claim, tmp_path: Path) -> None:
    said, bound = list[str](), Wanted("weak", "bound", 1, None)
    a_run(claim, tmp_path / "one", bound, None, [0.4])
    collect(claim, tmp_path / "one", tmp_path / "docs", said.append)
    job = jobs.job_of(claim, bound, None)
    note(job, job.folder(tmp_path / "two"), "no data set")
    found = collect(claim, tmp_path / "two", tmp_path / "docs", said.append)
    assert said[-1] == "left out  tiny: weak: bound: seed 1: it failed, and the records have a run that has completed"
    assert [run.status for run in found.runs] == ["completed"]


def test_a_failure_that_is_no_result_is_not_collected(claim: Claim, tmp_path: Path) -> None:
    said, out = list[str](), tmp_path / "out"
    search(claim, out, [0.5, 0.7, 0.6])
    job, bound = jobs.search_jobs(claim, WEAK)[2], jobs.job_of(claim, Wanted("weak", "bound", 1, None), None)
    (job.folder(out) / "summary.json").unlink()
    note(job, job.folder(out), "no space is left", final=False)
    note(bound, bound.folder(out), "no data set", final=False)
    found = collect(claim, out, tmp_path / "docs", said.append)
    assert (found.runs, found.searches, rate_below(claim, out)) == ([], [], None)
    assert said == [
        "left out  tiny: weak: FeDepth: search: not all of its runs have ended",
        "left out  tiny: weak: bound: seed 1: its failure is no result (no data set); `run --retry` tries it again",
    ]


def test_a_damaged_note_costs_its_run_alone(claim: Claim, tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    a_run(claim, out, Wanted("weak", "bound", 1, None), None, [0.4])
    other = a_run(claim, out, Wanted("skew", "bound", 1, None), None, [0.4])
    other.with_name(f"{other.name}.json").write_text("[]", "utf-8")
    (out / "tiny" / "weak" / ".DS_Store").write_text("", "utf-8")
    assert len(collect(claim, out, tmp_path / "docs", said.append).runs) == 1
    assert said[0].startswith(f"left out  tiny: {other}.json is damaged: ")
    assert said[1].startswith("added     tiny: weak: bound")


def test_records_that_cannot_be_written_stay_as_they_were(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Records("tiny", [], []).write(claim, tmp_path)
    before = path.read_bytes()

    def full(_: Path) -> None:
        raise OSError(28, "no space is left")

    monkeypatch.setattr(disk, "sync", full)
    with pytest.raises(OSError, match="no space is left"):
        Records("tiny", [], []).write(claim, tmp_path)
    assert path.read_bytes() == before


def test_a_run_with_damaged_records_does_not_replace_a_good_record(claim: Claim, tmp_path: Path) -> None:
    out, docs, said = tmp_path / "out", tmp_path / "docs", list[str]()
    search(claim, out, [0.5, 0.7, 0.6])
    run = RunDir(a_run(claim, out, Wanted("weak", "bound", 1, None), None, [0.2, 0.4]))
    collect(claim, out, docs, said.append)
    before, lines = (docs / "tiny.json").read_text("utf-8"), run.rounds_file.read_bytes().splitlines(keepends=True)
    searched = RunDir(jobs.search_jobs(claim, WEAK)[1].folder(out))
    searched.rounds_file.write_bytes(
        searched.rounds_file.read_bytes()[:-9]
    )  # the records have its figure, and it is not read
    cut = "is damaged: it has the records of 1 rounds, and the run's summary counts 2"
    for content, why in (
        (lines[0], cut),
        (lines[0] + lines[1][:-9], cut),
        (b"{}\n" + lines[1], ", line 1, is damaged: not the record of a round"),
    ):
        run.rounds_file.write_bytes(content)
        said.clear()
        collect(claim, out, docs, said.append)
        assert [line.split(" is damaged")[0] for line in said] == [
            f"left out  tiny: weak: bound: seed 1: {run.rounds_file}{', line 1,' if 'line' in why else ''}",
        ]
        assert why in said[0]
        assert (docs / "tiny.json").read_text("utf-8") == before


def test_records_of_another_definition_are_removed_and_said(claim: Claim, tmp_path: Path) -> None:
    out, docs, said = tmp_path / "out", tmp_path / "docs", list[str]()
    search(claim, out, [0.5, 0.7, 0.6])
    a_run(claim, out, Wanted(*WEAK, 1, WEAK), 0.05, [0.4])
    a_run(claim, out, Wanted("weak", "bound", 1, None), None, [0.4])
    collect(claim, out, docs, said.append)
    said.clear()
    other = a_claim(tmp_path, TWO_CASES.replace('strategy = "fedepth"', 'strategy = "fedepth", clients = 7'))
    found = collect(other, out, docs, said.append)
    assert [run.row for run in found.runs] == ["bound"] == [run.row for run in Records.read("tiny", docs).runs]
    assert said == [
        "removed   tiny: weak: FeDepth: search: of another definition",
        "removed   tiny: weak: FeDepth: seed 1: of another definition",
        *(f"left out  tiny: weak: FeDepth: {job.name}: of another definition" for job in jobs.search_jobs(claim, WEAK)),
        "left out  tiny: weak: FeDepth: seed 1: of another definition",
    ]


def test_the_command_collects(
    claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(claim, tmp_path / "out", Wanted("weak", "bound", 1, None), None, [0.4])
    monkeypatch.setattr(command, "names", lambda: ["tiny"])
    monkeypatch.setattr(command, "load", lambda name: jobs.load(name, tmp_path))
    monkeypatch.setattr(command, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(sys, "argv", ["claims", "collect", str(tmp_path / "out")])
    command.main()
    assert capsys.readouterr().out.splitlines() == [
        "added     tiny: weak: bound: seed 1: 40.00%",
        "tiny: 1 runs and 0 searches are recorded",
    ]
    assert json.loads((tmp_path / "docs" / "tiny.json").read_text("utf-8"))["runs"][0]["mean_last"] == 0.4
    monkeypatch.setattr(sys, "argv", ["claims", "collect", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"no folder in it is that of a claim \(tiny\)"):
        command.main()


@pytest.mark.parametrize(
    ("flags", "named"), [("fpu avx avx2", "Zen with AVX2"), ("avx2 avx512f", "Zen with AVX-512"), ("fpu", "Zen")]
)
def test_a_processor_is_named_with_its_vectors(flags: str, named: str) -> None:
    cores = [f"processor\t: {core}\nmodel name\t: Zen\nflags\t\t: {flags}\n\n" for core in range(2)]
    assert processor("".join(cores)) == named
