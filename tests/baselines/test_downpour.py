"""Downpour against a step-by-step reference."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from loops import close, sgd
from offbeat import Compute, Network, simulate
from offbeat_lab.baselines.downpour import Downpour
from problems import assign, flat, make_batch, make_model, train_step
from worlds import run

STEP = 0.01
FAST = Network("100Gbit/s", latency=0)  # messages of this model take nanoseconds
Make = Callable[[nn.Module], torch.optim.Optimizer]


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups with different rates, in another order than the model's."""
    return torch.optim.SGD(
        [
            {"params": list(model[2].parameters()), "lr": 0.02},
            {"params": [*model[0].parameters(), *model[3].parameters()], "lr": 0.1},
        ],
        lr=1.0,
        weight_decay=0.1,
    )


def heavy(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, weight_decay=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# -- several workers ------------------------------------------------------------------------------


def train(
    rank: int, size: int, strategy: Downpour, make: Make, steps: Sequence[int]
) -> dict[str, Any]:
    model = make_model(seed=rank)
    optimizer = make(model)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    trace = []
    for step in range(steps[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
    sync.finish()
    return {"trace": trace, "end": flat(model), "stats": sync.stats}


def play(
    strategy: Downpour, make: Make, order: Sequence[int], size: int
) -> tuple[list[list[Tensor]], Tensor, dict[int, int]]:
    """Downpour with one worker's step at a time, in ``order``.

    Messages take next to no time: z has come before the next step ends.
    """
    models = [make_model(seed=0) for _ in range(size)]
    optimizers = [make(model) for model in models]
    trace: list[list[Tensor]] = [[] for _ in range(size)]
    z = flat(models[0])
    sums = [torch.zeros_like(z) for _ in range(size)]
    unpushed, pushes, downloads = [0] * size, [0] * size, [[0] * size for _ in range(size)]
    staleness: dict[int, int] = {}
    coming: list[tuple[Tensor, Tensor] | None] = [None] * size  # z, and x at its request

    def fetched(rank: int) -> None:
        if coming[rank] is not None:
            new, asked = coming[rank]
            assign(models[rank], new + (flat(models[rank]) - asked))
            coming[rank] = None

    def push(rank: int) -> None:
        nonlocal z
        behind = sum(pushes[o] - downloads[rank][o] for o in range(size) if o != rank)
        staleness[behind] = staleness.get(behind, 0) + 1
        pushes[rank] += 1
        z = z + sums[rank]
        sums[rank], unpushed[rank] = torch.zeros_like(z), 0

    for rank in order:
        model, step = models[rank], len(trace[rank])
        before = flat(model)
        train_step(model, optimizers[rank], make_batch(rank, step))
        sums[rank] = sums[rank] + (flat(model) - before) / size
        unpushed[rank] += 1
        fetched(rank)
        if (step + 1) % strategy.push_every == 0:
            push(rank)
        if (step + 1) % strategy.fetch_every == 0:
            coming[rank] = z, flat(model)
            downloads[rank] = list(pushes)
        trace[rank].append(flat(model))
    for rank in sorted(range(size), key=lambda r: max(i for i, o in enumerate(order) if o == r)):
        if unpushed[rank]:
            push(rank)
    return trace, z, staleness


STRATEGIES = [
    Downpour(),
    Downpour(push_every=3, fetch_every=2),
    Downpour(push_every=2, fetch_every=5),
]


@pytest.mark.sampled
@pytest.mark.parametrize("make", [sgd, grouped, heavy, adam], ids=lambda make: make.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_two_workers_step_by_step(strategy: Downpour, make: Make) -> None:
    """Compares every model after every step, the server's final model, and the staleness."""
    steps, paces = (14, 9), (1.0, 1.7)
    compute = Compute(STEP, slowdown=dict(enumerate(paces)))
    result = simulate(
        lambda: train(dist.get_rank(), 2, strategy, make, steps),
        workers=2,
        network=FAST,
        compute=compute,
    )
    moments = [
        (pace * (i + 1), rank) for rank, pace in enumerate(paces) for i in range(steps[rank])
    ]
    trace, z, staleness = play(strategy, make, [rank for _, rank in sorted(moments)], 2)
    for rank, one in enumerate(result.results):
        for got, want in zip(one["trace"], trace[rank], strict=True):
            close(got, want)
        close(one["end"], z)
        assert torch.equal(one["end"], result.results[0]["end"])
        details = one["stats"].details
        assert details["staleness_histogram"] == staleness
        assert details["pushes_served"] == sum(staleness.values())
        assert details["staleness_max"] == max(staleness)
        assert one["stats"].syncs == (steps[rank] - 1) // strategy.fetch_every
        others = 8 * z.numel() // 2
        assert 0 <= details["pulled_bytes"] - others * one["stats"].syncs <= others


@pytest.mark.parametrize("make", [heavy, adam], ids=lambda make: make.__name__)
def test_one_worker_trains_as_without_a_server(make: Make) -> None:
    """It pushes and fetches in every step; momentum and Adam count as in torch's own loop."""
    (found,) = run(train, Downpour(), make, [12], workers=1)
    model = make_model(seed=0)
    optimizer = make(model)
    for step, got in enumerate(found["trace"]):
        train_step(model, optimizer, make_batch(0, step))
        close(got, flat(model))
    close(found["end"], flat(model))


def test_steps_taken_while_a_fetch_travels_stay() -> None:
    """By hand: a round trip of 5 and a bit steps, two workers, gradients and rate of 1.

    Rank 1 serves the only number of the model. At step 1 rank 0 pushes η g/N = 1/2 and asks. What
    comes at step 7 holds that half, and the 6 steps since stay. Then the halves of steps 2 to 7 go
    together; step 13 brings them.
    """

    def work() -> list[float]:
        model = nn.Module()
        model.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = offbeat.attach(model, optimizer, Downpour())
        trace = []
        for _ in range(14 * (dist.get_rank() == 0)):
            model.x.grad = torch.ones(1, dtype=torch.float64)
            optimizer.step()
            trace.append(model.x.item())
        if trace:
            assert sync.stats.wait_seconds == 0
            assert sync.stats.syncs == 2
        sync.finish()
        return [*trace, model.x.item()]

    network = Network("1Gbit/s", latency="25ms")
    result = simulate(work, workers=2, network=network, compute=Compute(STEP))
    trace, end = result.results[0][:-1], result.results[0][-1]
    assert trace[:6] == [-1, -2, -3, -4, -5, -6]
    assert trace[6:12] == [-0.5 - 6 - step for step in range(6)]
    assert trace[12:] == [-3.5 - 6, -3.5 - 7]
    assert end == -7.0, "the end contains all 14 halves"
