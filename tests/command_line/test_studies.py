"""Studies: which runs they have, how they go on, and what contradicts them. Most runs here only leave files."""

import io
import json
import signal
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from claims_harness import NOBODY, Process
from claims_helpers import finish
from studies_helpers import IN_ORDER, TWO, Here
from typer.testing import CliRunner

import piecework
from piecework.cli import app
from piecework.commands.console import PlainConsole
from piecework.commands.options import settings_from
from piecework.engines.processes import Connection
from piecework.server_app.records import RunDir
from piecework.studies import queue, runner
from piecework.studies.ask import find_study, parse_sweep, read_sweep
from piecework.studies.go_on import StudyProgress
from piecework.studies.study import Study, StudyPlan
from piecework.training.settings import Scalar, SettingsError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch)


def test_a_study_is_run_once_and_in_order(here: Here) -> None:
    here.accuracies = {("fedavg", 1): 0.50, ("fedavg", 2): 0.60, ("heterofl", 1): 0.54, ("heterofl", 2): 0.62}
    done = here.run("--study", "s", *TWO)
    assert done.exit_code == 0, done.output
    assert here.started == IN_ORDER
    assert "strategy=fedavg seed=1 has completed: accuracy 50.0%" in done.stderr
    assert "4 of 4 runs done" in done.stdout
    assert "B against A  at the end  +3.00 ± 1.41 points      2   in 2          -" in done.stdout
    page = (here.folder / "runs/s/compare.html").read_text("utf-8")
    assert "<td>+3.00 ± 1.41 points</td>" in page
    for words in (TWO, []):
        again = here.run("--study", "s", *words)
        assert (again.exit_code, here.words) == (0, [])
        assert again.stdout == done.stdout


def test_the_file_of_a_study(here: Here) -> None:
    (here.folder / "mine").mkdir()
    here.run("--study", "s", *TWO, "--set", "data-dir=mine", "--set", "training.lr=1")
    found = tomllib.loads((here.folder / "runs/s/study.toml").read_text("utf-8"))
    assert found["seeds"] == [1, 2]
    assert found["sweep"] == {"strategy": ["fedavg", "heterofl"]}
    assert found["settings"] == {"num-rounds": 3, "data-dir": str(here.folder / "mine"), "training.lr": 1}


def test_a_failed_run_is_counted_and_does_not_end_the_study(here: Here) -> None:
    here.accuracies = {("fedavg", 1): None}
    done = here.run("--study", "s", *TWO, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["status"], found["done"], found["failed"], found["missing"]) == ("failed", 3, 1, 0)
    assert [(run["state"], run["reason"]) for run in found["runs"][:2]] == [
        ("failed", "no such data set"),
        ("done", ""),
    ]
    (pair,) = found["paired"]
    assert pair["seeds"] == [2]
    here.accuracies = {}
    assert here.run("--study", "s").exit_code == 0
    assert here.started == [("fedavg", 1)]


def test_a_failure_that_is_a_result_is_not_repeated(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(words: list[str], log: Path) -> Any:
        run = log.with_name(log.name.removesuffix(".log"))
        finish(run, [], status="failed", reason=NOBODY)
        return Process(1)

    monkeypatch.setattr(queue, "spawn", nobody)
    first = here.run("--study", "s", "--strategies", "fedavg", "--seeds", "1,2")
    assert first.exit_code == 1
    assert " ".join(first.stdout.split()).count(NOBODY) == 2
    monkeypatch.setattr(queue, "spawn", here.spawn)
    again = here.run("--study", "s")
    assert (again.exit_code, here.words) == (1, [])
    assert "to try it again, remove its folder and the note beside it (.json)" in again.stderr


@pytest.mark.slow
def test_rows_and_seeds_extend_a_study(here: Here) -> None:
    here.run("--study", "s", *TWO)
    assert here.run("--study", "s", "--seeds", "3", "--strategies", "fedprox").exit_code == 0
    assert here.started == [("fedprox", 1), ("fedprox", 2), ("fedavg", 3), ("heterofl", 3), ("fedprox", 3)]
    assert here.run("--study", "s", "--sweep", "training.lr=0.05,0.1").exit_code == 0, "0.1 is the default"
    assert len(here.words) == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "4"], "num-rounds = 4 contradicts num-rounds = 3 of the study's runs"),
        (["--set", "training.lr=0.2"], "training.lr = 0.2 contradicts training.lr = 0.1 of the study's runs"),
        (["--sweep", "training.lr=0.2,0.3"], "training.lr = 0.2, 0.3 contradicts training.lr = 0.1 of"),
        (["--fleet", "boards"], "fleet = boards contradicts fleet = demo of the study's runs"),
        (["--seed", "1", "--seeds", "2"], "--seeds 2 contradicts seed = 1: give one of them"),
        (["--sweep", "seed=1,2"], "seed is decided for each run of a study: give --seeds"),
        (["--set", "run-name=x"], "run-name is decided for each run of a study"),
        (["--strategies", "fedavg", "--strategy", "fedavg"], "strategy is given one value, and swept over several"),
        (["--strategies", "fedawg"], "fedawg"),
        (["--sweep", "training.lr=0.1,0.1"], "expected different values, separated by commas"),
        (["--sweep", "training.lr"], "expected KEY=VALUE,VALUE"),
        (["--sweep", "training.lr=0,1"], "training.lr = 0"),
        (["--sweep", "workers=1,2"], "workers = 1, 2: it changes none of a run's numbers, so it is not swept"),
    ],
)
def test_what_contradicts_a_study_is_refused(here: Here, words: list[str], said: str) -> None:
    here.run("--study", "s", *TWO)
    before = (here.folder / "runs/s/study.toml").read_text("utf-8")
    done = here.run("--study", "s", *words)
    assert (done.exit_code, here.words) == (2, [])
    assert said in " ".join(done.stderr.split())
    assert (here.folder / "runs/s/study.toml").read_text("utf-8") == before


def test_what_does_not_contradict_a_study(here: Here) -> None:
    here.run("--study", "s", *TWO)
    done = here.run(
        "--study", "s", "--fleet", "demo", "--set", "training.lr=0.1", "--rounds", "3", "--set", "workers=1"
    )
    assert (done.exit_code, here.words) == (0, [])


def test_a_study_that_is_none_is_not_begun(here: Here) -> None:
    done = here.run("--study", "typo", "--rounds", "3")
    assert done.exit_code == 2
    assert "typo is not the folder of a study. A new one needs something to compare" in " ".join(done.stderr.split())
    (here.folder / "runs/full").mkdir(parents=True)
    (here.folder / "runs/full/notes").touch()
    done = here.run("--study", "full", *TWO)
    assert "full holds 'notes', but no study.toml" in " ".join(done.stderr.split())
    assert here.words == []


def test_a_name_is_chosen_and_said(here: Here) -> None:
    done = here.run(*TWO, "--output-dir", "out")
    (folder,) = (here.folder / "out").glob("study-*")
    assert done.stdout.splitlines()[-1] == f"study folder: {folder}"


APP = """
[project]
name = "mine"
[tool.flwr.app.components]
serverapp = "piecework.flower_server:app"
[tool.flwr.app.config]
num-rounds = 3
output-dir = "of-app"
"""


def test_a_study_is_where_preset_app_and_settings_say(here: Here) -> None:
    """What is given wins over the preset, and that over the app in this folder, as for single runs."""
    (here.folder / "mine.toml").write_text('output-dir = "of-preset"\nnum-rounds = 3\n', "utf-8")
    (here.folder / "pyproject.toml").write_text(APP, "utf-8")
    of_preset, of_set = ("--preset", "mine.toml"), ("--set", "output-dir=of-set")
    for place, words in {"of-app": (), "of-preset": of_preset, "of-set": (*of_preset, *of_set)}.items():
        done = here.run("--study", "s", "--seeds", "1", "--strategies", "fedavg", *words)
        assert done.stdout.splitlines()[-1] == f"study folder: {here.folder / place / 's'}", done.output
        assert len([*(here.folder / place / "s").glob("fedavg-seed1-*/summary.json")]) == 1
    assert len(here.started) == 1
    assert CliRunner().invoke(app, ["study", "s"]).stdout.splitlines()[0].startswith("s: 1 of 1 runs done")
    (here.folder / "mine.toml").write_text("output-dir = 3\n", "utf-8")
    wrong = here.run("--study", "s", "--seeds", "1,2", *of_preset)
    assert (wrong.exit_code, "output-dir" in wrong.stderr) == (2, True)
    assert sorted(path.name for path in here.folder.iterdir() if path.is_dir()) == ["of-app", "of-preset", "of-set"]


def test_an_interrupted_run_goes_on(here: Here) -> None:
    here.run("--study", "s", *TWO)
    (run,) = here.folder.glob("runs/s/heterofl-seed1-*/")
    (run / "summary.json").unlink()
    done = here.run("--study", "s", "--set", "workers=2")
    assert here.words == [["run", "--set", "workers=2", "--set", f"resume-from={run}"]]
    assert "strategy=heterofl seed=1 goes on" in done.stderr


def test_ctrl_c_says_how_to_go_on(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    process = Process(None)
    monkeypatch.setattr(queue, "spawn", lambda words, log: process)
    monkeypatch.setattr(runner.time, "sleep", interrupt)
    done = here.run("--study", "s", *TWO)
    assert done.exit_code == 130
    assert process.signals == [signal.SIGTERM]
    again = f"piecework run --study {here.folder / 'runs/s'}"
    stopped = f"was stopped after round 0, because the study was stopped; `{again}` goes on with it"
    assert f"strategy=fedavg seed=1 {stopped}" in done.stderr
    assert f"go on with the study: {again}" in done.stderr
    there = ("--superlink", "host:8000", "--insecure")
    monkeypatch.setattr(queue, "spawn", lambda words, log: Process(None))
    assert f"go on with the study: {again} {' '.join(there)}\n" in here.run("--study", "s", *there).stderr


def test_a_study_on_a_superlink_goes_on_there(here: Here) -> None:
    """Else the runs that it still lacks would have emulated clients, and be compared with those of boards."""
    words, there = (
        ("--study", "s", "--seeds", "1", "--strategies", "fedavg"),
        ("--superlink", "host:8000", "--insecure"),
    )
    here.run(*words)
    (run,) = here.folder.glob("runs/s/fedavg-seed1-*/")
    RunDir(run).create(settings_from("", [], connection=Connection("host:8000", None)))
    before = (run.parent / "study.toml").read_text("utf-8")
    refused = here.run("--study", "s", "--seeds", "2")
    assert refused.exit_code == 2
    assert f"{run} had the clients of the SuperLink host:8000" in refused.stderr
    assert (here.words, (run.parent / "study.toml").read_text("utf-8")) == ([], before)
    assert here.run("--study", "s", "--seeds", "2", *there).exit_code == 0
    assert [given[1:4] for given in here.words] == [list(there)]


def test_a_terminal_is_shown_how_far_it_is(here: Here) -> None:
    """Three runs of three rounds are done, and the first round of the last, which took 2 s."""
    here.run("--study", "s", *TWO)
    run = here.interrupt("s/heterofl-seed2-*", 0.1)
    screen = io.StringIO()
    study = Study.read(here.folder / "runs/s")
    with StudyProgress(
        study, here.folder / "runs/s", PlainConsole(file=screen, force_terminal=True, width=150)
    ) as shown:
        child = queue.Child(study.jobs()[-1], run, Process(None), None)  # type: ignore[arg-type]
        shown.watch(queue.Queue(StudyPlan(study), queue.Options(run.parent), shown.say, [child]))
        (task,) = shown.bar.tasks if shown.bar is not None else []
    assert (task.completed, task.total) == (10, 12)
    assert task.description == "strategy=heterofl seed=2 round 1: 3 of 4 runs done, 1 interrupted, 4.0 s left"


def study_of(folder: Path, asked: dict[str, Scalar], sweep: dict[str, Sequence[Any]], preset: str = "") -> Study:
    return find_study("new", {"output-dir": str(folder), **asked}, preset, read_sweep([], sweep), [1])[1]


def test_a_value_without_effect_in_a_row_is_left_out_of_it(tmp_path: Path) -> None:
    study = study_of(tmp_path, {}, {"strategy": ["fedavg", "fedprox"], "fedprox": {"mu": [0.1, 1]}})
    assert [row.label for row in study.rows] == [
        "strategy=fedavg",
        "strategy=fedprox fedprox.mu=0.1",
        "strategy=fedprox fedprox.mu=1",
    ]
    with pytest.raises(SettingsError, match=r"fedprox\.mu: no run of this study uses it"):
        study_of(tmp_path, {}, {"strategy": ["fedavg", "heterofl"], "fedprox.mu": [0.1, 1]})


def test_fleets_of_one_name_have_rows_of_their_own_names(tmp_path: Path) -> None:
    """As of a file that was copied and changed."""
    rest = 'assignment = "round-robin"\n[[device]]\nname = "board"\nflops = 1e9\ndisk-bandwidth = 1e8\n'
    files = [tmp_path / "one.toml", tmp_path / "two.toml"]
    for file, memory in zip(files, ("64MB", "96MB"), strict=True):
        file.write_text(f'name = "mine"\ndescription = "mine"\n{rest}memory = "{memory}"\n', "utf-8")
    study = study_of(tmp_path / "runs", {"strategy": "fedavg"}, {"fleet": [*map(str, files)]})
    labels = [row.label for row in study.rows]
    assert len({*labels}) == 2
    assert all(label.startswith("fleet=mine#") for label in labels)
    assert [row.label for row in study_of(tmp_path, {}, {"fleet": ["demo", "boards"]}).rows] == [
        "fleet=demo",
        "fleet=boards",
    ]


def test_a_preset_s_own_settings_stay_with_its_system(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('strategy = "fedprox"\nseed = 7\n[fedprox]\nmu = 0.3\n', "utf-8")
    preset = str(tmp_path / "mine.toml")
    asked: dict[str, Scalar] = {"output-dir": str(tmp_path)}
    _, study = find_study("new", asked, preset, parse_sweep("fedavg,fedprox", []), [])
    assert study.seeds == (7,)
    assert [row.settings.get("fedprox.mu") for row in study.rows] == [None, 0.3]
    _, other = find_study("new", asked, preset, parse_sweep("fedavg,heterofl", []), [])
    assert "fedprox.mu" not in other.settings


def test_what_has_no_effect_is_said_of_the_app_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'{APP}strategy = "fedprox"\nfedprox.mu = 0.3\n', "utf-8")
    find_study("new", {"strategy": "fedavg"}, "", {}, [1])
    assert "--preset pyproject.toml: these have no effect with what was given: fedprox.mu" in caplog.text


def test_the_identity_of_a_run_is_what_its_numbers_depend_on(tmp_path: Path) -> None:
    def hashes(**asked: Scalar) -> list[str]:
        return [job.hash for job in study_of(tmp_path, asked, {"strategy": ["fedavg", "heterofl"]}).jobs()]

    own = hashes()
    free: dict[str, Scalar] = {"workers": 1, "data-dir": "elsewhere", "run.track": "tensorboard"}
    assert own == hashes(**free) == hashes(**{"training.lr": 0.1}) == hashes(fleet="demo")
    assert len({*own, *hashes(fleet="boards"), *hashes(**{"training.lr": 1})}) == 6
    assert hashes(**{"training.lr": 1}) == hashes(**{"training.lr": 1.0})


@pytest.mark.parametrize("how", ["environment", "setting"])
def test_own_data_are_where_runs_look_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    (tmp_path / "mine.npz").touch()
    asked: dict[str, Scalar] = {"data-dir": str(tmp_path)} if how == "setting" else {}
    if how == "environment":
        monkeypatch.setenv("PIECEWORK_DATA", str(tmp_path))
    there = f"npz:{tmp_path / 'mine.npz'}"
    (row,) = study_of(tmp_path, {**asked, "dataset": "npz:mine.npz"}, {}).rows
    assert row.settings == {**asked, "dataset": there}
    rows = study_of(tmp_path, asked, {"dataset": ["npz:mine.npz", "digits"]}).rows
    assert [row.settings["dataset"] for row in rows] == [there, "digits"]


def test_a_study_that_goes_on_has_its_own_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIECEWORK_DATA", str(tmp_path / "environment"))
    known = study_of(tmp_path, {"data-dir": "mine", "dataset": "npz:a.npz"}, {})
    known.write(tmp_path / "runs" / "s")
    both: dict[str, list[Scalar]] = {"dataset": ["npz:a.npz", "npz:b.npz"]}
    assert find_study("s", {"dataset": "npz:a.npz"}, "", {}, [1])[1] == known
    _, extended = find_study("s", {}, "", both, [1])
    assert extended.settings["data-dir"] == str(tmp_path / "mine")
    assert extended.sweep["dataset"] == tuple(f"npz:{tmp_path / 'mine' / file}" for file in ("a.npz", "b.npz"))
    with pytest.raises(SettingsError, match=r"other/a\.npz contradicts dataset = npz:.*mine/a\.npz"):
        find_study("s", {"data-dir": "other", "dataset": "npz:a.npz"}, "", {}, [1])


def test_values_with_commas_are_in_a_list() -> None:
    found = parse_sweep("a, b", ['training.lr-rounds=["30,60", "45"]', "clients=4,8"])
    assert found == {"strategy": ["a", "b"], "training.lr-rounds": ["30,60", "45"], "clients": [4, 8]}


def test_from_python(here: Here) -> None:
    here.accuracies = {("heterofl", 1): 0.54, ("heterofl", 2): 0.52, ("heterofl", 3): None}
    found = piecework.study(
        name="s", strategies=["fedavg", "heterofl"], seeds=[1, 2, 3], num_rounds=3, progress=False, preset=""
    )
    assert [run.settings["seed"] for run in found.runs] == [1, 2, 3, 1, 2]
    assert found.failed == {"strategy=heterofl seed=3": "no such data set"}
    (pair,) = found.pairs
    assert (pair["seeds"], pair["mean"]) == ([1, 2], pytest.approx(0.03))
    assert list(found.to_pandas("pairs")["ahead"]) == [2]
    assert len(found.to_pandas("runs")) == 5
    assert str(piecework.Study("runs/s").status) == "5 of 6 runs done, 1 failed"
    shown = CliRunner().invoke(app, ["study", "s", "--json"])
    assert json.loads(shown.stdout) == json.loads(json.dumps(found.record))


def test_a_module_of_this_process_is_refused(here: Here) -> None:
    from torch import nn

    class Net(nn.Sequential):
        pass

    with pytest.raises(SettingsError, match=r"do not have this module: give FILE\.py:FUNCTION"):
        piecework.study(name="s", seeds=[1, 2], model=Net(nn.Flatten(), nn.Linear(64, 10)))


def test_what_is_missing_and_for_how_long(here: Here) -> None:
    """Rounds of 2 s, the last of three evaluations; a completed run takes 3 s besides."""
    here.run("--study", "s", *TWO)
    here.interrupt("s/heterofl-seed2-*", 0.1)
    shown = CliRunner().invoke(app, ["study", "runs/s"])
    assert shown.stdout.splitlines()[0] == "s: 3 of 4 runs done, 1 interrupted, 4.0 s left"
