"""A worker with non-finite values is named, and stops the training or is excluded.

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
from loops import attach, close, error_of
from offbeat import StreamingAveraging
from problems import (
    OPTIMIZERS,
    Batch,
    Simulated,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
    train_step,
)
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
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = attach(model, optimizer, text, **options)
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


EXCLUDE: dict[str, Any] = {"non_finite": "exclude"}


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_bsp_averages_the_gradients_of_the_others(kind: str) -> None:
    """The excluded worker receives the same mean."""
    model = make_model(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    want = []
    for step in range(6):
        ranks = [r for r in range(3) if (r, step) != (BAD_RANK, BAD_STEP)]
        each = [gradients(model, make_batch(rank, step)) for rank in ranks]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = sum(parts) / len(ranks)  # type: ignore[assignment]
        optimizer.step()
        want.append(flat(model))
    for rank, (trace, final, error, details) in enumerate(
        run(train, "bsp", kind, 6, (BAD_RANK,), EXCLUDE, workers=3)
    ):
        assert error == "nothing was raised"
        for got, expected in zip(trace, want, strict=True):
            close(got, expected)
        close(final, want[-1])
        assert details.get("non_finite", 0) == (rank == BAD_RANK)
        assert details["non_finite_excluded"] == 1


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("local:period=3", 3),
        ("selsync:delta=0", 1),
        ("diloco:period=3,outer_lr=1,outer_momentum=0", 3),
    ],
)
def test_means_of_models_exclude_the_worker(text: str, period: int, kind: str) -> None:
    """x ← the mean of the others on all workers.

    The optimizer of the excluded worker starts from scratch.
    """
    reference = Simulated.start(3, kind)
    for step in range(9):
        reference.step(step)
        if step == BAD_STEP:  # what a batch with a NaN has left behind
            reference.optimizers[BAD_RANK].state.clear()
        if (step + 1) % period == 0:
            reference.average([1.0, float(step != BAD_STEP), 1.0])
    for trace, final, error, _ in run(train, text, kind, 9, (BAD_RANK,), EXCLUDE, workers=3):
        assert error == "nothing was raised"
        close(trace[-1], reference.flat()[0])
        close(final, reference.flat()[0])


def train_alike(rank: int, size: int, text: str, bad: tuple[int, ...]) -> Any:
    """Let all workers read the same batches: every mean is the same regardless of exclusions."""
    model = nn.Sequential(make_model(seed=0), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, text, **EXCLUDE)
    trace, buffers = [], []
    for step in range(14):
        x, y = make_batch(0, step)
        if step == BAD_STEP and rank in bad:
            x = x * math.nan
        train_step(model, optimizer, (x, y))
        trace.append(flat(model))
        buffers.append(torch.cat([model[1].running_mean, model[1].running_var]))
    sync.finish()
    return torch.stack(trace), torch.stack(buffers), flat(model), sync.stats.details


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("text", "same", "back"),
    [
        ("diloco:period=3", 5, 3),
        ("diloco:period=3,fragments=3", 3, 3),
        ("diloco:period=4,fragments=2,overlap=1", 6, 4),
        ("async:staleness=4,outer_momentum=0.5,outer_lr=0.7", 7, 4),
        ("async:staleness=4,schedule=eager", 0, 9),
        ("streaming:parts=2,schedule=cyclic,staleness=4", 5, 3),
        ("streaming:parts=3,staleness=6,outer_gain=1", 0, 9),
        ("streaming:parts=1,staleness=6", 0, 9),
    ],
)
def test_an_excluded_worker_changes_no_mean(text: str, same: int, back: int) -> None:
    """The others' models equal those of a run without NaN for ``same`` steps, including a landing.

    The excluded worker has a finite model again after ``back`` steps. Its updates then count again.
    """
    want = simulated(train_alike, text, (), workers=3)
    got = simulated(train_alike, text, (BAD_RANK,), workers=3)
    for rank, (trace, buffers, final, details) in enumerate(got):
        if rank != BAD_RANK:
            close(trace[:same], want[rank][0][:same])
            assert trace.isfinite().all()
            assert buffers.isfinite().all()
        assert trace[back - 1 :].isfinite().all()
        assert buffers[-1].isfinite().all()
        # Variances are restored to those of the last mean: no 0 in place of NaN reaches the others.
        variances, expected = buffers[:, 1], want[rank][1][:, 1]
        assert variances[variances.isfinite()].min() > 0.9 * expected.min()
        assert torch.equal(final, got[0][2])
        assert final.isfinite().all()
        assert details.get("non_finite_excluded", 0) <= 1, "its restored model is finite"
    assert got[BAD_RANK][3]["non_finite_excluded"] == 1


def bsp_statistics(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return running statistics before a consensus, in it, and at the end."""
    model = nn.Sequential(nn.BatchNorm1d(4).double(), *make_model(seed=0))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = attach(model, optimizer, "bsp", **EXCLUDE)
    for step in range(BAD_STEP + 2):
        train_step(model, optimizer, batch_of(rank, step))

    def statistics() -> Tensor:
        return torch.cat([model[0].running_mean, model[0].running_var])  # type: ignore[list-item]

    own = statistics()
    with sync.consensus():
        shown = statistics()
    sync.finish()
    return own, shown, statistics()


def test_nan_in_the_statistics_of_a_worker_does_not_reach_the_others() -> None:
    """BSP averages statistics only in a consensus and at the end."""
    results = simulated(bsp_statistics, workers=3)
    others = [own for rank, (own, _, _) in enumerate(results) if rank != BAD_RANK]
    assert results[BAD_RANK][0].isnan().any()
    for _, shown, end in results:
        close(shown, sum(others) / 2)
        close(end, sum(others) / 2)


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
    monkeypatch.setattr(StreamingAveraging, "due", lambda _, view: float(view.staleness >= 4))
    for rank, (spoiled, error) in enumerate(run(spoil_statistics, text, "raise", workers=3)):
        assert error.startswith("rank 1 would contribute NaN or infinity to the mean at ")
        assert rank == BAD_RANK or not spoiled
    for policy in ("exclude", "none"):
        for spoiled, error in run(spoil_statistics, text, policy, workers=3):
            assert error == "nothing was raised"
            assert not spoiled


class Overflowing(torch.optim.SGD):
    """Leaves a NaN in the model if ``bad`` is set, although the gradients are finite."""

    bad = False

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.bad:
            with torch.no_grad():
                self.param_groups[0]["params"][-1].fill_(math.nan)


def overflow(rank: int, size: int, text: str, policy: str) -> tuple[Tensor, str]:
    model = make_model(seed=0)
    optimizer = Overflowing(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, non_finite=policy)

    def loop() -> None:
        for step in range(10):
            optimizer.bad = (rank, step) == (BAD_RANK, 3)
            train_step(model, optimizer, make_batch(rank, step))
        sync.finish()

    _, error = error_of(loop)
    sync.detach()
    return flat(model), error


@pytest.mark.parametrize(
    "text", ["streaming:schedule=cyclic,staleness=4", "streaming", "diloco:period=4"]
)
def test_what_becomes_nan_after_the_vote_reaches_no_other_worker(text: str) -> None:
    for model, error in simulated(overflow, text, "exclude", workers=3):
        assert error == "nothing was raised"
        assert model.isfinite().all()
    for rank, (model, error) in enumerate(simulated(overflow, text, "raise", workers=3)):
        assert error.startswith("rank 1 would contribute NaN or infinity to the mean at step ")
        assert rank == BAD_RANK or model.isfinite().all()


def fail_last(rank: int, size: int, text: str) -> Tensor:
    """Put the NaN into the last step before ``finish``."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = attach(model, optimizer, text, **EXCLUDE)
    for step in range(BAD_STEP + 1):
        train_step(model, optimizer, batch_of(rank, step))
    sync.finish()
    return flat(model)


@pytest.mark.parametrize(
    "text",
    [
        "diloco:period=2",
        "diloco:period=4,fragments=2,overlap=2",
        "async:staleness=8",
        "async:schedule=eager",
        "streaming:parts=2,schedule=cyclic,staleness=4",
        "streaming:parts=2",
    ],
)
def test_the_final_mean_is_finite(text: str) -> None:
    """A worker that can be restored to the shared model is, before the models are averaged."""
    first, *others = simulated(fail_last, text, workers=3)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_a_model_that_has_become_nan_between_two_rounds_is_excluded() -> None:
    """The last gradient before a round may be finite again, so the model is checked, too."""
    reference = Simulated.start(3, "sgd")
    for step in range(4):
        reference.step(step)
    reference.average([1.0, 0.0, 1.0])

    def ruined(rank: int, size: int) -> Tensor:
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        sync = attach(model, optimizer, "local:period=4", **EXCLUDE)
        for step in range(4):
            if rank == BAD_RANK and step == 3:
                with torch.no_grad():
                    model[3].bias.fill_(math.nan)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            else:
                train_step(model, optimizer, make_batch(rank, step))
        sync.finish()
        return flat(model)

    for model in simulated(ruined, workers=3):
        close(model, reference.flat()[0])


def test_all_workers_raise_if_no_other_contributes() -> None:
    for text in ("bsp", "local:period=1"):
        for trace, _, error, _ in run(train, text, "sgd", 4, (0, 1, 2), EXCLUDE, workers=3):
            assert error == (
                "3 workers would contribute NaN or infinity to the mean at step 3, and no other "
                'worker contributes (non_finite="exclude")'
            )
            assert len(trace) == 2


AVERAGING = [
    "bsp",
    "local:period=3",
    "selsync:delta=0",
    "selsync:delta=0,aggregate=gradients",
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
        advice = 'With non_finite="exclude" training continues without such a contribution'
        assert error.endswith('(non_finite="raise")' if "gradients" in text else advice)
        step = int(error.partition("at step ")[2].partition(";")[0])
        assert BAD_STEP + 1 <= step <= BAD_STEP + 5
        assert model.isfinite().all() or rank == BAD_RANK
        assert rank == BAD_RANK or not details.get("non_finite")


@pytest.mark.parametrize("text", some(AVERAGING, 0, 1, 5, 6))
def test_a_warning_is_logged_once(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each worker names rank and step. All workers receive the non-finite mean."""
    results = simulated(train, text, "sgd", 12, (BAD_RANK,), {"non_finite": "warn"}, workers=3)
    logged = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    logged = [one for one in logged if "the gradient is not finite" not in one]
    begins = [f"rank {rank}: rank {BAD_RANK} would contribute NaN" for rank in range(3)]
    assert sorted(one[: len(begins[0])] for one in logged) == begins
    policies = '"raise"' if "gradients" in text else '"raise" or "exclude"'
    for one in logged:
        assert one.endswith(f": all workers receive it; non_finite={policies} prevents that")
    assert all(error == "nothing was raised" for _, _, error, _ in results)
    assert not any(model.isfinite().all() for _, model, _, _ in results)


def counted(rank: int, size: int, text: str) -> tuple[dict[str, Any], bool]:
    """Let two workers read a NaN in different steps, one of them twice."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sync = attach(model, optimizer, text, **EXCLUDE)
    for step in range(20):
        x, y = make_batch(rank, step)
        if (rank, step) in ((0, 2), (2, 6), (2, 11)):
            y[0, 0] = math.inf
        train_step(model, optimizer, (x, y))
    sync.finish()
    return sync.stats.details, bool(flat(model).isfinite().all())


@pytest.mark.parametrize("text", ["bsp", "local:period=1", "diloco:period=2", "async:staleness=2"])
def test_exclusions_are_counted(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """All workers count them; each logs the first one, and the number at the end."""
    for rank, (details, finite) in enumerate(simulated(counted, text, workers=3)):
        assert finite
        assert details["non_finite_excluded"] == 3
        assert details.get("non_finite", 0) == (1, 0, 2)[rank]
    logged = [r.getMessage() for r in caplog.records if "would contribute" in r.getMessage()]
    assert sorted(logged) == [
        f"rank {rank}: rank 0 would contribute NaN or infinity to the mean at step "
        f"{4 if 'diloco' in text else 3}: excluded; later ones are counted in Stats.details as "
        "non_finite_excluded"
        for rank in range(3)
    ]
    assert sorted(r.getMessage() for r in caplog.records if "were excluded" in r.getMessage()) == [
        f"rank {rank}: 3 contributions with NaN or infinity were excluded from the means of this "
        "training"
        for rank in range(3)
    ]


def scaled(rank: int, size: int) -> tuple[int, bool]:
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with attach(model, optimizer, "bsp", scaler=scaler, non_finite="raise") as sync:
        for step in range(3):
            optimizer.zero_grad()
            x, y = make_batch(rank, step, dtype=torch.float32)
            scaler.scale((model(x) - y).square().sum() * 100).backward()
            scaler.step(optimizer)
            scaler.update()
    return sync.step, bool(flat(model).isfinite().all())


def test_overflows_under_a_scaler_are_not_reported() -> None:
    """The scaler skips such a step and changes its scale."""
    assert run(scaled, workers=2) == [(3, True)] * 2
