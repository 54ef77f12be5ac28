"""From where a run goes on when some of its files are damaged: the newest checkpoint that can be used and is recorded.

Nothing is thrown away: damaged files, and checkpoints of rounds whose records are lost, are put aside under another name.
"""

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from piecework.server_app.records import Checkpoint, CheckpointError, RunDir, read_checkpoint, round_of

LOG = logging.getLogger("piecework")


@dataclass(frozen=True)
class Recovery:
    """`checkpoint` is None where the run has not come to one. `records_damage` is empty where no record is damaged.

    `damaged` and `unrecorded` are folders of checkpoints.
    """

    checkpoint: Checkpoint | None
    records_damage: str = ""
    damaged: dict[Path, str] = field(default_factory=dict)
    unrecorded: list[Path] = field(default_factory=list)


def find_recovery(run_dir: RunDir) -> Recovery:
    """Look at a run that is to go on; nothing is changed. Raises CheckpointError where no checkpoint is left to go on from."""
    records, damage = run_dir.readable_rounds()
    last = records[-1]["round"] if records else 0
    damaged: dict[Path, str] = {}
    unrecorded: list[Path] = []
    for path in reversed(run_dir.checkpoint_paths()):
        if round_of(path) > last:
            unrecorded.append(path)
            continue
        try:
            return Recovery(read_checkpoint(path), damage, damaged, unrecorded)
        except CheckpointError as error:
            damaged[path] = str(error)
    if not (damaged or unrecorded or damage):
        return Recovery(None)
    lines = [f"{run_dir.path} has no checkpoint to go on from; begin a new run", *filter(None, [damage])]
    lines += damaged.values()
    lines += [f"{path}: {run_dir.rounds_file} holds no record of this round" for path in unrecorded]
    raise CheckpointError("\n".join(lines))


def put_aside(run_dir: RunDir, recovery: Recovery) -> None:
    """Keep what is damaged under another name, and say so in the log."""
    if recovery.checkpoint is None:
        return
    where = f"the run goes on from round {recovery.checkpoint.values['round']}"
    if recovery.records_damage:
        kept = free_name(run_dir.rounds_file.with_name(run_dir.rounds_file.name + ".damaged"))
        shutil.copy2(run_dir.rounds_file, kept)
        LOG.warning("%s: %s, and the damaged file is kept as %s", recovery.records_damage, where, kept)
    for path, damage in recovery.damaged.items():
        kept = path.replace(free_name(path.with_name("damaged-" + path.name)))
        LOG.warning("%s: %s, and the damaged checkpoint is kept as %s", damage, where, kept)
    for path in recovery.unrecorded:
        kept = path.replace(free_name(path.with_name("unrecorded-" + path.name)))
        LOG.warning(
            "%s holds no record of round %s: %s, and that checkpoint is kept as %s",
            run_dir.rounds_file,
            round_of(path),
            where,
            kept,
        )


def free_name(path: Path) -> Path:
    """The path, or with -2, -3, ... behind it, so that nothing is overwritten."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
