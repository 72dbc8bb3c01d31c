"""Bits of a quantized sum, and when a single stage replaces two."""

from offbeat.quantization.codecs import CODECS
from offbeat.quantization.kernels import BLOCK

_SINGLE_STAGE_LIMIT = 1.1
"""A single stage may send up to 1.1 times the bits of two stages.

A few more bits are worth it, because one operation and one quantization are saved.
"""


def bits(precision: str) -> float:
    """Return the bits per number in one stage of a sum."""
    return 8 * CODECS[precision].block_bytes / BLOCK


def sum_bits(precision: str) -> float:
    """Return the bits per number of a sum, both stages together: 64 for "float32".

    Each of N workers sends (N − 1)/N of these bits per number, because it keeps one of N chunks.
    """
    return 64.0 if precision == "float32" else 2 * bits(precision)


def uses_single_stage(precision: str, workers: int) -> bool:
    """Return True if the updates of so many workers are sent in a single stage.

    In the single stage each worker receives the updates of all workers and adds them up. The bits
    grow with the number of workers, so only two workers use a single stage.
    """
    if precision == "float32":
        return False
    return workers * bits(precision) <= _SINGLE_STAGE_LIMIT * sum_bits(precision)
