"""The compiled loops give the bits of the torch operations where all workers need the same bits.

``test_codecs.py`` tests their error bounds.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import offbeat
import worlds
from offbeat.quantization import gpu, kernels
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS
from problems import flat, make_wide, wide_step
from quantization.rounding import values

PRECISIONS = ["int8", "int4", "int2"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_and_quantization_errors_have_the_same_bits(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, results = CODECS[precision](), []
    for _ in range(2):
        numbers = torch.randn(40 * BLOCK, generator=torch.Generator().manual_seed(1)).exp()
        rows = torch.empty(40, codec.block_bytes, dtype=torch.uint8)
        codec.encode(numbers, rows)
        results.append((numbers, rows))
        monkeypatch.setattr(kernels, "kernels", lambda: None)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("elements", [1, BLOCK - 1, 3 * BLOCK, 300 * BLOCK + 77])
def test_any_rows_decode_to_the_same_bits(
    precision: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also rows that no codec makes: all integers, and any scales."""
    codec = CODECS[precision]()
    blocks = -(-elements // BLOCK)
    generator = torch.Generator().manual_seed(elements)
    rows = torch.randint(256, (blocks, codec.block_bytes), dtype=torch.uint8, generator=generator)
    scales = rows[:, :4].view(torch.float32)
    scales.copy_(torch.randn(blocks, 1, generator=generator).exp())
    scales[1::5] = 0.0
    scales[3::7] = float("nan")
    results = []
    for _ in range(2):
        decoded, total = torch.zeros(elements), torch.full((elements,), 0.25)
        codec.decode(rows, decoded)
        codec.decode(rows, total, add=True)
        results.append((decoded, total))
        monkeypatch.setattr(kernels, "kernels", lambda: None)
    for ours, theirs in zip(*results, strict=True):
        assert ours.any()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_are_encoded_to_the_same_bits(
    precision: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the numbers is a tie between two integers only after the product is rounded."""
    codec, generator = CODECS[precision](), torch.Generator().manual_seed(10)
    numbers, results = torch.randn(300 * BLOCK, generator=generator), []
    for _ in range(2):
        rows = torch.empty(300, codec.block_bytes, dtype=torch.uint8)
        codec.encode(numbers.clone(), rows, keep_error=keep)
        results.append(rows)
        monkeypatch.setattr(kernels, "kernels", lambda: None)
    assert torch.equal(*results)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("elements", [1, BLOCK - 1, 3 * BLOCK, 300 * BLOCK + 77])
def test_the_loop_that_lands_has_the_bits_of_separate_operations(
    elements: int, momentum: float
) -> None:
    """numpy rounds after each operation."""
    loops, weight, step = kernels.kernels(), 2.5, (momentum, 0.7, 0.3)
    assert loops is not None
    keep, near, ahead = map(np.float32, step)
    total, own, shared, v = (values(seed, elements).numpy() for seed in range(4))
    v = v if momentum else v[:0]
    mean = total * np.float32(1 / weight)
    moving = mean + keep * v if momentum else v
    change = near * mean + ahead * moving if momentum else near * mean
    wanted, squares = (change - own, shared + change, moving), np.ones(2)
    loops.land(total, own, weight, shared, v, *step, squares)
    for found, expected in zip((total, shared, v), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)
    norms = [(x.astype(np.float64) ** 2).sum() for x in (mean, own)]
    np.testing.assert_allclose(squares, 1 + np.array(norms), rtol=1e-5)


@pytest.mark.parametrize(
    ("wire", "gain", "workers"),
    [("int8", 1.0, 3), ("int2", 1.7, 3), ("int2", 1.0, 5), ("int8", 1.7, 7)],
)
def test_workers_with_and_without_numba_train_together(
    wire: str, gain: float, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P has the same bits on all workers. All but one have no numba."""
    calls = {True: 0, False: 0}

    def train(rank: int, size: int) -> dict[str, Any]:
        model = make_wide(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = offbeat.StreamingAveraging(
            parts=2, schedule="cyclic", staleness=4, outer_gain=gain
        )
        sync = offbeat.attach(model, optimizer, strategy, wire=wire)
        for step in range(12):
            wide_step(model, optimizer, rank, step)
        state = copy.deepcopy(sync.state_dict()["state"])
        sync.finish()
        return {"P": torch.cat(state["shared"]), "v": state["velocity"], "end": flat(model)}

    original = kernels.kernels

    def on_rank_0_only() -> Any:
        # A background thread has no rank in the simulator. It has no numba here, either.
        loops = original() if dist.is_initialized() and dist.get_rank() == 0 else None
        calls[loops is not None] += 1
        return loops

    monkeypatch.setattr(kernels, "kernels", on_rank_0_only)
    results = worlds.simulated(train, workers=workers)
    assert calls[True] > 20
    assert calls[False] > 20
    for result in results:
        assert len(result["v"]) == (gain > 1)
        assert torch.equal(result["P"], results[0]["P"])
        assert torch.equal(result["end"], results[0]["end"])


def test_the_environment_can_disable_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_KERNELS", "0")
    kernels.kernels.cache_clear()
    try:
        assert kernels.kernels() is None
    finally:
        monkeypatch.undo()
        kernels.kernels.cache_clear()
    assert kernels.kernels() is not None


def test_triton_kernels_that_fail_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the cause. There is no such GPU, or no Triton."""
    device = torch.device("cuda", 99)
    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    assert [gpu.triton_kernels(device, "int4") for _ in range(2)] == [None, None]
    (warning,) = caplog.messages
    assert warning.startswith("the Triton kernels fail (")
    assert warning.endswith("set OFFBEAT_KERNELS=0 to silence this warning")
    gpu.triton_kernels.cache_clear()
    monkeypatch.setenv("OFFBEAT_KERNELS", "0")
    assert gpu.triton_kernels(device, "int4") is None
    assert gpu.triton_kernels(torch.device("cpu"), "int4") is None
    assert len(caplog.messages) == 1
