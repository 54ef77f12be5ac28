"""The ServerApp of `benchmarks.superlink`: in each round every node gets new arrays, and sends back as many of its own.

It sends and pulls as a run of Piecework does, and adds a line of JSON for each round to the file `lines`.
"""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from piecework.federation.reply_guard import ReplyGuard, reply_limit
from piecework.federation.transport import Transport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Wait for the nodes, then run the rounds."""
    config = context.run_config
    nodes, arrays, size, seconds = (int(config[key]) for key in ("nodes", "arrays", "bytes", "seconds"))
    while len(present := list(grid.get_node_ids())) < nodes:
        time.sleep(0.2)
    guard = ReplyGuard(grid, reply_limit(0, arrays * size), seconds)
    transport = Transport(guard, 2**16, seconds)
    generator = np.random.default_rng(0)
    for server_round in range(1, int(config["rounds"]) + 1):
        content = {f"array-{i}": Array(generator.random(max(1, size // 8))) for i in range(arrays)}
        began, errors, answered = time.monotonic(), list[str](), 0
        messages = [
            Message(
                RecordDict({"arrays": ArrayRecord(content)}), dst_node_id=node, message_type="train", ttl=2 * seconds
            )
            for node in present
        ]
        for reply in transport.exchange(server_round, messages):
            if reply.has_error():
                errors.append(f"{reply.error.code}: {reply.error.reason}")
            else:
                answered += len(reply.content["arrays"]) == arrays
        line = {"round": server_round, "seconds": time.monotonic() - began, "asked": nodes}
        with Path(str(config["lines"])).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line | {"answered": answered, "errors": errors}) + "\n")
