"""Hostile answers: five of six clients send whatever they like, in every system, and may not harm the run.

    python -m benchmarks.hostile [--answers 100000] [--only fedavg,prism] [--seed 1]

In each example, hypothesis draws how the answers of five clients are changed: figures, outcomes, texts, arrays, whole records,
or an error in their place. The sixth client is honest. A round is played with these answers, from the beginning or from a state
that honest rounds left: queries, training, evaluation, and the measurement of batch norms. Afterwards the round must have its
record, in JSON, with every number in range and every text printable, and the model its arrays, finite and of their shapes. Each
system also reads answers of nodes that connect. At the end the run must have a summary. Clients train once; from then on their
true answers are repeated, so that a round takes milliseconds.
"""

import argparse
import json
import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Error, Message, RecordDict
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks.golden import NEEDED
from benchmarks.hostile_arrays import ARRAYS, NESTED, PARCELS, change_arrays, change_parcels
from piecework.federated_data.datasets import default_cache, prepare
from piecework.federation.aggregation import spec_of
from piecework.federation.registry import ClientRegistry
from piecework.server_app.local_grid import LocalGrid
from piecework.server_app.ordered_grid import FIRST_NODE
from piecework.server_app.records import RunDir
from piecework.server_app.rounds import Run
from piecework.server_app.summary import summarise
from piecework.training.answers import Figures
from piecework.training.methods import METHODS
from piecework.training.parcels import pack, unpack
from piecework.training.settings import Settings
from piecework.training.setup import open_dataset

HOSTILE = range(FIRST_NODE, FIRST_NODE + 5)
TINY = {
    "clients": 6,
    "clients-per-round": 0,
    "num-rounds": 1000,
    "training.local-epochs": 1,
    "training.batch-size": 8,
    "evaluation.on-clients-every": 1,
    "faults.allow-untrained": True,
    "faults.max-empty-rounds": 10**6,
    "engine": "local",
    "workers": 1,
}
OWN = {
    "feddf": {"feddf.server-iterations": 1},
    "fedet": {"feddf.server-iterations": 1},
    "fjord": {"heterofl.width-ratios": "1,0.5"},
    "fedprophet": {"fedprophet.stage-rounds": 1, "attack.steps": 1, "attack.warmup": 0},
    "local": {"evaluation.on-clients-every": 0},
    "profl": {"fleet": "unlimited"},
    "slt": {"num-rounds": 1000},
    "spafl": {"evaluation.on-clients-every": 0},
    "splitmix": {"splitmix.width-ratio": 0.25},
}
Drawn = dict[str, st.SearchStrategy[Any]]
LARGEST = 1e60  # of any number in a record: products of two figures are still far from infinity

EXTREMES = [0, 1, -1, 2**31, 2**56, 2**60, 2**60 + 1, 2**63 - 1, -(2**63), 10**8, 10**12]
LIMITS = [57.5, -1.0, 1e8, 1e30, 1e300, 1.7e308, -1.7e308, 5e-324, math.nan, math.inf, -math.inf]
WHOLE = st.integers(-(2**63), 2**63 - 1)
NUMBERS: st.SearchStrategy[Any] = st.sampled_from([*EXTREMES, *LIMITS]) | WHOLE | st.floats()
LISTS = st.sampled_from([[], [0] * 10_000]) | st.lists(WHOLE, max_size=9) | st.lists(st.floats())
ITEMS = ['[{"atoms":["first"]}]', '[{"atoms":[0],"copies":1e999}]', '[{"atoms":[0],"variant":{"width":-1}}]']
SHOWN = ["\x1b]0;owned\x07", "[red]a[/b]", "\u202e", "ok", ""]
TEXTS = st.sampled_from([*NESTED, *ITEMS, *SHOWN]) | st.text(max_size=20)
NAMES = st.sampled_from(
    [*Figures.model_fields, *(field.alias or "" for field in Figures.model_fields.values())]
) | st.sampled_from(["macs", "mask", "classes", "widths", "fresh", "perturbation", "min-feature", "val-loss-2", "new"])
FIELDS = st.sampled_from(
    ["status", "needed", "allowed", "reason", "note", "missing", "done", "device", "software", "new"]
)
RECORDS = st.sampled_from(["outcome", "metrics", "arrays", "node"])
CHANGES = st.one_of(
    st.tuples(st.just("figure"), NAMES, NUMBERS | LISTS),
    st.tuples(st.just("field"), FIELDS, NUMBERS | LISTS | TEXTS | st.lists(TEXTS, max_size=3) | st.booleans()),
    st.tuples(st.just("array"), st.integers(0, 99), ARRAYS),
    st.tuples(st.just("parcel"), st.integers(0, 99), PARCELS),
    st.tuples(st.just("without"), NAMES | FIELDS | RECORDS, st.none()),
    st.tuples(st.just("instead"), RECORDS, RECORDS),
    st.tuples(st.just("error"), st.integers(-(2**31), 2**31 - 1) | st.integers(0, 9), TEXTS),
)


def change(content: RecordDict, kind: str, name: Any, value: Any) -> None:
    """Change an answer in place. A change that Flower itself does not let through leaves it as it is."""
    try:
        if kind == "figure":
            content.metric_records["metrics"][name] = value
        elif kind == "field":
            content.config_records["node" if name in ("device", "software") else "outcome"][name] = value
        elif kind == "instead" and {name, value} <= {*content}:
            other = content[value]
            del content[name]  # Flower warns of a record of another kind
            content[name] = other
        elif kind == "without" and name in content:
            del content[name]
        elif kind == "without":
            for record in content.values():
                record.pop(name, None)
        elif kind == "array":
            arrays = unpack(content.array_records["arrays"])
            change_arrays(arrays, name, value)
            content["arrays"] = pack(arrays.items())
        elif kind == "parcel":
            change_parcels(content.array_records["arrays"], name, value)
    except (KeyError, TypeError, ValueError):
        return


class HostileGrid(LocalGrid):
    """Clients answer a message of each kind once; from then on that answer is repeated, and changed if a change is `due`.

    `changed` counts the answers that were changed.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.due: deque[Sequence[tuple[str, Any, Any]]] = deque()
        self.changed = 0
        self._sent: dict[str, Message] = {}
        self._true: dict[tuple[Any, ...], RecordDict] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Keep messages until they are pulled; their clients may have answered such messages before."""
        identifiers = []
        for message in messages:
            identifiers.append(str(len(self._sent)))
            message.metadata.__dict__["_message_id"] = identifiers[-1]
            self._sent[identifiers[-1]] = message
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the answer to the oldest of these messages."""
        wanted = sorted(message_ids, key=int)
        return [self._answer(self._sent[wanted[0]])] if wanted else []

    def sent(self) -> list[Message]:
        """Return all messages so far, in their order."""
        return [*self._sent.values()]

    def _answer(self, message: Message) -> Message:
        content = message.content
        asked = tuple(unpack(content.array_records["arrays"])) if "arrays" in content else ()
        own = content.config_records["task"]["own"] if "task" in content else None
        key = message.metadata.dst_node_id, message.metadata.message_type, asked, own
        if key not in self._true:
            own_identifier = message.metadata.message_id
            (answer,) = super().pull_messages(super().push_messages([message]))
            message.metadata.__dict__["_message_id"] = own_identifier
            assert not answer.has_error(), answer.error
            self._true[key] = answer.content
        content = RecordDict({name: deepcopy_of(record) for name, record in self._true[key].items()})
        if message.metadata.dst_node_id not in HOSTILE or not self.due:
            return Message(content, reply_to=message)
        self.changed += 1
        for kind, name, value in self.due.popleft():
            if kind == "error":
                return Message(Error(name, value), reply_to=message)
            change(content, kind, name, value)
        return Message(content, reply_to=message)


def deepcopy_of(record: Any) -> Any:
    """Return a record of its own, with the same values: arrays are never changed, but replaced."""
    return type(record)(dict(record))


def small_digits(folder: Path) -> Path:
    """Write 36 digits to train on and 12 to test with, and return the file."""
    path = folder / "small-digits.npz"
    prepare("digits", data_dir="", cache_dir=default_cache())
    data = open_dataset("digits", "")
    arrays = {"x_train": data.inputs[:36], "y_train": data.labels[:36]}
    np.savez(path, **arrays, x_test=data.test_inputs[:12], y_test=data.test_labels[:12])
    return path


class Target:
    """A run to attack, and its states to begin from."""

    def __init__(self, strategy: str, folder: Path) -> None:
        values = TINY | {"strategy": strategy} | NEEDED.get(strategy, {}) | OWN.get(strategy, {})
        values |= {"dataset": f"npz:{small_digits(folder)}", "output-dir": str(folder), "run-name": strategy}
        config = Settings.from_run_config(values)
        self.grid = HostileGrid(config.clients, config.to_run_config(), 1)
        self.folder = RunDir(folder / strategy)
        self.run = Run(self.grid, config, self.folder)
        self.run.prepare_run_dir()
        self.run.wait_for_clients()
        self.states = [self._state()]
        for server_round in (1, 2):
            self.run.one_round(server_round)
            self.states.append(self._state())
        self.spec = spec_of(self.run.arrays)
        self.played = 0

    def _state(self) -> tuple[Any, ...]:
        method = self.run.server.method
        return deepcopy(method.state.to_values()), self.run.arrays, method.kept

    def attack(self, start: int, changes: Sequence[Sequence[tuple[str, Any, Any]]]) -> None:
        """Play a round with changed answers, from one of the states. Raises AssertionError if that did harm."""
        run, (values, arrays, kept) = self.run, self.states[start]
        method = run.server.method
        method.state = type(method.state).from_values(deepcopy(values))
        run.arrays, method.kept = arrays, kept
        self.grid.due.extend(changes)
        record = run.one_round(start + 1).to_values()
        self.grid.due.clear()
        self.played += 1
        self.folder.append_round(record | {"round": self.played})
        require_in_range(json.loads(json.dumps(record, allow_nan=False)), "record")
        assert any(client["status"] == "ok" for client in record["clients"]) or not record["aggregated"]
        require_model(run.arrays, self.spec)

    def connect(self, changes: Sequence[Sequence[tuple[str, Any, Any]]]) -> None:
        """Let nodes connect whose answers are changed, and use what they said."""
        run = self.run
        registry = ClientRegistry(run.registry.fleet, run.settings.seed, run.settings.clients, run.settings.memory)
        self.grid.due.extend(changes)
        registry.update(self.grid)
        self.grid.due.clear()
        require_in_range(registry.unusable(), "unusable")
        require_in_range(registry.devices(), "devices")
        for client in registry.members:
            state = registry.state(client, 1, 10**6, 10**5)
            assert 0 <= state.budget_bytes <= 2**60 and 0 < state.flops_per_second <= 1e21, state


def require_model(arrays: ArrayRecord, spec: Any) -> None:
    """Raise AssertionError unless a model's arrays have their shapes and types, and finite values."""
    assert {name: (tuple(array.shape), np.dtype(array.dtype)) for name, array in arrays.items()}.items() <= spec.items()
    for name, array in arrays.items():
        assert np.isfinite(array.numpy()).all(), name


def require_in_range(value: Any, where: str) -> None:
    """Raise AssertionError for a number that is not finite or too large, or for a text with control characters."""
    if isinstance(value, dict):
        for name, held in value.items():
            require_in_range(name, where)
            require_in_range(held, f"{where}.{name}")
    elif isinstance(value, list):
        for held in value:
            require_in_range(held, where)
    elif isinstance(value, str):
        assert value.isprintable() and len(value) <= 10_000, f"{where} is {value!r:.200}"
    elif isinstance(value, int | float):
        assert math.isfinite(value) and abs(value) <= LARGEST, f"{where} is {value!r}"
        if where.endswith("accuracy"):
            assert 0 <= value <= 1, f"{where} is {value!r}"


def attack(strategy: str, folder: Path, answers: int, number: int = 1) -> int:
    """Attack a system with at least that many changed answers. Returns how many there were.

    `number` is the seed of hypothesis. Raises AssertionError, or what ended the run, for the shortest example that does harm.
    """
    target = Target(strategy, folder)
    answer = st.lists(CHANGES, min_size=1, max_size=2)
    states = st.integers(0, len(target.states) - 1)

    rounds: Drawn = {"start": states, "changes": st.lists(answer, min_size=15, max_size=15)}
    nodes: Drawn = {"changes": st.lists(answer, min_size=5, max_size=5)}
    for test, drawn, share in (
        (target.connect, nodes, answers // 10),
        (target.attack, rounds, answers - answers // 10),
    ):
        goal = target.grid.changed + share
        while (left := goal - target.grid.changed) > 0:
            repeated(test, drawn, max(1, min(1000, left // 11)), number)
            number += 1
    summary = summarise(target.folder, "completed", "", 1.0)
    require_in_range(json.loads(json.dumps(summary, allow_nan=False)), "summary")
    return target.grid.changed


def repeated(test: Callable[..., None], drawn: Drawn, examples: int, number: int) -> None:
    """Call a function with what hypothesis draws, for that many examples from a seed."""

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(**drawn)
    def example(**given: Any) -> None:
        test(**given)

    example()


def main() -> None:
    """Attack the systems that the command line names, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000, help="changed answers, of all systems together")
    parser.add_argument("--only", default=",".join(METHODS), help="systems, separated by commas")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    systems = arguments.only.split(",")
    for strategy in systems:
        with tempfile.TemporaryDirectory() as folder:
            count = attack(strategy, Path(folder), -(-arguments.answers // len(systems)), arguments.seed)
        print(f"{strategy}: {count} answers, no harm", flush=True)


if __name__ == "__main__":
    main()
