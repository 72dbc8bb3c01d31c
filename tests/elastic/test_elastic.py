"""Training that continues when workers are lost and join, on simulated workers."""

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import offbeat
from cells import some
from loops import Sink, close, error_of, sgd
from offbeat import (
    AttachError,
    CheckpointError,
    CommunicationError,
    Compute,
    MismatchError,
    Network,
    Simulation,
    simulate,
)
from offbeat.averaging import Worker
from offbeat.simulate import Join, Kill
from problems import Simulated, flat, gradients, loss_of, make_batch, make_model, train_step
from worlds import require_complete

STRATEGIES = [
    "bsp",
    "local:period=3",
    "selsync:delta=0.05",
    "streaming",
    "diloco:period=4,fragments=2,overlap=2",
    "selsync:target_lssr=0.5",
    "async:staleness=4,outer_momentum=0.5",
    "async:schedule=eager",
    "streaming:schedule=cyclic,staleness=8",
]
DAILY = range(5)
STEPS = 12


def attach(model: nn.Module, strategy: str, **options: Any) -> Any:
    optimizer = options.pop("optimizer", None) or sgd(model)
    chosen = offbeat.parse_strategy(strategy)
    options = {"min_workers": 1, "timeout_seconds": 2.0, **options}
    return optimizer, offbeat.attach(model, optimizer, chosen, **options)


def train(
    strategy: str, make: Callable[[nn.Module], Optimizer] = sgd, **options: Any
) -> dict[str, Any]:
    rank = dist.get_rank()
    model, sink = make_model(rank), Sink()
    optimizer, sync = attach(model, strategy, optimizer=make(model), log=sink, **options)
    begun = sync.step
    for step in range(begun, STEPS):
        train_step(model, optimizer, make_batch(rank, step))
    sync.finish()
    return {
        "model": flat(model),
        "begun": begun,
        "steps": sync.step,
        "details": dict(sync.stats.details),
        "records": sink.records,
    }


SLOW, FAST = Network("1Mbit/s", latency="1ms"), Network("100Gbit/s", latency="1us")


def simulated(
    function: Callable[[], Any],
    *faults: Any,
    workers: int = 4,
    network: Network = SLOW,
    jitter: float = 0.0,
) -> Simulation:
    compute = Compute("10ms", jitter=jitter)
    found = simulate(function, workers=workers, network=network, compute=compute, faults=faults)
    require_complete(found)
    return found


def run(function: Callable[[], Any], *faults: Any, workers: int = 4) -> list[Any]:
    return simulated(function, *faults, workers=workers, jitter=0.2).results


def exact(function: Callable[[], Any], *faults: Any, workers: int = 4) -> list[Any]:
    """Steps of 10 ms, one after the other, and a network that takes next to no time."""
    return simulated(function, *faults, workers=workers, network=FAST).results


def survivors(results: Sequence[Any]) -> list[dict[str, Any]]:
    return [one for one in results if one is not None]


def check(results: Sequence[Any], members: list[int]) -> None:
    """The workers that are left have one finite model, all steps, and the same members."""
    left = survivors(results)
    assert len(left) == len(members)
    for one in left:
        assert torch.equal(one["model"], left[0]["model"])
        assert one["model"].isfinite().all()
        assert one["steps"] == STEPS
        assert one["details"]["members"] == members


@pytest.mark.parametrize("strategy", some(STRATEGIES, *DAILY))
def test_training_survives_a_loss_and_a_join(strategy: str) -> None:
    """At the end all workers have one finite model and have taken all steps.

    The record of the step in which a generation begins has its number and its size.
    """
    results = run(lambda: train(strategy), Kill(worker=2, at=0.061), Join(at=0.07))
    assert results[2] is None
    check(results, [0, 1, 3, 4])
    newcomer = results[4]
    assert 0 < newcomer["begun"] < STEPS
    assert newcomer["records"][0]["step"] == newcomer["begun"] + 1
    assert {r["rank"] for r in newcomer["records"]} == {4}
    records, details = results[0]["records"], results[0]["details"]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    generations = [(r["generation"], r["workers"]) for r in records if "generation" in r]
    assert (generations[0], generations[-1]) == ((0, 4), (details["generation"], 4))
    assert details["membership_changes"] == details["generation"] >= 1
    assert details["membership_seconds"] > 0


class Steps(nn.Module):
    """A model that counts the steps of each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(4))


def count_steps(strategy: str) -> Any:
    rank, model = dist.get_rank(), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _, sync = attach(model, strategy, optimizer=optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (-model.steps[rank]).backward()
        optimizer.step()
    sync.finish()
    return model.steps.detach()


@pytest.mark.parametrize("spared", [(), (1, 3)])
def test_survivors_keep_local_steps_if_one_has_decided_more_rounds(spared: tuple[int, ...]) -> None:
    """Only the first step is averaged. The last summed votes arrive on the spared workers alone."""
    for at in (0.0605, 0.0615, 0.0625):
        kill = Kill(worker=2, at=at, spared=spared)
        for steps in survivors(run(lambda: count_steps("selsync:delta=1e9"), kill)):
            own = [1 / 4 + (STEPS - 1) / 3] * 3
            assert steps[[0, 1, 3]].tolist() == pytest.approx(own), at


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_momentum(strategy: str) -> dict[str, Any]:
    return train(strategy, momentum)


def reference_bsp(ranks_of: Callable[[int], Sequence[int]]) -> Tensor:
    """One worker that uses the mean gradient of the workers of each step."""
    model = make_model(0)
    optimizer = momentum(model)
    for step in range(STEPS):
        each = [gradients(model, make_batch(rank, step)) for rank in ranks_of(step)]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = sum(parts) / len(parts)  # type: ignore[assignment]
        optimizer.step()
    return flat(model)


def test_bsp_averages_over_the_remaining_workers() -> None:
    """Rank 2 is lost in its fifth step, rank 0 in its eighth."""
    # 50 ms until a loss is noticed, 50 ms to agree: the eighth step is from 170 to 180 ms
    results = exact(
        lambda: train_momentum("bsp"), Kill(worker=2, at=0.045), Kill(worker=0, at=0.175)
    )

    def ranks(step: int) -> Sequence[int]:
        return range(4) if step < 4 else (0, 1, 3) if step < 7 else (1, 3)

    left = survivors(results)
    assert [one["details"]["generation"] for one in left] == [2, 2]
    for one in left:
        close(one["model"], reference_bsp(ranks))


def test_a_newcomer_takes_its_first_bsp_step_with_the_others() -> None:
    """They wait for it with the gradients of that step, and it has their momentum."""
    results = exact(lambda: train_momentum("bsp"), Join(at=0.055))
    assert [one["begun"] for one in results] == [0, 0, 0, 0, 5]
    expected = reference_bsp(lambda step: range(4 if step < 5 else 5))
    for one in results:
        close(one["model"], expected)


def test_a_bsp_step_is_applied_on_all_workers_or_none() -> None:
    """If the mean of step 4 has reached some workers, the others receive the result."""

    def worker() -> dict[str, Any]:
        return train_momentum("bsp")

    at = partial(simulated, worker)
    spans = [s for s in at().timeline if s.kind == "transfer" and s.rank == 0]
    means = [s for s in spans if s.what == "mean of the gradients"]
    middle = (means[4].start + means[4].end) / 2
    for spared, until in [((), 4), ((0,), 5), ((1, 3), 5)]:
        results = at(Kill(worker=2, at=middle, spared=spared)).results
        expected = reference_bsp(lambda step, last=until: range(4) if step < last else (0, 1, 3))
        for one in survivors(results):
            close(one["model"], expected)


def test_local_sgd_averages_over_the_remaining_workers() -> None:
    """Rank 2 is lost in its fifth step; the mean after step 6 is over the other three."""
    results = exact(lambda: train_momentum("local:period=3"), Kill(worker=2, at=0.045))
    workers = Simulated.start(4, "momentum")
    workers.optimizers = [momentum(model) for model in workers.models]
    for step in range(STEPS):
        workers.step(step)
        if step % 3 == 2:
            workers.average([1, 1, float(step < 4), 1])
    for one in survivors(results):
        close(one["model"], workers.flat()[0])


def test_a_newcomer_begins_at_the_mean_of_local_models() -> None:
    """It asks in the fifth step, between whose gradients and update the others take their mean.

    That step and two more remain until the next mean. The newcomer has rank 0's momentum.
    """
    results = exact(lambda: train_momentum("local:period=3"), Join(at=0.045))
    workers = Simulated.start(4, "momentum")
    workers.optimizers = [momentum(model) for model in workers.models]
    for step in range(4):
        workers.step(step)
        if step == 2:
            workers.average()
    for rank, model in enumerate(workers.models):
        parts = gradients(model, make_batch(rank, 4))
        for p, gradient in zip(model.parameters(), parts, strict=True):
            p.grad = gradient
    workers.average()
    newcomer = make_model(0)
    newcomer.load_state_dict(workers.models[0].state_dict())
    fifth = momentum(newcomer)
    fifth.load_state_dict(copy.deepcopy(workers.optimizers[0].state_dict()))
    for optimizer in workers.optimizers:
        optimizer.step()
    workers.models.append(newcomer)
    workers.optimizers.append(fifth)
    train_step(newcomer, fifth, make_batch(4, 4))
    assert results[4]["begun"] == 4
    for step in range(5, STEPS):
        workers.step(step)
        if step in (6, 9):
            workers.average()
    workers.average()
    for one in results:
        close(one["model"], workers.flat()[0])


class Drift(nn.Module):
    """Its gradient is 1 everywhere: with learning rate 1 every step of every worker takes 1."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.q = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.p.sum() + self.q.sum()


KEPT = [
    "bsp",
    "local:period=3",
    "async:staleness=4",
    "diloco:period=3,outer_lr=1,outer_momentum=0",
    "local:period=1",
    "selsync:delta=0",
    "selsync:target_lssr=0.5",
]


@pytest.mark.parametrize("strategy", some(KEPT, 0, 1, 2, 3))
def test_every_step_of_a_remaining_worker_counts_once(strategy: str) -> None:
    """The model has moved as far as each of them has stepped."""

    def worker() -> dict[str, Any]:
        model = Drift()
        optimizer, sync = attach(model, strategy, optimizer=sgd(model, lr=1.0))
        for _ in range(STEPS):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        sync.finish()
        return {"model": flat(model)}

    for at, spared in [(0.061, ()), (0.1, (1, 3)), (0.123, (0,))]:
        for one in survivors(run(worker, Kill(worker=2, at=at, spared=spared))):
            close(one["model"], torch.full((11,), -float(STEPS), dtype=torch.float64))


@pytest.mark.parametrize("strategy", ["local:period=9", "diloco:period=9"])
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_membership_change_checks_the_models_that_it_averages(
    strategy: str, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Worker 1 has NaN when worker 2 is killed."""

    def worker() -> tuple[Tensor, str]:
        rank = dist.get_rank()
        model = make_model(rank)
        optimizer, sync = attach(model, strategy, non_finite=policy)

        def loop() -> None:
            for step in range(STEPS):
                train_step(model, optimizer, make_batch(rank, step))
                if (rank, step) == (1, 3):
                    with torch.no_grad():
                        next(model.parameters())[0] = torch.nan

        kinds, text = error_of(loop)
        assert kinds[:1] in ([], ["OffbeatError"]), text
        sync.detach()
        return flat(model), text

    results = simulated(worker, Kill(worker=2, at=0.052), workers=4).results
    assert [model.isfinite().all().item() for model, _ in survivors(results)] == (
        [True, False, True] if policy == "raise" else [False] * 3
    )
    text = "rank 1 would contribute NaN or infinity to the mean at step"
    if policy == "raise":
        assert all(text in error for _, error in survivors(results))
    else:
        assert text in caplog.text


def test_too_few_workers_raise_one_error() -> None:
    """Every remaining worker raises it, with the number of workers, and again at each step."""

    def worker() -> str:
        rank = dist.get_rank()
        model = make_model(rank)
        optimizer, sync = attach(model, "local:period=3", min_workers=3)

        def steps() -> None:
            for step in range(STEPS):
                train_step(model, optimizer, make_batch(rank, step))

        with pytest.raises(CommunicationError) as error:
            steps()
        seconds = sync._host.now()
        for _ in range(3):
            with pytest.raises(CommunicationError, match="min_workers=3"):
                train_step(model, optimizer, make_batch(rank, 0))
        assert sync._host.now() < seconds + 1  # of a time-out of 2 s
        sync.detach()
        return str(error.value)

    results = run(worker, Kill(worker=0, at=0.06), Kill(worker=1, at=0.2))
    for text in results[2:]:
        assert "2 workers are left" in text
        assert "ranks 2, 3" in text
        assert "min_workers=3" in text


def test_a_silent_worker_is_left_behind() -> None:
    """The others continue after the time-out; it raises and does not disturb them."""

    def worker() -> Any:
        try:
            return train("bsp", timeout_seconds=0.5)
        except CommunicationError as error:
            return str(error)

    slow = Compute("10ms", slowdown=lambda rank, step, _: 300 if (rank, step) == (1, 5) else 1)
    results = simulate(
        worker,
        workers=4,
        network=Network("1Mbit/s", latency="1ms"),
        compute=slow,
        faults=[Kill(worker=1, at=1e3)],
    ).results
    for rank in (0, 2, 3):
        assert results[rank]["details"]["members"] == [0, 2, 3]
        assert torch.equal(results[rank]["model"], results[0]["model"])
    assert re.search("left behind|training has ended", results[1])


@pytest.mark.parametrize("strategy", ["bsp", "local:period=3", "async:staleness=4"])
def test_a_loss_in_consensus_and_in_finish_is_survived(strategy: str) -> None:
    """The remaining workers see one consensus, their own model again, and one final model."""

    def worker() -> dict[str, Any]:
        rank = dist.get_rank()
        model = make_model(rank)
        optimizer, sync = attach(model, strategy)
        for step in range(4):
            train_step(model, optimizer, make_batch(rank, step))
        if rank == 1:
            sync._host.sleep(1.0, "something else")  # the others wait for it
        before = flat(model)
        with sync.consensus():
            seen = flat(model)
        after = flat(model)
        for step in range(4, 8):
            train_step(model, optimizer, make_batch(rank, step))
        if rank == 2:
            sync._host.sleep(1.0, "something else")
        sync.finish()
        return {"before": before, "seen": seen, "after": after, "model": flat(model)}

    results = run(worker, Kill(worker=1, at=0.7), Kill(worker=2, at=1.6))
    assert results[1] is None
    assert results[2] is None
    for one in (results[0], results[3]):
        assert torch.equal(one["seen"], results[0]["seen"])
        assert torch.equal(one["model"], results[0]["model"])
        close(one["after"], one["seen"])  # a generation began from there


@pytest.mark.parametrize("strategy", ["local:period=5", "bsp"])
def test_a_loss_in_the_last_message_ends_training_on_all(strategy: str) -> None:
    """Workers that have seen the end have left; the others end with the same model."""
    at = partial(simulated, lambda: train(strategy))
    spans = [s for s in at(Kill(worker=0, at=1e3)).timeline if s.kind == "transfer" and s.rank == 0]
    assert spans[-1].what == "the end of training"
    for span in spans[-3:]:
        middle = (span.start + span.end) / 2
        results = survivors(at(Kill(worker=2, at=middle, spared=(0,))).results)
        assert len(results) == 3
        for one in results:
            close(one["model"], results[0]["model"])


def with_module() -> float:
    """Finish with a module whose weight is the number of the worker, counted from 1."""
    rank = dist.get_rank()
    model, module = make_model(rank), nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 1.0 + rank)
    optimizer, sync = attach(model, "local:period=5")
    for step in range(sync.step, STEPS):
        train_step(model, optimizer, make_batch(rank, step))
        if step == 9:
            with sync.consensus(also=[module]):
                pass
    sync.finish(also=[module])
    return module.weight.item()


def test_further_modules_are_averaged_by_the_workers_that_are_left() -> None:
    """Also if one is lost while their mean is computed: (1 + 2 + 4) / 3. Or all have the mean."""
    assert run(with_module, Kill(worker=2, at=0.061), Join(at=0.07)) == [3.0, 3.0, None, 3.0, 3.0]

    at = partial(simulated, with_module)
    spans = [s for s in at(Kill(worker=0, at=1e3)).timeline if s.kind == "transfer" and s.rank == 0]
    assert "consensus of the modules in also" in [span.what for span in spans[-3:]]
    found = []
    for span in spans[-9:]:
        for share, spared in ((0.1, ()), (0.5, (0,)), (0.9, (0, 3))):
            moment = span.start + share * (span.end - span.start)
            left = survivors(at(Kill(worker=2, at=moment, spared=spared)).results)
            assert len({*left}) == 1, (span.what, left)
            found.append(left[0])
    assert {round(3 * weight, 5) for weight in found} == {7.0, 7.5}


def test_a_detached_worker_is_not_awaited() -> None:
    """The same holds for an exception that leaves the ``with`` block."""

    def worker() -> Any:
        model = make_model(dist.get_rank())
        optimizer, sync = attach(model, "local:period=2")
        try:
            with sync:
                for step in range(STEPS):
                    train_step(model, optimizer, make_batch(dist.get_rank(), step))
                    if (dist.get_rank(), step) == (1, 4):
                        raise KeyError("something of the user's own")
        except KeyError:
            return None
        return {"model": flat(model), "seconds": sync._host.now()}

    left = survivors(run(worker, Kill(worker=1, at=1e3)))  # losses can be seen
    assert len(left) == 3
    for one in left:
        assert torch.equal(one["model"], left[0]["model"])
        assert one["seconds"] < 1  # of a time-out of 2 s


@pytest.mark.parametrize("strategy", ["bsp", "local:period=3", "streaming"])
def test_a_generation_whose_last_barrier_fails_is_followed_by_another(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the newcomer, which has the model and the state by then."""
    barrier = Worker.barrier

    def fail(worker: Worker, what: str) -> None:
        barrier(worker, what)
        if what == "the beginning of generation 1":
            raise CommunicationError("a worker is lost at the end of the barrier")

    monkeypatch.setattr(Worker, "barrier", fail)
    results = run(lambda: train(strategy), Join(at=0.06), workers=3)
    check(results, [0, 1, 2, 3])


def test_a_newcomer_with_another_model_is_refused() -> None:
    """Its error names the difference; the others continue without it."""

    def worker() -> Any:
        if dist.get_rank() < 3:
            return train("local:period=3")
        other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 1)).double()
        with pytest.raises(MismatchError, match=r"rank 3 has parameter '0.weight': shape \(5, 3"):
            attach(other, "local:period=3")
        return None

    check(run(worker, Join(at=0.06), workers=3), [0, 1, 2])


@pytest.mark.parametrize("strategy", ["bsp", "local:period=3"])
def test_a_newcomer_that_cannot_receive_the_model_in_time_leaves(strategy: str) -> None:
    """The state has 80 kB. Without its own end, the newcomer is killed after a minute."""

    def worker() -> tuple[int, float, list[str], str]:
        model = nn.Sequential(nn.Linear(1000, 10), nn.Linear(10, 1))
        optimizer, sync = None, None

        def loop() -> None:
            nonlocal optimizer, sync
            optimizer, sync = attach(model, strategy)
            for _ in range(sync.step, STEPS):
                optimizer.zero_grad()
                model(torch.ones(1, 1000)).sum().backward()
                optimizer.step()
            sync.finish()

        error = error_of(loop)
        return (sync.step, sync._host.now(), *error) if sync else (0, 0.0, *error)

    network = Network(lambda rank, time: "60kbit/s" if rank == 3 else "1Gbit/s", latency="1ms")
    faults = Join(at=0.03), Kill(worker=3, at=60)
    *others, newcomer = simulated(worker, *faults, workers=3, network=network).results
    assert (
        "rank 3: could not receive the model in generation 1 within timeout_seconds=2: "
        in newcomer[3]
    )
    assert newcomer[2][0] == "CommunicationTimeout"  # ``Gathering.repeat`` does not repeat
    for steps, seconds, kinds, _ in others:
        assert (steps, kinds) == (STEPS, [])
        assert seconds < 6


def test_workers_whose_link_becomes_too_slow_raise() -> None:
    """After three membership changes that end by a time-out, and not never."""

    def worker() -> str:
        model = nn.Linear(10000, 1)
        optimizer, sync = attach(model, "local:period=3")

        def loop() -> None:
            for _ in range(STEPS):
                model(torch.ones(1, 10000)).sum().backward()
                optimizer.step()
            sync.finish()

        text = error_of(loop)[1]
        assert sync._host.now() < 30
        return text

    network = Network(lambda rank, time: "60kbit/s" if time > 0.02 else "1Gbit/s", latency="1ms")
    results = simulated(worker, Kill(worker=0, at=60), workers=3, network=network).results
    assert any("could not average the models in generation 3 within" in text for text in results)


def test_a_newcomer_receives_buffers_and_optimizer_state() -> None:
    """With averaged gradients: Adam's moments and counters, and the statistics of BatchNorm."""

    def worker() -> Any:
        rank = dist.get_rank()
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer, sync = attach(model, "bsp", optimizer=optimizer)
        if rank == 3:
            state = copy.deepcopy(optimizer.state_dict()["state"])
            buffers = {name: one.clone() for name, one in model.named_buffers()}
        while sync.step < STEPS:
            if rank == 0 and sync.step == 6:
                state = copy.deepcopy(optimizer.state_dict()["state"])
                buffers = {name: one.clone() for name, one in model.named_buffers()}
            train_step(model, optimizer, make_batch(rank, sync.step, 8, torch.float32))
        sync.finish()
        return (
            {"model": flat(model), "state": state, "buffers": buffers} if rank in (0, 3) else None
        )

    # steps of 10 ms: rank 0 has six behind it when it is asked, in the seventh
    results = exact(worker, Join(at=0.065), workers=3)
    first, newcomer = results[0], results[3]
    torch.testing.assert_close(first["state"], newcomer["state"], rtol=0, atol=0)
    assert newcomer["buffers"]["1.running_mean"].abs().sum() > 0
    assert torch.equal(first["model"], newcomer["model"])


def test_a_newcomer_receives_the_state_of_the_script() -> None:
    """Two states, in the order in which they were shared, as of the steps that are complete."""

    def worker() -> Any:
        rank = dist.get_rank()
        model = make_model(rank)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        optimizer, sync = attach(model, "local:period=3", optimizer=optimizer)
        samples = {"seen": torch.tensor(0)}

        def load(state: dict[str, Any]) -> None:
            scheduler.load_state_dict(state)
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]

        sync.share_state(scheduler.state_dict, load)
        sync.share_state(lambda: samples, samples.update)
        begun = sync.step, int(samples["seen"]), scheduler.last_epoch, scheduler.get_last_lr()[0]
        lr = optimizer.param_groups[0]["lr"]
        for step in range(sync.step, STEPS):
            train_step(model, optimizer, make_batch(rank, step))
            scheduler.step()
            samples["seen"] = samples["seen"] + 4
        sync.finish()
        return begun, lr, optimizer.param_groups[0]["lr"]

    results = run(worker, Kill(worker=2, at=0.061), Join(at=0.07))
    for (steps, seen, epoch, last), lr, final in survivors(results):
        assert (seen, epoch) == (4 * steps, steps)
        assert lr == last == pytest.approx(0.05 * 0.9**steps, rel=1e-12)
        assert final == pytest.approx(0.05 * 0.9**STEPS, rel=1e-12)
    assert [begun[0] > 0 for begun, *_ in survivors(results)] == [False, False, False, True]


class Counting(torch.optim.SGD):
    """Counts its steps in its options, as schedule-free optimizers do. It calls a closure."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


def test_a_newcomer_receives_the_options_of_the_optimizer() -> None:
    """Without the factors that change learning rates inside a step."""

    def worker() -> Any:
        model = make_model(dist.get_rank())
        optimizer = Counting(model.parameters(), lr=0.05 if dist.get_rank() < 3 else 0.5)
        optimizer, sync = attach(model, "local:period=3", optimizer=optimizer)
        sync._iteration.flow.state.view.lr_factor = 0.5
        options = {**optimizer.param_groups[0]}
        begun = sync.step

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, make_batch(0, sync.step))
            loss.backward()
            return loss

        while sync.step < STEPS:
            optimizer.step(closure)
        sync.finish()
        return begun, options["lr"], options.get("k", 0)

    begun, lr, count = run(worker, Join(at=0.07), workers=3)[3]
    assert begun > 0
    assert (lr, count) == (0.05, begun + 1)  # it joins inside a step of the others


def test_states_and_numbers_of_workers_that_cannot_be_are_refused() -> None:
    """A state when it is given, and not when a worker joins. See also ``test_attach``."""
    model = make_model()
    optimizer, sync = attach(model, "bsp", min_workers=None)
    sync.share_state(lambda: object(), close)  # no worker joins, so it is not even called
    train_step(model, optimizer, make_batch(0, 0))
    with pytest.raises(AttachError, match="before the first step"):
        sync.share_state(dict, dict)
    sync.finish()
    with pytest.raises(AttachError, match=r"share_state\(\) after finish"):
        sync.share_state(dict, dict)

    def worker() -> None:
        with pytest.raises(AttachError, match="min_workers=3, but there are 2 workers"):
            attach(make_model(), "bsp", min_workers=3)
        _, sync = attach(make_model(), "bsp")
        with pytest.raises(CheckpointError, match=r"the shared state can .* GLOBAL loops.Sink"):
            sync.share_state(lambda: Sink(), close)
        sync.finish()

    run(worker, workers=2)


def test_a_state_saved_after_a_loss_is_one_of_fewer_workers() -> None:
    """It loads where as many workers attach."""

    def save() -> Any:
        rank = dist.get_rank()
        model = make_model(rank)
        optimizer, sync = attach(model, "local:period=3")
        for step in range(8):
            train_step(model, optimizer, make_batch(rank, step))
        return sync.rank, sync.state_dict()

    saved = survivors(run(save, Kill(worker=1, at=0.045)))
    assert [rank for rank, _ in saved] == [0, 1, 2]

    def load() -> int:
        model = make_model()
        _, sync = attach(model, "local:period=3")
        sync.load_state_dict(saved[dist.get_rank()][1])
        sync.finish()
        return sync.step

    assert run(load, workers=3) == [8] * 3


def share_badly() -> Any:
    """Share a state that can be saved before the first step only."""
    model = make_model(dist.get_rank())
    try:
        optimizer, sync = attach(model, "local:period=2", timeout_seconds=5)
    except CheckpointError as error:
        return str(error)
    sync.share_state(lambda: 1 / (sync.step == 0), lambda state: None)
    while sync.step < 40:
        train_step(model, optimizer, make_batch(0, sync.step))
    sync.finish()
    return sync.step


def test_an_error_in_saving_a_shared_state_ends_the_worker_that_joins_alone() -> None:
    *old, refused = simulate(
        share_badly, workers=2, compute=Compute("10ms"), faults=[Join(at=0.15)]
    ).results
    assert old == [40, 40]
    assert "save failed on a worker that trains (ZeroDivisionError" in refused


def meet_often() -> Any:
    """Enter a consensus every ten steps, as docs/failures.md shows it for saving."""
    model = make_model(dist.get_rank())
    optimizer, sync = attach(model, "streaming", timeout_seconds=5)
    begun, saves, sizes = sync.step, {"count": sync.step // 10}, {}
    sync.share_state(lambda: saves, saves.update)

    def meet_if_due() -> None:
        while saves["count"] < sync.step // 10:
            with sync.consensus():
                saves["count"] += 1
                sizes[saves["count"]] = sync.size

    meet_if_due()
    while sync.step < 40:
        train_step(model, optimizer, make_batch(0, sync.step))
        meet_if_due()
    sync.finish()
    return begun, sizes


@pytest.mark.parametrize("at", [0.15, 0.21, 0.23])
def test_a_worker_that_joins_in_a_consensus_enters_it(at: float) -> None:
    """Workers that share the number of consensuses enter the same ones."""
    *old, (begun, sizes) = simulate(
        meet_often,
        workers=2,
        network=Network("1Mbit/s", latency="1ms"),
        compute=Compute("10ms", jitter=0.5),
        faults=[Join(at=at)],
    ).results
    for _, others in old:
        assert {count for count, size in others.items() if size == 3} == {*sizes}
    assert 0 < begun < 40
