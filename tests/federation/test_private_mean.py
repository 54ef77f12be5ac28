"""The private mean, by hand: what one client can move, what the sum is divided by, and the noise on it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from piecework.federation.aggregation import UpdateRejectedError
from piecework.federation.privacy import Privacy, Release
from piecework.federation.private_mean import Holders, PrivateMean

SECRET = "ab" * 32
BIG = "atoms.0.weight"


def a_privacy(noise: float = 1.0, clip: float = 2.0, releases: int = 0, secret: str = SECRET) -> Privacy:
    """Ten clients, of which a round draws each with probability 1/2."""
    return Privacy(Release(noise, 5, 10, 1e-3), clip, limit=0.0, secret=secret, releases=releases)


def a_record(**arrays: Any) -> ArrayRecord:
    return ArrayRecord({name.replace("_", "."): Array(np.asarray(each)) for name, each in arrays.items()})


def a_mean(privacy: Privacy, model: ArrayRecord, *holders: tuple[Mapping[str, Any], int]) -> PrivateMean:
    mean = PrivateMean(privacy, model)
    mean.expect([Holders(entries, clients) for entries, clients in holders])
    return mean


def sum_of(mean: PrivateMean, name: str) -> np.ndarray:
    """The sum of clipped changes, before the noise."""
    return mean._sums[name]


def test_all_that_a_client_changes_is_clipped_once() -> None:
    """Changes of 3 and of 4 are one of norm 5: with C = 2 each is scaled by 2/5, and not each array to 2 by itself."""
    model = a_record(a_w=np.full(1, 10, np.float32), b_w=np.zeros(1, np.float32))
    mean = a_mean(a_privacy(), model, ({"a.w": None, "b.w": None}, 10))
    mean.add({"a.w": np.array([13.0], np.float32), "b.w": np.array([-4.0], np.float32)}, 1)
    assert (sum_of(mean, "a.w")[0], sum_of(mean, "b.w")[0]) == pytest.approx((1.2, -1.6))


def test_a_small_change_stays_as_it_is_and_weights_do_not_count() -> None:
    mean = a_mean(a_privacy(), a_record(a_w=np.zeros(2, np.float32)), ({"a.w": None}, 10))
    mean.add({"a.w": np.array([0.5, -1.0], np.float32)}, 1000)
    mean.add({"a.w": np.array([0.25, 0.0], np.float32)}, 1)
    assert sum_of(mean, "a.w").tolist() == [0.75, -1.0]


def test_the_sum_is_divided_by_who_holds_an_entry_and_not_by_who_answered() -> None:
    """Four of ten clients hold it and q = 1/2: the divisor is 2, whether none, one or three of them answer."""
    model = a_record(a_w=np.array([1.0], np.float32))
    noise = a_mean(a_privacy(1e-9), model, ({"a.w": None}, 4)).over("a.w", np.array([1.0], np.float32))
    assert noise == pytest.approx(1.0)
    for answers in (1, 3):
        mean = a_mean(a_privacy(1e-9), model, ({"a.w": None}, 4))
        for _ in range(answers):
            mean.add({"a.w": np.array([1.5], np.float32)}, 1)
        assert mean.over("a.w", np.array([1.0], np.float32)) == pytest.approx(1 + answers * 0.5 / 2)
        assert mean.weight("a.w") == 2.0


def test_entries_that_fewer_hold_have_a_smaller_divisor_and_those_of_nobody_stay() -> None:
    """Four clients hold the first row, one of them the second as well, and nobody the third."""
    one, two = (np.array([0]), np.array([0])), (np.array([0, 1]), np.array([0]))
    model = a_record(a_w=np.zeros((3, 1), np.float32))
    mean = a_mean(a_privacy(1e-9), model, ({"a.w": one}, 3), ({"a.w": two}, 1))
    mean.add({"a.w": np.array([[0.5], [1.0]], np.float32)}, 1, {"a.w": two}, {"a.w": (3, 1)})
    mean.add({"a.w": np.array([[0.5]], np.float32)}, 1, {"a.w": one}, {"a.w": (3, 1)})
    assert mean.over("a.w", np.zeros((3, 1), np.float32)).ravel() == pytest.approx([1.0 / (0.5 * 4), 1.0 / 0.5, 0.0])


def test_what_nobody_holds_does_not_move_and_neither_do_counts() -> None:
    model = a_record(a_w=np.zeros(1, np.float32), b_w=np.zeros(1, np.float32), a_n=np.array(7))
    mean = a_mean(a_privacy(), model, ({"a.w": None, "a.n": None}, 10))
    mean.add({"b.w": np.array([99.0], np.float32), "a.n": np.array(9), "a.w": np.array([1.0], np.float32)}, 1)
    assert ("a.w" in mean, "b.w" in mean, "a.n" in mean) == (True, False, False)
    assert sum_of(mean, "a.w").tolist() == [1.0]  # and not scaled by the 99 that has no place


@pytest.mark.parametrize(("noise", "clip"), [(1.0, 2.0), (0.5, 0.1)])
def test_the_noise_on_a_sum_is_gaussian_with_z_times_c(noise: float, clip: float) -> None:
    """Of 200,000 values: standard deviation within 1 %, a third within one of it, 1 in 22 beyond two, and no mean."""
    size = 200_000
    mean = a_mean(a_privacy(noise, clip), a_record(atoms_0_weight=np.zeros(size, np.float64)), ({BIG: None}, 4))
    drawn = mean.over(BIG, np.zeros(size)) * 2.0 / (noise * clip)  # 2 = q m
    assert drawn.std() == pytest.approx(1, rel=0.01)
    assert abs(drawn.mean()) < 5 / size**0.5
    assert np.mean(np.abs(drawn) < 1) == pytest.approx(0.6827, abs=0.005)
    assert np.mean(np.abs(drawn) > 2) == pytest.approx(0.0455, abs=0.002)


def test_noise_is_drawn_again_for_each_array_and_release_and_repeated_by_the_secret() -> None:
    model = a_record(a_w=np.zeros(100), b_w=np.zeros(100))

    def noise(name: str, **changes: Any) -> np.ndarray:
        return a_mean(a_privacy(**changes), model, ({"a.w": None, "b.w": None}, 10)).over(name, np.zeros(100))

    first = noise("a.w")
    assert np.array_equal(first, noise("a.w"))
    for other in (noise("b.w"), noise("a.w", releases=1), noise("a.w", secret="cd" * 32)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.4


def test_the_signal_to_noise_ratio_of_a_unit_is_estimated_from_what_is_released() -> None:
    """Ten clients move 10,000 entries by 1.9 together, C = 2: a sum of norm 19 against noise of norm 0.1 x 100 = 10."""
    entries, model = 10_000, a_record(atoms_0_weight=np.zeros(10_000), head_w=np.zeros(10_000))
    mean = a_mean(a_privacy(0.05), model, ({BIG: None, "head.w": None}, 10))
    for _ in range(10):
        mean.add({BIG: np.full(entries, 1.9 / entries**0.5)}, 1)
    for name in (BIG, "head.w"):
        mean.over(name, np.zeros(entries))
    found = mean.signal_to_noise()
    assert found["atoms.0"] == pytest.approx(1.9, rel=0.02)
    assert found["head"] < 0.2


def test_the_new_array_has_the_type_of_the_old_one() -> None:
    model = a_record(a_w=np.ones(3, np.float32))
    mean = a_mean(a_privacy(), model, ({"a.w": None}, 10))
    assert mean.over("a.w", np.ones(3, np.float32)).dtype == np.float32
    assert mean["a.w"].dtype == np.float64


def test_a_change_whose_norm_is_no_number_is_rejected_whole() -> None:
    mean = a_mean(a_privacy(), a_record(a_w=np.full(9, -1.7e308)), ({"a.w": None}, 10))
    with pytest.raises(UpdateRejectedError, match="too large for a number"), np.errstate(over="ignore"):
        mean.add({"a.w": np.full(9, 1.7e308)}, 1)
    assert not mean._sums
