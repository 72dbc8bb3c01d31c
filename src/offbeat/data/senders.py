"""Random choices of data injection, and the batch size that compensates for added samples.

In each step of data injection some workers, the *senders*, send some samples of their batch to all
other workers.
"""

import math

import numpy as np

from offbeat.arguments import require_integer, require_number
from offbeat.data.conversation import Key

_SENDERS, _SAMPLES = 4, 5  # generators are seeded by (seed, purpose, …); these are purposes


def injected_batch_size(batch_size: int, alpha: float, beta: float, workers: int) -> int:
    """Return the batch size b' for a loader whose batches have about b samples after injection.

    This is Equation 3 of the paper, rounded to the nearest integer and at least 1:

        b' = max(1, ⌊b / (1 + α·β·N) + ½⌋)

    In each step there are S = ⌈α·N⌉ senders, which send k = max(1, ⌊β·b' + ½⌋) samples each. After
    injection a batch has B = b' + S·k samples. On a sender it has only B − k, because a sender
    does not receive its own samples. B differs from b, because α·N, b' and k are rounded.

    Example: for b = 32, α = β = 1/2 and N = 10, b' is 9 and B is 9 + 5·5 = 34. A sender has 29
    samples, and the mean over the workers is 31.5.

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


def count_to_send(samples: int, beta: float) -> int:
    """Return how many of its ``samples`` a sender sends: β·samples, rounded, and at least 1."""
    return min(samples, max(1, math.floor(_clean(beta * samples) + 0.5)))


def draw_senders(seed: int, key: Key, workers: int, alpha: float) -> list[int]:
    """Draw the ⌈α·N⌉ senders of step ``key``. The ranks are ascending, and equal on all workers."""
    random = np.random.default_rng([seed % 2**64, _SENDERS, *key])
    count = math.ceil(_clean(alpha * workers))
    drawn: list[int] = np.sort(random.choice(workers, count, replace=False)).tolist()
    return drawn


def draw_samples(seed: int, key: Key, rank: int, samples: int, beta: float) -> list[int]:
    """Draw the samples that sender ``rank`` sends in step ``key``: positions in its batch."""
    random = np.random.default_rng([seed % 2**64, _SAMPLES, *key, rank])
    count = count_to_send(samples, beta)
    drawn: list[int] = np.sort(random.choice(samples, count, replace=False)).tolist()
    return drawn


def _clean(value: float) -> float:
    return round(value, 9)  # 0.07 · 100 becomes 7 instead of 7.000000000000001


def require_fraction(name: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a number in (0, 1]."""
    require_number(name, value)
    if not 0 < value <= 1:  # type: ignore[operator]  # it is a number
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
