"""Run the commands that the documents show, each page's in a folder of its own, and keep when each was run and what came of it.

    python -m benchmarks.docs run [--pages run,memory] [--seconds 120] [--again]
    python -m benchmarks.docs status

A command has so many seconds. One that goes on longer, such as a preset of hours, is interrupted, as by Ctrl-C, and counts as
begun. What stands for something of the reader's (NAME, FOLDER, my-boards.toml) is put in. Not run are commands that need
containers, boards, a cluster or a package index, and long measurements, whose pages say when they were run; `status` lists them
with the reason. The figures are in docs/commands.json, and the site shows them below blocks of commands that take longer than
ten seconds. A command that failed ends `run` with the exit code 1. Without --again, only what is new or failed is run.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "commands.json"
PROGRAMS = re.compile(r"(?:piecework|python|make|flwr|pip|docker-compose|docker|bash|ray|sudo|systemctl)\b")
SHORT = "house|overview|cards|fit|bfloat16|prism_step|spafl_step|fedprophet_time|client_time|claims (status|table)"
# Commands that are not run here, by how they begin or what they have, and the reason.
LEFT_OUT = {
    r"docker|compose build": "needs containers; `pytest -m docker` runs a federation in them",
    r"sudo|systemctl|piecework-super|piecework-health|flower-|/var/lib": "needs a board; tests/command_line/test_boards.py",
    r"--superlink|HOST|ray (start|stop)|--ray-address": "needs a server or a cluster; tests/engines starts them",
    r"pip |make (setup|demo|test|check|docs)|bash \.ci/run": "installs, or is what CI runs",
    r"make (clean|defaults|tables)|piecework clean": "changes the checkout or other runs; the tests have it in a folder",
    r"piecework serve": "goes on until it is stopped; tests/command_line/test_serve.py",
    r"runs/(vit|narrow)/|resume-from=runs/NAME --set evaluation.autoattack": "takes what a command above it makes in hours",
    r"npz:imdb128": "takes what a program of two lines above it makes; its page says what it gave",
    r"--format executorch": "needs the extra executorch, whose tests are not in CI",
    r"python -c": "is a line of a program of several lines",
    r"-m pytest": "one of the tests",
    r"resume-from=auto": "needs an unfinished run; tests/server_app has one",
    r"flwr run": "tests/engines runs it",
    r"--install-completion": "changes the user's shell",
    r" \.\.\.( |$)": "is the part of the command before it that changes",
    rf"python (-m benchmarks\.|benchmarks/)(?!{SHORT})": "a tool, or a long measurement, whose page has its date or commit",
}
SHELLS = ("", "bash", "console", "sh")
# What is put in for something of the reader's.
OURS = {
    r"robust-fmnist-NAME": "robust-fmnist-heterofl",
    r"^STUDY$": "rates",
    r"strategy=NAME": "strategy=fedepth",
    r"KIND$": "static",
    r"\bNAME\b": "demo",
    r"\b(FOLDER|CIFAR|DATA)\b": os.environ.get("PIECEWORK_DATA", "data"),
    r"=N$": "=1",
    r"=W$": "=0.5",
}
FILES = ("my-boards.toml", "mine.toml", "shelf.toml", "fleet.toml")
LONG = 10.0  # seconds


def pages() -> list[Path]:
    """Return the documents that are written by hand: README and its companions, the site's pages, and the systems' cards."""
    docs = ROOT / "docs"
    written = {
        "_build",
        "systems",
        "claims",
        "commands.md",
        "settings.md",
    }  # by Sphinx, benchmarks.site and benchmarks.claims
    site = [path for path in docs.rglob("*.md") if not written & {*path.relative_to(docs).parts}]
    return sorted([*ROOT.glob("*.md"), *site, *(ROOT / "strategies").rglob("*.md")])


def commands_of(text: str) -> list[str]:
    """Return the commands in a page's blocks, in their order, each in one line and without its comment.

    A block is indented by four spaces, or stands between fences that name no language but that of a shell.
    """
    found, fence = list[str](), None
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            fence = None if fence is not None else line.strip().removeprefix("```")
        elif fence in SHELLS if fence is not None else line.startswith("    "):
            command = " ".join(re.split(r"\s#", line.strip().removeprefix("$ "))[0].split())
            found.append(command.removeprefix(".venv/bin/"))
    return list(dict.fromkeys(command for command in found if PROGRAMS.match(command)))


def why_not(command: str) -> str:
    """Return why a command is not run here, or an empty text."""
    return next((reason for pattern, reason in LEFT_OUT.items() if re.search(pattern, command)), "")


def prepare(folder: Path) -> None:
    """Put into a folder what the documents take for granted: a fleet, runs, and the files that their blocks of code show."""
    everything = "".join(page.read_text("utf-8") for page in pages())
    for name, code in re.findall(r"```(?:python|toml)\n# (\w[\w-]*\.(?:py|toml))\n(.*?)```", everything, re.DOTALL):
        (folder / name).write_text(code, encoding="utf-8")
    for name in FILES:
        if not (folder / name).exists():
            shutil.copy(ROOT / "device_profiles" / "fleets" / "boards.toml", folder / name)
    (folder / "docs" / "pictures").mkdir(parents=True)
    if (folder / "my_data.py").exists():
        run_in(folder, "python my_data.py", 60)
    for name in ("demo", "A", "B"):
        done = run_in(folder, f"piecework run --rounds 2 --set run-name={name}", 120)
        assert done["code"] == 0, done


def run_in(folder: Path, command: str, seconds: float) -> dict[str, Any]:
    """Run a command in a folder for so many seconds at most. Returns what came of it."""
    words = shlex.split(re.sub(r"study NAME\b", "study STUDY", command))
    for pattern, ours in OURS.items():
        words = [re.sub(pattern, ours, word) for word in words]
    if {">", "|"} & {*words}:
        words = ["bash", "-c", " ".join(word if word in (">", "|") else shlex.quote(word) for word in words)]
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    if re.search(r":(mine|pictures)\b", command):  # in the page's folder
        environment.pop("PIECEWORK_DATA", None)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(seconds)
            outcome = "done" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            outcome = "begun"
            interrupt(process)
        took = time.monotonic() - started
        output.seek(0)
        said = output.read()[-600:] if outcome == "failed" else ""
    return {"outcome": outcome, "code": process.returncode, "seconds": round(took, 1), "said": said}


def interrupt(process: "subprocess.Popen[bytes]") -> None:
    """End a command and its processes as Ctrl-C does: the first ends it after what it is at, the second at once."""
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
        return


def run(chosen: list[str], seconds: float, *, again: bool) -> int:
    """Run the commands of these pages, or of all, and write the records after each. Returns how many failed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    records: dict[str, Any] = json.loads(RECORDS.read_text("utf-8")) if RECORDS.exists() else {}
    everywhere = {each for page in pages() for each in commands_of(page.read_text("utf-8"))}
    records = {command: record for command, record in records.items() if command in everywhere}
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary) / "base"
        base.mkdir()
        prepare(base)
        for page in pages():
            if chosen and page.stem not in chosen:
                continue
            wanted = [each for each in commands_of(page.read_text("utf-8")) if not why_not(each)]
            wanted = [each for each in wanted if again or records.get(each, {}).get("outcome", "failed") == "failed"]
            if not wanted:
                continue
            folder = Path(shutil.copytree(base, Path(temporary) / "page"))
            for command in wanted:
                found = run_in(folder, command, seconds)
                said = found.pop("said")
                found |= {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}
                records[command] = found
                failed += found["outcome"] == "failed"
                print(f"{found['outcome']} {found['seconds']:7.1f} s  {page.stem}: {command}", flush=True)
                if said:
                    print(said, flush=True)
                RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            shutil.rmtree(folder)
    return failed


def beside(block: str, records: dict[str, Any]) -> str:
    """Return the sentence below a block of commands: when those that take long were last run. Empty if none of them does."""
    found = [(each, records[each]) for each in commands_of(f"```\n{block}\n```") if each in records]
    long = [record for _, record in found if record["seconds"] > LONG and record["outcome"] != "failed"]
    if not long:
        return ""
    last = min(long, key=lambda record: record["date"])
    times = ", ".join(
        f"{record['seconds']:.0f} s" if record["outcome"] == "done" else "stopped before its end" for record in long
    )
    return f"Last run on {last['date']} at commit {last['commit']} ({times})."


def status() -> None:
    """Print each command with what came of it, or why it is not run."""
    records = json.loads(RECORDS.read_text("utf-8")) if RECORDS.exists() else {}
    for page in pages():
        for command in commands_of(page.read_text("utf-8")):
            found = records.get(command)
            what = (
                f"{found['outcome']}, {found['date']}, {found['commit']}"
                if found
                else why_not(command) or "not run yet"
            )
            print(f"{page.stem}: {command}\n    {what}")


def main() -> None:
    """Run the commands, or say which were run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "status"])
    parser.add_argument("--pages", default="", help="names of pages, separated by commas; all without")
    parser.add_argument("--seconds", type=float, default=120.0, help="that a command may take")
    parser.add_argument("--again", action="store_true", help="run what was run before, too")
    arguments = parser.parse_args()
    if arguments.what == "status":
        status()
        return
    chosen = arguments.pages.split(",") if arguments.pages else []
    sys.exit(1 if run(chosen, arguments.seconds, again=arguments.again) else 0)


if __name__ == "__main__":
    main()
