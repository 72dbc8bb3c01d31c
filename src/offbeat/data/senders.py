"""Who gives which samples in data injection, and how large batches become: alike on all workers."""

import math

import numpy as np

from offbeat.arguments import require_integer, require_number
from offbeat.data.exchange import Key

_SENDERS, _SAMPLES = 4, 5  # purposes of a generator


def injected_batch_size(batch_size: int, alpha: float, beta: float, workers: int) -> int:
    """The batch size b' for the loader, so that batches hold about ``batch_size`` = b afterwards.

    Equation 3 of the paper, rounded to nearest (a half up), at least 1:

        b' = ⌊b / (1 + α·β·N) + ½⌋

    What a batch then holds, exactly, with S = ⌈α·N⌉ senders of k = ``given(b', β)`` samples each:
    B = b' + S·k on a worker that is no sender of the step, B − k on one that is (it does not
    receive its own), and B − S·k/N on average. α·N, b' and k are rounded, so B is b only about;
    where none of them was rounded up from below ½ to 1:

        −(1 + α·β·N)/2 − S/2  ≤  B − b  ≤  (1 + α·β·N)/2 + S/2 + (S − α·N)·β·b'

    For b = 32, α = β = 1/2, N = 10 it is 9 + 5·5 = 34 samples, 29 on a sender, 31.5 on average.

    Args:
        batch_size: b, the samples each step shall use.
        alpha: α in (0, 1], the fraction of workers that send.
        beta: β in (0, 1], the fraction of its own samples that each gives.
        workers: N.

    Raises:
        TypeError: something else than numbers.
        ValueError: a number out of its range.

    Source: Tyagi & Swany, arXiv 2307.07950, Equation 3.
    """
    require_fraction("alpha", alpha)
    require_fraction("beta", beta)
    for name, value in (("batch_size", batch_size), ("workers", workers)):
        require_integer(name, value, least=1)
    return max(1, math.floor(_clean(batch_size / (1 + alpha * beta * workers)) + 0.5))


def given(samples: int, beta: float) -> int:
    """How many of ``samples`` a sender gives: β of them, a half rounded up, at least 1."""
    return min(samples, max(1, math.floor(_clean(beta * samples) + 0.5)))


def draw_senders(seed: int, key: Key, workers: int, alpha: float) -> list[int]:
    """The ⌈α·N⌉ ranks that give samples at step ``key``, ascending; the same on all workers."""
    random = np.random.default_rng([seed % 2**64, _SENDERS, *key])
    count = math.ceil(_clean(alpha * workers))
    drawn: list[int] = np.sort(random.choice(workers, count, replace=False)).tolist()
    return drawn


def draw_samples(seed: int, key: Key, rank: int, samples: int, beta: float) -> list[int]:
    """Which of its ``samples`` the sender ``rank`` gives at step ``key``, ascending."""
    random = np.random.default_rng([seed % 2**64, _SAMPLES, *key, rank])
    count = given(samples, beta)
    drawn: list[int] = np.sort(random.choice(samples, count, replace=False)).tolist()
    return drawn


def _clean(value: float) -> float:
    return round(value, 9)  # 0.1 · 30 is 3, not 3.0000000000000004


def require_fraction(name: str, value: object) -> None:
    """Raise unless ``value`` is a number in (0, 1].

    Raises:
        TypeError: it is no number.
        ValueError: it is out of range.
    """
    require_number(name, value)
    if not 0 < value <= 1:  # type: ignore[operator]  # it is a number
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
