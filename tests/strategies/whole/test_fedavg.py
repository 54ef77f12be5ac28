"""FedAvg: what a client counts for in the mean."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import TRIO, arrays_of, model_of, run_local, training

UNLIKE = {"data__partition": "dirichlet", "data__partition_balanced": False, "data__partition_alpha": 0.5}


@pytest.mark.parametrize("weights", ["examples", "equal"])
def test_clients_count_by_their_examples_or_alike(tmp_path: Path, grids: Callable[..., Any], weights: str) -> None:
    grid = grids()
    run_dir = run_local(tmp_path, grid, strategy="fedavg", fedavg__client_weights=weights, **TRIO | UNLIKE)
    replies = training(grid.last.received)
    counts = [message.content.metric_records["metrics"]["num-examples"] for message in replies]
    assert len(set(counts)) > 1
    counted = counts if weights == "examples" else [1, 1, 1]
    for name, array in model_of(run_dir).items():
        sent = [arrays_of(message)[name].astype(np.float64) for message in replies]
        if np.issubdtype(array.dtype, np.floating):
            np.testing.assert_allclose(array, np.average(sent, axis=0, weights=counted), atol=1e-6)
