"""Randomness as a function of (seed, round, client, purpose): no global generator, so order and workers do not matter."""

import zlib

import numpy as np


def sequence(seed: int, *parts: int | str) -> np.random.SeedSequence:
    """The seed sequence of a purpose, e.g. `sequence(seed, round, client, "batches")`."""
    return np.random.SeedSequence([seed, *(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in parts)])


def generator(seed: int, *parts: int | str) -> np.random.Generator:
    """A numpy generator of a purpose."""
    return np.random.default_rng(sequence(seed, *parts))


def integer(seed: int, *parts: int | str) -> int:
    """A 63-bit seed of a purpose, for torch."""
    return int(sequence(seed, *parts).generate_state(1, np.uint64)[0] >> 1)
