"""AsyncAveraging against Algorithm 2 written out with a parameter server, and its lemmas."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat.strategies.base import Strategy
from worlds import run

BOTH = ["cyclic", "eager"]


class Quadratic(nn.Module):
    """½‖A x − b‖² in double precision, so that references agree to 1e-12."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.y = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))

    def forward(self, data: tuple[Tensor, Tensor]) -> Tensor:
        a, b = data
        return 0.5 * (a @ torch.cat([self.x, self.y.reshape(-1)]) - b).square().sum()


def batches(rank: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1000 + rank)
    return [
        (
            torch.randn(4, 9, generator=generator, dtype=torch.float64),
            torch.randn(4, generator=generator, dtype=torch.float64) + rank,
        )
        for _ in range(steps)
    ]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def make(kind: str) -> tuple[Quadratic, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = Quadratic()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype))
    if kind == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def train(
    rank: int, size: int, strategy: Strategy, kind: str, counts: list[int], look: int = 0
) -> dict[str, Any]:
    """Train and return the model before and after each step boundary, and at the end."""
    model, optimizer = make(kind)
    if rank:
        with torch.no_grad():
            model.x.add_(rank)  # attach must start everyone from rank 0
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(flat(model)))
    after: list[Tensor] = []
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    for data in batches(rank, counts[rank]):
        optimizer.zero_grad()
        model(data).backward()
        optimizer.step()
        after.append(flat(model))
        if look and sync.step % look == 0:
            with sync.consensus():
                pass
    sync.finish()
    return {
        "before": before,
        "after": after,
        "end": flat(model),
        "details": sync.stats.details,
        "stats": sync.stats.to_dict(),
    }


def algorithm_2(
    kind: str, workers: int, steps: int, tau: int, outer_lr: float = 1.0, momentum: float = 0.0
) -> tuple[list[list[Tensor]], Tensor, list[Tensor]]:
    """The cyclic schedule with explicit u, x_init and server, as the paper writes it.

    Returns each worker's models after each step, the final mean, and the server's models.
    """
    beta = tau // 2
    models = [make(kind) for _ in range(workers)]
    data = [batches(rank, steps) for rank in range(workers)]
    x_init = [flat(model) for model, _ in models]
    server, velocity = x_init[0].clone(), torch.zeros_like(x_init[0])
    servers = [server.clone()]
    in_flight: list[Tensor] = []
    trace: list[list[Tensor]] = [[] for _ in range(workers)]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(models):
            optimizer.zero_grad()
            model(data[rank][step]).backward()
            optimizer.step()
        if (step + 1) % beta == 0:
            now = [flat(model) for model, _ in models]
            updates = [x - start for x, start in zip(now, x_init, strict=True)]
            shift = [torch.zeros_like(server)] * workers
            if in_flight:
                mean = sum(in_flight) / workers
                velocity = momentum * velocity + mean
                extra = outer_lr * (mean + momentum * velocity) - mean
                server = server + mean + extra
                servers.append(server.clone())
                shift = [mean - u + extra for u in in_flight]
            for rank, (model, _) in enumerate(models):
                now[rank] = now[rank] + shift[rank]
                assign(model, now[rank])
            x_init, in_flight = now, updates
        for rank, (model, _) in enumerate(models):
            trace[rank].append(flat(model))
    last = [flat(model) for model, _ in models]
    mean_last = sum(last) / workers
    if in_flight and (outer_lr, momentum) != (1.0, 0.0):  # the drain applies the last merge too
        mean = sum(in_flight) / workers
        velocity = momentum * velocity + mean
        mean_last = mean_last + outer_lr * (mean + momentum * velocity) - mean
    return trace, mean_last, servers


def assign(model: nn.Module, values: Tensor) -> None:
    with torch.no_grad():
        offset = 0
        for p in model.parameters():
            p.copy_(values[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_cyclic_schedule_is_algorithm_2(kind: str) -> None:
    """Every worker's model after every step is that of Algorithm 2 with a server."""
    results = run(train, offbeat.AsyncAveraging(staleness=4), kind, [23] * 3, workers=3)
    trace, mean, _ = algorithm_2(kind, 3, 23, 4)
    for result, expected in zip(results, trace, strict=True):
        for got, want in zip(result["after"], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
        torch.testing.assert_close(result["end"], mean, rtol=0, atol=1e-11)


def test_lemma_3_1_and_3_2() -> None:
    """A reset keeps the workers' mean; the server's model is the mean at the last cycle's end."""
    results = run(train, offbeat.AsyncAveraging(staleness=6), "sgd", [21] * 3, workers=3)
    _, _, servers = algorithm_2("sgd", 3, 21, 6)
    moved = 0
    for step in range(21):
        before = [r["before"][step] for r in results]
        after = [r["after"][step] for r in results]
        torch.testing.assert_close(sum(before) / 3, sum(after) / 3, rtol=0, atol=1e-12)
        moved += not torch.equal(before[0], after[0])
    assert moved == 6  # resets at steps 6, 9, …, 21; that at step 3 has nothing to apply
    for cycle in range(6):  # P_{j+1} = mean of x at the end of cycle j
        mean = sum(r["after"][3 * cycle + 2] for r in results) / 3
        torch.testing.assert_close(mean, servers[cycle + 1], rtol=0, atol=1e-11)


def test_every_cycle_merges_once() -> None:
    """T steps are ⌊T/β⌋ merges; each is applied, the last one at the end."""
    for steps, merges in ((20, 10), (21, 10), (1, 0), (2, 1)):
        results = run(train, offbeat.AsyncAveraging(staleness=4), "sgd", [steps] * 2, workers=2)
        assert [r["details"].get("merges", 0) for r in results] == [merges] * 2


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_one_worker_is_sequential_training(kind: str, schedule: str) -> None:
    """N = 1 equals training without Offbeat bit for bit."""
    strategy = offbeat.AsyncAveraging(staleness=4, schedule=schedule)  # type: ignore[arg-type]
    (result,) = run(train, strategy, kind, [30], workers=1)
    model, optimizer = make(kind)
    for data in batches(0, 30):
        optimizer.zero_grad()
        model(data).backward()
        optimizer.step()
    assert torch.equal(result["end"], flat(model))


@pytest.mark.parametrize("schedule", BOTH)
def test_drained_replicas_are_identical_and_hold_everything(schedule: str) -> None:
    """After finish all bits agree; in lockstep the model is the mean of all the workers had."""
    strategy = offbeat.AsyncAveraging(staleness=6, schedule=schedule)  # type: ignore[arg-type]
    results = run(train, strategy, "sgd", [20] * 3, workers=3)  # ends inside a cycle
    mean = sum(r["after"][-1] for r in results) / 3
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        if schedule == "cyclic":
            torch.testing.assert_close(result["end"], mean, rtol=0, atol=1e-11)


@pytest.mark.parametrize("schedule", BOTH)
def test_workers_may_take_different_numbers_of_steps(schedule: str) -> None:
    """A worker that has finished answers until all have; all end with the same bits."""
    strategy = offbeat.AsyncAveraging(staleness=4, schedule=schedule)  # type: ignore[arg-type]
    results = run(train, strategy, "sgd", [9, 31, 16], workers=3)
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
    assert [r["stats"]["steps"] for r in results] == [9, 31, 16]


def test_looking_does_not_change_training() -> None:
    """consensus() leaves the trajectory as it is, with a merge in flight and without."""
    looked = run(train, offbeat.AsyncAveraging(staleness=4), "sgd", [22] * 2, 3, workers=2)
    plain = run(train, offbeat.AsyncAveraging(staleness=4), "sgd", [22] * 2, workers=2)
    for a, b in zip(looked, plain, strict=True):
        assert torch.equal(torch.stack(a["after"]), torch.stack(b["after"]))
        assert torch.equal(a["end"], b["end"])


def see_consensus(rank: int, size: int, strategy: Strategy) -> list[tuple[Tensor, Tensor]]:
    model, optimizer = make("sgd")
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    seen = []
    for data in batches(rank, 13):
        optimizer.zero_grad()
        model(data).backward()
        optimizer.step()
        own = flat(model)
        with sync.consensus():
            seen.append((own, flat(model)))
        assert torch.equal(own, flat(model)) or strategy.schedule == "eager"
    sync.finish()
    return seen


@pytest.mark.parametrize("schedule", BOTH)
def test_consensus_is_the_mean_of_the_workers(schedule: str) -> None:
    """Inside consensus() the model is the mean of all workers' models, merge in flight or not."""
    strategy = offbeat.AsyncAveraging(staleness=6, schedule=schedule)  # type: ignore[arg-type]
    for seen in zip(*run(see_consensus, strategy, workers=3), strict=True):
        mean = sum(own for own, _ in seen) / 3
        for _, inside in seen:
            torch.testing.assert_close(inside, mean, rtol=0, atol=1e-11)


def count_steps(
    rank: int, size: int, strategy: Strategy, steps: int, finished: Path
) -> list[float]:
    """Each step of worker n adds 1 to coordinate n, so x tells which steps are merged.

    With I own steps inside P, x[n] = I/N + (t − I): the steps past P follow from x and t alone,
    as long as every worker has weight 1, that is until the first one has finished.
    """
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    past = []
    for step in range(1, steps + 1):
        time.sleep(0.005 if rank == 0 else 0.001)  # the work of a step: one worker 5 times slower
        model.x.grad = -torch.eye(size, dtype=torch.float64)[rank]
        optimizer.step()
        if finished.exists():
            continue
        merged = (step - model.x[rank].item()) / (1 - 1 / size)
        past.append(step - merged)
    finished.touch()
    sync.finish()
    total = sum(model.x.tolist())
    if strategy.schedule == "cyclic":  # in lockstep: nobody finishes before the others
        assert total == pytest.approx(steps), "every step is in the final mean once"
    return past


@pytest.mark.parametrize("schedule", BOTH)
@pytest.mark.parametrize("staleness", [2, 8])
def test_staleness_is_never_exceeded(schedule: str, staleness: int, tmp_path: Path) -> None:
    """Own steps past the last merged model never exceed τ, with one worker 5× slower."""
    strategy = offbeat.AsyncAveraging(staleness=staleness, schedule=schedule)  # type: ignore[arg-type]
    for past in run(count_steps, strategy, 60, tmp_path / "finished", workers=3):
        # At a boundary, before the next step: fewer than τ, so the next gradient makes at most τ.
        assert max(past) <= staleness - 1 + 1e-9
        assert max(past) >= min(staleness, 2) / 2 - 1e-9  # and it does run ahead


def bounded(rank: int, size: int, strategy: Strategy, steps: int) -> list[Tensor]:
    """SGD with gradients of norm exactly 1, pointing in a direction of the worker's own."""
    torch.manual_seed(0)
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=30)
    generator = torch.Generator().manual_seed(rank)
    drift = torch.randn(40, generator=generator, dtype=torch.float64)
    seen = []
    for _ in range(steps):
        noise = torch.randn(40, generator=generator, dtype=torch.float64)
        gradient = drift + 0.3 * noise
        model.x.grad = gradient / gradient.norm()
        optimizer.step()
        seen.append(model.x.detach().clone())
    sync.finish()
    return seen


def test_lemma_3_3_distance_is_bounded_and_independent_of_n() -> None:
    """‖x_n − x_m‖ ≤ 2·L·τ·η, and eight workers are no further apart than two."""
    largest = {}
    for workers in (2, 8):
        results = run(bounded, offbeat.AsyncAveraging(staleness=8), 40, workers=workers)
        largest[workers] = max(
            float((a - b).norm())
            for models in zip(*results, strict=True)
            for i, a in enumerate(models)
            for b in models[:i]
        )
        assert largest[workers] <= 2 * 1.0 * 8 * 0.1
    assert largest[8] <= 1.25 * largest[2]  # the maximum is over 28 pairs instead of 1


def test_outer_one_zero_is_plain() -> None:
    """outer_lr=1, outer_momentum=0 is exactly the plain method."""
    plain = run(train, offbeat.AsyncAveraging(staleness=4), "sgd", [11] * 2, workers=2)
    strategy = offbeat.AsyncAveraging(staleness=4, outer_lr=1.0, outer_momentum=0.0)
    outer = run(train, strategy, "sgd", [11] * 2, workers=2)
    for a, b in zip(plain, outer, strict=True):
        assert torch.equal(torch.stack(a["after"]), torch.stack(b["after"]))


@pytest.mark.parametrize(("outer_lr", "momentum"), [(0.5, 0.8), (0.7, 0.0), (1.0, 0.5)])
def test_outer_momentum_follows_its_recursion(outer_lr: float, momentum: float) -> None:
    """x ← x + (m − u) + (η_o(m + μv) − m), computed by hand, worker by worker and in the mean."""
    strategy = offbeat.AsyncAveraging(staleness=4, outer_lr=outer_lr, outer_momentum=momentum)
    results = run(train, strategy, "sgd", [17] * 3, workers=3)
    trace, mean, _ = algorithm_2("sgd", 3, 17, 4, outer_lr, momentum)
    for result, expected in zip(results, trace, strict=True):
        got, want = torch.stack(result["after"]), torch.stack(expected)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
        torch.testing.assert_close(result["end"], mean, rtol=0, atol=1e-11)


def normalised(rank: int, size: int, strategy: Strategy) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    generator = torch.Generator().manual_seed(rank)
    smallest = torch.tensor(1.0)
    for step in range(25 + rank):
        # the spread of the data changes wildly: a plain shift would make variances negative
        scale = 20.0 if (step // 3 + rank) % 2 else 0.01
        optimizer.zero_grad()
        model(scale * torch.randn(16, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        smallest = torch.minimum(smallest, model[1].running_var.min())
    sync.finish()
    return {"smallest": smallest, **model.state_dict()}


@pytest.mark.parametrize("schedule", BOTH)
def test_batch_statistics_are_merged_and_stay_positive(schedule: str) -> None:
    """Running variances are merged with the parameters and never turn negative."""
    strategy = offbeat.AsyncAveraging(staleness=4, schedule=schedule)  # type: ignore[arg-type]
    results = run(normalised, strategy, workers=3)
    for result in results:
        assert result["smallest"] >= 0
        for name in ("1.running_mean", "1.running_var", "0.weight"):
            assert torch.equal(result[name], results[0][name])
        assert result["1.num_batches_tracked"] == 27


def resumed(
    rank: int, size: int, strategy: Strategy, stop: int | None, steps: int
) -> tuple[Tensor, dict[str, Any]]:
    model, optimizer = make("sgd")
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    for step, data in enumerate(batches(rank, steps)):
        if step == stop:
            state = {"sync": sync.state_dict(), "m": model.state_dict()}
            state["o"] = optimizer.state_dict()
            file = io.BytesIO()
            torch.save(state, file)
            sync.detach()
            file.seek(0)
            state = torch.load(file, weights_only=True)
            model, optimizer = make("sgd")
            sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
            model.load_state_dict(state["m"])
            optimizer.load_state_dict(state["o"])
            sync.load_state_dict(state["sync"])
        optimizer.zero_grad()
        model(data).backward()
        optimizer.step()
    sync.finish()
    return flat(model), sync.stats.details


@pytest.mark.parametrize("stop", [7, 8])
def test_resumed_training_is_the_same_training(stop: int) -> None:
    """A checkpoint holds the merge in flight, P and v: resuming gives the same bits."""
    strategy = offbeat.AsyncAveraging(staleness=4, outer_lr=0.5, outer_momentum=0.8)
    whole = run(resumed, strategy, None, 20, workers=2)
    parts = run(resumed, strategy, stop, 20, workers=2)
    for (a, totals), (b, same) in zip(whole, parts, strict=True):
        assert torch.equal(a, b)
        assert totals["merges"] == same["merges"]


def test_eager_schedule_can_be_saved_and_resumed() -> None:
    """With the eager schedule saving is a collective; training goes on from it to one model."""
    strategy = offbeat.AsyncAveraging(staleness=6, schedule="eager")
    results = run(resumed, strategy, 9, 25, workers=3)
    for model, _ in results:
        assert torch.equal(model, results[0][0])


def test_telemetry_tells_of_merges() -> None:
    """Details hold merges, their length and time, the staleness and the discrepancy asked for."""
    strategy = offbeat.AsyncAveraging(staleness=8, discrepancy_every=1)
    results = run(train, strategy, "sgd", [24] * 3, workers=3)
    details = results[0]["details"]
    assert details["merges"] == 6
    assert details["steps_per_merge"] == 4
    assert details["merge_seconds"] > 0
    assert details["staleness_max"] == 8
    assert sum(details["staleness_histogram"].values()) == 24
    # The snapshot of cycle j is the model right after step 4(j+1); its distance to the mean is
    # told with the roll of a later merge.
    expected = []
    for step in (3, 7, 11, 15):
        models = [r["after"][step] for r in results]
        mean = sum(models) / 3
        expected.append(sum(float((x - mean).norm()) for x in models) / 3)
    assert details["discrepancies"][:4] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"staleness": 1}, "staleness must be at least 2"),
        ({"staleness": 5}, "staleness must be even"),
        ({"staleness": 0, "schedule": "eager"}, "staleness must be at least 1"),
        ({"schedule": "lazy"}, "schedule must be"),
        ({"outer_lr": 0}, "outer_lr must be positive"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in"),
        ({"discrepancy_every": 0}, "discrepancy_every must be at least 1"),
    ],
)
def test_bad_settings_say_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offbeat.AsyncAveraging(**settings)


def test_text_form() -> None:
    strategy = offbeat.parse_strategy("async:staleness=5,schedule=eager")
    assert strategy == offbeat.AsyncAveraging(staleness=5, schedule="eager")
    assert offbeat.parse_strategy(str(strategy)) == strategy
