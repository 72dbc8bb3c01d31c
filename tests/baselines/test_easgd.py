"""EASGD against the recursions of Zhang, Choromanska & LeCun."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from loops import close
from offbeat import Compute, Network, simulate
from offbeat_lab.baselines.easgd import EASGD
from problems import OPTIMIZERS, flat, gradient_at, make_batch, make_model, train_step
from worlds import run

FAST = Network("100Gbit/s", latency=0)  # messages of this model take nanoseconds
RATE = 0.05


def centre(sync: Any) -> Tensor:
    """Return this rank's shard of z."""
    return sync._iteration.flow.server.shard.values.clone()


def train(rank: int, size: int, strategy: EASGD, kind: str, steps: Sequence[int]) -> dict[str, Any]:
    model = make_model(seed=rank)
    optimizer: torch.optim.Optimizer = OPTIMIZERS["sgd"](model.parameters())
    if kind == "nesterov":
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    trace, decisions = [], []
    for step in range(steps[rank]):
        before = sync.stats.syncs
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
        decisions.append(sync.stats.syncs - before)
    with sync.consensus():
        seen = flat(model)
    own = flat(model)
    sync.finish()
    return {
        "trace": trace,
        "decisions": decisions,
        "seen": seen,
        "own": own,
        "end": flat(model),
        "stats": sync.stats,
    }


# -- the recursions -------------------------------------------------------------------------------


def play(
    order: Sequence[int], size: int, period: int, alpha: float, momentum: float
) -> tuple[list[list[Tensor]], Tensor, Tensor]:
    """Reference of asynchronous EASGD, algorithm 1, with one step at a time, in ``order``.

    With Nesterov's momentum it is EAMSGD in PyTorch's form: v ← μv + g, x ← x − η(g + μv). An
    exchange does not change v.
    """
    xs = [flat(make_model(seed=0)) for _ in range(size)]
    vs = [torch.zeros_like(x) for x in xs]
    z = xs[0].clone()
    trace: list[list[Tensor]] = [[] for _ in range(size)]
    for rank in order:
        step = len(trace[rank])
        first = xs[rank]
        g = gradient_at(first, rank, step)
        vs[rank] = momentum * vs[rank] + g
        xs[rank] = first - RATE * (g + momentum * vs[rank])
        if (step + 1) % period == 0:
            d = alpha * (first - z)
            xs[rank], z = xs[rank] - d, z + d
        trace[rank].append(xs[rank])
    before = z
    last = {rank: place for place, rank in enumerate(order)}
    for rank in sorted(last, key=lambda rank: last[rank]):
        z = z + alpha * (xs[rank] - z)
    return trace, before, z


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "period", "alpha"),
    [("sgd", 1, 0.2), ("sgd", 2, None), ("nesterov", 1, 0.2), ("nesterov", 4, 0.5)],
)
def test_asynchronous_workers_exchange_one_at_a_time(
    kind: str, period: int, alpha: float | None
) -> None:
    """Each worker uses the current z without waiting, and finish pushes the remaining steps."""
    steps, paces = (13, 9, 6), (1.0, 1.37, 2.1)
    strategy = EASGD(period=period, alpha=alpha)
    result = simulate(
        lambda: train(dist.get_rank(), 3, strategy, kind, steps),
        workers=3,
        network=FAST,
        compute=Compute(0.01, slowdown=dict(enumerate(paces))),
    )
    moments = [
        (pace * (i + 1), rank) for rank, pace in enumerate(paces) for i in range(steps[rank])
    ]
    order = [rank for _, rank in sorted(moments)]
    alpha = 0.3 if alpha is None else alpha
    trace, before, after = play(order, 3, period, alpha, 0.9 * (kind == "nesterov"))
    for rank, one in enumerate(result.results):
        for got, want in zip(one["trace"], trace[rank], strict=True):
            close(got, want)
        close(one["seen"], before)
        # they leave the consensus together, so their last pushes have no fixed order
        close(one["end"], after, atol=0.1)
        assert torch.equal(one["end"], result.results[0]["end"])
        assert one["stats"].wait_seconds < 1e-4
        assert one["stats"].syncs == steps[rank] // period


# -- dtypes and refusals --------------------------------------------------------------------------


def half(rank: int, size: int) -> Any:
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.full((2,), 256.0, dtype=torch.bfloat16)),
            "b": nn.Parameter(torch.zeros(2)),
            "c": nn.Parameter(torch.zeros(2, dtype=torch.complex64)),
            "frozen": nn.Parameter(torch.full((1,), float(rank)), requires_grad=False),
        }
    )
    optimizer = torch.optim.SGD([p for p in model.values() if p.requires_grad], lr=1.0)
    strategy = EASGD(period=1, alpha=0.25)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    for _ in range(2 * (rank == 0)):  # the first exchange pushes the initial model
        model["a"].grad = torch.full((2,), -2.0, dtype=torch.bfloat16)
        model["b"].grad = torch.full((2,), -8.0)
        model["c"].grad = torch.full((2,), -8.0 - 4j, dtype=torch.complex64)
        optimizer.step()
    own = {name: p.detach().clone() for name, p in model.items()}
    with sync.consensus():  # rank 0 has exchanged
        z = centre(sync)
    sync.finish()
    return own, z, {name: p.detach().clone() for name, p in model.items()}


def test_dtypes_may_be_mixed() -> None:
    """The centre is float32: 256 + 0.25·2 = 256.5, which bfloat16 cannot hold."""
    results = run(half, workers=2)
    z = torch.cat([z for _, z, _ in results])
    assert z.dtype == torch.float32
    assert z.tolist() == [256.5] * 2 + [2.0] * 2 + [2.0, 1.0] * 2
    own = results[0][0]
    assert torch.equal(own["a"], torch.full((2,), 260.0, dtype=torch.bfloat16))  # 259.5
    assert torch.equal(own["b"], torch.full((2,), 14.0))
    assert torch.equal(own["c"], torch.full((2,), 14.0 + 7j, dtype=torch.complex64))
    for _, _, end in results:
        assert torch.equal(end["a"], torch.full((2,), 258.0, dtype=torch.bfloat16))  # 257.375
        assert torch.equal(end["b"], torch.full((2,), 5.0))
        assert torch.equal(end["frozen"], torch.zeros(1)), "rank 0's"
