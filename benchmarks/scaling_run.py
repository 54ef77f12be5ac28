"""The run that `benchmarks.scaling` has on the head of its cluster: it says when a round ends, and at last where the time went.

It imports Ray, which the machine that starts the containers need not have.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from benchmarks.phases import watching
from piecework.engines.cluster.address import RayCluster
from piecework.engines.launch import launch
from piecework.server_app.records import RunDir
from piecework.training.settings import Settings


def drive() -> None:
    """Run with the settings that come as JSON by the standard input; print a line of JSON a round, and one at the end."""
    config = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory() as folder, watching() as watch:
        settings = Settings.from_run_config(config | {"output-dir": folder, "run-name": "scaling"})
        run_dir = RunDir(Path(folder) / settings.run_name)
        launch(settings, run_dir, lambda values: print(json.dumps(values["round"]), flush=True), 0, RayCluster("auto"))
        seconds = [{c["client"]: c["seconds"] for c in record["clients"]} for record in run_dir.rounds()]
    found = [asdict(each) for each in watch.rounds[1:]]
    print(json.dumps([each | {"trained": own} for each, own in zip(found, seconds, strict=True)]), flush=True)
