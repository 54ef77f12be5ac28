"""Run what claims of papers need, say what is missing of it, and write down what came out.

    python -m benchmarks.claims run [NAME] [--jobs 2] [--hours 8] [--only ROW] [--case CASE] [--retry] [--out DIR]
    python -m benchmarks.claims run [NAME] [--first 2]
    python -m benchmarks.claims status [NAME] [--json] [--out runs/claims]
    python -m benchmarks.claims collect FOLDER
    python -m benchmarks.claims table [NAME]

A claim is a file NAME.toml in benchmarks/claims/ (definition.py shows one); without NAME all of them are meant, in the order
of their names. `run` starts what is missing as ordinary runs, one seed of every row before the second of any, and goes on with
what was interrupted; what docs/claims has already is not run again. With `--first 2` it starts one run of each row in each
case and stops it after two rounds, so that `status` can say how many hours of a core are left, on a busy machine too. `--hours
8` stops the running ones too. `--only FeDepth` and `--case "parameters, mixed"` run a part. A run that failed is tried again
only with `--retry`. Its failure is a result if the run itself says that nobody can train, or that it diverged; any other one,
such as a full disk, leaves its search open, and after three of these in a row nothing more is started. `collect` merges the
finished runs of a folder that `run` wrote to into docs/claims/NAME.json, and `table` writes the pages from these records.
"""

import argparse
import json
import math
import os
import signal
import sys
from pathlib import Path

from benchmarks.claims.collect import collect
from benchmarks.claims.definition import Claim, ClaimError
from benchmarks.claims.jobs import load, require_named
from benchmarks.claims.reading import names
from benchmarks.claims.records import DOCS
from benchmarks.claims.runner import ROOT, Options, run
from benchmarks.claims.status import STATES, ClaimStatus, RowStatus, status_of
from piecework.server_app.records import CheckpointError
from piecework.server_app.signals import end_on_hangup
from piecework.studies.notes import NoteError
from piecework.studies.outcomes import ENDED_BY_SIGNAL
from piecework.studies.pace import in_words

OUT = ROOT / "runs" / "claims"
INTERRUPTED, TERMINATED = ENDED_BY_SIGNAL
UNREAD = 141  # exit code after SIGPIPE


def main() -> None:
    """Parse the command line, and do what it asks for."""
    asked = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that started runs are stopped
    end_on_hangup()
    try:
        claims = [load(name) for name in ([asked.name] if getattr(asked, "name", "") else names())]
        asked.do(claims, asked)
        sys.stdout.flush()
    except BrokenPipeError:  # as of `status | head`, which has read enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # else Python complains when it flushes at its end
        sys.exit(UNREAD)
    except (ClaimError, NoteError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = argparse.ArgumentParser(
        "python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(required=True)
    of_run = commands.add_parser("run", help="start what is missing")
    of_run.add_argument("--jobs", type=positive, default=1, metavar="N", help="runs at once, each on one thread")
    of_run.add_argument("--only", default="", metavar="ROW", help="the runs of this row")
    of_run.add_argument("--case", default="", metavar="CASE", help="the runs of this case, and the searches they need")
    of_run.add_argument("--hours", type=hours, default=math.inf, metavar="H", help="stop after this time")
    of_run.add_argument("--first", type=positive, default=0, metavar="R", help="time a run of each row by R rounds")
    of_run.add_argument("--retry", action="store_true", help="try again what has failed")
    of_run.add_argument("--data-dir", default="", metavar="DIR", help="data sets; default: PIECEWORK_DATA")
    of_run.set_defaults(do=do_run)
    of_status = commands.add_parser("status", help="what is missing, and for how long")
    of_status.add_argument("--json", action="store_true", help="machine-readable output")
    of_status.set_defaults(do=do_status)
    of_collect = commands.add_parser("collect", help="merge finished runs into docs/claims")
    of_collect.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that `run --out` wrote to")
    of_collect.set_defaults(do=do_collect)
    of_table = commands.add_parser(
        "table", help="write docs/claims/NAME.md, its pictures and what advice tells, from the records"
    )
    of_table.set_defaults(do=do_table)
    for command in (of_run, of_status, of_table):
        command.add_argument("name", nargs="?", default="", metavar="NAME", help="a claim; default: all")
    for command in (of_run, of_status):
        command.add_argument(
            "--out", type=Path, default=OUT, metavar="DIR", help="where runs are; default: runs/claims"
        )
    return whole


def positive(text: str) -> int:
    """Parse a whole number above 0. Raises ValueError."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def hours(text: str) -> float:
    """Parse a number of hours, 0 or more. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of hours: give 0 or more, such as 0.5")
    return number


def require_folder(path: Path, option: str) -> Path:
    """Return a folder's path, which need not exist. Raises ClaimError if a file is in its place or above it."""
    path = path.resolve()
    if (found := next(each for each in (path, *path.parents) if each.exists())) and not found.is_dir():
        raise ClaimError(f"{option} {path}: {found} is a file; name a folder")
    return path


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def do_run(claims: list[Claim], asked: argparse.Namespace) -> None:
    """Start what is missing; exit code 1 if a run failed."""
    require_named(claims, asked.only, asked.case)
    data_dir = str(Path(asked.data_dir).resolve()) if asked.data_dir else ""
    out = require_folder(asked.out, "--out")
    os.environ["OMP_NUM_THREADS"] = "1"  # of each run
    options = Options(out, asked.jobs, asked.only, asked.case, asked.hours, asked.first, asked.retry, data_dir)
    if failed := run(claims, options, say):
        sys.exit(f"{len(failed)} failed: {'; '.join(failed)}")


def do_status(claims: list[Claim], asked: argparse.Namespace) -> None:
    """Print what is missing."""
    out = require_folder(asked.out, "--out")
    found = [status_of(claim, out) for claim in claims]
    total = sum(each.hours for each in found)
    unknown, unevaluated = sum(each.unknown for each in found), sum(each.unevaluated for each in found)
    if asked.json:
        values = [each.to_values() for each in found]
        print(json.dumps({"claims": values, "hours": total, "unknown": unknown, "unevaluated": unevaluated}))
        return
    for each in found:
        print("\n".join(lines_of(each)))
    how = " (`run --first 2` times two rounds of each row)" if unknown else ""
    print(f"all: {in_words(total, unknown, unevaluated)}{how}")


def lines_of(status: ClaimStatus) -> list[str]:
    """Return the status of a claim as lines of text."""
    width = max(len(row.row) for row in status.rows)
    lines = [f"{status.claim}: {left(status)}"]
    for row in status.rows:
        lines.append(f"  {row.row:{width}s}  {counts_of(row):30s}  {left(row)}")
    lines += [f"  {damage}" for damage in status.damage]
    return lines + [
        f"  of another definition, or with another rate than was found: {folder}" for folder in status.older
    ]


def counts_of(row: RowStatus) -> str:
    """Return how many runs of a row are in which state, in words: `2 done, 1 cannot train, 3 missing`."""
    counts: dict[str, int] = {}
    for state in STATES:
        idle = row.untrainable if state == "failed" else 0
        counts |= {state: row.counts[state] - idle} | ({"cannot train": idle} if state == "failed" else {})
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count)


def left(status: ClaimStatus | RowStatus) -> str:
    """Return in words how long a claim or a row will take, and what of it cannot be estimated yet."""
    return in_words(status.hours, status.unknown, status.unevaluated)


def do_collect(claims: list[Claim], asked: argparse.Namespace) -> None:
    """Merge the runs below a folder into the records of all claims that have some there."""
    folder = require_folder(asked.folder, "collect")
    if not any((folder / claim.name).is_dir() for claim in claims):
        raise ClaimError(f"{asked.folder}: no folder in it is that of a claim ({', '.join(c.name for c in claims)})")
    for claim in claims:
        found = collect(claim, folder, DOCS, say)
        say(f"{claim.name}: {len(found.runs)} runs and {len(found.searches)} searches are recorded")


def do_table(claims: list[Claim], asked: argparse.Namespace) -> None:
    """Write the pages."""
    from benchmarks.claims.evidence import write_evidence
    from benchmarks.claims.pages import write_pages

    for claim in claims:
        files = write_pages(claim)
        say(
            f"{claim.name}: {', '.join(path.name for path in files) or 'no record yet: run it, and collect what it wrote'}"
        )
    say(f"all: {write_evidence(names()).name}")


if __name__ == "__main__":
    main()
