"""Two processes that share one GPU over gloo give the values of the CPU. Skipped without a GPU.

``OFFBEAT_TEST_DEVICE=cpu`` runs them on the CPU, which checks the tests themselves.
"""

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import attach
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.gpu import triton_kernels
from problems import make_batch, make_wide, train_step
from workers import run

DEVICE = os.environ.get("OFFBEAT_TEST_DEVICE", "cuda")
START = "spawn" if DEVICE == "cuda" else "fork"

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no GPU"
    ),
]


def train(rank: int, size: int, device: str, strategy: str, wire: Any) -> Tensor:
    """Take eight steps. Returns the model that all workers then hold."""
    model = make_wide(rank).to(device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, strategy, wire=wire)
    for step in range(8):
        x, y = make_batch(rank, step, dtype=torch.float32)
        train_step(model, optimizer, (x.to(device), y.to(device)))
    sync.finish()
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


FIXED = [
    *("bsp", "local:period=3", "selsync:delta=0.05", "async:staleness=4"),
    *("diloco:period=3,fragments=2", "streaming:parts=2,schedule=cyclic,staleness=4"),
    "streaming:parts=2,schedule=cyclic,staleness=4,stored=host",
]
EAGER = [
    *("streaming", "async:schedule=eager,staleness=4", "easgd:period=2", "downpour"),
    "ssp:staleness=2",
]
BOUNDS = {"float32": 1e-4, "int4": 5e-2}
"""One quantization step where a value lies on an edge, and the order of additions."""


@pytest.mark.parametrize(
    ("strategy", "wire"), [*itertools.product(FIXED, BOUNDS), *((text, None) for text in EAGER)]
)
def test_workers_end_alike_with_the_values_of_the_cpu(strategy: str, wire: Any) -> None:
    """The values of eager schedules depend on what was in flight at any time."""
    there = run(train, DEVICE, strategy, wire, workers=2, seconds=120, start=START)
    assert there[0].isfinite().all()
    assert torch.equal(there[0], there[1]), "all workers end with the same bits"
    if wire is not None:
        here = run(train, "cpu", strategy, wire, workers=2)
        torch.testing.assert_close(there[0], here[0], rtol=0, atol=BOUNDS[wire])


@pytest.mark.parametrize("precision", ["int8", "int4", "int2"])
def test_payloads_are_decoded_as_by_the_cpu(precision: str) -> None:
    """Bit for bit, because a worker with a GPU may train with one without.

    Encoded values may differ.
    """
    codec, size = CODECS[precision](), 3 * BLOCK + 7
    numbers = torch.zeros(4 * BLOCK)
    numbers[:size] = torch.randn(size, generator=torch.Generator().manual_seed(0))

    def rounded(device: str) -> Tensor:
        payload = torch.zeros(4, codec.block_bytes, dtype=torch.uint8, device=device)
        codec.encode(numbers.to(device, copy=True), payload, keep_error=False)
        return payload

    def decoded(payload: Tensor, device: str) -> Tensor:
        codec.decode(payload.to(device), out := torch.empty(4 * BLOCK, device=device))
        return out[:size].cpu()

    payload = rounded("cpu")
    here = decoded(payload, "cpu")
    assert torch.equal(decoded(payload, DEVICE), here)
    step = numbers.abs().max() / {"int8": 127, "int4": 7, "int2": 1}[precision]
    there = decoded(rounded(DEVICE), DEVICE)
    torch.testing.assert_close(there, here, rtol=0, atol=1.001 * float(step))


@pytest.mark.parametrize("precision", ["int8", "int4", "int2"])
def test_the_triton_kernels_have_the_bits_of_torch(precision: str) -> None:
    """Otherwise Offbeat would warn, and use the torch operations."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        pytest.skip("the kernels need a GPU")
    assert triton_kernels(torch.device(DEVICE, 0), precision) is not None
