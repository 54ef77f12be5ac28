"""What a task of paged steps reads and writes is what is predicted for it, to the byte."""

import os
from pathlib import Path
from typing import Any

import pytest
from helpers import a_client, tiny_settings
from test_trainers import a_task

from piecework.client_app.paged import train_paged
from piecework.device_profiles.memory import StepCost
from piecework.models.work_item import WorkItem
from piecework.planning.costs import cost_model_for
from piecework.planning.page_cost import moved_by_task
from piecework.planning.timing import moved_by_part
from piecework.strategies import find_method
from piecework.training.memory_cap import Heap

PAIRS = ((0, 2), (2, 4), (4, 5))


def test_bytes_of_a_task_by_hand() -> None:
    step = StepCost(0, 0, bytes_read=100, bytes_written=40, accesses=7, state_read=12, writes=3)
    assert moved_by_task(step, 3, 20) == (300 - 12 + 20, 120, 21, 9)
    assert moved_by_task(step, 0, 20) == (20, 0, 0, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"training__local_iterations": 1},
        {"training__local_iterations": 3},
        {"training__local_iterations": 2, "training__momentum": 0.0},
        {"training__local_iterations": 2, "training__optimiser": "adam", "training__optimiser_state": "8-bit"},
    ],
)
@pytest.mark.parametrize("spilled", [False, True])
def test_bytes_of_a_task(tmp_path: Path, changes: dict[str, Any], spilled: bool) -> None:
    """The first step reads no state of the optimiser, and after the last one all weights are read for the answer."""
    settings = tiny_settings(strategy="fedavg", **changes)
    client = a_client(tmp_path, settings, rows=48)  # whole batches
    item = WorkItem((0, 1, 2, 3, 4), pages=PAIRS, spilled=spilled)
    metrics = train_paged(a_task("fedavg"), client, item).metrics
    cut = find_method("fedavg").make_cut(client.blueprint, cost_model_for(settings, client.blueprint), settings)
    steps = changes["training__local_iterations"]
    read, written, *_ = moved_by_part(cut.cost_model, cut.part(item), steps)
    assert (metrics["disk-read"], metrics["disk-written"]) == (read, written)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system drops nothing from its page cache")
@pytest.mark.parametrize("plenty", [False, True])
def test_only_a_device_with_plenty_of_memory_leaves_pages_in_the_page_cache(
    plenty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[int](), os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(file), sync(file))[1])
    monkeypatch.setattr(Heap, "spare", 2**20 if plenty else 0)
    client = a_client(tmp_path, tiny_settings(strategy="fedavg", training__local_iterations=1), rows=16)
    train_paged(a_task("fedavg"), client, WorkItem((0, 1, 2, 3, 4), pages=PAIRS, spilled=True))
    assert (not synced) == plenty
