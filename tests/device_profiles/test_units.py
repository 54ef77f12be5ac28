"""Amounts as people read them."""

import pytest

from piecework.device_profiles.units import format_count, format_flops, format_seconds, format_share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.0012, "0.0012 s"),
        (0.471, "0.47 s"),
        (0.96, "1.0 s"),
        (9.44, "9.4 s"),
        (42.4, "42 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7530, "2 h 5 min"),
        (47 * 3600, "47 h 0 min"),
        (76 * 3600, "3 d 4 h"),
        (1200 * 86400, "1,200 d 0 h"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_and_operations() -> None:
    assert [format_count(n) for n in (0, 950, 39_594, 520_300, 11_173_962)] == ["0", "950", "39.6 k", "520 k", "11.2 M"]
    assert [format_flops(n) for n in (950, 53e6, 5.06e9, 1.2e13)] == ["950 FLOP", "53 MFLOP", "5.06 GFLOP", "12 TFLOP"]
    assert format_flops(2.57e9, "MAC") == "2.57 GMAC"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0%"),
        (0.001, "<1%"),
        (0.01, "1%"),
        (0.994, "99%"),
        (0.998, ">99%"),
        (sum([0.1] * 10), "100%"),
        (1.0, "100%"),
    ],
)
def test_only_all_is_a_hundred_percent_and_only_nothing_is_none(share: float, text: str) -> None:
    assert format_share(share) == text
