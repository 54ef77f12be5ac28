"""Resume a run with damaged files from the newest checkpoint that is intact and whose round is recorded.

No file is deleted: damaged files, and checkpoints of rounds whose records are lost, are kept under another name.
"""

import logging
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from piecework.server_app.records import Checkpoint, CheckpointError, RunDir, read_checkpoint, round_of

LOG = logging.getLogger("piecework")


@dataclass(frozen=True)
class Recovery:
    """The checkpoint to resume from, None if the run has none, and the damage that was found.

    `records_damage` describes the first damaged record, and is empty if there is none. `damaged` maps folders of damaged
    checkpoints to descriptions. `unrecorded` are folders of checkpoints of rounds without a record.
    """

    checkpoint: Checkpoint | None
    records_damage: str = ""
    damaged: dict[Path, str] = field(default_factory=dict)
    unrecorded: list[Path] = field(default_factory=list)


def find_recovery(run_dir: RunDir) -> Recovery:
    """Inspect a run that is to be resumed, without changing it. Raises CheckpointError if no usable checkpoint is left."""
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
    lines = [f"{run_dir.path} has no usable checkpoint; start a new run", *filter(None, [damage])]
    lines += damaged.values()
    lines += [f"{path}: {run_dir.rounds_file} holds no record of this round" for path in unrecorded]
    raise CheckpointError("\n".join(lines))


def quarantine(run_dir: RunDir, recovery: Recovery) -> None:
    """Keep damaged files and unrecorded checkpoints under another name, and log each of them."""
    if recovery.checkpoint is None:
        return
    where = f"the run continues from round {recovery.checkpoint.values['round']}"
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
    """Return the path, or the first of path-2, path-3, ... that does not exist yet."""
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free
