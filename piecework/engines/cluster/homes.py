"""Where clients' states lie on a cluster, and how they come to where a client trains next.

A state lies in the run's folder, or in a folder of the node where its client trained last. What was on a node that is gone is
lost, as with a device whose disk is lost: the client begins without a state, and its record says so.
"""

import logging
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

from piecework.engines.cluster.book import HEAD, Node
from piecework.engines.cluster.keeper import start_keeper
from piecework.engines.cluster.nodes import Nodes
from piecework.engines.cluster.packed import Packed, drop, held_clients, pack, unpack

LOOK_SECONDS = 30.0
LOST = "its state was on a node of the cluster that is gone, starts without a state"
LOG = logging.getLogger("piecework")


class Homes:
    """`places` says where each client's state lies: HEAD, or a node's name. Clients without a state are not in it."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.places: dict[int, str] = {}
        self._rounds: dict[int, tuple[int, ...]] = {}
        self._lost: dict[int, str] = {}
        self._folders: dict[str, str] = {}  # of the nodes that were asked; empty = they see the run's folder
        self._keepers: dict[str, Any] = {}  # of nodes, since a state was first moved from there
        self._moves: dict[int, str] = {}  # from where a client's state was taken, until it is trained
        self._root, self._experiment, self._secret = Path(), "", secrets.token_hex(16)

    def look(self, state_dir: str, experiment: str) -> None:
        """Ask nodes that were not asked yet where they keep clients' folders, and what of the experiment they hold."""
        if not (experiment or self.begun):
            return
        if not self.begun:
            self._root, self._experiment = Path(state_dir), experiment
            self._root.mkdir(parents=True, exist_ok=True)
            self._mark.write_text(self._secret, encoding="utf-8")
            for client, rounds in held_clients(self._root / experiment).items():
                self._found(client, HEAD, rounds)
        for name in self.nodes.known.keys() - self._folders.keys():
            if (worker := next(iter(self.nodes.known[name].idle), None)) is not None:
                self._ask(name, worker)

    @property
    def begun(self) -> bool:
        """Whether there is an experiment, of which nodes may hold states."""
        return bool(self._experiment)

    def asked(self, name: str) -> bool:
        """Whether it is known where a node keeps clients' folders."""
        return name in self._folders

    @property
    def _mark(self) -> Path:
        return self._root / f".head-{self._secret[:8]}"

    def _ask(self, name: str, worker: str) -> None:
        look = self.nodes.actor(worker).look.remote(str(self._mark), self._secret, self._experiment)
        try:
            found = ray.get(look, timeout=LOOK_SECONDS)
        except ray.exceptions.RayError:  # it died, or is suspended
            return self.nodes.replace(worker)
        self._folders[name] = found.folder
        self.nodes.known[name].place = name if found.folder else HEAD
        for client, rounds in found.clients.items() if found.folder else ():
            self._found(client, name, rounds)

    def _found(self, client: int, place: str, rounds: tuple[int, ...]) -> None:
        """Take in that a place holds a client's state: the newest counts, if several places hold one."""
        if client not in self.places or rounds[-1:] > self._rounds.get(client, ())[-1:]:
            self.places[client], self._rounds[client] = place, rounds

    def prepare(self, client: int, node: Node) -> tuple[str, Any, str]:
        """Prepare that a client trains on a node.

        Returns the folder for its files there (empty = the run's), a reference of its packed folder if that comes from
        elsewhere, and a remark if it is lost.
        """
        folder, home = self._folders.get(node.name, ""), self.places.get(client)
        self._moves.pop(client, None)
        if home is None:
            return folder, None, self._lost.get(client, "")
        if home == node.place:
            return folder, None, ""
        self._moves[client] = home
        if folder:
            return folder, self._pack(client, home), ""
        place = self._root / self._experiment / str(client)  # in the run's folder, where the node sees it
        try:
            note = unpack(ray.get(self._pack(client, home)), place)
        except (ray.exceptions.RayError, OSError) as error:
            drop(place)  # what is left here is older
            note = f"its state, on another node, is lost ({type(error).__name__}), starts without a state"
        return folder, None, note

    def _pack(self, client: int, home: str) -> Any:
        if home == HEAD:
            return ray.put(pack(self._root / self._experiment / str(client)))
        return self._keeper(home).pack.remote(self._folders[home], self._experiment, client)

    def _keeper(self, name: str) -> Any:
        """Return Ray's handle of what packs and removes files on a node."""
        if name not in self._keepers:
            self._keepers[name] = start_keeper(name)
        return self._keepers[name]

    def note(self, client: int, node: Node | None, rounds: tuple[int, ...] | None, *, trained: bool) -> None:
        """Note that a client did a task on a node, and of which `rounds` it has states there (None: it keeps nothing).

        What it left on another node stays until the end, because its state may return there before a removal would have run:
        a state that arrives replaces it. If the node has just gone, so has what the client kept there.
        """
        moved = self._moves.pop(client, None)
        self.places.pop(client, None)
        if trained:
            self._lost.pop(client, None)
        if node is None:
            self._lost[client] = LOST
            return
        if rounds is not None:
            self.places[client], self._rounds[client] = node.place, rounds
        if moved == HEAD and node.place != HEAD:
            drop(self._root / self._experiment / str(client))

    def forget_lost(self) -> None:
        """Take in that nodes are gone, and with them the states that they held."""
        gone = self._folders.keys() - self.nodes.known.keys()
        for name in gone:
            del self._folders[name]
            self._keepers.pop(name, None)
        for client in [client for client, place in self.places.items() if place in gone]:
            del self.places[client]
            self._lost[client] = LOST

    def bring_all(self) -> None:
        """Bring all states that lie elsewhere to the run's folder, and remove the experiment from nodes.

        A state that cannot come stays, and the log says so.
        """
        failed = set[str]()
        for client, home in sorted(self.places.items()):
            if home != HEAD and home in self.nodes.known:
                try:
                    packed: Packed = ray.get(self._pack(client, home))
                    wrong = unpack(packed, self._root / self._experiment / str(client))
                except (OSError, ray.exceptions.RayError) as error:
                    wrong = str(error).splitlines()[0]
                if wrong:
                    LOG.warning("the state of client %d stays on node %s: %s", client, self.nodes.address(home), wrong)
                    failed.add(home)
                else:
                    self.places[client] = HEAD
        others = {name for name, folder in self._folders.items() if folder} & self.nodes.known.keys()
        removed = [self._keeper(name).drop.remote(self._folders[name], self._experiment) for name in others - failed]
        if removed:
            ray.wait(removed, num_returns=len(removed), timeout=LOOK_SECONDS)

    def close(self) -> None:
        """End the keepers, and remove the mark in the run's folder."""
        for keeper in self._keepers.values():
            with suppress(ray.exceptions.RayError):
                ray.kill(keeper)
        self._keepers.clear()
        if self._experiment:
            self._mark.unlink(missing_ok=True)
