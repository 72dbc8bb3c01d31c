"""Training with a lossy wire (``attach(..., wire=…)``) and one strategy of each kind."""

import copy
import ctypes
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cells import nightly
from loops import attach
from offbeat_lab.launch.cluster import Cluster
from problems import flat, make_wide, wide_loss, wide_step
from quantization.rounding import largest, most
from worlds import run


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def ordered(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters in the order of their names, as in P."""
    return [p for _, p in sorted(model.named_parameters())]


def in_order(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(ordered(model)).detach()


def train(
    rank: int, size: int, text: str, wire: str, steps: int, look: bool = False
) -> dict[str, Any]:
    """Train. With ``look``, there is a consensus after each step."""
    model = make_wide(rank)
    optimizer = adamw(model)
    sync = attach(model, optimizer, text, wire=wire)
    for step in range(steps):
        wide_step(model, optimizer, rank, step)
        if look:
            with sync.consensus():
                pass
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


@pytest.mark.parametrize("text", ["bsp", "local:period=3", "async:staleness=6"])
def test_a_consensus_does_not_change_training(text: str) -> None:
    """consensus() leaves errors and references unchanged."""
    looked = run(train, text, "int8", 12, True, workers=3)
    plain = run(train, text, "int8", 12, workers=3)
    for a, b in zip(looked, plain, strict=True):
        assert torch.equal(a["end"], b["end"])


@pytest.mark.parametrize(
    "text", ["diloco:period=4", *nightly(["bsp", "local:period=3", "async:staleness=4"])]
)
def test_training_reaches_nearly_the_same_loss(text: str) -> None:
    """The consensus after 60 steps is as good as with float32, at about half the bytes."""

    def final_loss(result: dict[str, Any]) -> float:
        model = make_wide(0)
        with torch.no_grad():
            nn.utils.vector_to_parameters(result["end"], ordered(model))
            return sum(float(wide_loss(model, rank, 10_000, 256)) for rank in range(3))

    results = {w: run(train, text, w, 60, workers=3)[0] for w in ("float32", "int8")}
    start = {"end": in_order(make_wide(0))}
    losses = {w: final_loss(result) for w, result in results.items()}
    assert losses["float32"] < 0.6 * final_loss(start)
    assert losses["int8"] < 1.1 * losses["float32"]
    assert results["int8"]["bytes"] < 0.55 * results["float32"]["bytes"]


def overflow(rank: int, size: int) -> list[tuple[bool, float]]:
    model = make_wide(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen = []
    with attach(model, optimizer, "bsp", wire="int8", scaler=scaler):
        for step in range(6):
            optimizer.zero_grad()
            factor = float("inf") if (rank, step) == (1, 2) else 1.0
            scaler.scale(factor * wide_loss(model, rank, step)).backward()
            before = flat(model)
            scaler.step(optimizer)
            scaler.update()
            seen.append((torch.equal(before, flat(model)), scaler.get_scale()))
        assert flat(model).isfinite().all()
    return seen


def test_an_overflow_is_seen_by_all_workers() -> None:
    """With infinite gradients on one worker every worker skips that step, and no other."""
    for seen in run(overflow, workers=3):
        assert [skipped for skipped, _ in seen] == [False, False, True, False, False, False]
        assert [scale for _, scale in seen] == [256.0] * 2 + [128.0] * 4


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
        errors = torch.cat([r["errors"][0] for r in results])[: len(expected)]
        assert bool(errors.any()) == (text == "local:period=4"), "it alone has averaged before"
        expected += errors.double() / 3
        first = sum(most(update, "int8") for update in updates)
        total = (sum(updates) + errors).abs() + largest(first)
        bound = (first + most(total, "int8")) / 3
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        assert ((result["end"] - expected).abs() <= bound + 1e-6 * expected.abs() + 1e-7).all()


def sent_bytes() -> int:
    """Return the counter of this node's network interface."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line for line in lines if line.strip().startswith(Cluster.interface))
    return int(counters.partition(":")[2].split()[8])


def on_a_node(rank: int, size: int, node: str, found: Any) -> None:
    """Report the bytes of 4 steps of BSP with 1 M gradients each, by wire."""
    with open(f"/run/netns/{node}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = Cluster.interface
    address = "tcp://10.111.0.1:29500"  # of node 0, where all ports are free
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    for wire in ("float32", "int8"):
        model = nn.Linear(1000, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model, optimizer, "bsp", wire=wire):
            dist.barrier()
            before = sent_bytes()
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(2, 1000)).square().mean().backward()
                optimizer.step()
            dist.barrier()
            found.put((wire, sent_bytes() - before))
    dist.barrier()
    os._exit(0)  # as in workers.py


@pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")
def test_int8_sends_a_quarter_over_real_interfaces() -> None:
    """Interface counters over 4 steps of BSP: 1 M gradients each, 3 nodes."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    with Cluster(3, 1e9) as cluster:
        nodes = [cluster.command(rank, [])[-1] for rank in range(3)]
        processes = [
            context.Process(target=on_a_node, args=(rank, 3, node, found), daemon=True)
            for rank, node in enumerate(nodes)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
            process.kill()
    sent: dict[str, list[int]] = {"float32": [], "int8": []}
    while not found.empty():
        wire, counted = found.get()
        sent[wire].append(counted)
    ring = 4 * 2 * (2 / 3) * 4 * 1_001_000
    assert len(sent["float32"]) == len(sent["int8"]) == 3
    for exact, lossy in zip(sorted(sent["float32"]), sorted(sent["int8"]), strict=True):
        assert 1.0 < exact / ring < 1.15  # and headers
        assert 3.6 < exact / lossy < 4.1
