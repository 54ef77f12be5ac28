"""The files of a client on disk: model units that are not in memory, its state between rounds, and features.

`<state-dir>/<experiment-id>/<client>/` holds a folder for the running task (model units, features, the state that is being
written), `state/<round>/...` (the last two are kept), `frozen/` (units by content hash) and `features/` (features of the
examples behind frozen atoms). A state has a manifest of checksums and is discarded if a file does not match it. All files are
safetensors, .npy and JSON, which cannot execute code when they are read. A unit without arrays, such as an atom that only
flattens, has no file.
"""

import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn

from piecework.client_app.kept_experiments import hold, remove_old
from piecework.client_app.seal import damage, seal
from piecework.client_app.task_folder import claim, remove, remove_leftovers
from piecework.models.cascade import unit_of
from piecework.models.static_norms import is_statistic
from piecework.training.readable import MessageError

KEPT_STATES = 2


class Store:
    """The folder of one client of one experiment; `task` names the folder of the running task.

    `notes` are remarks for the user on damaged files and on leftovers of tasks whose process died. `is_bare` says whether a
    unit of the task's model has no arrays. Raises ValueError for an experiment id that is no plain name.
    """

    is_bare: Callable[[str], bool]

    def __init__(self, state_dir: Path, experiment_id: str, client: int, task: str) -> None:
        if not re.fullmatch(r"[\w-]+", experiment_id):
            raise ValueError(f"experiment-id {experiment_id!r} is invalid: only letters, digits, - and _ are allowed")
        self._held = hold(state_dir / experiment_id)
        self.root = state_dir / experiment_id / str(client)
        self.frozen, self.features = self.root / "frozen", self.root / "features"
        self.task, self._lock, reused = claim(self.root, task)
        self.model = self.task / "model"
        self.model.mkdir()
        left = remove_leftovers(self.root, self.task, {"state", "frozen", "features"}) + [self.task.name] * reused
        self.is_bare = lambda unit: False
        self.notes = [f"removed {name}, left by a task whose process died" for name in left]

    def write_units(self, arrays: Mapping[str, np.ndarray], folder: Path | None = None) -> None:
        """Write arrays with global names, one file per unit, to the task's model folder or to `folder`.

        Raises MessageError for a name that a model's array cannot have.
        """
        units: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            if not re.fullmatch(r"[\w.]+", name):
                raise MessageError(f"array name {name!r:.100} is invalid: only letters, digits, _ and . are allowed")
            units.setdefault(unit_of(name), {})[name] = np.ascontiguousarray(array).reshape(array.shape)
        for unit, entries in units.items():
            path = (folder or self.model) / f"{unit}.safetensors"
            save_file(entries, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)

    def save(self, unit: str, module: nn.Module, folder: Path | None = None) -> None:
        """Write a unit's module to the task's model folder or to `folder`."""
        state = module.state_dict()
        self.write_units({f"{unit}.{name}": value.detach().cpu().numpy() for name, value in state.items()}, folder)

    def load(self, unit: str, module: nn.Module, folder: Path | None = None) -> None:
        """Copy a unit's arrays into its module, in place, one array at a time.

        Batch-norm statistics missing in the file keep their initial values: training may use none although the served model
        has them. Raises FileNotFoundError if a unit with arrays has no file.
        """
        if not (state := module.state_dict()):
            return
        with (
            safe_open(_existing((folder or self.model) / f"{unit}.safetensors"), framework="np") as file,
            torch.no_grad(),
        ):
            held = set(file.keys())
            for name, target in state.items():
                if f"{unit}.{name}" in held or not is_statistic(name):
                    _fill(target, f"{unit}.{name}", file, held)

    def read(self, units: Iterable[str], folder: Path | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the global names and arrays of units, from the task's model folder or from `folder`.

        Raises FileNotFoundError if a unit with arrays has no file.
        """
        for path in self.files(units, folder):
            yield from _arrays(path)

    def files(self, units: Iterable[str], folder: Path | None = None) -> Iterator[Path]:
        """Yield the files of those units that have arrays, in the task's model folder or in `folder`.

        Raises FileNotFoundError if such a unit has no file.
        """
        for unit in units:
            path = (folder or self.model) / f"{unit}.safetensors"
            if path.is_file() or not self.is_bare(unit):
                yield _existing(path)

    def close(self) -> None:
        """Remove the folder of the task, which has ended, and release its lock."""
        shutil.rmtree(self.task, ignore_errors=True)
        self._lock.close()
        self._held.close()

    def remove_other_experiments(self, kept: int) -> None:
        """Remove the stores of other experiments, with a note each, except those in use and the `kept` used last (0: all)."""
        experiment = self.root.parent
        self.notes += remove_old(experiment.parent, experiment.name, kept)

    def newest_state(self, state_round: int, discarded_rounds: Sequence[Sequence[int]] = ()) -> Path | None:
        """Return the folder of the newest intact state up to round `state_round`, or None.

        Later states are deleted, because the server went back behind them. States of rounds within a (first, last) pair of
        `discarded_rounds` are deleted too, and so are damaged ones, with a note.
        """
        discarded: list[str] = []
        for number in sorted(self._states(), reverse=True):
            folder = self.root / "state" / str(number)
            if number <= state_round and not any(first <= number <= last for first, last in discarded_rounds):
                fault = damage(folder)
                if not fault:
                    self._note_discarded(discarded, f"continues from its state of round {number}")
                    return folder
                discarded.append(f"{number} ({fault})")
            remove(folder)
        self._note_discarded(discarded, "starts without a state")
        return None

    def _note_discarded(self, discarded: list[str], then: str) -> None:
        if discarded:
            self.notes.append(f"discarded its state of round {', '.join(discarded)}, {then}")

    def new_state(self, server_round: int, old: Path | None = None) -> Path:
        """Return a folder for this round's state, with a copy of `old`; it becomes valid with `commit_state`."""
        folder = self.task / "state" / str(server_round)
        shutil.rmtree(folder, ignore_errors=True)
        if old is not None:
            shutil.copytree(old, folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit_state(self, folder: Path, kept_round: int = 0) -> None:
        """Make a completely written state the newest, and remove older ones.

        The last two are kept. With `kept_round`, so are the newest state up to that round and all later ones.
        """
        seal(folder)
        final = self.root / "state" / folder.name
        final.parent.mkdir(exist_ok=True)
        if final.exists():
            remove(final)
        folder.replace(final)
        states = sorted(self._states())
        oldest = max((n for n in states if n <= kept_round), default=0) if kept_round else states[-1]
        for number in (n for n in states[:-KEPT_STATES] if n < oldest):
            remove(self.root / "state" / str(number))

    def _states(self) -> list[int]:
        names = [path.name for path in (self.root / "state").glob("*")]
        return [int(name) for name in names if name.isdecimal() and name == str(int(name))]

    def drop_features(self, *parts: str) -> None:
        """Remove the features of parts that are not read any more."""
        for part in parts:
            self.feature_path(part).unlink(missing_ok=True)

    def feature_path(self, part: str) -> Path:
        """Return the file for the features of a part, which names training or validation data and the piece."""
        return self.task / f"features-{part}.npy"


def _fill(target: torch.Tensor, name: str, file: Any, held: Collection[str]) -> None:
    """Copy an array of a file into a parameter or a buffer. Raises MessageError if there is none, or one of another shape."""
    if name not in held:
        raise MessageError(f"the message has no array {name!r:.100}, which the task's model needs")
    found = file.get_tensor(name)
    if found.shape != tuple(target.shape):
        raise MessageError(
            f"array {name!r:.100} has shape {found.shape}: that of the task's model has {tuple(target.shape)}"
        )
    if found.dtype.kind == "i" and (found < 0).any():
        raise MessageError(f"array {name!r:.100} counts batches, and has a number below 0")
    target.copy_(torch.from_numpy(found))


def _arrays(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
            yield name, file.get_tensor(name)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"the client's store has no {path.name} in {path.parent}: the task names a unit that was not sent"
        )
    return path


class FeatureWriter:
    """Writes batches to an .npy file of known size without mapping it, because dirty pages would count as memory.

    `count` is the number of examples, `shape` the shape of one. The file has float32, or uint16 that are the bits of bfloat16
    (`kind`). Raises OSError if the file would exceed `limit` bytes.
    """

    def __init__(
        self, path: Path, count: int, shape: tuple[int, ...], limit: int, kind: type[np.generic] = np.float32
    ) -> None:
        self._kind = np.dtype(kind)
        size = self._kind.itemsize * count * math.prod(shape)
        if size > limit:
            raise OSError(
                f"features of {count} examples of shape {shape} take {size:,} bytes, more than memory.feature-cache-bytes = "
                f"{limit:,}: raise it, or give the client fewer examples"
            )
        self.path = path
        self._file = path.with_suffix(".tmp").open("wb")
        header = {"descr": self._kind.newbyteorder("<").str, "fortran_order": False, "shape": (count, *shape)}
        np.lib.format.write_array_header_1_0(self._file, header)
        self._start, self._row = self._file.tell(), self._kind.itemsize * math.prod(shape)

    def put(self, rows: np.ndarray, batch: np.ndarray) -> None:
        """Write each example of a batch [B, *shape] to its row; consecutive rows are written together."""
        first = 0
        for last in [*np.flatnonzero(np.diff(rows) != 1), len(rows) - 1]:
            self._file.seek(self._start + int(rows[first]) * self._row)
            self._file.write(np.ascontiguousarray(batch[first : last + 1], dtype=self._kind).data)
            first = last + 1

    def close(self) -> np.ndarray:
        """Finish the file and return it memory-mapped, read-only."""
        self._file.close()
        self.path.with_suffix(".tmp").replace(self.path)
        mapped: np.ndarray = np.load(self.path, mmap_mode="r", allow_pickle=False)
        return mapped
