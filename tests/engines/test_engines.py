"""Runs on Ray and as real processes, killed and started again; and the resident set of a client that serves one task."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args
from helpers import FEW, fleet_json, model_of, run_local
from other_users import told_to_nobody
from typer.testing import CliRunner

import piecework
from benchmarks.defaults import with_defaults
from piecework.cli import app
from piecework.client_app import prepare
from piecework.commands.options import settings_from
from piecework.engines import processes
from piecework.engines.guardian import lives
from piecework.engines.launch import launch
from piecework.engines.processes import free_ports
from piecework.server_app.records import RunDir
from piecework.server_app.run_lock import run_lock
from piecework.strategies.cascade.fedprophet.settings import FedProphetSettings
from piecework.training.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every Ray of this test keeps its files; a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield Path(folder)


@pytest.mark.processes
def test_ray_agrees_and_is_ours_until_ctrl_c(tmp_path: Path, ray_folder: Path, wheel: Path) -> None:
    """To the bit, from the wheel, where an ended cluster left the address that every plain `ray.init()` would join."""
    values = {"clients-per-round": 2, "training.local-iterations": 5, "run-name": "run", "training.lr-rounds": 400}
    (ray_folder / "ray").mkdir()
    (ray_folder / "ray" / "ray_current_cluster").write_text("127.0.0.1:9")
    sets = [f"--set={key}={value}" for key, value in (values | {"num-rounds": 400}).items()]
    call = [str(wheel), "run", "--engine=ray", "--nodes=2", *sets]
    environment, family = without_checkout(), list[psutil.Process]()
    with subprocess.Popen(
        call, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        run_dir = RunDir(tmp_path / "runs" / "run")
        while not ended(launcher):
            if not family and run_dir.last_complete_round() >= 1:
                family = psutil.Process(launcher.pid).children(recursive=True)
                modes = [each.environ()["RAY_AUTH_MODE"] for each in family if each.name() == "raylet"]
                os.killpg(launcher.pid, signal.SIGINT)
        said = launcher.stderr.read() if launcher.stderr else ""
    assert (bool(family), launcher.returncode) == (True, 130), said
    assert modes == ["token"]  # which other users do not have
    rounds = [record["round"] for record in run_dir.rounds()]
    assert rounds == [*range(1, len(rounds) + 1)]
    last = run_dir.last_complete_round()
    assert (run_dir.summary() or {})["reason"] == f"stopped by a signal, after round {last}"
    assert said.splitlines()[-1] == f"resume it: piecework run --set resume-from={run_dir.path}"
    assert [process for process in family if lives(process)] == []
    with run_lock(run_dir.path):  # which is free
        pass
    settings = settings_from("", [f"{key}={value}" for key, value in values.items()], nodes=2, output_dir=str(tmp_path))
    local = RunDir(tmp_path / "local")
    launch(settings.with_values({"num-rounds": last, "run-name": "local", "workers": 1}), local, lambda _: None)
    one, other = model_of(local), model_of(run_dir)
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])


def without_checkout() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"COLUMNS": "200"}


def ended(launcher: "subprocess.Popen[Any]") -> bool:
    """Whether it has; asked five times a second."""
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(0.2)
    return launcher.returncode is not None


@pytest.mark.slow
@pytest.mark.processes
def test_a_node_is_killed_and_started_again_then_the_launcher_is_killed(tmp_path: Path, wheel: Path) -> None:
    """SIGKILL to a SuperNode and its executor, before or while they register: both come back, and the client takes part.

    The launcher, which is held from then on so that it cannot see the end of the run, gets SIGKILL after it: its processes and
    their folder go too. All from the wheel. What a round does without a client that is gone is tested on the in-process grid.
    """
    values = {
        "num-rounds": 1,
        "clients-per-round": 0,
        "training.local-iterations": 2,
        "architecture.batch-norm": "running",  # a measurement would be a message more for each client and round
        "run-name": "run",
    }
    sets = [f"--set={key}={value}" for key, value in values.items()]
    call = [str(wheel), "run", "--engine=deployment", "--nodes=2", *sets]
    run_dir, killed, again = RunDir(tmp_path / "runs" / "run"), list[psutil.Process](), list[psutil.Process]()
    with subprocess.Popen(call, cwd=tmp_path, env=without_checkout(), stderr=subprocess.PIPE, text=True) as launcher:
        while not ended(launcher) and not again:
            found = node_and_executor(launcher.pid, 1)
            if killed:
                again = found
            for process in found if not killed else ():
                process.kill()
                killed.append(process)
        assert again
        launcher.send_signal(signal.SIGSTOP)
        family, home = psutil.Process(launcher.pid).children(recursive=True), again[0].environ()["FLWR_HOME"]
        told = told_to_nobody(set(family) - set(again))  # these may not listen yet
        while run_dir.summary() is None and all(map(lives, again)):
            ended(launcher)
        launcher.kill()
        said = launcher.stderr.read() if launcher.stderr else ""  # until the guardian ends
    assert told == {"403"}  # to other users, by the SuperLink and a SuperNode
    assert "supernode-1 ended with exit code -9: started again" in said
    assert (run_dir.summary() or {})["status"] == "completed", said
    (record,) = run_dir.rounds()
    assert {c["client"]: c["status"] for c in record["clients"]} == {0: "ok", 1: "ok"}
    psutil.wait_procs(family, timeout=30)  # the guardian itself is about to end
    assert [process for process in family if lives(process)] == []
    assert not Path(home).exists()


def node_and_executor(launcher: int, client: int) -> list[psutil.Process]:
    """The SuperNode of a client and the executor beside it, if both run."""
    family = list[tuple[psutil.Process, list[str]]]()
    for process in psutil.Process(launcher).children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if lives(process):
                family.append((process, process.cmdline()))
    for node, words in family:
        if f"partition-id={client} " in " ".join(words):
            address = f"127.0.0.1:{words[words.index('--port') + 1]}"
            executors = [process for process, others in family if address in others]
            return [node, *executors] if executors else []
    return []


def test_plain_flwr_run_has_every_setting() -> None:
    """`make defaults` writes them; Flower hands over the keys of tables with dots."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert with_defaults(text) == text
    assert with_defaults(text.replace("apa-step = 0.1", "apa-step = 0.3")) == text
    defaults = flatten_dict(tomllib.loads(text)["tool"]["flwr"]["app"]["config"])
    assert defaults == Settings().to_run_config()
    given = parse_config_args(["fedprophet.apa-step=0.2 num-rounds=3"])
    values = Settings.from_run_config(fuse_dicts(defaults, given, check_keys=True))
    assert (values.of(FedProphetSettings).apa_step, values.num_rounds) == (0.2, 3)


def test_resident_set_stays_within_the_budget(tmp_path: Path) -> None:
    """A model of 100 MB in a fresh process, with the heap of a device that has little memory: growth <= budget + 64 MB."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        fresh.submit(train_with_little_memory, tmp_path).result()
    ((client,),) = [record["clients"] for record in RunDir(tmp_path / "fedepth").rounds()]
    weights = sum(array.nbytes for array in model_of(RunDir(tmp_path / "fedepth")).values())
    assert weights > 100_000_000
    assert client["status"] == "ok"
    assert client["measured_peak"] <= client["budget"] < 2 * weights
    assert client["rss_growth"] <= 200_000_000 + 64 * 2**20


def train_with_little_memory(folder: Path) -> None:
    """FeDepth, where no more than 1 GB is available."""
    prepare.available_memory = lambda: 10**9
    common = {
        "model": "resnet18",
        "architecture__width": 1.5,
        "training__batch_size": 4,
        "dataset": FEW,
        "clients": 1,
        "data__partition": "iid",
        "clients_per_round": 1,
        "training__local_iterations": 1,
        "evaluation__every": 0,
        "data__validation_fraction": 0.9,
        "fleet": fleet_json(board=200_000_000),
    }
    run_local(folder, strategy="fedepth", run_name="fedepth", **common)


IN_THE_WHEEL = """
import importlib.util, json, sys
import piecework, piecework.app_folder, piecework.server_app
from typer.testing import CliRunner
from piecework.cli import app
places = [piecework.__file__, piecework.server_app.__file__, str(piecework.app_folder.PRESETS)]
others = [name for name in ("numpy", "flwr", "tests", "piecework") if importlib.util.find_spec("piecework." + name)]
found = [CliRunner().invoke(app, command) for command in json.loads(sys.argv[1])]
print(json.dumps([places, others, [[done.exit_code, done.stdout, done.stderr] for done in found]]))
"""
TINY_FLEET = """
name = "tiny"
assignment = "round-robin"
[[device]]
name = "a"
memory = "20kB"
flops = 1e9
bandwidth = 1e6
disk-bandwidth = 1e7
"""


@pytest.mark.slow
def test_the_wheel_from_an_empty_folder(tmp_path: Path, wheel: Path) -> None:
    """It has the packages and the presets, plans, trains, and says why it cannot; nothing of the checkout can be imported."""
    fleet, runs = tmp_path / "tiny.toml", tmp_path / "there" / "runs"
    fleet.write_text(TINY_FLEET, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    few = ["num-rounds=1", "clients-per-round=2", "training.local-epochs=1", "workers=1"]
    run = ["run", "--json", "--output-dir", str(runs), *(f"--set={text}" for text in few)]
    commands = [
        ["plan", "--json", "--preset", "spafl-digits"],
        [*run, "--seeds", "1,2"],
        [*run, "--set", f"fleet={fleet}"],
    ]
    call = [str(wheel.with_name("python")), "-c", IN_THE_WHEEL, json.dumps(commands)]
    done = subprocess.run(
        call, capture_output=True, text=True, check=False, cwd=tmp_path / "empty", env=without_checkout()
    )
    assert done.returncode == 0, done.stderr
    places, others, (plan, trained, refused) = json.loads(done.stdout.splitlines()[-1])
    assert others == []
    assert all(Path(path).is_relative_to(wheel.parents[1]) for path in places)
    shipped, there = (
        {path.relative_to(conf): path.read_bytes() for path in conf.rglob("*") if path.is_file()}
        for conf in (Path(places[2]), ROOT / "conf")
    )
    assert shipped == there
    assert json.loads(plan[1])["strategy"] == "spafl", plan
    assert refused[0] == 1
    assert "conv5" in " ".join(refused[2].split())
    assert "20,000" in refused[2]
    assert list((tmp_path / "empty").iterdir()) == []

    assert trained[0] == 0, trained
    last = json.loads(trained[1].splitlines()[-1])
    assert last["status"] == "completed"
    assert "seed 2 (2 of 2)" in trained[2]  # stdout is for objects
    assert {
        "run_dir",
        "status",
        "rounds",
        "accuracy",
        "clients_asked",
        "clients_answered",
        "clients_failed",
        "bytes_down",
        "bytes_up",
        "max_peak_over_budget",
        "seconds",
    } <= last.keys()


@pytest.mark.parametrize(
    ("address", "code", "why"),
    [
        ("nonsense", 2, "RAY_ADDRESS = 'nonsense' is not HOST:PORT or auto"),
        ("127.0.0.1:99999", 2, "RAY_ADDRESS = '127.0.0.1:99999' is not"),
        ("127.0.0.1:FREE", 1, "RAY_ADDRESS = '127.0.0.1:FREE': no Ray cluster answers there"),
        ("ray://127.0.0.1:FREE", 2, "RAY_ADDRESS = 'ray://127.0.0.1:FREE': a run is no client of Ray's"),
    ],
)
def test_a_ray_cluster_that_is_not_there_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, code: int, why: str
) -> None:
    port = str(free_ports(1)[0])
    monkeypatch.setenv("RAY_ADDRESS", address.replace("FREE", port))
    done = CliRunner().invoke(app, ["run", "--engine=ray", "--nodes=2", "--output-dir", str(tmp_path / "runs")])
    assert (done.exit_code, not (tmp_path / "runs").exists()) == (code, True)
    assert why.replace("FREE", port) in done.stderr


@pytest.mark.parametrize(
    ("options", "code", "why"),
    [
        (["--ray-address=nonsense"], 2, "--ray-address nonsense is not HOST:PORT or auto"),
        (["--ray-address=ray://head:10001"], 2, "--ray-address ray://head:10001: a run is no client of Ray's"),
        (["--ray-address=127.0.0.1:FREE"], 1, "--ray-address 127.0.0.1:FREE: no Ray cluster answers there"),
        (
            ["--ray-address=auto", "--engine=local"],
            2,
            "--ray-address auto with engine = local: only --engine ray joins",
        ),
        (
            ["--ray-address=auto", "--superlink=127.0.0.1:9", "--insecure"],
            2,
            "--superlink 127.0.0.1:9 contradicts --ray-address auto: give one of them",
        ),
        (["--ray-address=auto", "--insecure"], 2, "--root-certificates and --insecure say how to reach a SuperLink"),
    ],
)
def test_an_option_names_a_ray_cluster_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, why: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "another")
    port = str(free_ports(1)[0])
    words = [word.replace("FREE", port) for word in options]
    call = ["run", "--engine=ray", "--nodes=2", "--output-dir", str(tmp_path / "runs"), *words]
    done = CliRunner().invoke(app, call)
    assert (done.exit_code, not (tmp_path / "runs").exists()) == (code, True)
    assert why.replace("FREE", port) in " ".join(done.stderr.split())


def test_python_names_a_ray_cluster_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ray_address auto with engine = local"):
        piecework.run(ray_address="auto", nodes=2, output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"ray_address nonsense is not HOST:PORT or auto"):
        piecework.run(ray_address="nonsense", engine="ray", nodes=2, output_dir=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--engine=ray"], ["--engine=deployment"], ["--superlink=127.0.0.1:9", "--insecure"]]
)
def test_an_engine_that_does_not_start_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """A Ray without a place for its files, Flower's processes that have no time to start, a SuperLink that is not there."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "nowhere"))
    monkeypatch.setattr(processes, "START_SECONDS", 0)
    done = CliRunner().invoke(app, ["run", "--json", "--nodes=2", "--output-dir", str(tmp_path / "runs"), *options])
    assert done.exit_code == 1
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["run_dir"], said["status"]) == (None, "failed")
    assert said["reason"]
    assert "run folder" not in done.output
    assert not (tmp_path / "runs").exists()


def test_the_ray_engine_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, ["run", "--engine=ray", "--output-dir", str(tmp_path / "runs")])
    assert done.exit_code == 1
    assert "--engine ray needs Ray, which is not installed: pip install 'piecework[simulation]'" in " ".join(
        done.stderr.split()
    )
    assert not (tmp_path / "runs").exists()


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(5))) == 5
