"""DES-LOC: the moments after each step, bytes, refusals. ``strategies/`` tests the parameters."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from loops import attach, close
from offbeat import DesLoc
from problems import OPTIMIZERS, PARAMETERS, assign, flat, make_batch, make_model, train_step
from worlds import run, simulated

MOMENTS = ("exp_avg", "exp_avg_sq")
VOTE_BYTES, COMPARISON_BYTES = 56, 16


def moment(model: torch.nn.Module, optimizer: torch.optim.Optimizer, name: str) -> Tensor:
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in model.parameters()]).clone()


def train(rank: int, size: int, text: str, steps: int, kind: str = "adamw") -> dict[str, Any]:
    """Return the model and the moments after each step, as rows."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = attach(model, optimizer, text, adam_correction=False)
    trace = []
    for step in range(steps):
        train_step(model, optimizer, make_batch(rank, step))
        trace.append((flat(model), *(moment(model, optimizer, name) for name in MOMENTS)))
    sent = sync.stats.payload_bytes
    syncs = sync.stats.syncs
    sync.finish()
    return {"trace": [torch.stack(rows) for rows in trace], "sent": sent, "syncs": syncs}


def by_the_equations(periods: tuple[int, int, int], steps: int, workers: int) -> list[Tensor]:
    """Return (worker, vector, element) after each step, with AdamW written out.

    The vectors are the parameters and both moments.
    """
    rate, decay, (beta1, beta2), eps = 0.01, 0.1, (0.9, 0.999), 1e-8
    model = make_model(0)
    state = torch.zeros(workers, 3, PARAMETERS, dtype=torch.float64)
    state[:, 0] = flat(model)
    trace = []
    for t in range(1, steps + 1):
        for rank, (x, u, v) in enumerate(state):
            assign(model, x.clone())
            inputs, targets = make_batch(rank, t - 1)
            loss = (model(inputs) - targets).square().mean()
            g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(loss, [*model.parameters()])])
            u.mul_(beta1).add_((1 - beta1) * g)
            v.mul_(beta2).add_((1 - beta2) * g * g)
            x.mul_(1 - rate * decay)
            x.sub_(rate * (u / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))
        for vector, period in enumerate(periods):
            if t % period == 0:
                state[:, vector] = state[:, vector].mean(0)
        trace.append(state.clone())
    return trace


@pytest.mark.parametrize("kind", ["adamw", "fused"])
@pytest.mark.parametrize(
    ("text", "periods"),
    [
        ("desloc:period=2", (2, 6, 12)),
        ("desloc:period=4,first_period=3,second_period=5", (4, 3, 5)),
        ("desloc:period=5,second_period=2", (5, 15, 2)),
        ("desloc:period=1000,first_period=1,second_period=1000", (1000, 1, 1000)),
    ],
)
def test_parameters_and_moments_are_averaged_with_periods_of_their_own(
    text: str, periods: tuple[int, int, int], kind: str
) -> None:
    """Every vector of every worker after every step, the bytes, and the rounds."""
    steps, workers = 25, 3
    want = by_the_equations(periods, steps, workers)
    results = run(train, text, steps, kind, workers=workers)
    due = [[t % period == 0 for period in periods] for t in range(1, steps + 1)]
    for rank, result in enumerate(results):
        for got, expected in zip(result["trace"], want, strict=True):
            close(got, expected[rank], 1e-12)
        sent = sum(
            any(row) * VOTE_BYTES + any(row[1:]) * COMPARISON_BYTES + sum(row) * 8 * PARAMETERS
            for row in due
        )
        assert result["sent"] == sent
        assert result["syncs"] == sum(map(any, due))
    for t, row in enumerate(due):
        for vector, averaged in enumerate(row):
            first, *others = (result["trace"][t][vector] for result in results)
            assert all(torch.equal(first, other) == averaged for other in others)


def test_equal_periods_are_local_adam() -> None:
    """Bit for bit what local SGD does with the optimizers' state averaged."""
    periods = "period=4,first_period=4,second_period=4"
    ours = run(train, f"desloc:{periods}", 11, workers=3)
    local = run(train, "local:period=4,optimizer_state=average", 11, workers=3)
    for one, other in zip(ours, local, strict=True):
        assert torch.equal(torch.stack(one["trace"]), torch.stack(other["trace"]))
        assert one["sent"] == other["sent"]


# -- refusals --------------------------------------------------------------------------------------

LACKS = "averages both moments of Adam, 'exp_avg' and 'exp_avg_sq', and the state of this {} lacks"


def refused(rank: int, size: int, kind: str) -> tuple[str, str]:
    """Return the error, and the call that raised it."""
    model = make_model(seed=rank)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    try:
        attach(model, optimizer, "desloc:period=2")
    except offbeat.AttachError as error:
        return str(error), "attach"
    with pytest.raises(offbeat.AttachError) as caught:
        train_step(model, optimizer, make_batch(rank, 0))
    return str(caught.value), "step"


@pytest.mark.parametrize(
    ("kind", "call"),
    [("SGD", "attach"), ("RMSprop", "attach"), ("Adagrad", "attach"), ("Adamax", "step")],
)
def test_an_optimizer_without_both_moments_is_refused(kind: str, call: str) -> None:
    """By ``attach`` if it has no betas, and otherwise when its first step has made the state."""
    for text, raised_by in run(refused, kind, workers=2):
        assert LACKS.format(kind) in text
        assert "\n" not in text.partition("\nin simulated worker")[0]
        assert raised_by == call


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "RAdam"])
def test_variants_of_adam_train(kind: str) -> None:
    def work(rank: int, size: int) -> tuple[Tensor, Tensor]:
        model = make_model(seed=rank)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, "desloc:period=1")
        for step in range(6):
            train_step(model, optimizer, make_batch(rank, step))
        second = moment(model, optimizer, "exp_avg_sq")
        sync.finish()
        return flat(model), second

    results = simulated(work, workers=2)
    for one, other in itertools.pairwise(results):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    "options", [{"wire": "int8"}, {"non_finite": "exclude"}, {"min_workers": 1}], ids=str
)
def test_options_that_baselines_lack_are_refused(options: dict[str, Any]) -> None:
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with pytest.raises(offbeat.AttachError, match="baselines to compare with"):
        offbeat.attach(model, optimizer, DesLoc(period=4), **options)
