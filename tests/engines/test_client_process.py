"""A client's process: what it tells of its store, what it does without memory checks or memory, what it imports and holds."""

import errno
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TRIO, clients_of, fleet_json, run_local
from process_helpers import a_message, in_a_fresh_process
from safetensors import SafetensorError

from piecework.server_app.records import RunDir
from piecework.training.memory_cap import is_out_of_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


# ---- the store


@pytest.mark.slow
def test_a_damaged_state_is_reported_in_the_record(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**TRIO, "strategy": "fedavg", "architecture__batch_norm": "local"}
    run_dir = run_local(tmp_path, num_rounds=2, **settings)
    assert {client["note"] for number in (1, 2) for client in clients_of(run_dir, number)} == {""}
    (store,) = (run_dir.path / "clients").iterdir()
    for path in (store / "1" / "state" / "2" / "batch-norm").iterdir():
        path.write_bytes(pickle.dumps("no model"))
    run_local(tmp_path, num_rounds=3, resume_from=str(run_dir.path), **settings)
    fault = "batch-norm/atoms.0.safetensors does not match its checksum"
    assert [(client["status"], client["note"]) for client in clients_of(run_dir, 3)] == [
        ("ok", ""),
        ("ok", f"discarded its state of round 2 ({fault}), continues from its state of round 1"),
        ("ok", ""),
    ]


# ---- memory checks off, and no memory


@pytest.mark.slow
def test_without_checks_a_client_trains_over_its_budget(tmp_path: Path) -> None:
    poor: dict[str, Any] = {"strategy": "fedavg", "clients_per_round": 2, "fleet": fleet_json(poor=0.5)}
    run_dir = run_local(tmp_path, memory__enforce=False, **poor)
    (record,) = run_dir.rounds()
    assert record["enforced"] is False
    for client in record["clients"]:
        assert client["status"] == "ok"
        assert client["measured_peak"] > 1.5 * client["budget"] > 0
    assert (run_dir.summary() or {})["max_peak_over_budget"] is None
    with pytest.raises(RuntimeError, match="2 refused for memory"):
        run_local(tmp_path, run_name="checked", **poor)
    (record,) = RunDir(tmp_path / "checked").rounds()
    assert record["enforced"] is True


def test_without_checks_a_cut_is_the_whole_model_on_both_sides(tmp_path: Path) -> None:
    poor: dict[str, Any] = {"strategy": "fedepth", "clients_per_round": 1, "fleet": fleet_json(poor=0.5)}
    assert [
        c["pieces"] for c in clients_of(run_local(tmp_path, fedepth__mutual_models=1, memory__enforce=False, **poor))
    ] == [[[0, 1, 2, 3, 4]]]
    (client,) = clients_of(run_local(tmp_path, fedepth__mutual_models=1, run_name="checked", **poor))
    assert len(client["pieces"]) > 1


WITHOUT_MEMORY = """
import json, pickle, resource, sys
from pathlib import Path
from piecework.server_app.local_grid import answer
from piecework.server_app.ordered_grid import identify
import piecework.client_app.app, piecework.client_app.whole
identify(1)
task, config = pickle.loads(Path(sys.argv[1]).read_bytes())
size = int(next(x for x in open("/proc/self/status") if x.startswith("VmSize")).split()[1]) * 1024
for more in sys.argv[2:]:
    resource.setrlimit(resource.RLIMIT_AS, (size + int(more), resource.RLIM_INFINITY))
    reply = pickle.loads(answer([task], config, 20, {}))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert not reply.has_error(), reply.error.reason
    outcome = dict(reply.content.config_records["outcome"])
    print(json.dumps(outcome | {"arrays": len(reply.content.array_records["arrays"])}))
"""


@pytest.mark.slow
@linux
def test_no_memory_left_is_a_normal_answer(tmp_path: Path) -> None:
    """A model of 45 MB needs three times as much to be trained; the process may have 130 MB more, and then 2 GB."""
    task = a_message(tmp_path, strategy="fedavg", model="resnet18", data__validation_fraction=0.9)
    said = in_a_fresh_process(WITHOUT_MEMORY, task, "130_000_000", "2_000_000_000")
    outcome, then = map(json.loads, said.splitlines())
    assert outcome["status"] == "memory"
    assert outcome["needed"] == 0
    assert outcome["reason"].startswith("the device ran out of memory: ")
    assert outcome["arrays"] == 0
    assert then["status"] == "ok"


def raised(work: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # which it is depends on the library
        work()
    return caught.value


def test_which_errors_mean_that_memory_was_exceeded() -> None:
    assert is_out_of_memory(raised(lambda: torch.empty(2**50)))
    assert is_out_of_memory(raised(lambda: np.empty(2**50)))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert is_out_of_memory(RuntimeError("std::bad_alloc"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))  # oneDNN, seen under a limit
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_out_of_memory(raised(lambda: torch.zeros(2) @ torch.zeros(3)))
    assert not is_out_of_memory(SafetensorError("header too small"))


# ---- what a process imports and holds

LOADS = """
import json, pickle, sys
from pathlib import Path
import flwr.supernode.runtime.run_clientapp, torch
theirs = set(sys.modules)
import piecework.client_app.app
from flwr.app import Context, RecordDict
from piecework.server_app.ordered_grid import identify

identify(1)

def size(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024

def answer(path):
    data, config = pickle.loads(Path(path).read_bytes())
    message = pickle.loads(data)
    del data
    Path("/proc/self/clear_refs").write_text("5")
    context = Context(1, 2, {"partition-id": 0, "num-partitions": 20}, RecordDict(), config)
    reply = piecework.client_app.app.app(message, context)
    assert reply.content["outcome"]["status"] == "ok", reply.content["outcome"]["reason"]
    return message, reply  # Flower keeps both
"""


def roots(names: list[str]) -> set[str]:
    """Modules with the packages that they lie in."""
    parts = [name.split(".") for name in names]
    return {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}


HOLDS = (
    LOADS
    + """
answer(sys.argv[1])  # libraries prepare themselves at the first task
print(json.dumps([sorted(sys.modules), sorted(set(sys.modules) - theirs)]))
figures = {}
floor = size("VmRSS")
original, trainer = piecework.client_app.app.ResidentPeak, piecework.client_app.app.find_trainer

def before_training():
    figures.update(before=size("VmRSS") - floor, arriving=size("VmHWM") - floor)
    return original()

def find(name):
    def train(task, client):
        update = trainer(name)(task, client)
        figures.update(trained=size("VmHWM") - floor, accounted=client.cap.peak_bytes)
        piecework.training.memory_cap.return_free_memory()
        Path("/proc/self/clear_refs").write_text("5")
        return update
    return train

piecework.client_app.app.ResidentPeak, piecework.client_app.app.find_trainer = before_training, find
message, reply = answer(sys.argv[2])
figures.update(after=size("VmRSS") - floor, packing=size("VmHWM") - floor, left=len(message.content["arrays"]))
figures["reply"] = sum(len(array.data) for array in reply.content["arrays"].values())
print(json.dumps(figures))
"""
)


@pytest.mark.slow
@linux
def test_a_task_imports_nothing_heavy_and_a_message_is_held_once_and_not_while_training(tmp_path: Path) -> None:
    """As in deployment: what flwr-clientapp and torch import is theirs, torch's fake tensors and rich among it.

    100 MB in and out, arrays of up to 21 MB. Measured: +0 MB before training, +1 over the message as it arrives. While the
    reply is made +70 over it (the file of a unit, mapped, and a copy of an array), in the end +6. Memory is plentiful here, so
    that up to 32 MiB of what training freed may still be there.
    """
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    small = a_message(tmp_path / "small", strategy="fedavg")
    shape: dict[str, Any] = {
        "model": "resnet18",
        "architecture__width": 1.5,
        "training__batch_size": 4,
        "data__validation_fraction": 0.9,
    }
    said = in_a_fresh_process(HOLDS, small, a_message(tmp_path / "large", strategy="fedavg", **shape))
    modules, held = map(json.loads, said.splitlines())
    loaded, own = map(roots, modules)
    assert {"piecework.client_app.whole", "piecework.training.settings"} <= own
    assert {"torch", "flwr"} <= loaded
    heavy = {"torchvision", "ray", "sklearn", "pandas", "matplotlib", "plotly", "scipy"}
    assert loaded & (heavy | {"torch._dynamo", "torch._inductor", "sympy", "triton"}) == set()
    assert own & {"torch._subclasses", "torch.fx.experimental.symbolic_shapes", "rich", "typer", "torch.optim"} == set()
    size = held["reply"]
    assert size > 100_000_000
    assert held["left"] == 0
    assert held["before"] < 24 * 2**20
    assert size <= held["arriving"] + 8 * 2**20
    assert held["arriving"] < size + 40 * 2**20
    assert held["trained"] > held["accounted"] > 3 * size
    assert held["packing"] < size + (80 + 32) * 2**20
    assert held["after"] < size + 24 * 2**20
