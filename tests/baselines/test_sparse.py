"""SparseLoCo and SPARTA: their messages, large and unusual tensors, and convergence."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loops import attach, close
from offbeat import SPARTA, SparseLoCo, Strategy
from offbeat.baselines.sparseloco import SparseVectors
from problems import flat, make_wide, wide_step
from strategies.sparse_references import largest_in_two_bits
from worlds import run

VOTE_BYTES = 7 * 8


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


@pytest.mark.parametrize("strategy", [SparseLoCo(period=2), SPARTA(share=0.01)], ids=str)
def test_buffers_are_sent_at_the_end_only(strategy: Strategy) -> None:
    """Also if no worker has steps that the others lack."""
    norm, plain = (
        run(lambda *place, n=n: wide(*place, strategy, 4, norm=n), workers=3) for n in (True, False)
    )
    extra = 128 if isinstance(strategy, SparseLoCo) else round(0.01 * 128) * 4 * 4
    for one, other in zip(norm, plain, strict=True):
        assert one["sent"][-1] <= other["sent"][-1] + extra
        assert not torch.equal(one["before"][0], norm[0]["before"][0]) or one is norm[0]
        for own, same in zip(one["buffers"], norm[0]["buffers"], strict=True):
            assert torch.equal(own, same)
    close(norm[0]["buffers"][0], sum(one["before"][0] for one in norm) / 3, 1e-6)


def test_sparta_counts_the_bytes_of_its_values() -> None:
    strategy = SPARTA(share=0.01)
    results = run(lambda *place: wide(*place, strategy, 4, norm=False), workers=3)
    each = round(0.01 * 8705) * 4 + VOTE_BYTES
    for result in results:
        assert result["sent"] == [each, 2 * each, 3 * each, 4 * each]
    after = [result["trace"][4] for result in results]
    equal = torch.stack([own == after[0] for own in after]).all(0)
    assert round(0.01 * 8705) <= int(equal.sum()) < 0.05 * 8705


def test_sparta_draws_another_subset_in_each_step_and_for_each_seed() -> None:
    draws = [tuple(SPARTA(share=0.1).draw(launch, 0, 1000)) for launch in range(20)]
    assert len(set(draws)) == 20
    assert all(len(set(one)) == 100 and list(one) == sorted(one) for one in draws)
    assert draws[0] != tuple(SPARTA(share=0.1, seed=1).draw(0, 0, 1000))
    covered = len(set().union(*draws))
    assert covered == pytest.approx(1000 * (1 - 0.9**20), rel=0.05)


class Unusual(nn.Module):
    """Parameters of several dtypes, complex ones, and one that is not contiguous."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        self.small = nn.Parameter(values(7).to(torch.bfloat16))
        self.pairs = nn.Parameter(torch.complex(values(3, 5), values(3, 5)))
        self.turned = nn.Parameter(values(6, 4).t())
        self.large = nn.Parameter(values(9).double())
        self.empty = nn.Parameter(values(0, 3))


@pytest.mark.parametrize("strategy", [SPARTA(share=1.0), SPARTA(share=1.0, overlap=1)], ids=str)
def test_sparta_averages_every_kind_of_parameter(strategy: Strategy) -> None:
    """With all parameters in each subset the models become the mean of the models sent."""

    def trained(rank: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
        model = Unusual(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        sync = attach(model, optimizer, strategy)
        before = [p.detach().clone() for p in model.parameters()]
        for gradient in (float(rank), 0.0):
            for p in model.parameters():
                p.grad = torch.full_like(p, gradient)
            optimizer.step()
        after = [p.detach().clone() for p in model.parameters()]
        sync.finish()
        return before, after

    for before, after in run(trained, workers=3):
        for b, a in zip(before, after, strict=True):
            torch.testing.assert_close(a, b - 0.5, rtol=0.02, atol=0.02)
