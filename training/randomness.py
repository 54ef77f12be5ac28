"""Random numbers as a function of (seed, round, client, purpose).

No generator is global, so results do not depend on the order of tasks or on the number of workers.
"""

import zlib

import numpy as np


def sequence(seed: int, *parts: int | str) -> np.random.SeedSequence:
    """Return the seed sequence of a purpose, e.g. `sequence(seed, round, client, "batches")`."""
    return np.random.SeedSequence([seed, *(zlib.crc32(p.encode()) if isinstance(p, str) else p for p in parts)])


def generator(seed: int, *parts: int | str) -> np.random.Generator:
    """Return a numpy generator for a purpose."""
    return np.random.default_rng(sequence(seed, *parts))


def integer(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed for a purpose, for torch."""
    return int(sequence(seed, *parts).generate_state(1, np.uint64)[0] >> 1)
