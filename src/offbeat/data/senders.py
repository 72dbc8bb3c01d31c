"""Random choice of senders and samples in data injection, and the size of injected batches."""

import math

import numpy as np

from offbeat.arguments import require_integer, require_number
from offbeat.data.exchange import Key

_SENDERS, _SAMPLES = 4, 5  # purposes of a generator, in (seed, purpose, …)


def injected_batch_size(batch_size: int, alpha: float, beta: float, workers: int) -> int:
    """Return the batch size b' of the loader with which injected batches have about b samples.

    Equation 3 of the paper, rounded to nearest (a half up), at least 1:

        b' = ⌊b / (1 + α·β·N) + ½⌋

    The exact size of an injected batch, with S = ⌈α·N⌉ senders of k = ``given(b', β)`` samples
    each, is B = b' + S·k on a worker that is not a sender of the step, B − k on a sender (which
    does not receive its own samples), and B − S·k/N on average. Because α·N, b' and k are rounded,
    B only approximates b. If none of them was rounded up from below ½ to 1:

        −(1 + α·β·N)/2 − S/2  ≤  B − b  ≤  (1 + α·β·N)/2 + S/2 + (S − α·N)·β·b'

    For b = 32, α = β = 1/2, N = 10, B is 9 + 5·5 = 34 samples, 29 on a sender, 31.5 on average.

    Args:
        batch_size: Desired number b of samples per step (≥ 1).
        alpha: Fraction α of workers that send, in (0, 1].
        beta: Fraction β of its own samples that each sender sends, in (0, 1].
        workers: Number of workers N (≥ 1).

    Raises:
        TypeError: An argument is not a number.
        ValueError: An argument is out of its range.

    Source: Tyagi & Swany, arXiv 2307.07950, Equation 3.
    """
    require_fraction("alpha", alpha)
    require_fraction("beta", beta)
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        require_integer(name, value, least=1)
    return max(1, math.floor(_clean(batch_size / (1 + alpha * beta * workers)) + 0.5))


def given(samples: int, beta: float) -> int:
    """Return how many of its ``samples`` a sender gives: β of them, a half rounded up, ≥ 1."""
    return min(samples, max(1, math.floor(_clean(beta * samples) + 0.5)))


def draw_senders(seed: int, key: Key, workers: int, alpha: float) -> list[int]:
    """Return the ⌈α·N⌉ senders of step ``key``, ascending. The same on all workers."""
    random = np.random.default_rng([seed % 2**64, _SENDERS, *key])
    count = math.ceil(_clean(alpha * workers))
    drawn: list[int] = np.sort(random.choice(workers, count, replace=False)).tolist()
    return drawn


def draw_samples(seed: int, key: Key, rank: int, samples: int, beta: float) -> list[int]:
    """Return the indices of the samples that sender ``rank`` gives in step ``key``, ascending."""
    random = np.random.default_rng([seed % 2**64, _SAMPLES, *key, rank])
    count = given(samples, beta)
    drawn: list[int] = np.sort(random.choice(samples, count, replace=False)).tolist()
    return drawn


def _clean(value: float) -> float:
    return round(value, 9)  # 0.1 · 30 is 3, not 3.0000000000000004


def require_fraction(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a number in (0, 1]."""
    require_number(name, value)
    if not 0 < value <= 1:  # type: ignore[operator]  # it is a number
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
