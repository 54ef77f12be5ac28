"""Six client containers with hard memory limits: trained in, killed by the kernel, and put through faults.

    python -m pytest -m docker tests/engines/test_docker.py

Needs a Docker engine, docker-compose 1.29 or Compose v2, and what the image's build needs (docs/howto/containers.md): its build
arguments are taken from the environment. Prints a line a scenario. A container that is stopped by `docker kill` stays down
until it is started: Docker restarts only what ended by itself.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker_fleet import IMAGE, ROOT, Containers, Memory, Run, checked, docker, federation, missing, wait_for

from piecework.deploy.certs import issue
from piecework.federation.registry import sample_clients

PRESET = ("--preset", "fedepth-containers")
CLIENTS, LARGE = 6, (2, 5)
# A small model for what is about processes: rounds of a few seconds of training.
BRIEF = [
    *PRESET,
    *(
        f"--set={text}"
        for text in ("model=convnet", "training.batch-size=32", "training.local-epochs=1", "fedepth.mutual-models=1")
    ),
]
FLIP = """
import sys, time
from pathlib import Path
deadline, found = time.monotonic() + 300, []
while not found:
    assert time.monotonic() < deadline, "no state was written"
    found = [*Path("/store").glob("*/0/state/2/batch-norm/*.safetensors")]
    time.sleep(0.01)
content = bytearray(found[0].read_bytes())
content[-1] ^= 0xFF
found[0].write_bytes(content)
"""

pytestmark = [pytest.mark.docker, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def shared() -> Iterator[Path]:
    """A folder that containers may read; pytest's are for their owner only."""
    with tempfile.TemporaryDirectory(prefix="piecework-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def data(shared: Path) -> Path:
    command = ["export-data", *PRESET, "--nodes", str(CLIENTS), "--out", str(shared / "data")]
    environment = os.environ | {"PIECEWORK_CACHE": str(shared / "cache")}
    checked([sys.executable, "-m", "piecework.cli", *command], cwd=ROOT, env=environment)
    return shared / "data"


@pytest.fixture(scope="module")
def standing(data: Path) -> Iterator[Containers]:
    with federation(data, CLIENTS, [ROOT / "docker-compose.yml"]) as containers:
        yield containers


@pytest.fixture
def fleet(standing: Containers) -> Iterator[Containers]:
    """The federation, whole again after a test that broke it."""
    yield standing
    standing.recover()


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", end="")

    return line


def statuses(record: dict[str, Any]) -> str:
    """`ok` of everybody who is, the others by number: "4 ok, client 0 crashed"."""
    others = [f"client {c['client']} {c['status']}" for c in record["clients"] if c["status"] != "ok"]
    return ", ".join([f"{record['answered']} ok", *others])


def story(records: list[dict[str, Any]]) -> str:
    return "; ".join(f"round {r['round']}: {statuses(r)}" for r in records)


def status(record: dict[str, Any], client: int) -> str:
    return str(next(c["status"] for c in record["clients"] if c["client"] == client))


def megabytes(seen: dict[int, Memory]) -> str:
    return ", ".join(f"{m.anonymous / 1e6:.0f} of {m.limit / 1e6:.0f}" for m in seen.values())


def killed(seen: dict[int, Memory]) -> dict[int, int]:
    return {client: memory.killed for client, memory in seen.items() if memory.killed}


def simulated(data: Path) -> dict[str, Any]:
    """The same preset on the local engine, in the same image: the same build of torch."""
    cache = ["-v", f"{data.parent / 'cache'}:/cache:ro", "-e", "PIECEWORK_CACHE=/cache"]
    command = ["piecework", "run", *PRESET, "--nodes", str(CLIENTS), "--output-dir", "/tmp/runs", "--json"]
    return dict(json.loads(docker("run", "--rm", *cache, IMAGE, *command).splitlines()[-1]))


def test_one_command_trains_within_the_limits(fleet: Containers, data: Path, say: Callable[[str], None]) -> None:
    with fleet.watched() as seen:
        summary = fleet.finish(fleet.start_run(*PRESET))
    in_process = simulated(data)
    say(
        f"FeDepth: {summary['accuracy']:.2%} after {summary['rounds']} rounds in {summary['seconds']:.0f} s, the local engine "
        f"{in_process['accuracy']:.2%}; anonymous MB of the limit: {megabytes(seen)}; killed: {killed(seen) or 'none'}"
    )
    assert abs(summary["accuracy"] - in_process["accuracy"]) <= 0.01
    assert summary["clients_failed"] == 0
    assert not killed(seen)
    assert all(0 < memory.anonymous < memory.limit for memory in seen.values())


def test_the_kernel_ends_what_does_not_fit(fleet: Containers, say: Callable[[str], None]) -> None:
    whole = [
        *PRESET,
        "--set=strategy=fedavg",
        "--set=num-rounds=2",
        "--set=training.local-epochs=1",
        "--set=memory.enforce=false",
    ]
    with fleet.watched() as seen:
        run = fleet.start_run(*whole)
        fleet.finish(run)
    first, second = fleet.rounds(run)
    say(f"FedAvg unchecked: {story([first])}; killed by the kernel: {killed(seen)}; in round 2 {excluded(second)}")
    small = sorted(set(range(CLIENTS)) - set(LARGE))
    assert sorted(killed(seen)) == small
    assert [c["client"] for c in first["clients"] if c["status"] == "crashed" and "error 8" in c["reason"]] == small
    assert all(status(first, client) == "ok" for client in LARGE)
    assert [entry["client"] for entry in second["excluded"]] == small
    assert not first["enforced"]


def excluded(record: dict[str, Any]) -> str:
    return f"clients {', '.join(str(entry['client']) for entry in record['excluded'])} are excluded"


def test_clients_refuse_before_the_kernel_acts(fleet: Containers, say: Callable[[str], None]) -> None:
    with fleet.watched() as seen:
        run = fleet.start_run(*PRESET, "--set=strategy=fedavg", "--set=num-rounds=1", "--set=training.local-epochs=1")
        fleet.finish(run)
    (record,) = fleet.rounds(run)
    say(f"FedAvg checked: {story([record])}; killed: {killed(seen) or 'none'}")
    assert {c["client"] for c in record["clients"] if c["status"] == "memory"} == set(range(CLIENTS)) - set(LARGE)
    assert all(status(record, client) == "ok" for client in LARGE)
    assert not killed(seen)


def test_a_client_killed_in_mid_round(fleet: Containers, say: Callable[[str], None]) -> None:
    run = fleet.start_run(*BRIEF, "--set=num-rounds=4")
    fleet.wait_in_round(run, 2, client=0)
    docker("kill", fleet.id("client-0"))
    docker("start", fleet.id("client-0"))
    fleet.finish(run)
    records = fleet.rounds(run)
    say(f"a client killed: {story(records)}")
    assert status(records[1], 0) == "crashed"
    assert status(records[3], 0) == "ok"
    assert all(record["answered"] >= CLIENTS - 1 for record in records)


def test_a_client_that_is_stopped_answers_before_it_ends(fleet: Containers, say: Callable[[str], None]) -> None:
    run = fleet.start_run(*BRIEF, "--set=num-rounds=3")
    fleet.wait_in_round(run, 2, client=0)
    docker("stop", fleet.id("client-0"))
    docker("start", fleet.id("client-0"))
    fleet.finish(run)
    records = fleet.rounds(run)
    say(f"a client stopped: {story(records)}")
    (stopped,) = (each for each in records[1]["clients"] if each["client"] == 0)
    assert (stopped["status"], stopped["reason"]) == ("gone", "error 3: the task was ended before it answered")
    assert status(records[2], 0) == "ok"


def test_a_client_that_stays_down_holds_no_round_beyond_its_deadline(
    fleet: Containers, say: Callable[[str], None]
) -> None:
    """Its task of round 2 fails when Flower misses its heartbeats; nothing takes a later one."""
    run = fleet.start_run(*BRIEF, "--set=num-rounds=6", "--set=faults.deadline-factor=1.5")
    fleet.wait_in_round(run, 2, client=0)
    docker("kill", fleet.id("client-0"))
    fleet.finish(run)
    records = fleet.rounds(run)
    down = {record["round"]: each for record in records[1:] for each in record["clients"] if each["client"] == 0}
    waited = {number: (each["waited_seconds"], each["deadline_seconds"]) for number, each in down.items()}
    say(f"a client down: {story(records)}; waited for it, and its deadline: {waited}")
    assert {each["status"] for each in down.values()} <= {"crashed", "late"}
    assert any(each["status"] == "late" for each in down.values())
    assert all(record["answered"] == CLIENTS - 1 for record in records[1:])
    assert len(records) == 6


def test_a_client_paused_beyond_the_timeout(fleet: Containers, say: Callable[[str], None]) -> None:
    """Two clients a round, so that the other answers well within the timeout."""
    paused, other = sample_clients(range(CLIENTS), 2, seed=1, server_round=2)
    few = [f"--set={text}" for text in ("num-rounds=6", "clients-per-round=2", "messages.round-timeout=50")]
    run = fleet.start_run(*BRIEF, *few)
    fleet.wait_in_round(run, 2, paused)
    docker("pause", fleet.id(f"client-{paused}"))
    wait_for("round 2", lambda: len(fleet.rounds(run)) >= 2)
    docker("unpause", fleet.id(f"client-{paused}"))
    fleet.finish(run)
    records = fleet.rounds(run)
    late = {record["round"]: entry for record in records for entry in record["late_replies"]}
    say(f"a client paused: {story(records)}; late replies, by the round they came in: {late}")
    assert status(records[1], paused) == "timeout"
    assert status(records[1], other) == "ok"
    assert [(entry["client"], entry["round"]) for entry in late.values()] == [(paused, 2)]
    assert len(records) == 6


def test_the_superlink_restarts(fleet: Containers, say: Callable[[str], None]) -> None:
    run = fleet.start_run(*BRIEF, "--set=num-rounds=4")
    fleet.wait_in_round(run, 2, client=0)
    docker("restart", "--time", "1", fleet.id("superlink"))
    fleet.finish(run)
    records = fleet.rounds(run)
    say(f"the SuperLink restarted: {story(records)}")
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    assert records[3]["answered"] == CLIENTS


def test_the_serverapp_dies(fleet: Containers, say: Callable[[str], None]) -> None:
    run = fleet.start_run(*BRIEF, "--set=num-rounds=4", "--restarts", "2")
    fleet.wait_in_round(run, 3, client=0)
    docker("kill", fleet.id("server"))
    docker("start", fleet.id("server"))
    fleet.finish(run)
    records = fleet.rounds(run)
    say(f"the ServerApp killed: {restarts(run)}; {story(records)}")
    assert "restart 1 of 2" in run.output
    assert [record["round"] for record in records] == [1, 2, 3, 4]


def restarts(run: Run) -> str:
    return "; ".join(line.strip() for line in run.output.splitlines() if "restart " in line)


def test_a_client_finds_its_store_damaged(fleet: Containers, say: Callable[[str], None]) -> None:
    flip = ["docker", "exec", fleet.id("client-0"), "python", "-c", FLIP]
    run = fleet.start_run(*BRIEF, "--set=num-rounds=4", "--set=architecture.batch-norm=local")
    flipped = subprocess.run(flip, check=False, capture_output=True, text=True)
    fleet.finish(run)
    assert flipped.returncode == 0, flipped.stderr
    records = fleet.rounds(run)
    notes = {record["round"]: note for record in records for c in record["clients"] if (note := c["note"])}
    say(f"a store damaged: {notes}; {story(records)}")
    assert "discarded its state of round 2" in notes[3]
    assert status(records[2], 0) == "ok"


def test_with_certificates_only_known_nodes_take_part(shared: Path, data: Path, say: Callable[[str], None]) -> None:
    """TLS, node keys and executor secrets: what one command registers takes part."""
    certs = shared / "certs"
    issue(["superlink"], CLIENTS, certs)
    owner = os.getuid() or 1000  # the containers' user reads private keys as their owner, and is never root
    if not os.getuid():
        for path in [certs, *certs.rglob("*")]:
            os.chown(path, owner, -1)
    files = [ROOT / "docker-compose.yml", ROOT / "docker-compose.tls.yml"]
    environment = {"PIECEWORK_CERTS": str(certs), "PIECEWORK_UID": str(owner)}
    with federation(data, CLIENTS, files, start=False, **environment) as fleet:
        trusted = ("--root-certificates", "/certs/ca.crt")
        register = ["register", "/certs", "--superlink", "superlink:8000", *trusted, "--json"]
        nodes = json.loads(fleet.call("run", "--rm", "-T", "piecework", *register).splitlines()[-1])["nodes"]
        fleet.call("up", "-d")
        run = fleet.start_run(*BRIEF, "--set=num-rounds=1", connection=trusted)
        summary = fleet.finish(run)
        say(f"TLS: {len(nodes)} keys registered; {story(fleet.rounds(run))}")
        assert [node["done"] for node in nodes] == ["registered"] * CLIENTS
        assert summary["clients_answered"] == CLIENTS
