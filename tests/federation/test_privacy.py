"""What a private run spends, by hand and by Flower's accountant; its coins, its secret and its limit."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
from settings_helpers import settings_with

from piecework.federation.privacy import ORDERS, Privacy, Release, epsilon_of, noise_for
from piecework.server_app.records import RunDir
from piecework.server_app.run_values import known_privacy, note_releases
from piecework.training.settings import Settings, SettingsError

ALL = {"clients": 10, "clients_per_round": 0, "num_rounds": 4}


def by_hand(renyi: dict[float, float], count: int, delta: float) -> float:
    """Epsilon of releases with a Renyi divergence for each order: the least over the orders (Balle et al. 2020, Theorem 21)."""
    bounds = (
        count * each + math.log1p(-1 / order) - math.log(delta * order) / (order - 1) for order, each in renyi.items()
    )
    return min(bounds)


@pytest.mark.parametrize(("noise", "count"), [(4.0, 10), (1.0, 1), (2.0, 100)])
def test_epsilon_where_all_take_part_is_that_of_the_gaussian_mechanism(noise: float, count: int) -> None:
    """The Renyi divergence of order a of noise z is a / (2 z^2) (Mironov 2017)."""
    expected = by_hand({order: order / (2 * noise**2) for order in ORDERS}, count, 1e-5)
    assert epsilon_of(Release(noise, 10, 10, 1e-5), count) == pytest.approx(expected, rel=1e-9)


def test_epsilon_of_a_drawn_round_is_that_of_the_subsampled_mechanism() -> None:
    """Of integer orders a: log of sum_i C(a, i) (1 - q)^(a - i) q^i exp((i^2 - i) / (2 z^2)), / (a - 1) (Mironov 2019)."""
    q, noise, count, delta = 0.1, 2.0, 50, 1e-5
    terms = {
        order: [
            math.comb(order, i) * (1 - q) ** (order - i) * q**i * math.exp((i * i - i) / (2 * noise**2))
            for i in range(order + 1)
        ]
        for order in range(2, 65)
    }
    integers = by_hand({a: math.log(math.fsum(each)) / (a - 1) for a, each in terms.items()}, count, delta)
    found = epsilon_of(Release(noise, 10, 100, delta), count)
    assert integers * 0.99 < found <= integers  # quarters between the integers may be a little better


def test_nothing_is_spent_before_the_first_release_and_more_with_each() -> None:
    release = Release(1.0, 10, 100, 1e-5)
    spent = [epsilon_of(release, count) for count in (0, 1, 2, 10)]
    assert spent[0] == 0.0
    assert spent == sorted(set(spent))


@pytest.mark.parametrize(("target", "sample"), [(8.0, 10), (1.0, 10), (3.0, 100)])
def test_the_noise_for_a_limit_just_meets_it(target: float, sample: int) -> None:
    noise = noise_for(target, 50, sample, 100, 1e-4)
    assert epsilon_of(Release(noise, sample, 100, 1e-4), 50) <= target
    assert epsilon_of(Release(noise * 0.998, sample, 100, 1e-4), 50) > target


def test_each_client_has_a_coin_of_its_own() -> None:
    """Over 200 releases 50 clients with q = 1/5 take part 2,000 times, with a standard deviation of 40."""
    privacy = Privacy(Release(1.0, 10, 50, 1e-4), 1.0, 0.0, "17" * 32)
    taken = []
    for privacy.releases in range(200):
        taken.append([privacy.takes_part(client) for client in range(50)])
    assert 1880 < sum(map(sum, taken)) < 2120
    assert len({sum(each) for each in taken}) > 4  # a round's number of clients varies, as the accountant assumes
    larger = Privacy(Release(1.0, 20, 100, 1e-4), 1.0, 0.0, "17" * 32, releases=199)
    assert [larger.takes_part(client) for client in range(50)] == taken[-1]  # others change nothing


def test_all_take_part_in_every_round_if_all_are_asked() -> None:
    privacy = Privacy.of(settings_with(**ALL, privacy__noise_multiplier=1.0), {})
    assert privacy.rate == 1
    assert all(privacy.takes_part(client) for client in range(10))


def test_a_new_run_has_a_secret_of_its_own_and_a_resumed_one_keeps_it() -> None:
    settings = settings_with(**ALL, privacy__noise_multiplier=1.0)
    one, other = Privacy.of(settings, {}), Privacy.of(settings, {})
    assert one.secret != other.secret
    assert len(one.secret) == 64
    assert not one.is_known
    one.releases = 3
    again = Privacy.of(settings, one.to_values())
    assert (again.secret, again.releases, again.spent) == (one.secret, 3, one.spent)


def test_a_seed_is_no_secret() -> None:
    privacy = Privacy.of(settings_with(**ALL, privacy__noise_multiplier=1.0, privacy__seed=7), {})
    assert privacy.is_known
    assert privacy.describe()["secret"] is False


def test_a_limit_alone_finds_the_noise_for_all_rounds_and_a_resumed_run_keeps_it() -> None:
    settings = settings_with(**ALL, privacy__epsilon=5.0)
    privacy = Privacy.of(settings, {})
    assert 4.9 < privacy.epsilon(4) <= 5.0
    longer = Privacy.of(
        settings_with(**ALL | {"num_rounds": 8}, privacy__epsilon=5.0), privacy.to_values() | {"releases": 4}
    )
    assert longer.release == privacy.release
    assert longer.exhausted
    assert not privacy.exhausted


def test_delta_falls_with_the_number_of_clients() -> None:
    assert Privacy.of(settings_with(**ALL, privacy__noise_multiplier=1.0), {}).release.delta == pytest.approx(10**-1.1)


def test_a_limit_that_does_not_pay_for_a_round_is_refused_with_what_it_costs() -> None:
    with pytest.raises(
        ValueError, match=r"epsilon = 0\.1: one round with privacy\.noise-multiplier = 1 spends \d\.\d+;"
    ):
        Privacy.of(settings_with(**ALL, privacy__noise_multiplier=1.0, privacy__epsilon=0.1), {})


def test_noise_that_hides_nobody_is_refused_with_what_a_round_costs() -> None:
    with pytest.raises(ValueError, match=r"multiplier = 0\.01: one round spends epsilon = \d+, which promises nothing"):
        Privacy.of(settings_with(**ALL, privacy__noise_multiplier=0.01), {})


def test_a_missing_accountant_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    epsilon_of.cache_clear()
    with pytest.raises(ValueError, match=r'pip install "piecework\[privacy\]"'):
        epsilon_of(Release(1.0, 10, 100, 1e-5), 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"privacy__epsilon": 1e6}, "1e\\+06 promises nothing"),
        ({"privacy__clip": 0.0}, "privacy.clip"),
        ({"privacy__noise_multiplier": 1e-200}, "privacy.noise-multiplier = 1e-200: give 0.001 to 1000"),
        ({"privacy__delta": 1.0}, "privacy.delta"),
        ({"privacy__clip": 3.0}, "privacy.clip = 3 makes nothing private: set privacy.noise-multiplier or"),
        ({"privacy__seed": 7}, "privacy.seed = 7 makes nothing private"),
    ],
)
def test_settings_that_promise_nothing(values: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        settings_with(**values)


def test_a_run_is_private_with_noise_or_a_limit() -> None:
    assert settings_with(privacy__epsilon=1.0).privacy.on
    assert settings_with(privacy__noise_multiplier=1.0, privacy__clip=3.0).privacy.on
    assert Settings().privacy.on is False


def test_what_was_shown_counts_however_often_the_run_is_killed_and_begun_again(tmp_path: Path) -> None:
    """Killed before its first checkpoint, after that of round 3, and twice in a repeated round 4."""
    run, settings = RunDir(tmp_path), settings_with(**ALL, privacy__noise_multiplier=1.0)
    first = Privacy.of(settings, known_privacy({}, run, settings))
    first.releases += 1
    note_releases(run, first)
    run.forget()
    again = Privacy.of(settings, known_privacy({}, run, settings))
    assert (again.releases, again.secret == first.secret) == (1, False)
    again.releases += 3
    kept = {"privacy": again.to_values()}
    for expected in (5, 6):
        again.releases += 1
        note_releases(run, again)
        run.forget_after(3)
        again = Privacy.of(settings, known_privacy(kept, run, settings))
        assert again.releases == expected
    known = settings_with(**ALL, privacy__noise_multiplier=1.0, privacy__seed=7)
    assert known_privacy(kept, run, known)["releases"] == 4  # the round is repeated to the bit
