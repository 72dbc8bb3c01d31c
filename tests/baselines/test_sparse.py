"""SparseLoCo: its messages and their bytes."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from loops import close
from offbeat_lab.baselines.sparseloco import SparseVectors
from strategies.sparse_references import largest_in_two_bits


def read(message: Tensor, elements: int, kept: int) -> list[float]:
    """Decode a message bit by bit, by its documentation."""
    chunks = math.ceil(elements / 4096)
    width = math.ceil(elements / chunks)
    raw = message.numpy().tobytes()
    levels = np.frombuffer(raw[: 8 * chunks], "<f4").reshape(chunks, 2)
    bits = int.from_bytes(raw[8 * chunks :], "little")
    values = [0.0] * (chunks * width)
    for entry in range(chunks * kept):
        code = bits >> (14 * entry) & 0x3FFF
        size = float(levels[entry // kept, code & 1])
        values[entry // kept * width + (code >> 2)] = -size if code & 2 else size
    return values[:elements]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("elements", "density"), [(40, 0.25), (4096, 1 / 64), (9001, 0.01), (4097, 1.0), (1, 0.5)]
)
def test_a_message_holds_the_largest_entries_of_each_chunk(
    elements: int, density: float, dtype: torch.dtype
) -> None:
    vector = torch.randn(elements, dtype=dtype, generator=torch.Generator().manual_seed(elements))
    vectors = SparseVectors(elements, density)
    message = vectors.encode(vector)
    chunks = math.ceil(elements / 4096)
    width = math.ceil(elements / chunks)
    kept = max(1, round(density * width))
    assert message.nbytes == vectors.nbytes == 8 * chunks + 7 * math.ceil(chunks * kept / 4)
    padded = [*vector.tolist(), *[0.0] * (chunks * width - elements)]
    expected = [
        value
        for start in range(0, chunks * width, width)
        for value in largest_in_two_bits(padded[start : start + width], kept)
    ]
    decoded = vectors.sum([message], dtype)
    close(decoded.double(), torch.tensor(read(message, elements, kept), dtype=torch.float64), 0)
    close(decoded.double(), torch.tensor(expected[:elements], dtype=torch.float64), 1e-6)
    other = vectors.encode(vector.roll(3))
    close(
        vectors.sum([message, other], dtype),
        decoded + vectors.sum([other], dtype),
        0 if dtype == torch.float64 else 1e-6,
    )


def test_zeros_are_sent_as_zeros() -> None:
    vectors = SparseVectors(100, 0.1)
    assert not vectors.sum([vectors.encode(torch.zeros(100))], torch.float32).any()
