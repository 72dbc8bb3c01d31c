"""A worker with non-finite values is named, and stops the training or causes a warning.

The worker reads one batch with a NaN in it, so its whole gradient is NaN.
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cells import some
from loops import attach, error_of, start
from offbeat import StreamingAveraging
from problems import OPTIMIZERS, Batch, flat, loss_of, make_batch, make_model, train_step
from worlds import run, simulated

BAD_RANK, BAD_STEP = 1, 2  # the third step


def batch_of(rank: int, step: int, bad: Sequence[int] = (BAD_RANK,)) -> Batch:
    x, y = make_batch(rank, step)
    if step == BAD_STEP and rank in bad:
        x[0, 0] = math.nan
    return x, y


def train(
    rank: int, size: int, text: str, kind: str, steps: int, bad: tuple[int, ...], options: dict
) -> tuple[list[Tensor], Tensor, str, dict[str, Any]]:
    """Return the model after each step and after finish, the error, and the totals."""
    model, optimizer, sync = start(rank, text, kind, **options)
    trace: list[Tensor] = []

    def loop() -> None:
        for step in range(steps):
            train_step(model, optimizer, batch_of(rank, step, bad))
            trace.append(flat(model))
        sync.finish()

    kinds, text = error_of(loop)
    sync.detach()
    assert kinds[:1] in ([], ["OffbeatError"]), text
    return trace, flat(model), text, sync.stats.details


def spoil_statistics(rank: int, size: int, text: str, policy: str) -> Any:
    """Skip a step on one worker because its loss is NaN. Its running mean stays NaN."""
    model = nn.Sequential(nn.BatchNorm1d(4).double(), *make_model(seed=0))
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    model.register_buffer("unset", torch.tensor(math.nan) if policy == "none" else None)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    options = {} if policy == "none" else {"non_finite": policy}
    sync = attach(model, optimizer, text, **options)

    def loop() -> None:
        for step in range(12):
            loss = loss_of(model, batch_of(rank, step, [BAD_RANK] * (policy != "none")))
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        sync.finish()

    _, error = error_of(loop)
    sync.detach()
    return bool(model[0].running_mean.isnan().any()), error  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text", ["local:period=4", "diloco:period=4", "async:staleness=6", "streaming:staleness=12"]
)
def test_nan_in_statistics_alone_counts_as_non_finite(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Infinite masks do not count, nor do buffers that were NaN from the start."""
    # Otherwise a part is always in flight, and its landing replaces the NaN by the mean.
    monkeypatch.setattr(StreamingAveraging, "due", lambda _, view: float(view.since_launch >= 4))
    for rank, (spoiled, error) in enumerate(run(spoil_statistics, text, "raise", workers=3)):
        assert error.startswith("rank 1 would contribute NaN or infinity to the mean at ")
        assert rank == BAD_RANK or not spoiled
    for spoiled, error in run(spoil_statistics, text, "none", workers=3):
        assert error == "nothing was raised"
        assert not spoiled


def overflow(rank: int, size: int, text: str, wire: str) -> tuple[Tensor, str]:
    """Take a step whose gradients are finite, with a learning rate at which the model is not."""
    torch.manual_seed(rank)
    model = nn.Linear(16, 256)  # large enough for few bits
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, wire=wire)

    def loop() -> None:
        for step in range(10):
            bad = (rank, step) == (BAD_RANK, 3)
            optimizer.param_groups[0]["lr"] = 1e38 if bad else 0.05
            optimizer.zero_grad()
            ((1e6 if bad else 1) * model(torch.randn(8, 16)).square().mean()).backward()
            optimizer.step()
        sync.finish()

    _, error = error_of(loop)
    sync.detach()
    return flat(model), error


@pytest.mark.parametrize("wire", ["float32", "int2"])
@pytest.mark.parametrize(
    "text", ["streaming:schedule=cyclic,staleness=4", "streaming", "diloco:period=4"]
)
def test_what_overflows_after_the_vote_reaches_no_other_worker(text: str, wire: str) -> None:
    for rank, (model, error) in enumerate(simulated(overflow, text, wire, workers=3)):
        assert error.startswith("rank 1 would contribute NaN or infinity to the mean at step ")
        assert rank == BAD_RANK or model.isfinite().all()


def ruined(rank: int, size: int) -> tuple[Tensor, str]:
    model, optimizer, sync = start(rank, "local:period=4")

    def loop() -> None:
        for step in range(4):
            if rank == BAD_RANK and step == 3:
                with torch.no_grad():
                    model[3].bias.fill_(math.nan)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            else:
                train_step(model, optimizer, make_batch(rank, step))

    _, error = error_of(loop)
    sync.detach()
    return flat(model), error


def test_a_model_that_has_become_nan_between_two_rounds_is_found() -> None:
    """The last gradient before a round may be finite again, so the model is checked, too."""
    for rank, (model, error) in enumerate(simulated(ruined, workers=3)):
        assert error.startswith("rank 1 would contribute NaN or infinity to the mean at step 4")
        assert rank == BAD_RANK or model.isfinite().all()


AVERAGING = [
    "bsp",
    "local:period=3",
    "selsync:delta=0",
    "diloco:period=4,fragments=2,overlap=1",
    "async:staleness=2,schedule=eager",
    "streaming:parts=2",
    "streaming:parts=2,schedule=cyclic,staleness=2",
]


@pytest.mark.parametrize("text", AVERAGING)
def test_by_default_all_workers_raise_before_the_mean(text: str) -> None:
    """The models of the others have not received the value. The message names rank and step."""
    results = simulated(train, text, "momentum", 12, (BAD_RANK,), {}, workers=3)
    for rank, (_, model, error, details) in enumerate(results):
        assert error.startswith(f"rank {BAD_RANK} would contribute NaN or infinity to the mean at ")
        assert error.endswith("and continue from the last checkpoint")
        step = int(error.partition("at step ")[2].partition(";")[0])
        assert BAD_STEP + 1 <= step <= BAD_STEP + 5
        assert model.isfinite().all() or rank == BAD_RANK
        assert rank == BAD_RANK or not details.get("non_finite")


@pytest.mark.parametrize("text", some(AVERAGING, 0, 1, 4, 5))
def test_a_warning_is_logged_once(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each worker names rank and step. All workers receive the non-finite mean."""
    results = simulated(train, text, "sgd", 12, (BAD_RANK,), {"non_finite": "warn"}, workers=3)
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    logged = [one for one in logged if "the gradient is not finite" not in one]
    begins = [f"rank {rank}: rank {BAD_RANK} would contribute NaN" for rank in range(3)]
    assert sorted(one[: len(begins[0])] for one in logged) == begins
    for one in logged:
        assert one.endswith(': all workers receive it; non_finite="raise" prevents that')
    assert all(error == "nothing was raised" for _, _, error, _ in results)
    assert not any(model.isfinite().all() for _, model, _, _ in results)
