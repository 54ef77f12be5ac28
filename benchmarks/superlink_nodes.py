"""Nodes in one process, as `benchmarks.superlink` starts them: the first number, how many, arrays of an answer, bytes of each.

    python -m benchmarks.superlink_nodes 127.0.0.1:8000 0 25 16 20000

Each node is a thread with a connection of Flower's own SuperNode: it registers a key, signs, sends heartbeats, asks for
messages every three seconds, pulls and pushes each object by a request, two at once, and tries again where Flower does. It
answers at once, with arrays of its own, as many and as large as it was told. Each failure that costs
an answer is a line on stdout.
"""

import argparse
import threading
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_objects, push_object_contents_from_iterable
from flwr.supernode.fleet_http_connection import http_request_response

IDLE_SECONDS = 3.0  # as Flower's SuperNode


def serve(address: str, number: int, arrays: int, size: int) -> None:
    """Answer messages until the process ends."""
    generator = np.random.default_rng(number)
    with http_request_response(address, insecure=True) as connection:
        _, receive, send, get_run, _, pull_object, push_object, confirm = connection
        known = set[int]()
        while True:
            stage = "asking for a message"
            try:
                received = receive()
                if received is None:
                    time.sleep(IDLE_SECONDS)
                    continue
                message, tree = received
                run = message.metadata.run_id
                stage = "pulling"
                if run not in known:
                    get_run(run)
                    known.add(run)
                identifiers = list({each.object_id for each in iterate_object_tree(tree)})
                pull_objects(identifiers, lambda identifier, run=run: pull_object(run, identifier))
                confirm(run, message.metadata.message_id)
                record = {f"array-{i}": Array(generator.random(max(1, size // 8))) for i in range(arrays)}
                stage = "pushing"
                reply = Message(RecordDict({"arrays": ArrayRecord(record)}), reply_to=message)
                reply.metadata.__dict__["_message_id"] = reply.object_id
                wanted, session = send(reply, get_object_tree(reply), 0.0)
                objects = get_all_nested_objects(reply)
                contents = [(each, objects[each].deflate()) for each in objects if each in wanted]
                push_object_contents_from_iterable(
                    contents,
                    lambda identifier, content, run=run, session=session: push_object(
                        run, session, identifier, content
                    ),
                )
            except Exception as error:  # a SuperNode, too, notes it and goes on; the answer is lost
                print(f"node {number}, {stage}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
                time.sleep(IDLE_SECONDS)


def main() -> None:
    """Run the nodes of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of the SuperLink")
    for name in ("first", "count", "arrays", "bytes"):
        parser.add_argument(name, type=int)
    of = parser.parse_args()
    for number in range(of.first, of.first + of.count):
        threading.Thread(target=serve, args=(of.address, number, of.arrays, of.bytes), daemon=True).start()
    threading.Event().wait()  # until the benchmark ends this process


if __name__ == "__main__":
    main()
