"""Training with a lossy wire (``attach(..., wire=…)``) and one strategy of each kind."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import attach
from problems import make_wide, wide_step
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
    sync.state_dict()  # lands what is in flight
    seen = {"own": in_order(model)}
    with sync.consensus():
        seen["seen"] = in_order(model)
    sync.finish()
    return {**seen, "end": in_order(model)}


@pytest.mark.parametrize("text", ["bsp", "local:period=1", "selsync:delta=0"])
def test_blocking_strategies_keep_workers_together(text: str) -> None:
    """In every step gradients have the same bits on all workers, or P has.

    A local model then differs from P by the quantization error of the worker's last update, which
    is a step of AdamW: about the learning rate.
    """

    def steps(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
        model = make_wide(rank)
        optimizer = adamw(model)
        trace = []
        with attach(model, optimizer, text, wire="int8") as sync:
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
    ],
)
def test_the_final_mean_is_exact(text: str, wire: str) -> None:
    """The wire does not change the mean of a consensus, nor that of finish()."""
    results = run(train, text, wire, 9, workers=3)
    expected = sum(r["own"].double() for r in results) / 3
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        assert torch.equal(result["end"], result["seen"])
        assert ((result["end"] - expected).abs() <= 1e-6 * expected.abs() + 1e-7).all()
