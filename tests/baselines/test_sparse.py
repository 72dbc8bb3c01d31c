"""SparseLoCo: its messages, their bytes, and buffers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loops import attach, close
from offbeat import Strategy
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


def wide(rank: int, size: int, strategy: Strategy, steps: int, *, norm: bool) -> dict[str, Any]:
    """Train 8,705 parameters in float32, and observe the bytes and the models after each step."""
    model = make_wide(rank, norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sync = attach(model, optimizer, strategy)
    trace, sent = [flat(model)], []
    for step in range(steps):
        wide_step(model, optimizer, rank, step)
        trace.append(flat(model))
        sent.append(sync.stats.payload_bytes)
    before = [b.clone() for b in model.buffers() if b.is_floating_point()]
    sync.finish()
    buffers = [b.clone() for b in model.buffers() if b.is_floating_point()]
    seen = {"trace": trace, "sent": sent, "before": before}
    return {**seen, "buffers": buffers, "end": flat(model)}


def test_sparseloco_counts_the_bytes_of_its_messages() -> None:
    """Three chunks of 2,902 elements, of which 45 are sent: 34 words of 7 bytes, and 6 levels."""
    strategy = SparseLoCo(period=3)
    results = run(lambda *place: wide(*place, strategy, 7, norm=False), workers=3)
    each = 3 * 8 + math.ceil(3 * round(2902 / 64) / 4) * 7 + VOTE_BYTES
    for result in results:
        assert result["sent"] == [0, 0, each, each, each, 2 * each, 2 * each]
        start, synced = result["trace"][0], result["trace"][3]
        changed = int((synced != start).sum())
        assert 45 * 3 <= changed <= 3 * 45 * 3  # of three workers, some entries coincide
        assert torch.equal(synced, results[0]["trace"][3])
        assert torch.equal(result["end"], results[0]["end"])


def test_buffers_are_sent_at_the_end_only() -> None:
    """Also if no worker has steps that the others lack."""
    norm, plain = (
        run(lambda *place, n=n: wide(*place, SparseLoCo(period=2), 4, norm=n), workers=3)
        for n in (True, False)
    )
    for one, other in zip(norm, plain, strict=True):
        assert one["sent"][-1] <= other["sent"][-1] + 128
        assert not torch.equal(one["before"][0], norm[0]["before"][0]) or one is norm[0]
        for own, same in zip(one["buffers"], norm[0]["buffers"], strict=True):
            assert torch.equal(own, same)
    close(norm[0]["buffers"][0], sum(one["before"][0] for one in norm) / 3, 1e-6)
