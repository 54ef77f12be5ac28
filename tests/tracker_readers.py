"""What trackers have of a run, read from their stores on this machine with their own libraries."""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.track_resume import Curves, mlflow_runs

BLOCK = 32768  # of the log of records that W&B writes, which is LevelDB's


@dataclass
class Tracked:
    """A run as a tracker has it."""

    name: str
    status: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    curves: Curves = field(default_factory=dict)


def mlflow_curves(store: Path) -> list[Tracked]:
    """The runs in a database."""
    return [Tracked(run.info.run_name, run.info.status, run.data.params, curves) for run, curves in mlflow_runs(store)]


def trackio_curves(folder: Path) -> list[Tracked]:
    """The runs in the only project of Trackio's folder. Trackio looks for it when it is imported."""
    import os
    import subprocess
    import sys

    code = (
        "import json, trackio; from trackio import SQLiteStorage as store;"
        "print(json.dumps([[run.name, run.config, store.get_logs('piecework', run.name, run_id=run.id)]"
        " for run in trackio.Api().runs('piecework')], default=str))"
    )
    environment = os.environ | {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    found = []
    for name, settings, logs in json.loads(done.stdout.splitlines()[-1]):
        curves: Curves = {}
        for row in logs:
            for key, value in row.items():
                if isinstance(value, int | float) and key != "step":
                    curves.setdefault(key, []).append((row["step"], value))
        found.append(Tracked(name, settings=settings, curves=curves))
    return found


def wandb_curves(folder: Path) -> list[Tracked]:
    """The runs in W&B's folder, one of each process, oldest first; `name` is the id, and a killed one may lack its end."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(folder.glob("offline-run-*/run-*.wandb"), key=lambda each: each.stat().st_ctime_ns):
        run = Tracked("")
        for content in _wandb_records(path.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("run"):
                run.name = record.run.run_id
                run.settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif record.HasField("history"):
                for item in record.history.item:
                    key = item.key or "/".join(item.nested_key)
                    value = json.loads(item.value_json)
                    if not key.startswith("_"):
                        run.curves.setdefault(key, []).append((record.history.step.num, value))
        found.append(run)
    return found


def _wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log of LevelDB's kind, whose parts are FULL, FIRST, MIDDLE or LAST."""
    at, whole = 7, b""  # after the file's own header
    while at + 7 <= len(content):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if kind == 0:
            return
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
