"""The arrays of a message in few objects: what comes out is what went in, and what is no such parcel is refused."""

import json
import tracemalloc
from io import BytesIO

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from piecework.models.cascade import isolate_rng, unit_of
from piecework.models.zoo import build_blueprint
from piecework.training.answers import AnswerError, Outcome, read_answer
from piecework.training.messages import content_bytes
from piecework.training.parcels import (
    ENOUGH,
    MOST_ARRAYS,
    PARCEL,
    PREFIX,
    STYPE,
    ParcelError,
    count_bytes,
    pack,
    unpack,
    view,
)

KINDS = st.sampled_from([np.dtype(name) for name in ("<f4", ">f4", "<f8", "<f2", "<i8", "u1", "?", "<c8", "<U3")])
ARRAYS = KINDS.flatmap(lambda kind: npst.arrays(kind, npst.array_shapes(min_dims=0, min_side=0, max_side=4)))
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(["atoms.0.w", "atoms.1.w"])


def parcel_of(head: bytes, data: bytes = b"", length: int | None = None) -> ArrayRecord:
    content = (len(head) if length is None else length).to_bytes(PREFIX, "little") + head + data
    return ArrayRecord({"0": Array("uint8", (len(content),), STYPE, content)})


def zeros(**sizes: int) -> ArrayRecord:
    """Arrays of so many bytes, by name; `__` stands for a dot."""
    return ArrayRecord({name.replace("__", "."): Array(np.zeros(n, np.uint8)) for name, n in sizes.items()})


@given(st.dictionaries(NAMES, ARRAYS, max_size=6))
def test_what_comes_out_is_what_went_in(arrays: dict[str, np.ndarray]) -> None:
    """From Flower's arrays and from numpy's, over Flower's own form on the wire, with the bytes that Flower counts."""
    plain = ArrayRecord({name: Array(array) for name, array in arrays.items()})
    for packed in (pack(plain.items()), pack(arrays.items())):
        objects = get_all_nested_objects(packed)
        contents = {each: held.deflate() for each, held in objects.items()}
        arrived = inflate_object_from_contents(packed.object_id, contents)
        assert isinstance(arrived, ArrayRecord)
        assert count_bytes(arrived) == count_bytes(packed) == plain.count_bytes() == count_bytes(plain)
        found = unpack(arrived)
        assert [*found.items()] == [*plain.items()]
        for name, array in found.items():
            for decoded in (array.numpy(), view(array)):
                assert (decoded.dtype, decoded.shape, decoded.tobytes()) == (
                    arrays[name].dtype,
                    arrays[name].shape,
                    arrays[name].tobytes(),
                )


def test_arrays_in_another_order_of_memory() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for other in (array.T, array[:, ::2], np.asfortranarray(array)):
        assert np.array_equal(unpack(pack([("a", other)]))["a"].numpy(), other)


def test_a_model_is_few_objects() -> None:
    """Those of PreResNet-20 were two objects each, with their record; a large array has its chunks still."""
    blueprint = build_blueprint("preresnet20", num_classes=10, input_shape=(3, 32, 32), batch_norm="running")
    with isolate_rng(0):
        units = {unit: blueprint.build_unit(unit).state_dict() for unit in blueprint.units()}
    shapes = {f"{unit}.{name}": value.shape for unit, state in units.items() for name, value in state.items()}
    # equal arrays would be one object, as in a model that nobody has trained
    arrays = {name: np.full(shape, number, np.float32) for number, (name, shape) in enumerate(shapes.items())}
    assert len(arrays) == 123
    assert len(get_all_nested_objects(ArrayRecord({n: Array(a) for n, a in arrays.items()}))) == 2 * 123 + 1
    assert len(get_all_nested_objects(pack(arrays.items()))) == 3
    large = pack([("head.weight", np.arange(3_000_000, dtype=np.float32))])
    assert len(get_all_nested_objects(large)) == 2 + 3  # 12 MB in chunks of 5 MiB


def test_where_parcels_end() -> None:
    """An array is never cut; small units share a parcel, and larger ones begin one."""
    arrays = zeros(
        atoms__0__w=ENOUGH // 4,
        atoms__1__w=ENOUGH,
        atoms__1__b=ENOUGH // 2,
        atoms__2__w=2 * PARCEL,
        head__w=1,
        head__b=1,
    )
    parcels = [unpack(ArrayRecord({"0": each})) for each in pack(arrays.items()).values()]
    assert [[*map(str, each)] for each in parcels] == [
        ["atoms.0.w", "atoms.1.w", "atoms.1.b"],
        ["atoms.2.w"],
        ["head.w", "head.b"],
    ]
    assert not pack([])


def test_parts_that_several_clients_get_are_the_same_objects() -> None:
    """One client is sent two units more, before and after; the 3 MiB between them are one object for both."""
    more = zeros(atoms__0__w=ENOUGH, atoms__1__w=3 * 2**20, head__w=5)
    fewer = ArrayRecord({name: array for name, array in more.items() if unit_of(name) == "atoms.1"})
    (shared,) = pack(fewer.items()).values()
    assert shared.object_id in {each.object_id for each in pack(more.items()).values()}


LISTS: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "cannot be read"),
    ("no JSON", b"[[", "cannot be read"),
    ("no text", b"\xff\xfe", "cannot be read"),
    ("no list", b'{"a":1}', "cannot be read"),
    ("nested", b"[" * 100_000, "cannot be read"),
    ("fields", b'[["a","f",[3]]]', "cannot be read"),
    ("name", b'[[7,"f",[3],3]]', "cannot be read"),
    ("dtype", b'[["a",null,[3],3]]', "cannot be read"),
    ("negative shape", b'[["a","f",[-1],3]]', "cannot be read"),
    ("fraction", b'[["a","f",[1.5],3]]', "cannot be read"),
    ("dimensions", b'[["a","f",[' + b",".join([b"1"] * 65) + b"],3]]", "cannot be read"),
    ("negative size", b'[["a","f",[3],4],["b","f",[3],-1]]', "cannot be read"),
    ("words", b'[["a","f",[3],"3"]]', "cannot be read"),
    ("yes", b'[["a","f",[3],true],["b","f",[3],2]]', "cannot be read"),
    ("too long", b'[["a","f",[3],4]]', "has arrays of 4 bytes, the parcel has 3"),
    ("endless", b'[["a","f",[3],1' + b"0" * 40 + b"]]", "the parcel has 3"),
    ("too short", b'[["a","f",[3],2]]', "has arrays of 2 bytes, the parcel has 3"),
    ("twice", b'[["a","f",[1],1],["a","f",[2],2]]', "array 'a' is in the message twice"),
    ("many", b"[" + b",".join([b'["","",[],0]'] * (MOST_ARRAYS + 1)) + b"]", "cannot be read"),
    ("much", b"[" + b" " * 2**20 + b"]", "it may have 1,048,576"),
]


@pytest.mark.parametrize(("head", "reason"), [each[1:] for each in LISTS], ids=[each[0] for each in LISTS])
def test_what_is_no_parcel_is_refused(head: bytes, reason: str) -> None:
    """And an answer with it, as one that cannot be read; its bytes are counted as they are."""
    parcels = parcel_of(head, b"abc")
    assert count_bytes(parcels) in (parcels.count_bytes(), 3 + 2)  # the latter for what `unpack` alone sees
    content = RecordDict(
        {"arrays": parcels, "outcome": Outcome("ok").to_record(), "metrics": MetricRecord({"num-examples": 3})}
    )
    assert content_bytes(content) > 0
    with pytest.raises(ParcelError, match=reason):
        unpack(parcels)
    with pytest.raises(AnswerError, match=reason):
        read_answer(content)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (zeros(a=3), "is 'numpy.ndarray': expected 'piecework.parcel'"),
        (parcel_of(b"[]", length=2**32 - 1), "list has 4,294,967,295 bytes: it may have 6"),
        (ArrayRecord({"0": Array("uint8", (2,), STYPE, b"ab")}), "list has 25,185 bytes"),
        (ArrayRecord({"0": Array("uint8", (0,), STYPE, b"")}), "list has 0 bytes: it may have 0"),
        (
            ArrayRecord(dict(pack(zeros(a=1).items())) | {"more": pack(zeros(a=1).items())["0"]}),
            "'a' is in the message twice",
        ),
    ],
)
def test_records_that_are_no_parcels(record: ArrayRecord, reason: str) -> None:
    with pytest.raises(ParcelError, match=reason):
        unpack(record)


def test_lists_of_all_parcels_together_are_bounded() -> None:
    """A parcel each of a list that would do alone."""
    head = json.dumps([(f"{n:0>100}", "", [], 0) for n in range(5000)]).encode()
    record = ArrayRecord({str(n): parcel_of(head.replace(b'"0', f'"{n}'.encode()))["0"] for n in range(3)})
    unpack(ArrayRecord({"0": record["0"]}))
    with pytest.raises(ParcelError, match="a parcel's list has"):
        unpack(record)


@pytest.mark.parametrize("entry", [b'["","",[],0],', b'["a","",[0,0,0,0,0,0],0],', b"0,", b"[],", b'{"":0},', b'"a",'])
def test_reading_a_list_takes_a_bounded_part_of_memory(entry: bytes) -> None:
    """Python's own memory; the parser's is of the same order."""
    head = b"[" + entry * (2**20 // len(entry) - 1)
    parcels = parcel_of(head[:-1] + b"]")
    tracemalloc.start()
    with pytest.raises(ParcelError):
        unpack(parcels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_one_parcel_is_in_memory_twice_while_it_is_packed_and_none_while_it_is_read() -> None:
    """Of 40 MB in arrays of 1 MB, which are packed as they are made. A parcel is freed with the last of its arrays."""
    tracemalloc.start()
    packed = pack((f"atoms.{n // 10}.{n}", np.full(250_000, n, np.float32)) for n in range(40))
    size, peak = tracemalloc.get_traced_memory()
    assert 40_000_000 < size < 40_100_000
    assert peak < size + 2 * PARCEL
    tracemalloc.reset_peak()
    found = unpack(packed)
    assert [view(array)[-1] for array in found.values()] == [*range(40)]
    packed.clear()
    for name in list(found)[:20]:
        del found[name]
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size + 100_000
    assert left < 22_000_000


@pytest.mark.parametrize(
    "data", [b"", b"abc", b"\x93NUMPY\x01\x00\x02\x00{}", Array(np.zeros(3)).data[:-1], b"\x80\x04K\x01."]
)
def test_bytes_that_are_no_array(data: bytes) -> None:
    with pytest.raises(ValueError):
        view(Array("float32", (3,), "numpy.ndarray", data))


def test_an_array_of_objects_is_not_read() -> None:
    file = BytesIO()
    np.save(file, np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        view(Array("object", (1,), "numpy.ndarray", file.getvalue()))


def test_bytes_of_other_records_are_as_they_were() -> None:
    content = RecordDict({"arrays": pack(zeros(a=3).items()), "words": ConfigRecord({"b": "four"})})
    assert content_bytes(content) == 128 + 3 + 1 + 4 + 1
