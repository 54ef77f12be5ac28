"""Files that a run reads, damaged at random bytes: the file is named, or made again, or the result is what it would be.

A trial copies a folder, damages one file in it, and runs a command that reads it. Allowed are: an error that names the file,
with no traceback; the very result of the undamaged file; and another result that the record of the round explains, as that of
a client that lost its state. A file that the user wrote has no checksum: if what it holds after the damage is valid, it is
another input.
"""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos.broken import said_by, whole_and_broken
from benchmarks.chaos.children import HANGS, Ended, end_of, start
from benchmarks.chaos.notebook import note, noted
from benchmarks.chaos.reads import READS, Read
from benchmarks.chaos.systems import differing, results, words_to_resume
from piecework.server_app.records import CheckpointError, RunDir

REFUSED = (1, 2)  # exit codes
WAYS = ("bytes", "block", "zeros", "cut", "emptied", "extended")
BASES = {"profl": 4, "spafl": 3}  # the rounds after which runs of these systems were killed


@dataclass(frozen=True)
class File:
    """A kind of file in the folder of a run that is resumed; `*` in its path is a client of the last round."""

    kind: str
    system: str
    path: str


FILES = [
    File("checkpoint: arrays", "profl", "checkpoint/round-00004/arrays.safetensors"),
    File("checkpoint: kept arrays", "profl", "checkpoint/round-00004/kept.safetensors"),
    File("checkpoint: state", "profl", "checkpoint/round-00004/state.json"),
    File("checkpoint: manifest", "profl", "checkpoint/round-00004/manifest.json"),
    File("rounds.jsonl", "profl", "rounds.jsonl"),
    File("settings.toml", "profl", "settings.toml"),
    File("lock", "profl", "lock"),
    File("now.json", "profl", "now.json"),
    File("coverage.json", "profl", "coverage.json"),
    File("client: features", "profl", "clients/*/{client}/features/*.npy"),
    File("client: frozen unit", "profl", "clients/*/{client}/frozen/*.safetensors"),
    File("client: in-use", "profl", "clients/*/in-use"),
    File("client: state", "spafl", "clients/*/{client}/state/*/*.safetensors"),
    File("client: manifest of a state", "spafl", "clients/*/{client}/state/*/manifest.json"),
]


def damage_runs(folder: Path, seed: int, trials: int, only: Sequence[str] = ()) -> None:
    """Damage each kind of file in each way, `trials` times, and note what came of it."""
    folder.mkdir(parents=True, exist_ok=True)
    bases = dict[str, tuple[dict[str, Any], Path]]()
    for file in FILES:
        for way, number in left_to_try(folder, file.kind, seed, trials, only):
            if file.system not in bases:
                bases[file.system] = whole_and_broken(folder, file.system, BASES[file.system])
            expected, broken = bases[file.system]
            draw = random.Random(f"{seed}-{file.kind}-{way}-{number}")
            came, said = resume_damaged(folder / "damaged-run", file, way, draw, expected, broken)
            note(folder, kind="damage", file=file.kind, way=way, number=number, seed=seed, came=came, said=said)
    for read in READS:
        for way, number in left_to_try(folder, read.kind, seed, trials, only):
            draw = random.Random(f"{seed}-{read.kind}-{way}-{number}")
            came, said = read_damaged(folder, read, way, draw)
            note(folder, kind="damage", file=read.kind, way=way, number=number, seed=seed, came=came, said=said)


def left_to_try(folder: Path, kind: str, seed: int, trials: int, only: Sequence[str]) -> list[tuple[str, int]]:
    """Return the ways and numbers of the trials of a kind that are not noted yet."""
    if only and not any(word in kind for word in only):
        return []
    done = {(each["way"], each["number"]) for each in noted(folder, kind="damage", file=kind, seed=seed)}
    return [(way, n) for n in range(1, trials + 1) for way in WAYS if (way, n) not in done]


def damage(path: Path, way: str, draw: random.Random) -> None:
    """Damage a file in one of WAYS. It has other content afterwards, unless it was empty and is cut."""
    content = bytearray(path.read_bytes())
    size = len(content)
    if way == "bytes":
        for position in draw.sample(range(size), min(size, draw.randint(1, 4))):
            content[position] ^= draw.randint(1, 255)
    elif way in ("block", "zeros"):
        at, length = draw.randrange(size or 1), draw.randint(1, 512)
        block = draw.randbytes(length) if way == "block" else bytes(length)
        content[at : at + length] = block[: max(0, size - at)]
    elif way == "cut":
        del content[draw.randrange(size or 1) :]
    elif way == "emptied":
        content.clear()
    else:
        content += draw.randbytes(draw.randint(1, 100))
    path.write_bytes(content)


def resume_damaged(
    run_dir: Path, file: File, way: str, draw: random.Random, expected: dict[str, Any], broken: Path
) -> tuple[str, str]:
    """Resume a copy of a broken run in which a file is damaged. Returns what came of it, and what was said."""
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(broken, run_dir)
    asked = [client["client"] for client in expected["records"][-1]["clients"] if client["status"] == "ok"]
    found = sorted(run_dir.glob(file.path.format(client=draw.choice(asked))))
    if not found:
        raise SystemExit(f"{broken} has no {file.path}")
    victim = draw.choice(found)
    damage(victim, way, draw)
    child = start(words_to_resume(run_dir), run_dir.with_suffix(".txt"))
    ended = end_of(child)
    assert ended is not None
    named = (victim.name, victim.parent.name) if victim.parent != run_dir else (victim.name, str(run_dir))

    def differs() -> bool:
        return bool(differing(expected, results(run_dir)))

    return judge(ended, named, differs, lambda: explained(run_dir))


def explained(run_dir: Path) -> str:
    """Return why clients say that they went on with something else than they had kept; empty if none says so."""
    notes = [client["note"] for record in RunDir(run_dir).rounds() for client in record["clients"] if client["note"]]
    return "; ".join(notes)


def read_damaged(folder: Path, read: Read, way: str, draw: random.Random) -> tuple[str, str]:
    """Run a command that reads a file, once with a sound one and once with a damaged one."""
    place = folder / f"read-{read.kind.replace(' ', '-').replace(':', '')}"
    place.mkdir(exist_ok=True)
    file, words, environment = read.make(place)
    sound = file.read_bytes()

    def carry_out() -> Ended:
        for name in ("run", "written"):
            shutil.rmtree(place / name, ignore_errors=True)
        ended = end_of(start(words, place / "said.txt", environment))
        assert ended is not None
        return ended

    if not (place / "sound.txt").is_file():
        ended = carry_out()
        if ended.code:
            raise SystemExit(f"{' '.join(words)} ended with exit code {ended.code}:\n{ended.said}")
        (place / "sound.txt").write_text(read.result(place, ended), encoding="utf-8")
    damage(file, way, draw)
    ended = carry_out()

    def differs() -> bool:
        return read.result(place, ended) != (place / "sound.txt").read_text("utf-8")

    try:
        return judge(ended, (file.name, file.parent.name), differs, lambda: "another input" if read.own else "")
    finally:
        file.write_bytes(sound)


def judge(ended: Ended, named: Sequence[str], differs: Callable[[], bool], why: Callable[[], str]) -> tuple[str, str]:
    """Return what came of a command, in one of a few words; what begins with FAULT may not be. And what was said of it."""
    said = said_by(ended)
    names = any(name in said for name in named)
    if "Traceback" in said:
        return "FAULT: traceback", said[-1500:]
    if ended.seconds >= HANGS or ended.code not in (0, *REFUSED):
        return f"FAULT: {'hangs' if ended.seconds >= HANGS else f'exit code {ended.code}'}", said[-1500:]
    if ended.code:
        return ("refused" if names else "FAULT: refused without a name"), said[-600:]
    try:
        if not differs():
            return "same result, told" if names else "same result", ""
    except (CheckpointError, ValueError, OSError) as error:
        return "FAULT: unreadable result", str(error)
    if reason := why():
        return "another result, told", reason[:300]
    return "FAULT: another result", said[-1500:]
