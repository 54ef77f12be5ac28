"""Client-level differential privacy: what a run promises, what it has spent, and the randomness behind it.

The models of all rounds together are (epsilon, delta)-differentially private for a client and all its data: it takes part when
its coin falls so, or never. How many clients there are, and of which device classes, is public. (H. Brendan McMahan, Daniel
Ramage, Kunal Talwar, Li Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018,
https://arxiv.org/abs/1710.06963.) In a round each of K clients takes part with the probability q, by a coin of its own.
With D_k, all that client k changes of the model in a round, zero where it holds nothing, the model moves by

    ( sum_k D_k min(1, C / ||D_k||)  +  N(0, (z C)^2) ) / (q m)

in each entry, m of the K clients' devices hold the entry. C is `privacy.clip`, z the noise multiplier. The divisor is known
before the round: it is the same whoever answers. So one round is a Poisson-subsampled Gaussian mechanism of sensitivity C, and
Flower's accountant composes the rounds (Renyi differential privacy, by Google's dp-accounting).

The coins and the noise come from a secret of the run, which a checkpoint holds, and from the number of models released before.
"""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
from flwr.serverapp import GaussianPrivacyEvent, NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod

from piecework.training.settings import Settings
from piecework.training.settings.privacy import LARGEST_EPSILON

WORDS = 8  # of 32 bits, of a secret
# Renyi orders at which the accountant looks. Its own begin at 1.1, where its sum for subsampled noise does not converge.
ORDERS = (
    1.25,
    1.5,
    1.75,
    *(quarters / 4 for quarters in range(8, 40)),
    *map(float, range(10, 65)),
    128.0,
    256.0,
    512.0,
)
NO_LIBRARY = 'privacy needs an accountant: pip install "piecework[privacy]"'


@dataclass(frozen=True)
class Release:
    """What one round gives away: noise of z times the clip, while each client takes part with probability sample / clients.

    `delta` is that of the guarantee.
    """

    noise_multiplier: float
    sample: int
    clients: int
    delta: float


@lru_cache(maxsize=4096)
def epsilon_of(release: Release, count: int) -> float:
    """Return the epsilon of so many releases, 0 without any. Raises ValueError without the library that counts it."""
    if not count:
        return 0.0
    accountant = _accountant(release)
    accountant.compose(GaussianPrivacyEvent(release.noise_multiplier, release.sample, release.clients), count)
    return accountant.get_epsilon(release.delta)


def _accountant(release: Release) -> RdpAccountant:
    # If all take part in every round, nobody can hide in not having been drawn.
    everyone = release.sample == release.clients
    sampling = SamplingMethod.NO_AMPLIFICATION if everyone else SamplingMethod.POISSON
    config = PrivacyConfig(release.delta, release.clients, NeighboringRelation.ADD_OR_REMOVE_ONE, sampling)
    try:
        return RdpAccountant(config, ORDERS)
    except ImportError as error:
        raise ValueError(f"{NO_LIBRARY} ({error})") from error
    finally:
        logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of orders that it leaves out, at every release


def noise_for(target: float, rounds: int, sample: int, clients: int, delta: float) -> float:
    """Return the least noise multiplier, within a thousandth, with which so many rounds spend at most `target`.

    Raises ValueError if not even a million times the clip is enough.
    """
    low, high = 0.0, 1.0
    while epsilon_of(Release(high, sample, clients, delta), rounds) > target:
        low, high = high, 2 * high
        if high > 2**20:
            raise ValueError(
                f"privacy.epsilon = {target:g}: no noise is enough for {rounds} rounds with delta = {delta:g}; give more "
                "epsilon, fewer rounds, or more clients"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        enough = middle and epsilon_of(Release(middle, sample, clients, delta), rounds) <= target
        low, high = (low, middle) if enough else (middle, high)
    return high


@dataclass
class Privacy:
    """The privacy of a run: the mechanism, its limit, and how many models it has released.

    `secret` is in hexadecimal digits.
    """

    release: Release
    clip: float
    limit: float
    secret: str
    releases: int = 0

    @classmethod
    def of(cls, settings: Settings, known: Mapping[str, Any]) -> "Privacy":
        """Return the privacy of a new run, or of one that goes on from what `to_values` returned.

        Raises ValueError if the limit does not pay for one round, or the accountant's library is missing.
        """
        own, clients = settings.privacy, settings.clients
        sample = min(settings.clients_per_round or clients, clients)
        delta = own.delta or clients**-1.1
        noise = known.get("noise-multiplier") or own.noise_multiplier
        noise = noise or noise_for(own.epsilon, settings.num_rounds, sample, clients, delta)
        secret = known.get("secret") or (f"{own.seed:x}" if own.seed else secrets.token_hex(4 * WORDS))
        found = cls(Release(noise, sample, clients, delta), own.clip, own.epsilon, secret, known.get("releases", 0))
        if found.epsilon(1) > LARGEST_EPSILON:
            raise ValueError(
                f"privacy.noise-multiplier = {noise:g}: one round spends epsilon = {found.epsilon(1):.4g}, which promises "
                "nothing; give more noise"
            )
        if own.epsilon and found.epsilon(1) > own.epsilon:
            raise ValueError(
                f"privacy.epsilon = {own.epsilon:g}: one round with privacy.noise-multiplier = {noise:g} spends "
                f"{found.epsilon(1):.4g}; give more noise, more epsilon, or leave privacy.noise-multiplier out"
            )
        return found

    def to_values(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON values."""
        return {
            "noise-multiplier": self.release.noise_multiplier,
            "secret": self.secret,
            "releases": self.releases,
        }

    def epsilon(self, releases: int) -> float:
        """Return the epsilon of so many rounds."""
        return epsilon_of(self.release, releases)

    @property
    def spent(self) -> float:
        """The epsilon that the rounds so far have spent."""
        return self.epsilon(self.releases)

    @property
    def exhausted(self) -> bool:
        """Whether one more round would spend more than the limit."""
        return bool(self.limit) and self.epsilon(self.releases + 1) > self.limit

    def affordable(self, rounds: int) -> int:
        """Return how many of so many rounds the limit pays for."""
        if not self.limit or self.epsilon(rounds) <= self.limit:
            return rounds
        low, high = 0, rounds
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon(middle) <= self.limit else (low, middle)
        return low

    @property
    def rate(self) -> float:
        """The probability q with which a client takes part in a round."""
        return self.release.sample / self.release.clients

    @property
    def noise(self) -> float:
        """The standard deviation z C of the noise on a sum of updates."""
        return self.release.noise_multiplier * self.clip

    def generator(self, *parts: int | str) -> np.random.Generator:
        """Return the generator of a purpose, a function of the secret."""
        digest = sha256(repr((self.secret, parts)).encode()).digest()
        return np.random.default_rng(np.frombuffer(digest, np.uint32))

    def takes_part(self, client: int) -> bool:
        """Return whether a client takes part in the next round: its own coin, which no other client's presence changes."""
        if self.release.sample == self.release.clients:
            return True
        return bool(self.generator("coin", self.releases, client).random() < self.rate)

    def describe(self) -> dict[str, Any]:
        """Return the entry of a round's record."""
        release = self.release
        return {
            "epsilon": self.spent,
            "delta": release.delta,
            "limit": self.limit,
            "noise_multiplier": release.noise_multiplier,
            "clip": self.clip,
            "sampling_rate": self.rate,
            "secret": not self.is_known,
        }

    @property
    def is_known(self) -> bool:
        """Whether the secret is a seed of the settings, so that nothing is private."""
        return len(self.secret) < 8 * WORDS
