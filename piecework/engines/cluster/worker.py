"""What trains on the nodes of a cluster: a process of one thread, which keeps torch, its data and what it built."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray

from piecework.engines.cluster.packed import Packed, drop, held_clients, keeps, state_rounds, unpack
from piecework.engines.cluster.shared_arrays import Apart, as_arrays, put_together, take_apart
from piecework.engines.cluster.start import software
from piecework.engines.cluster.travel import find_data, keep_data, node_folder, shares
from piecework.federated_data.datasets import DatasetError
from piecework.models.imported.objects import take_object
from piecework.server_app.local_grid import NodeConfig, reply_to
from piecework.server_app.ordered_grid import SERVER, identify
from piecework.training.settings import Settings


class Greeting(NamedTuple):
    """What a worker says when it has started. `bytes` are its own; `data` says whether it has the run's data set."""

    software: dict[str, str]
    host: str
    process: int
    bytes: int
    data: bool


class Look(NamedTuple):
    """Where a node keeps clients' folders (empty = in the run's), and which clients of an experiment are there."""

    folder: str
    clients: dict[int, tuple[int, ...]]


class Job(NamedTuple):
    """A message for a worker. `references` are its larger arrays, `state` is a reference of the client's packed folder.

    `root` is the run's folder of clients, and `folder` the node's own, if it does not see that. `note` is a remark for the
    records. What a `fresh` client has on the node is older than a state that is lost, or of a run that ended.
    """

    message: Apart
    references: list[Any]
    client: int
    fresh: bool
    root: str = ""
    experiment: str = ""
    folder: str = ""
    state: Any = None
    note: str = ""

    @property
    def place(self) -> Path:
        """The client's folder on the node."""
        return Path(self.folder or self.root) / self.experiment / str(self.client)


class Answered(NamedTuple):
    """A reply, taken apart, and the rounds of the states that the client keeps on the node; None if it keeps nothing."""

    message: Apart
    arrays: list[np.ndarray]
    rounds: tuple[int, ...] | None


class Worker:
    """Trains clients, one after another. `checksums` are those of the run's data set; `module` is a model from Python."""

    def __init__(
        self,
        run_config: Mapping[str, Any],
        clients: int,
        node_config: NodeConfig,
        module: bytes,
        checksums: dict[str, str],
    ) -> None:
        import piecework.client_app.app  # noqa: F401 (takes seconds, once)

        identify(SERVER)
        self.run_config, self.clients, self.node_config = dict(run_config), clients, node_config
        self.checksums = checksums
        if module:
            take_object(str(run_config["model"]), module)

    def greet(self) -> Greeting:
        """Say what this node has."""
        data = not self.checksums or self._use(find_data(Settings.from_run_config(self.run_config), self.checksums))
        used = psutil.Process().memory_info().rss
        return Greeting(software(), platform.node(), os.getpid(), used, data)

    def _use(self, folder: Path | None) -> bool:
        if folder is not None:
            self.run_config["data-dir"] = str(folder)
        return folder is not None

    def take_data(self, files: dict[str, Any]) -> str:
        """Keep the data set that the head sends, as references of its files. Returns why that is impossible, if it is."""
        names = list(files)
        try:
            self._use(keep_data(zip(names, ray.get(list(files.values())), strict=True), self.checksums))
        except DatasetError as error:
            return str(error)
        return ""

    def look(self, mark: str, secret: str, experiment: str) -> Look:
        """Say where clients' folders are kept here; the head has written a secret to the file `mark` in the run's folder."""
        folder = Path(mark).parent if shares(Path(mark), secret) else node_folder()
        return Look("" if folder == Path(mark).parent else str(folder), held_clients(folder / experiment))

    def answer(self, job: Job) -> Answered:
        """Run the ClientApp on a message."""
        message = put_together(job.message, ray.get(job.references), copied=False)
        note = job.note
        if job.fresh and job.folder:
            drop(job.place)
        if job.state is not None:
            note = self._take_state(job)
        own = self.node_config
        if job.folder:
            own = {**(own if isinstance(own, Mapping) else own[job.client]), "scratch-dir": job.folder}
        reply = reply_to(message, self.run_config, self.clients, own)
        if note and not reply.has_error():
            outcome = reply.content.config_records["outcome"]
            outcome["note"] = "; ".join(filter(None, (note, str(outcome["note"]))))
        apart, buffers = take_apart(reply)
        kept = job.experiment and keeps(job.place)
        return Answered(apart, as_arrays(buffers), state_rounds(job.place) if kept else None)

    def _take_state(self, job: Job) -> str:
        """Put a client's state that comes from another node into its folder. Returns a remark if it is lost."""
        try:
            return unpack(Packed(*ray.get(job.state)), job.place)
        except ray.exceptions.RayError as error:
            drop(job.place)  # what is left here is older
            return f"its state, on another node, is lost ({type(error).__name__}), starts without a state"
