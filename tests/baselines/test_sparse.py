"""SparseLoCo: its messages, their bytes, and buffers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loops import attach, close
from offbeat_lab import SparseLoCo
from offbeat_lab.baselines.sparseloco import SparseVectors
from problems import flat, make_wide, wide_step
from strategies.sparse_references import largest_in_two_bits
from worlds import run

VOTE_BYTES = 8 * 8


# -- messages of SparseLoCo ------------------------------------------------------------------------


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


# -- larger models ---------------------------------------------------------------------------------


def wide(rank: int, size: int) -> dict[str, Any]:
    """Train 8,833 parameters in float32, and observe the bytes and the models after each step."""
    model = make_wide(rank, norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = attach(model, optimizer, SparseLoCo(period=3))
    trace, sent = [flat(model)], []
    for step in range(7):
        wide_step(model, optimizer, rank, step)
        trace.append(flat(model))
        sent.append(sync.stats.payload_bytes)
    before = [b.clone() for b in model.buffers() if b.is_floating_point()]
    sync.finish()
    buffers = [b.clone() for b in model.buffers() if b.is_floating_point()]
    return {"trace": trace, "sent": sent, "before": before, "buffers": buffers, "end": flat(model)}


def test_sparseloco_counts_the_bytes_of_its_messages() -> None:
    """Three chunks of 2,945 elements, of which 46 are sent: 35 words of 7 bytes, and 6 levels.

    Buffers are sent at the end only.
    """
    results = run(wide, workers=3)
    each = 3 * 8 + math.ceil(3 * round(2945 / 64) / 4) * 7 + VOTE_BYTES
    for result in results:
        assert result["sent"] == [0, 0, each, each, each, 2 * each, 2 * each]
        start, synced = result["trace"][0], result["trace"][3]
        changed = int((synced != start).sum())
        assert 46 * 3 <= changed <= 3 * 46 * 3  # of three workers, some entries coincide
        assert torch.equal(synced, results[0]["trace"][3])
        assert torch.equal(result["end"], results[0]["end"])
        for i, buffer in enumerate(result["buffers"]):
            close(buffer, sum(one["before"][i] for one in results) / 3, 1e-6)
