"""What a client cannot use of a message is told in one sentence, whatever the message says, and its store stays as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import nn

from piecework.client_app import frozen
from piecework.client_app.prepare import unpack
from piecework.client_app.store import Store
from piecework.client_app.trainers import find_query
from piecework.strategies.cascade.profl.client import ProFLTaskConfig
from piecework.training.messages import EXPECTED, Question, Task, read_expected
from piecework.training.parcels import pack
from piecework.training.readable import MessageError, config_of

TASK = Task("abc", 2, 1, "fedavg", 10**9, 10**6, 0.1, "/somewhere")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("round", "2", "the task cannot be used: round is '2': it must be a valid integer"),
        ("round", 0, "round is 0: it must be greater than or equal to 1"),
        ("lr", float("nan"), "lr is nan: it must be a finite number"),
        ("budget", -(2**63), "budget is -9223372036854775808: it must be greater than or equal to 0"),
        ("reference", 0, "reference is 0: it must be greater than or equal to 1"),
        ("budget", None, "budget is missing"),
        ("experiment-id", "../x", "experiment_id is '../x': String should match pattern"),
        ("frozen", '{"../../x":"ab"}', "frozen is '../../x': String should match pattern"),
        ("costs", "[" * 100_000, "the task's costs cannot be read: it is nested too deeply"),
        ("costs", '[[{"atoms":["first"]},1]]', "the task's costs cannot be read: atoms is 'first': it must be a valid integer"),
        ("costs", "[1]", "the task's costs cannot be read: cannot unpack non-iterable int object"),
        ("costs", 7, "the task's costs cannot be read: it is 7, and no text"),
        ("costs", None, "the task has no costs"),
        ("void", "[[1]]", "discarded_rounds is [1]: List should have at least 2 items"),
        ("variant", '{"width":-1}', "the task's variant cannot be read: width is -1: it must be greater than 0"),
        ("variant", '{"widht":1}', "the task's variant cannot be read: a variant has no widht"),
        ("own", "[]", "config is []: it must be a valid dictionary"),
        ("evaluation", '[["all"]]', "the task's evaluation cannot be read: bytes is 'all': it must be a valid integer"),
        ("new", 1, "the task has no 'new'"),
    ],
)  # fmt: skip
def test_a_field_of_a_task(field: str, value: Any, says: str) -> None:
    record = dict(TASK.to_record())
    if value is None:
        del record[field]
    else:
        record[field] = value
    with pytest.raises(MessageError) as caught:
        Task.from_record(ConfigRecord(record))
    assert str(caught.value).startswith(says if says.startswith("the task") else f"the task cannot be used: {says}")
    assert "\n" not in str(caught.value)


def test_a_methods_own_fields_of_a_task() -> None:
    for config, says in (
        ({}, "step is missing"),
        ({"step": [], "doing": "growing"}, r"step is \[\]: it must be a valid integer"),
        ({"step": 1, "doing": "growing", "x": 1}, "the task has no 'x' of ProFLTaskConfig"),
    ):
        with pytest.raises(MessageError, match=says):
            ProFLTaskConfig.of(replace(TASK, config=config))


def test_records_that_are_missing_and_questions() -> None:
    for content, says in (
        (RecordDict(), "no record 'task' of values"),
        (RecordDict({"task": ArrayRecord()}), "no record 'task'"),
    ):
        with pytest.raises(MessageError, match=says):
            config_of(content, "task")
    with pytest.raises(MessageError, match="no record 'arrays' of arrays"):
        unpack(RecordDict(), lambda _: None)
    for wanted, says in (
        ([1], "wanted is 1: it must be a valid string"),
        ("ab", "wanted is 'ab': it must be a valid list"),
    ):
        values: Any = {"experiment_id": "abc", "state_dir": "", "wanted": wanted}
        with pytest.raises(MessageError, match=says):
            Question.from_record(ConfigRecord(values))
    with pytest.raises(MessageError, match="the task's data cannot be read: dataset is missing"):
        read_expected(RecordDict({EXPECTED: ConfigRecord({"data": "{}"})}))
    with pytest.raises(MessageError, match=r"'\.\./x' is not a content hash"):
        list(frozen.not_held(Path(), ["../x"]))
    with pytest.raises(ValueError, match="strategy fedavg has no query"):
        find_query("fedavg")


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (
            Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x01\x00"),
            "array 'head.weight' of the message cannot be read",
        ),
        (
            Array("float32", (1,), "numpy.ndarray", b"\x80\x04K\x01."),
            "array 'head.weight' of the message cannot be read",
        ),
        (Array(np.array(["a"])), "array 'head.weight' of the message holds <U1, and no numbers"),
    ],
)
def test_an_array_of_a_message(array: Array, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        unpack(RecordDict({"arrays": pack([("head.weight", array)])}), lambda _: None)


def test_arrays_that_are_not_the_models(tmp_path: Path) -> None:
    """torch itself would spread an array of one row over all rows."""
    store, layer = Store(tmp_path, "abc", 1, "train-1"), nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    for arrays, says in (
        ({"head.weight": np.zeros((1, 3), np.float32)}, r"shape \(1, 3\): that of the task's model has \(2, 3\)"),
        ({"head.bias": np.zeros(2, np.float32)}, "the message has no array 'head.weight'"),
    ):  # fmt: skip
        store.write_units(arrays)
        with pytest.raises(MessageError, match=says):
            store.load("head", layer)
        assert torch.equal(layer.weight, before)
    norm = nn.BatchNorm2d(2)
    counted = {f"head.{name}": value.numpy() for name, value in norm.state_dict().items()}
    store.write_units(counted | {"head.num_batches_tracked": np.array(-1)})
    with pytest.raises(MessageError, match=r"'head\.num_batches_tracked' counts batches, and has a number below 0"):
        store.load("head", norm)
    store.close()
