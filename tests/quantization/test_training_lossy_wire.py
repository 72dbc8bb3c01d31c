"""Training with a lossy wire (``attach(..., wire=…)``) and one strategy of each kind."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import attach
from offbeat.quantization.kernels import BLOCK
from problems import make_wide, wide_step
from quantization.rounding import largest, most
from worlds import run


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def ordered(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order of their names, as in P."""
    return [p for _, p in sorted(model.named_parameters())]


def in_order(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(ordered(model)).detach()


def train(rank: int, size: int, text: str, wire: str, steps: int) -> dict[str, Any]:
    model = make_wide(rank)
    optimizer = adamw(model)
    sync = attach(model, optimizer, text, wire=wire)
    for step in range(steps):
        wide_step(model, optimizer, rank, step)
    seen = {"own": in_order(model), "bytes": sync.stats.payload_bytes}
    seen.update(copy.deepcopy(sync.state_dict()["state"]))
    sync.finish()
    return {**seen, "end": in_order(model)}


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("text", ["bsp", "local:period=1", "selsync:delta=0"])
def test_blocking_strategies_keep_workers_together(text: str, wire: str) -> None:
    """In every step gradients have the same bits on all workers, or P has.

    A local model then differs from P by the quantization error of the worker's last update, which
    is a step of AdamW: about the learning rate.
    """

    def steps(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
        model = make_wide(rank)
        optimizer = adamw(model)
        trace = []
        with attach(model, optimizer, text, wire=wire) as sync:
            for step in range(8):
                wide_step(model, optimizer, rank, step)
                x, state = in_order(model), copy.deepcopy(sync.state_dict()["state"])
                trace.append((x, x if text == "bsp" else torch.cat(state["shared"])))
        return trace

    traces = run(steps, workers=3)
    for trace in traces:
        for (x, shared), (_, same) in zip(trace, traces[0], strict=True):
            assert torch.equal(shared, same)
            assert (x - shared).abs().max() < 1.1 * 0.01 / 254
        assert not torch.equal(trace[0][1], trace[1][1])
    assert torch.equal(traces[0][0][0], traces[1][0][0]) == (text == "bsp")


@pytest.mark.parametrize(
    ("text", "wire"),
    [
        ("selsync:delta=inf", "int8"),
        ("async:staleness=40", "int2"),
        ("local:period=4", "int4"),
        ("local:period=4", "bfloat16"),
    ],
)
def test_the_final_mean_is_nearly_exact(text: str, wire: str) -> None:
    """finish() sends the differences to P in int8, and the errors of earlier sums. Bfloat16: x."""
    results = run(train, text, wire, 9, workers=3)
    expected, bound = sum(r["own"].double() for r in results) / 3, torch.zeros(1)
    if wire != "bfloat16":
        updates = [r["own"] - r["shared"][0] for r in results]
        owned = [r["errors"][0].view(-1, BLOCK) for r in results]  # worker b mod N has block b
        errors = torch.stack(owned, 1).flatten()[: len(expected)]
        assert bool(errors.any()) == (text == "local:period=4"), "it alone has averaged before"
        expected += errors.double() / 3
        first = sum(most(update, "int8") for update in updates)
        total = (sum(updates) + errors).abs() + largest(first)
        bound = (first + most(total, "int8")) / 3
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        assert ((result["end"] - expected).abs() <= bound + 1e-6 * expected.abs() + 1e-7).all()
