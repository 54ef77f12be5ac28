"""The live page's answers: what they show of runs, and that they are the only thing that is shown, to nobody else."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from report_helpers import make_run, refused, round_record, two_rounds
from serve_helpers import client_of, completed, contents, going_on, listed, next_round
from typer.testing import CliRunner

from piecework.cli import app
from piecework.report.page import STYLE
from piecework.serve import folders
from piecework.server_app.run_lock import run_lock

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_has_each_run_with_its_state(tmp_path: Path) -> None:
    completed(tmp_path / "a")
    make_run(tmp_path / "b", [next_round(1)], "failed", "no client trained\nclosest to fitting: client 1")
    make_run(tmp_path / "c", two_rounds(0.5), "stopped", "stopped by a signal, after round 1")
    going_on(tmp_path / "study" / "d")
    going_on(tmp_path / "study" / "e")
    (tmp_path / "notes.txt").write_text("no run")
    (tmp_path / ".hidden").mkdir()
    completed(tmp_path / ".hidden" / "f")
    with run_lock(tmp_path / "study" / "e"):
        rows = listed(tmp_path)
    assert {name: row["state"] for name, row in rows.items()} == {
        "a": "completed",
        "b": "failed",
        "c": "stopped",
        "study/d": "interrupted",
        "study/e": "running",
    }
    keys = ("strategy", "dataset", "rounds", "accuracy", "left", "page", "report")
    assert [rows["a"][key] for key in keys] == [
        *("fedepth", "digits", "2 of 2", "75.00%", "-", "/run/a", "/report/a"),
    ]
    assert rows["b"]["why"] == "no client trained"
    assert rows["c"]["why"] == "stopped by a signal, after round 1"
    assert (rows["study/e"]["rounds"], rows["study/e"]["page"]) == ("2 of 12", "/run/study/e")


def test_a_folder_that_is_a_run_is_a_list_of_one(tmp_path: Path) -> None:
    completed(tmp_path / "a")
    assert [*listed(tmp_path / "a")] == ["a"]
    assert listed(tmp_path)["a"] == listed(tmp_path / "a")["a"]


def test_the_time_that_is_left(tmp_path: Path) -> None:
    """Ten rounds of 2 s are to come, and one of them may end at any moment."""
    run = going_on(tmp_path / "a")
    os.utime(run.rounds_file, (0, 0))
    with run_lock(run.path):
        assert listed(tmp_path)["a"]["left"] == "18 s"
    assert listed(tmp_path)["a"]["left"] == "-"


def test_what_the_page_of_a_run_gets(tmp_path: Path) -> None:
    run = going_on(tmp_path / "a", strategy="fedavg")
    with run_lock(run.path):
        found = client_of(tmp_path).get("/api/run/a").json()
    assert (found["state"], found["says"], found["rounds"]) == (
        "running",
        "2 of 12 rounds done, accuracy 2.00%",
        {"done": 2, "of": 12},
    )
    facts = dict(found["facts"])
    assert (facts["Strategy"], facts["Requests"]) == ("fedavg", "4 clients asked, 2 failed")
    assert facts["Written by"].startswith(f"process {os.getpid()} on ")
    trained, failed = found["clients"]
    assert (trained["budget"], trained["peak"], trained["share"], trained["of"]) == ("1 kB", "900 B", 0.9, "90.0%")
    assert (trained["last"], trained["failed"], trained["ok"]) == ("round 2: trained", "0 of 2", True)
    assert (failed["peak"], failed["share"], failed["of"], failed["failed"]) == ("-", None, "-", "2 of 2")
    assert failed["last"] == "round 2: memory: needs 2,000 bytes, the budget allows 1,001"
    assert found["devices"] == [["small", "2 of 4"]]
    assert found["failures"] == [["memory", "2", "needs 2,000 bytes, the budget allows 1,001 (client 1, round 1)"]]


def test_the_curves_grow_and_are_sent_once(tmp_path: Path) -> None:
    run, browser = going_on(tmp_path / "a"), client_of(tmp_path)
    first = browser.get("/api/run/a").json()
    (picture,) = first["figures"]
    assert (picture["figure"]["data"][0]["name"], picture["figure"]["data"][0]["y"]) == ("test accuracy", [0.01, 0.02])
    alternative = "Accuracy and loss: test accuracy rises from 1.0% (round 1) to 2.0% (round 2); "
    assert picture["alternative"].startswith(alternative)
    assert "figures" not in browser.get("/api/run/a", params={"have": first["version"]}).json()
    run.append_round(next_round(3))
    second = browser.get("/api/run/a", params={"have": first["version"]}).json()
    assert second["figures"][0]["figure"]["data"][0]["y"] == [0.01, 0.02, 0.03]
    assert second["says"] == "3 of 12 rounds done, accuracy 3.00%"


def test_accuracy_under_attack_has_a_curve(tmp_path: Path) -> None:
    rounds = two_rounds(0.5, 0.75)
    for record, attacked in zip(rounds, (0.125, 0.25), strict=True):
        record |= {"adversarial_accuracy": attacked, "client_adversarial_accuracy": None}
    make_run(tmp_path / "a", rounds, evaluation__attack_steps=7)
    found = client_of(tmp_path).get("/api/run/a").json()
    assert ["Accuracy under attack", "25.00%"] in found["facts"]
    curves = {curve["name"]: curve["y"] for curve in found["figures"][0]["figure"]["data"]}
    assert curves == {"clean": [0.5, 0.75], "under PGD-7": [0.125, 0.25]}


def test_reports_are_made_on_request_and_nothing_is_written(tmp_path: Path) -> None:
    completed(tmp_path / "a", seed=1)
    completed(tmp_path / "s" / "b", seed=2)
    before, browser = contents(tmp_path), client_of(tmp_path)
    report = browser.get("/report/s/b")
    assert (report.status_code, "<th>Rounds</th><td>2 of 2</td>" in report.text) == (200, True)
    assert "* plotly.js v" in report.text
    both = browser.get("/compare", params={"run": ["a", "s/b"]})
    assert (both.status_code, "mean of 2 runs" in both.text) == (200, True)
    for page in (report, both):
        assert '<a href="/">All runs</a>' in page.text
        assert "connect-src" not in page.headers["content-security-policy"]
    assert contents(tmp_path) == before


@pytest.mark.parametrize("names", [[], ["a", "nothing"], ["../secret"], ["a"] * 2 + [str(n) for n in range(50)]])
def test_what_cannot_be_compared(tmp_path: Path, names: list[str]) -> None:
    completed(tmp_path / "runs" / "a")
    completed(tmp_path / "secret")
    answer = client_of(tmp_path / "runs").get("/compare", params={"run": names})
    assert answer.status_code in (400, 404)
    assert "Runs compared" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/run/a", "/report/a", "/nothing"])
def test_it_only_reads(tmp_path: Path, method: str, path: str) -> None:
    completed(tmp_path / "a")
    answer = client_of(tmp_path).request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_head_has_no_body(tmp_path: Path) -> None:
    answer = client_of(tmp_path).head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    ("host", "named", "status"),
    [
        ("127.0.0.1", "127.0.0.1:8321", 200),
        ("127.0.0.1", "localhost:8321", 200),
        ("127.0.0.1", "elsewhere.example", 400),
        ("127.0.0.1", "127.0.0.1.elsewhere.example:8321", 400),
        ("127.0.0.1", "", 400),
        ("localhost", "elsewhere.example:8321", 400),
        ("::1", "[::1]:8321", 200),
        ("::1", "elsewhere.example:8321", 400),
        ("0.0.0.0", "server.example:8321", 200),
    ],
)
def test_names_that_may_be_made_to_lead_here_are_refused(tmp_path: Path, host: str, named: str, status: int) -> None:
    """DNS rebinding: a page of elsewhere whose name comes to mean 127.0.0.1."""
    completed(tmp_path / "a")
    browser = client_of(tmp_path, host, {"Host": named})
    assert {browser.get(path).status_code for path in ("/", "/api/runs", "/report/a", "/plotly.js")} == {status}


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("same-origin", "cors", 200),
        ("none", "navigate", 200),
        ("cross-site", "navigate", 200),  # a link
        ("cross-site", "no-cors", 403),
        ("same-site", "cors", 403),  # another port of this machine
    ],
)
def test_pages_of_other_sites_may_only_link_here(tmp_path: Path, site: str, mode: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
    assert client_of(tmp_path, headers=headers).get("/api/runs").status_code == status


ELSEWHERE = (
    *("../secret", "%2e%2e/secret", "..%2fsecret", "a/%2e%2e/%2e%2e/secret", "%2e%2e%5csecret", "/secret", "%2fetc"),
    *("a/settings.toml", "a/rounds.jsonl", "a/lock", "a/", ".", "", "a%00", "%ff", "A"),
)


@pytest.mark.parametrize("kind", ["run", "report", "api/run", "assets"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_nothing_but_a_run_that_was_found_has_an_address(tmp_path: Path, kind: str, name: str) -> None:
    completed(tmp_path / "runs" / "a", strategy="fedavg")
    completed(tmp_path / "secret", strategy="heterofl")
    answer = client_of(tmp_path / "runs").get(f"/{kind}/{name}")
    assert answer.status_code == 404
    assert not re.search("heterofl|fedavg|num-rounds", answer.text)


@pytest.mark.parametrize("name", ["serve.css", "../app.py", "%2e%2e/app.py", "..%2fapp.py"])
def test_no_other_file_of_the_package_has_an_address(tmp_path: Path, name: str) -> None:
    assert client_of(tmp_path).get(f"/assets/{name}").status_code == 404


def test_links_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    completed(root / "a", strategy="fedavg")
    completed(tmp_path / "elsewhere" / "secret", strategy="heterofl")
    (root / "out").symlink_to(tmp_path / "elsewhere" / "secret")
    (root / "again").symlink_to(root / "a")
    (root / "circle").symlink_to(root / "circle")
    rows = listed(root)
    assert {name: row["state"] for name, row in rows.items()} == {"a": "completed", "out": "damaged"}
    assert rows["out"]["strategy"] == "-"
    assert "is a link that leads out of" in rows["out"]["why"]
    answer = client_of(root).get("/report/out")
    assert (answer.status_code, "heterofl" in answer.text) == (422, False)


@pytest.mark.parametrize("name", [*folders.SMALL, *folders.OTHERS])
def test_a_link_in_place_of_a_record_is_not_read(tmp_path: Path, name: str) -> None:
    root, secret = tmp_path / "runs", tmp_path / "secret"
    run = completed(root / "a")
    secret.write_text("only mine\n")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(secret)
    assert "is a link" in listed(root)["a"]["why"]
    browser = client_of(root)
    for path in ("/run/a", "/api/run/a", "/report/a", "/compare?run=a"):
        assert "only mine" not in browser.get(path).text
    assert browser.get("/report/a").status_code == browser.get("/compare?run=a").status_code == 422


@pytest.mark.slow
def test_every_answer_forbids_scripts_of_others(tmp_path: Path) -> None:
    completed(tmp_path / "a")
    browser = client_of(tmp_path)
    for path in ("/", "/run/a", "/api/runs", "/api/run/a", "/assets/run.js", "/plotly.js", "/nothing", "/compare"):
        headers = browser.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"]) == ("'none'", "'self'")
        assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "'unsafe-eval'" not in browser.get("/report/a").headers["content-security-policy"]


def test_texts_of_others_are_no_html(tmp_path: Path) -> None:
    script = "<img src=x onerror=alert(1)>"
    run = make_run(
        tmp_path / script, [round_record(1, None, [refused(0, script)])], "failed", script, dataset=f"npz:{script}"
    )
    (row,) = listed(tmp_path).values()
    browser = client_of(tmp_path)
    for path in ("/", row["page"], row["report"], "/run/nothing<img", f"/compare?run={script}"):
        assert "<img" not in browser.get(path).text
    assert browser.get(row["page"]).status_code == browser.get(row["report"]).status_code == 200
    shown = browser.get(f"/api{row['page']}")
    assert shown.headers["content-type"] == "application/json"
    assert shown.json()["why"] == script
    assert run.path.name == script


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """Its bytes cannot be in an address, so a digest tells it apart."""
    completed(tmp_path / "a").path.rename(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff\n"))
    (row,) = listed(tmp_path).values()
    assert re.fullmatch(r"a\?\?~[0-9a-f]{7}", row["name"])
    browser = client_of(tmp_path)
    pages = ("/", row["page"], f"/api{row['page']}", row["report"])
    assert [browser.get(path).status_code for path in pages] == [200] * 4


def test_scripts_and_style_are_ours_and_plotlys(tmp_path: Path) -> None:
    browser = client_of(tmp_path)
    assert browser.get("/assets/style.css").text.startswith(STYLE)
    plotly = Path(str(distribution("plotly").locate_file("plotly/package_data/plotly.min.js")))
    answer = browser.get("/plotly.js")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.content == plotly.read_bytes()
    for page in ("/", "/run/a"):
        assert "http" not in browser.get(page).text  # nothing is fetched from elsewhere
    for script in (ROOT / "piecework" / "serve" / "assets").glob("*.js"):
        code = script.read_text("utf-8")
        assert browser.get(f"/assets/{script.name}").text == code
        assert not re.search("innerHTML|insertAdjacentHTML|document.write|eval|http", code)


@pytest.mark.slow
def test_the_wheel_has_scripts_and_style(wheel: Path) -> None:
    (folder,) = wheel.parent.parent.glob("lib/python3*/site-packages/piecework/serve/assets")
    assert {path.name for path in folder.iterdir()} == {"list.js", "run.js", "live.js", "serve.css"}


def test_what_the_command_refuses(tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["serve", str(tmp_path / "none")])
    assert (missing.exit_code, "is not a folder" in missing.stderr) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        taken = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", port, "--json"])
    assert taken.exit_code == 2
    assert json.loads(taken.stdout)["reason"].startswith(f"127.0.0.1, port {port}: ")
    assert "--port 0 takes a free one" in taken.stderr
    unknown = CliRunner().invoke(app, ["serve", str(tmp_path), "--host", "192.0.2.1", "--port", "0"])
    assert (unknown.exit_code, unknown.stderr.startswith("error: 192.0.2.1, port 0: ")) == (2, True)


@pytest.mark.slow
@pytest.mark.processes
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    completed(tmp_path / "runs" / "a")
    (tmp_path / "secret").write_text("only mine")
    words = [sys.executable, "-m", "piecework.cli", "serve", "runs", "--host", "0.0.0.0", "--port", "0", "--json"]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=tmp_path, env=own, stdout=-1, stderr=-1, text=True) as server:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["url"]
        answers = [raw_answer(address, path) for path in ("/api/runs", "/run/../../secret", "/assets/../../../secret")]
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=60)
    assert [answer.split(b" ")[1] for answer in answers] == [b"200", b"404", b"404"]
    assert b'"state":"completed"' in answers[0]
    assert not any(b"only mine" in answer for answer in answers)
    assert said.splitlines() == [
        f"warning: whoever reaches {address} can read the runs in runs: there is no password",
        "interrupted",
    ]
    assert server.returncode == 130


def raw_answer(address: str, path: str) -> bytes:
    """What a server answers to a path that clients would change before they send it."""
    port = urlsplit(address).port
    with socket.create_connection(("127.0.0.1", port or 0), timeout=60) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        with connection.makefile("rb") as answer:
            return answer.read()
