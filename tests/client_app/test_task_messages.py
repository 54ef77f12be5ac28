"""The messages between server and client, there and back, and their bytes."""

import json
from dataclasses import replace

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from store_helpers import A

from piecework.models.mix import Mix
from piecework.models.variant import Variant
from piecework.models.work_item import WorkItem
from piecework.server_app.ordered_grid import identify
from piecework.strategies.cascade.fedepth.mutual import Mutual
from piecework.training.answers import Outcome, reply
from piecework.training.messages import Question, Task, content_bytes

TASK = Task(
    experiment_id="abc",
    round=3,
    state_round=2,
    strategy="fedepth",
    budget=2**40,
    reference=12_345,
    lr=0.1,
    state_dir="/somewhere",
    enforced=False,
    costs={WorkItem((0, 1)): 10, WorkItem((0, 1), mode=Mutual(2)): 20},
    frozen={"atoms.0": "ab" * 32},
)


def test_a_task_round_trips() -> None:
    sent = TASK.to_record()
    assert sent["state-round"] == 2
    assert sent["costs"] == '[[{"atoms":[0,1]},10],[{"atoms":[0,1],"copies":2},20]]'
    assert sent["frozen"] == f'{{"atoms.0":"{"ab" * 32}"}}'
    assert Task.from_record(sent) == TASK
    assert Task.from_record(replace(TASK, costs={}).to_record()).costs == {}


def test_a_task_carries_the_network_and_whether_it_is_attacked() -> None:
    narrow = replace(TASK, variant=Variant(width=0.5, changes=(Mix((0, 3)),)), adversarial=True)
    assert narrow.to_record()["variant"] == '{"width":0.5,"nets":[0,3]}'
    assert Task.from_record(narrow.to_record()) == narrow


@pytest.mark.parametrize("wanted", [[], ["ab", "cd"]])
def test_a_question_round_trips(wanted: list[str]) -> None:
    question = Question("abc", "/somewhere", wanted)
    assert Question.from_record(ConfigRecord.inflate(question.to_record().deflate())) == question


def test_a_reply() -> None:
    identify(1)
    message = Message(RecordDict(), dst_node_id=7, message_type="train")
    answer = reply(message, Outcome("ok"), {"num-examples": 3, "loss": 0.5})
    assert answer.metadata.src_node_id == 7
    assert dict(answer.content.metric_records["metrics"]) == {"num-examples": 3, "loss": 0.5}
    assert len(answer.content.array_records["arrays"]) == 0
    arrays = ArrayRecord({"a": Array(A)})
    assert reply(message, Outcome("ok"), {}, arrays).content.array_records["arrays"] == arrays


def test_content_bytes() -> None:
    array = Array(A)
    assert len(array.data) == 128 + 24  # a .npy header and six floats
    metrics = MetricRecord({"ab": 1, "c": [1.0, 2.0]})
    config = ConfigRecord({"name": "four", "none": "", "flag": True, "n": 3, "list": ["a", "bc"], "empty": []})
    metric_size = 2 + 8 + 1 + 16
    config_size = (4 + 4) + (4 + 0) + (4 + 1) + (1 + 8) + (4 + 3) + (5 + 0)
    assert content_bytes(RecordDict({"m": metrics})) == metric_size
    assert content_bytes(RecordDict({"c": config})) == config_size
    arrays = ArrayRecord({"w": array})
    assert content_bytes(RecordDict({"a": arrays})) == arrays.count_bytes() >= 152
    assert content_bytes(RecordDict({"a": arrays, "m": metrics, "c": config})) == (
        arrays.count_bytes() + metric_size + config_size
    )
    assert content_bytes(RecordDict({"o": Outcome("ok").to_record(), "j": ConfigRecord({"j": json.dumps({})})})) > 0
