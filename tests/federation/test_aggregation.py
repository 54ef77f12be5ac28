"""Updates are checked, then averaged: numbers by hand, a reason for every refusal, and equalities that must be exact."""

import math
import tokenize
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from piecework.federation.aggregation import (
    CheckedUpdate,
    UpdateRejectedError,
    WeightedMean,
    add_norm_limits,
    check_update,
    first_limit,
    norm_limits,
    note_norms,
    share_bytes,
    spec_of,
)

Arrays = dict[str, np.ndarray]


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


# ---- the mean


def test_weighted_mean_by_hand() -> None:
    mean = WeightedMean()
    mean.add({"a": floats(1, 2), "b": floats(4)}, 1)
    mean.add({"a": floats(5, 10)}, 3)
    mean.add({"a": floats(0, 0), "c": floats(7)}, 4)
    assert mean["a"].tolist() == [(1 + 15) / 8, (2 + 30) / 8]
    assert mean["b"].tolist() == [4.0]  # of the one client that sent it
    assert mean["c"].tolist() == [7.0]
    assert mean["a"].dtype == np.float64
    assert "a" in mean
    assert "d" not in mean


def test_integers_take_the_maximum() -> None:
    mean = WeightedMean()
    for value, weight in ((3, 1), (9, 1), (5, 1000)):
        mean.add({"n": np.array(value, dtype=np.int64), "v": np.array([value, -value])}, weight)
    assert mean["n"] == 9
    assert mean["n"].dtype == np.int64
    assert mean["v"].tolist() == [9, -3]


def test_the_mean_keeps_no_hold_of_what_it_was_given() -> None:
    mean = WeightedMean()
    a, n = np.array([1.0, 2.0]), np.array([1])
    mean.add({"a": a, "n": n}, 1)
    mean.add({"a": a, "n": n + 1}, 1)
    assert (a.tolist(), n.tolist()) == ([1.0, 2.0], [1])
    a[:], n[:] = 100, 100
    assert (mean["a"].tolist(), mean["n"].tolist()) == ([1.0, 2.0], [2])


def test_small_contributions_are_not_lost() -> None:
    """Summed in float32, 1 + 2^-24 a hundred times stays 1."""
    mean = WeightedMean()
    mean.add({"a": floats(1)}, 1)
    for _ in range(100):
        mean.add({"a": floats(2**-24)}, 1)
    assert mean["a"][0] * 101 == pytest.approx(1 + 100 * 2**-24, rel=1e-12)


FLOAT32 = hnp.arrays(np.float32, st.integers(1, 5), elements=st.floats(-(2.0**100), 2.0**100, width=32))


@given(FLOAT32, st.lists(st.integers(1, 10**5), min_size=1, max_size=8))
def test_the_mean_of_equal_arrays_is_exact(array: np.ndarray, weights: list[int]) -> None:
    mean = WeightedMean()
    for weight in weights:
        mean.add({"a": array}, weight)
    assert mean["a"].astype(np.float32).tobytes() == array.tobytes()


@given(FLOAT32, st.integers(1, 10**12))
def test_one_client_gives_its_own_weights(array: np.ndarray, weight: int) -> None:
    mean = WeightedMean()
    mean.add({"a": array}, weight)
    assert mean["a"].astype(np.float32).tobytes() == array.tobytes()


@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(1, 1000)), min_size=1, max_size=10))
def test_the_mean_lies_between_and_weighs(rows: list[tuple[float, int]]) -> None:
    mean = WeightedMean()
    for value, weight in rows:
        mean.add({"a": floats(value)}, weight)
    expected = math.fsum(v * w for v, w in rows) / sum(w for _, w in rows)
    assert mean["a"][0] == pytest.approx(expected, rel=1e-12, abs=1e-12)


# ---- the check


def a_model() -> Arrays:
    return {"w": np.zeros((2, 3), dtype=np.float32), "b": floats(1, 2), "n": np.array(5, dtype=np.int64)}


def check(update: Arrays | ArrayRecord, examples: object = 10, limit: float = math.inf) -> Any:
    previous = record(a_model())
    arrays = update if isinstance(update, ArrayRecord) else record(update)
    return check_update(arrays, examples, previous, spec_of(previous), {"b": limit})


def test_spec() -> None:
    assert spec_of(record(a_model())) == {
        "w": ((2, 3), np.dtype("float32")),
        "b": ((2,), np.dtype("float32")),
        "n": ((), np.dtype("int64")),
    }


def test_a_good_update_and_its_norm() -> None:
    w = np.zeros((2, 3), dtype=np.float32)
    w[1, 2] = 3
    checked = check({"w": w, "b": floats(1, 6), "n": np.array(1000)}, examples=7)
    assert checked.norms == {"w": math.sqrt(9 / 6), "b": math.sqrt(16 / 2)}  # 3 and 6 - 2; integers have no distance
    assert checked.examples == 7
    assert list(checked.arrays) == ["w", "b", "n"]
    assert checked.arrays["w"].tolist() == w.tolist()
    assert list(check({"b": floats(1, 2)}).arrays) == ["b"]  # a partial update


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"b": floats(1, math.nan)}, "array 'b' holds 1 non-finite values"),
        ({"b": floats(math.inf, -math.inf)}, "array 'b' holds 2 non-finite values"),
        ({"b": floats(1, 2, 3)}, "array 'b' has shape (3,), expected (2,)"),
        ({"b": floats(1)}, "array 'b' has shape (1,), expected (2,)"),
        ({"w": np.zeros((3, 2), dtype=np.float32)}, "array 'w' has shape (3, 2), expected (2, 3)"),
        ({"n": np.array([5])}, "array 'n' has shape (1,), expected ()"),
        ({"b": np.zeros(2)}, "array 'b' has dtype float64, expected float32"),
        ({"b": np.zeros(2, dtype=">f4")}, "array 'b' has dtype >f4, expected float32"),
        ({"b": np.zeros(2, dtype=np.complex64)}, "array 'b' has dtype complex64, expected float32"),
        ({"n": np.array(5, dtype=np.int32)}, "array 'n' has dtype int32, expected int64"),
        ({"n": np.array(5.0)}, "array 'n' has dtype float64, expected int64"),
        ({"x": floats(1)}, "array 'x' is not part of the model"),
        ({"w.": floats(1)}, "array 'w.' is not part of the model"),
    ],
)
def test_bad_arrays(change: Arrays, reason: str) -> None:
    with pytest.raises(UpdateRejectedError) as caught:
        check(a_model() | change)
    assert str(caught.value) == reason


@pytest.mark.parametrize("count", [0, -1, 3.0, math.nan, None, True, False, "7", [7]])
def test_bad_counts(count: object) -> None:
    with pytest.raises(UpdateRejectedError) as caught:
        check(a_model(), count)
    assert str(caught.value) == f"num-examples is {count!r}: it must be a positive integer"


def test_an_empty_update() -> None:
    with pytest.raises(UpdateRejectedError, match="the update holds no arrays"):
        check({})


def test_the_norm_limit_is_inclusive() -> None:
    five = a_model() | {"b": floats(6, 7)}
    assert check(five, limit=5.0).norms["b"] == 5.0
    with pytest.raises(
        UpdateRejectedError,
        match=r"moves it by 5 \(root mean square\), more than the limit 4\.99 \(faults.update-norm-limit\)",
    ):
        check(five, limit=4.99)


def test_a_norm_too_large_for_float32_is_a_number() -> None:
    checked = check({"b": floats(3e38, 2)})
    assert checked.norms["b"] == pytest.approx(3e38 / math.sqrt(2), rel=1e-6)
    with pytest.raises(UpdateRejectedError, match="more than the limit"):
        check({"b": floats(3e38, 2)}, limit=1e30)


def with_bytes(content: bytes) -> ArrayRecord:
    return ArrayRecord({"b": Array("float32", (2,), "numpy.ndarray", content)})


GOOD = Array(floats(1, 2)).data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage that is no array",
        GOOD[:20],
        GOOD[:-1],
        b"PK\x03\x04" + bytes(30),
        b"PK\x05\x06" + bytes(18),
        b"\x80\x04K\x01.",
        GOOD.replace(b"(2,)", b"(((("),
        GOOD.replace(b"(2,), ", b"(2**40,"),
        GOOD.replace(b"'<f4'", b"'|O' "),
        GOOD.replace(b"\x01\x00", b"\x09\x00", 1),
    ],
)
def test_bytes_that_are_no_array(content: bytes) -> None:
    with pytest.raises(UpdateRejectedError, match="array 'b' cannot be read: "):
        check(with_bytes(content))


def test_tokens_are_among_what_numpys_reader_raises() -> None:
    """So that catching ValueError alone would not do."""
    with pytest.raises((tokenize.TokenError, ValueError)):
        with_bytes(GOOD.replace(b"(2,)", b"(((("))["b"].numpy()


def test_what_the_envelope_says_is_not_believed() -> None:
    lying = ArrayRecord({"b": Array("float32", (2,), "numpy.ndarray", Array(floats(1, 2, 3)).data)})
    with pytest.raises(UpdateRejectedError, match=r"has shape \(3,\), expected \(2,\)"):
        check(lying)


@given(st.data())
def test_mutated_bytes_are_refused_or_read(data: st.DataObject) -> None:
    content = bytearray(GOOD)
    for position in data.draw(st.lists(st.integers(0, len(GOOD) - 1), min_size=1, max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    try:
        checked = check(with_bytes(bytes(content[: data.draw(st.integers(0, len(GOOD)))] or content)))
    except UpdateRejectedError:
        return
    assert checked.arrays["b"].shape == (2,)
    assert np.isfinite(checked.arrays["b"]).all()


@pytest.mark.parametrize(("accepted", "limit"), [([1.0, 2.0, 9.0], 20.0), ([1.0, 2.0, 4.0, 9.0], 30.0), ([0.5], 5.0)])
def test_limits_are_of_a_units_median(accepted: list[float], limit: float) -> None:
    assert norm_limits({"head": accepted}, 10.0) == {"head": limit}
    assert norm_limits({"head": accepted}, 0.0) == {}
    assert norm_limits({"head:statistics": accepted}, 10.0) == {"head:statistics": 10 * limit}  # they go with squares


def test_without_a_history_the_limit_is_of_the_model_itself() -> None:
    """|(3, 0, 0, -4)| = 5; integers do not count. It holds for the whole update, as long as a unit of it has no history."""
    model = record({"atoms.0.w": floats(3, 0, 0), "head.b": floats(-4), "head.n": np.array(7)})
    assert first_limit(10.0, model) == 50.0
    assert first_limit(0.0, model) == math.inf
    far = record({"atoms.0.w": floats(3, 30, 40), "head.b": floats(-4)})
    assert check_update(far, 1, model, spec_of(model), {}, lambda: 50.0).norms["head"] == 0
    with pytest.raises(
        UpdateRejectedError, match=r"the update's norm 50 exceeds the limit 49\.9 \(faults.update-norm-limit\)"
    ):
        check_update(far, 1, model, spec_of(model), {"head": 1.0}, lambda: 49.9)
    assert check_update(far, 1, model, spec_of(model), {"head": 1.0, "atoms.0": 30.0}, lambda: 49.9).examples == 1


def test_variances_are_not_negative() -> None:
    model = record({"atoms.0.bn.running_var": floats(1, 1)})
    with pytest.raises(
        UpdateRejectedError, match=r"array 'atoms\.0\.bn\.running_var' has variances below 0, the smallest is -0\.5"
    ):
        check_update(record({"atoms.0.bn.running_var": floats(1, -0.5)}), 1, model, spec_of(model))


def test_counts_of_batches_are_counts() -> None:
    name = "atoms.0.bn.num_batches_tracked"
    model = record({name: np.array(5)})
    assert check_update(record({name: np.array(5 + 2**31)}), 1, model, spec_of(model)).arrays[name] == 5 + 2**31
    for count in (-1, 6 + 2**31, 2**63 - 1, -(2**63)):  # the last is what casting NaN makes
        with pytest.raises(UpdateRejectedError, match=rf"num_batches_tracked' counts {count} to {count} batches"):
            check_update(record({name: np.array(count)}), 1, model, spec_of(model))


def test_norms_are_of_units_over_their_arrays() -> None:
    model = record(
        {"atoms.0.w": floats(1, 1, 1), "atoms.0.b": floats(0), "atoms.0.n": np.array(1), "head.b": floats(2)}
    )
    moved = record(
        {"atoms.0.w": floats(1, 3, 1), "atoms.0.b": floats(1.5), "atoms.0.n": np.array(9), "head.b": floats(2)}
    )
    seen = record({"atoms.0.bn.running_mean": floats(0, 0), "atoms.0.bn.running_var": floats(1, 1)})
    moved_on = record({"atoms.0.bn.running_mean": floats(4, 0), "atoms.0.bn.running_var": floats(3, 5)})
    assert check_update(moved_on, 1, seen, spec_of(seen)).norms == {"atoms.0:statistics": 3.0}
    norms = check_update(moved, 1, model, spec_of(model)).norms
    assert norms == {"atoms.0": 1.25, "head": 0.0}
    found = {"atoms.0": [1.0]}
    note_norms(found, norms)
    assert found == {"atoms.0": [1.0, 1.25]}  # what did not move says nothing


def test_what_batch_norms_have_seen_has_no_first_limit() -> None:
    """Variances go with squares of features, of which nothing is known before; weights are held to the limit as ever."""
    model = record({"atoms.0.bn.running_var": floats(1, 1), "atoms.0.conv.weight": floats(3, 4)})
    spread = record({"atoms.0.bn.running_var": floats(7000, 1), "atoms.0.conv.weight": floats(3, 6)})
    assert check_update(spread, 1, model, spec_of(model), maximum=lambda: 2.5).norms["atoms.0"] == math.sqrt(2)
    with pytest.raises(
        UpdateRejectedError, match=r"the update's norm 2 exceeds the limit 1.5 \(faults.update-norm-limit\)"
    ):
        check_update(spread, 1, model, spec_of(model), maximum=lambda: 1.5)


def limits_of(updates: list[dict[str, float]], factor: float, known: set[str]) -> list[tuple[int, dict[str, float]]]:
    pairs = [(number, CheckedUpdate({}, 1, norms)) for number, norms in enumerate(updates)]
    return [(number, limits) for number, _, limits in add_norm_limits(pairs, factor, known)]


def test_units_without_a_history_are_compared_with_each_other() -> None:
    """Most clients train the head alone: the one that trains a block too is not measured by them."""
    block, head = {"atoms.0": 40.0, "head": 1.0}, {"head": 2.0}
    heads = {"head": 20.0}  # known with the third of them; the block's only when no more come
    found = limits_of([head, block, {"head": 3.0}, head], 10.0, set())
    assert found == [(0, heads), (2, heads), (3, heads), (1, heads | {"atoms.0": 400.0})]
    assert limits_of([{"head": 1.0, "atoms.0": 0.0}] * 3, 10.0, {"head"}) == [(n, {}) for n in range(3)]
    # the head is known: only those with the block wait, until no more come
    assert limits_of([block, head], 10.0, {"head"}) == [(1, {}), (0, {"atoms.0": 400.0})]
    assert limits_of([head, head], 10.0, {"head"}) == [(0, {}), (1, {})]
    assert limits_of([block, block], 0.0, set()) == [(0, {}), (1, {})]


def test_records_share_bytes_and_no_arrays() -> None:
    one = ArrayRecord({"a": Array(np.zeros(2)), "b": Array(np.ones(2))})
    some, again = ArrayRecord({**one}), ArrayRecord({name: Array(array.numpy()) for name, array in one.items()})
    assert some["a"] is not one["a"]
    assert share_bytes(one, some)
    assert not share_bytes(one, again)  # equal alone
    assert not share_bytes(one, ArrayRecord({"a": one["a"]}))
    assert not share_bytes(one, ArrayRecord({"b": one["b"], "a": one["a"]}))
