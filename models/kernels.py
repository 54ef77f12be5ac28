"""Principal kernels: decompose a layer's weight into U S V^T, sample kernels and compose them (PriSM, sections 3.1 and 3.2).

W is [N, M, k, k] or [N, M]. sigma_i, i < R = min(M k^2, N), are its singular values in descending order; v'_i = sqrt(sigma_i)
v_i and u'_i = sqrt(sigma_i) u_i.
"""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

Sampling = Literal["importance", "uniform", "softmax", "top"]


def decompose(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return sigma[R]; v'[R, M, k, k], u'[N, R, 1, 1] of a convolution or v'[R, M], u'[N, R] of a linear layer; all float32.

    It uses the eigenvectors of W W^T (or of W^T W, if that is smaller) in double precision: U U^T W = W whatever sigma is, and
    a ResNet-18 takes a tenth of the time of LAPACK's singular value decomposition. The sign of a pair is fixed by u_i, whose
    entry of the largest magnitude is positive.
    """
    matrix = weight.reshape(len(weight), -1).astype(np.float64)
    transposed = matrix.shape[0] > matrix.shape[1]
    short = matrix.T if transposed else matrix
    vectors = np.linalg.eigh(short @ short.T)[1]
    others = vectors.T @ short  # rows of length sigma_i
    sigma = np.linalg.norm(others, axis=1)
    order = np.argsort(-sigma, kind="stable")
    sigma, root = sigma[order], np.sqrt(sigma[order])
    scaled = vectors[:, order] * root
    others = others[order] / np.where(root > 0, root, 1)[:, None]
    u, v = (others.T, scaled.T) if transposed else (scaled, others)
    signs = np.where(u[np.abs(u).argmax(0), np.arange(len(sigma))] < 0, -1, 1)
    u, v = (u * signs).astype(np.float32), (v * signs[:, None]).astype(np.float32)
    spatial = (1,) * (weight.ndim - 2)
    return sigma.astype(np.float32), v.reshape(-1, *weight.shape[1:]), u.reshape(len(weight), -1, *spatial)


def compose(v: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Return W from all its kernels."""
    product: np.ndarray = u.reshape(len(u), -1) @ v.reshape(len(v), -1)
    return product.reshape(len(u), *v.shape[1:])


def sample(
    sigma: np.ndarray, kept: int, kappa: float, rng: np.random.Generator, sampling: Sampling = "importance"
) -> np.ndarray:
    """Draw `kept` of R kernels without replacement, in ascending order, with p_i = sigma_i^kappa / sum (Eq. 2).

    `softmax` uses p_i = exp(sigma_i) / sum and `uniform` 1 / R (Table 5); `top` takes the largest and draws nothing. Taking the
    largest of log p_i + g_i, with g_i from Gumbel's distribution, is equivalent to drawing one after the other.
    """
    if sampling == "top":
        return np.arange(kept)
    keys = _log_weights(sigma, kappa, sampling) + rng.gumbel(size=len(sigma))
    return np.sort(np.argsort(-keys, kind="stable")[:kept])


def _log_weights(sigma: np.ndarray, kappa: float, sampling: Sampling) -> np.ndarray:
    """Return log p_i, up to a constant."""
    if sampling == "importance":
        return np.asarray(kappa * np.log(np.maximum(sigma, np.finfo(sigma.dtype).tiny)))
    return sigma if sampling == "softmax" else np.zeros_like(sigma)


def inclusion(sigma: np.ndarray, kept: int, kappa: float, sampling: Sampling = "importance") -> np.ndarray:
    """Return pi[R], the probability that `sample` draws each kernel, within 1e-4. They sum to `kept`.

    Drawing one after the other is a race: kernel i arrives at a time that is exponential with rate p_i, and the first `kept`
    are drawn. So pi_i is the integral over t of p_i exp(-t p_i) P(fewer than `kept` of the others have arrived by t). This is
    the trapezoidal rule in log t, from where no kernel has arrived to where more than `kept` have.
    """
    if sampling == "top":
        return (np.arange(len(sigma)) < kept).astype(np.float64)
    if kept >= len(sigma):
        return np.ones(len(sigma))
    logarithms = _log_weights(sigma, kappa, sampling).astype(np.float64)
    # Below e^-60 the weights of a rank-deficient layer's last kernels are noise.
    logarithms = np.maximum(logarithms - logarithms.max(), -60)
    step = 0.7 / math.sqrt(kept)
    log_t = np.arange(-14, math.log(25) - np.sort(logarithms)[-1 - kept], step)
    arrivals = np.exp(log_t[:, None] + logarithms)  # t p_i
    waiting, count = np.exp(-arrivals), min(kept, len(sigma) - kept)
    none = np.eye(1, count).repeat(len(log_t), 0)
    fewer = np.stack([*_fewer(none, -np.expm1(-arrivals) if count == kept else waiting)], 1)
    found = (arrivals * waiting * (fewer if count == kept else 1 - fewer)).sum(0)
    return np.asarray(found * (kept / found.sum()))


def _fewer(counts: np.ndarray, events: np.ndarray) -> Iterator[np.ndarray]:
    """Yield for each of n events the probability [T] that fewer than c happen of all the others.

    events[T, n] are their probabilities. counts[T, c] are the probabilities that 0 to c - 1 happened of events not listed. Each
    half of the events is added for the other half, which takes n log n additions.
    """
    if events.shape[1] == 1:
        yield counts.sum(1)
        return
    left, right = np.array_split(events, 2, axis=1)
    for half, rest in ((left, right), (right, left)):
        with_rest = counts.copy()
        for happens in rest.T[:, :, None]:
            more = with_rest[:, :-1] * happens
            with_rest *= 1 - happens
            with_rest[:, 1:] += more
        yield from _fewer(with_rest, half)


def effective_rank(sigma: np.ndarray) -> float:
    """Return 2^H, H the entropy (bits) of p_i = sigma_i / sum: the kernels that a layer needs (section 4.4.1).

    The paper prints 2^(-log(sum p log p)), a logarithm too many. It is 0 for a zero layer.
    """
    if not (total := float(sigma.sum(dtype=np.float64))):
        return 0.0
    p = sigma.astype(np.float64)[sigma > 0] / total
    return float(2 ** -(p * np.log2(p)).sum())
