"""LeasedSampler in training: shares, waits, deaths, checkpoints, loaders with processes."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import offbeat
from cells import some
from gathered import gather_in_order, store
from loops import sgd
from offbeat import Compute, Network, simulate
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat.errors import (
    AttachError,
    CommunicationError,
    CommunicationTimeout,
    MismatchError,
)
from offbeat.simulate import Join, Kill, Simulation
from offbeat.transport.board import LocalBoard
from offbeat_lab import baselines
from problems import flat, loss_of, make_batch, make_model
from workers import run as on_processes

SAMPLES, TIMES = 230, 12
STRATEGIES = [
    "streaming",
    "bsp",
    "local:period=4",
    "selsync:target_lssr=0.5",
    "selsync:delta=0.05,aggregate=gradients",
    "async:schedule=eager",
    "diloco:period=4",
    "fedavg:period=4,fraction=0.5",
    "ssp:staleness=8",
    "downpour:push_every=2,fetch_every=2",
]


def dataset() -> TensorDataset:
    """Samples that know their index."""
    x, y = make_batch(0, 0, SAMPLES)
    return TensorDataset(x, y, torch.arange(SAMPLES))


def attach(strategy: str = "streaming", **options: Any) -> Any:
    model = make_model(0)
    optimizer = sgd(model, lr=0.01)
    options = {"timeout_seconds": 20, **options}
    chosen = offbeat.parse_strategy(strategy, baselines.STRATEGIES)
    sync = offbeat.attach(model, optimizer, chosen, **options)
    return model, optimizer, sync


def train_on(model: Any, optimizer: Any, batches: Iterable[Any], seconds: float = 0.0) -> list[int]:
    """Train, and return the samples in the order of their use."""
    used: list[int] = []
    for x, y, indices in batches:
        optimizer.zero_grad()
        loss_of(model, (x, y)).backward()
        time.sleep(seconds)
        optimizer.step()
        used += indices.tolist()
    return used


def lease(
    strategy: str = "streaming",
    epochs: int = 3,
    seconds: tuple[float, ...] = (),
    readers: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train on leased data for some epochs."""
    rank = dist.get_rank()
    model, optimizer, sync = attach(strategy)
    sampler = LeasedSampler(dataset(), 4, sync=sync, **options)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler, num_workers=readers))
    used, progress = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        used.append(train_on(model, optimizer, loader, seconds[rank] if seconds else 0.0))
        progress.append(sampler.progress)
    waited = sync.stats.wait_seconds
    sync.finish()
    return {
        "used": used,
        "steps": sync.step,
        "model": flat(model),
        "progress": progress,
        "wait": waited,
        "repeated": sampler.repeated,
        "clock": sync.stats.wait_seconds + sync.stats.compute_seconds,
    }


def simulated(function: Any, *, workers: int = 4, faults: Any = (), **compute: Any) -> Simulation:
    return simulate(
        function,
        workers=workers,
        network=Network("1Gbit/s", latency="100us"),
        compute=Compute("10ms", **compute),
        faults=faults,
    )


def used_by(results: list[Any]) -> Counter[tuple[int, int]]:
    """Return how often each sample was used, by epoch."""
    return Counter(
        (epoch, sample)
        for each in results
        for epoch, samples in enumerate(each["used"])
        for sample in samples
    )


ONCE = Counter((epoch, sample) for epoch in range(3) for sample in range(SAMPLES))


# -- shares and waits --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", some(STRATEGIES, 0, 1, 2, 4))
def test_every_sample_is_used_once_in_each_epoch(strategy: str) -> None:
    """Also with strategies that keep the workers in lock step, and with a slow worker."""
    results = simulated(lambda: lease(strategy), slowdown={3: 2.0}).results
    assert used_by(results) == ONCE
    for each in results:
        assert torch.equal(each["model"], results[0]["model"])
        assert each["repeated"] == 0


def test_a_slow_worker_takes_less_and_nobody_waits() -> None:
    """One of four has half the speed: the run takes 4/3.5 of the time of equal workers.

    Without patience the workers can only wait for leases.
    """
    strategy = "streaming:patience=0"
    results = simulated(lambda: lease(strategy, epochs=10), slowdown={3: 2.0}).results
    steps = [each["steps"] for each in results]
    batches = 10 * 58  # 230 samples in batches of 4
    assert sum(steps) == batches
    assert steps[3] == pytest.approx(batches * 0.5 / 3.5, abs=3)
    ideal = batches / 3.5 * 0.010
    assert max(each["clock"] for each in results) == pytest.approx(ideal, rel=0.04)
    # In each epoch a worker waits for its first chunk, one round trip of 0.2 ms. In the first epoch
    # it compares the settings before.
    assert max(each["wait"] for each in results) == pytest.approx(11 * 0.0002)


def test_equal_runs_have_equal_results() -> None:
    """In virtual time, to the bit."""
    first, second = (
        simulated(lambda: lease(epochs=2), jitter=0.3, slowdown={0: 1.7}) for _ in range(2)
    )
    assert first.to_json() == second.to_json()
    for one, two in zip(first.results, second.results, strict=True):
        assert one["used"] == two["used"]
        assert torch.equal(one["model"], two["model"])


def test_a_slow_store_does_not_delay_the_training() -> None:
    """A lease takes ten steps: chunks become longer, and more batches are kept in hand."""

    def worker() -> Any:
        return lease(epochs=20)

    results = simulate(
        worker, workers=3, network=Network("1Gbit/s", latency="25ms"), compute=Compute("10ms")
    ).results
    assert used_by(results) == Counter((e, s) for e in range(20) for s in range(SAMPLES))
    # 387 steps of 10 ms. The leases of the first epoch have shorter chunks.
    assert max(each["clock"] for each in results) < 3.87 * 1.6  # without longer chunks: 60


def test_progress_is_common() -> None:
    """All workers see about the same progress, whatever their speeds."""
    for each in simulated(lambda: lease(), slowdown={1: 3.0}).results:
        assert each["progress"] == pytest.approx([1, 2, 3], abs=0.15)
        assert each["progress"] == sorted(each["progress"])


def test_a_schedule_may_follow_the_progress(caplog: pytest.LogCaptureFixture) -> None:
    """Workers with equally many steps may then have different rates, which is no mistake."""

    def worker() -> list[float]:
        model, optimizer, sync = attach()
        sampler = LeasedSampler(dataset(), 4, sync=sync)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - sampler.progress)
        loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
        rates = []
        for batch in loader:
            train_on(model, optimizer, [batch])
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
            if sync.step == 10:
                with sync.consensus():
                    pass
        sync.finish()
        return rates

    results = simulated(worker, slowdown={1: 2.0}).results
    assert len({rates[9] for rates in results}) > 1
    for rates in results:
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == pytest.approx(0, abs=0.001)
    assert not caplog.records


def test_the_number_of_batches_can_be_limited() -> None:
    """The second epoch ends early, and later ones are empty."""
    results = simulated(lambda: lease(total_batches=58 + 10), workers=2).results
    count = Counter(epoch for epoch, _ in used_by(results).elements())
    assert count == {0: SAMPLES, 1: 40}


def test_no_shuffle_and_drop_last() -> None:
    (result,) = simulated(lambda: lease(shuffle=False, drop_last=True, epochs=1), workers=1).results
    assert result["used"][0] == list(range(228))


def train_alone() -> None:
    model, optimizer, sync = attach()
    sampler = LeasedSampler(dataset(), 32, sync=sync)
    assert (len(sampler), sampler.batches) == (8, 8)
    for epoch in range(2):
        assert sorted(train_on(model, optimizer, plain(sampler))) == list(range(SAMPLES))
        assert sampler.epoch == epoch + 1  # without set_epoch, the next epoch follows
    sync.finish()


def plain(sampler: LeasedSampler) -> DataLoader[Any]:
    return DataLoader(dataset(), batch_sampler=sampler)


def test_a_single_process_needs_no_store() -> None:
    """And a plain DataLoader works, too."""
    train_alone()


def test_a_loop_that_is_left_early_continues() -> None:
    """The batches that were read ahead and not used come first in the next iteration."""

    def worker() -> list[int]:
        model, optimizer, sync = attach()
        sampler = LeasedSampler(dataset(), 4, sync=sync)
        loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
        used = []
        for batch in loader:
            used += train_on(model, optimizer, [batch])
            if len(used) >= 20:
                break
        used += train_on(model, optimizer, loader)
        sync.finish()
        return used

    results = simulated(worker, workers=2).results
    assert Counter(results[0] + results[1]) == Counter(range(SAMPLES))


# -- mistakes ----------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    def worker() -> None:
        model, optimizer, sync = attach()
        with pytest.raises(TypeError, match="batch_size"):
            LeasedSampler(dataset(), 1.5, sync=sync)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="sync must be"):
            LeasedSampler(dataset(), 4, sync=None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="230 samples give no batch of 300 after drop_last"):
            LeasedSampler(dataset(), 300, sync=sync, drop_last=True)
        sampler = LeasedSampler(dataset(), 4, sync=sync)
        with pytest.raises(TypeError, match="must be a DataLoader with batch_sampler"):
            LeasedLoader(DataLoader(dataset(), batch_size=4))
        with pytest.raises(ValueError, match="or as sampler= with batch_size=None"):
            LeasedLoader(DataLoader(dataset(), sampler=sampler, batch_size=1))
        disordered = DataLoader(dataset(), batch_sampler=sampler, num_workers=1, in_order=False)
        with pytest.raises(ValueError, match="in_order=False changes the order"):
            LeasedLoader(disordered)
        train_on(model, optimizer, plain(sampler))
        with pytest.raises(ValueError, match="epoch 0 is used up, the next one is 1"):
            sampler.set_epoch(0)
        with pytest.raises(ValueError, match="call it before"):
            sampler.load_state_dict({})
        sync.finish()
        with pytest.raises(AttachError, match="LeasedSampler after finish"):
            LeasedSampler(dataset(), 4, sync=sync)

    simulated(worker, workers=1)


def test_nodes_are_refused() -> None:
    def worker() -> None:
        _, _, sync = attach(node_group="auto")
        with pytest.raises(AttachError, match="LeasedSampler with node_group"):
            LeasedSampler(dataset(), 4, sync=sync)
        sync.detach()

    simulate(worker, workers=4, network=Network("1Gbit/s", workers_per_node=2))


@pytest.mark.parametrize("name", ["batch_size", "total_batches"])
def test_different_settings_are_found(name: str) -> None:
    def worker() -> None:
        _, _, sync = attach()
        options: dict[str, Any] = {"batch_size": 4, "total_batches": 100}
        options[name] += dist.get_rank()
        sampler = LeasedSampler(dataset(), sync=sync, **options)
        next(iter(sampler))

    with pytest.raises(MismatchError, match="the workers lease different data"):
        simulated(worker, workers=2)


class LostBoard(LocalBoard):
    """A board whose store has ended."""

    @override
    def put(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer\nException raised from …")

    @override
    def add(self, key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer\nException raised from …")


class SilentBoard(LocalBoard):
    """A board whose store does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    @override
    def add(self, key: str, amount: int) -> int:
        self.released.wait(20)
        return super().add(key, amount)


def sampler_with(board: LocalBoard, **options: Any) -> LeasedLoader:
    _, _, sync = attach(**options)
    sampler = LeasedSampler(dataset(), 4, sync=sync)
    sampler._leases._board = board
    return LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))


def test_a_lost_store_is_named() -> None:
    """When the next chunk is needed, and at the end of an epoch of elastic training."""
    loader = sampler_with(LostBoard())
    for _ in range(2):
        with pytest.raises(CommunicationError, match=LOST):
            next(iter(loader))
    loader.sampler.sync.detach()

    def worker() -> None:
        loader = sampler_with(LocalBoard(), min_workers=1)
        with pytest.raises(CommunicationError, match=LOST):  # noqa: PT012
            for _ in loader:
                loader.sampler._leases._board = LostBoard()
        loader.sampler.sync.detach()

    simulated(worker, workers=1)


LOST = r"^rank 0: leasing data failed: the store .* \(Connection reset by peer\)$"


def test_a_silent_store_raises_a_timeout() -> None:
    board = SilentBoard()
    loader = sampler_with(board, timeout_seconds=0.2)
    text = "rank 0: leasing data failed: .* has not answered within timeout_seconds=0.2"
    with pytest.raises(CommunicationTimeout, match=text):
        next(iter(loader))
    board.released.set()
    loader.sampler.sync.detach()


def test_nothing_is_leased_after_the_end() -> None:
    loader = sampler_with(LocalBoard())
    batches = iter(loader)
    next(batches)
    loader.sampler.sync.detach()
    with pytest.raises(AttachError, match=r"LeasedSampler after finish\(\) or detach\(\)"):
        list(batches)


def test_elastic_training_needs_the_loader() -> None:
    """A plain DataLoader does not know what was trained on, and ends without waiting."""

    def worker() -> None:
        _, _, sync = attach(min_workers=1)
        sampler = LeasedSampler(dataset(), 4, sync=sync)
        with pytest.raises(AttachError, match=r"needs a LeasedLoader around the DataLoader"):
            next(iter(plain(sampler)))
        sync.detach()

    simulated(worker, workers=1)


# -- deaths ------------------------------------------------------------------------------------


def lease_elastically(strategy: str, record: dict[int, Any], epochs: int = 3) -> dict[str, Any]:
    """Train with possible losses. ``record`` also keeps what killed workers have used."""
    rank = dist.get_rank()
    model, optimizer, sync = attach(strategy, min_workers=1, timeout_seconds=2.0)
    sampler = LeasedSampler(dataset(), 4, sync=sync)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    mine = record[rank] = {"used": [[] for _ in range(epochs)]}
    for epoch in range(sampler.epoch, epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            mine["used"][epoch] += train_on(model, optimizer, [batch])
    ended = sync._team.host.now()
    sync.finish()
    return {**mine, "repeated": sampler.repeated, "model": flat(model), "ended": ended}


def samples_used(results: Iterable[Any]) -> Counter[int]:
    return Counter(s for each in results for epoch in each["used"] for s in epoch)


ELASTIC = ["streaming", "local:period=4", "async:staleness=4", "bsp"]


def elastic(strategy: str, *faults: Any, **compute: Any) -> tuple[dict[int, Any], list[Any]]:
    """Train with faults. Return what each worker has used, and the results of those that live."""
    record: dict[int, Any] = {}
    compute = {"slowdown": {2: 1.5}, **compute}
    run = simulated(lambda: lease_elastically(strategy, record), faults=faults, **compute)
    alive = [each for each in run.results if each is not None]
    for each in alive:
        assert torch.equal(each["model"], alive[0]["model"])
    return record, alive


def check_use(record: dict[int, Any], alive: list[Any]) -> int:
    """Every sample was used in every epoch. Return how many uses are repeated, all counted."""
    uses = used_by([*record.values()])
    assert uses.keys() == ONCE.keys()
    extra = sum(uses.values()) - sum(ONCE.values())
    assert extra <= sum(each["repeated"] for each in alive)
    return extra


@pytest.mark.parametrize("strategy", some(ELASTIC, 0, 3))
def test_elastic_training_without_losses_uses_every_sample_once(strategy: str) -> None:
    record, alive = elastic(strategy, Join(at=0.1))
    assert used_by([*record.values()]) == ONCE
    assert [each["repeated"] for each in alive] == [0] * 5
    assert used_by([record[4]])


@pytest.mark.parametrize("strategy", some(ELASTIC, 0, 3))
def test_the_others_train_on_what_a_killed_worker_has_left(strategy: str) -> None:
    """At any time, also while the others wait at the end of an epoch, and in ``finish``."""
    _, undisturbed = elastic(strategy)
    end = max(each["ended"] for each in undisturbed)
    repeated = 0
    for number in range(TIMES):
        at = 0.02 + end * number / TIMES
        repeated += check_use(*elastic(strategy, Kill(worker=2, at=at)))
    assert 0 < repeated < 40 * TIMES


@pytest.mark.parametrize("strategy", some(ELASTIC, 1, 2))
def test_workers_may_be_lost_while_they_take_over(strategy: str) -> None:
    """And others join meanwhile. Worker 2 is killed, and soon after it worker 1."""
    _, undisturbed = elastic(strategy)
    end = max(each["ended"] for each in undisturbed)
    for number in range(TIMES):
        at = 0.02 + (end - 0.1) * number / TIMES
        faults = Kill(worker=2, at=at), Kill(worker=1, at=at + 0.015), Join(at=at + 0.01)
        record, alive = elastic(strategy, *faults)
        assert len(alive) == 3
        check_use(record, alive)


def train_with_consensus(epochs: int = 6) -> dict[str, Any]:
    """Train, and enter a consensus after each epoch."""
    model, optimizer, sync = attach(min_workers=1)
    sampler = LeasedSampler(dataset(), 4, sync=sync)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    first, used, means = sampler.epoch, [list[int]() for _ in range(epochs)], {}
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        used[epoch] += train_on(model, optimizer, loader)
        with sync.consensus():
            means[epoch] = flat(model)
    sync.finish()
    return {"first": first, "used": used, "means": means}


@pytest.mark.parametrize("at", [0.3, 0.4, 0.5, 0.6])
def test_a_worker_that_joins_starts_from_the_epoch_of_the_others(at: float) -> None:
    """It enters the same consensus as the others after each epoch."""
    results = simulated(train_with_consensus, workers=3, faults=(Join(at=at),)).results
    assert used_by(results) == Counter((e, s) for e in range(6) for s in range(SAMPLES))
    joined = results[3]
    assert joined["first"] >= 1
    assert all(joined["used"][joined["first"] + 1 :])
    for epoch, mean in joined["means"].items():
        assert torch.equal(mean, results[0]["means"][epoch])


def train_and_die(rank: int, size: int) -> Any:
    """Rank 1 is killed in the middle of the second epoch; a newcomer joins."""
    gather_in_order(rank, size)
    kept = store()
    if rank == size:
        kept.wait(["died"])
    model, optimizer, sync = attach()
    sampler = LeasedSampler(dataset(), 4, sync=sync)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    used: list[list[int]] = [[] for _ in range(4)]
    for epoch in range(sampler.epoch, 4):
        sampler.set_epoch(epoch)
        for batch in loader:
            if rank == 1 and epoch == 1 and len(used[1]) >= 30:
                kept.set("used", json.dumps(used))
                kept.set("died", "")
                os.kill(os.getpid(), signal.SIGKILL)
            used[epoch] += train_on(model, optimizer, [batch], 0.003)
    sync.finish()
    dead = {"used": json.loads(kept.get("used"))}
    return {"used": used, "repeated": sampler.repeated, "dead": dead}


def test_no_sample_is_lost_when_a_real_worker_dies() -> None:
    """Its chunk is used again by others, over a TCPStore. The newcomer takes chunks, too."""
    results = on_processes(train_and_die, workers=3, newcomers=1, may_die=(1,))
    alive = [each for each in results if each is not None]
    assert len(alive) == 3
    counts = used_by([*alive, alive[0]["dead"]])
    assert counts.keys() == {(e, s) for e in range(4) for s in range(SAMPLES)}
    extra = sum(counts.values()) - 4 * SAMPLES
    assert 0 <= extra <= sum(each["repeated"] for each in alive) <= SAMPLES
    assert used_by([results[3]])


def leave_the_loop(strategy: str, kind: str) -> dict[str, Any]:
    """Worker 1 evaluates in the middle of the second epoch, or ends training there."""
    model, optimizer, sync = attach(strategy, min_workers=1)
    sampler = LeasedSampler(dataset(), 4, sync=sync)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    used: list[list[int]] = [[] for _ in range(3)]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            used[epoch] += train_on(model, optimizer, [batch])
            if dist.get_rank() == 1 and epoch == 1 and len(used[1]) == 20:
                if kind == "ends":
                    sync.finish()
                    return {"used": used, "repeated": 0}
                with sync.consensus():
                    pass
    sync.finish()
    return {"used": used, "repeated": sampler.repeated}


@pytest.mark.parametrize("strategy", some(ELASTIC, 0, 3))
def test_a_worker_may_evaluate_in_the_middle_of_an_epoch(strategy: str) -> None:
    """The others take part at the end of the epoch, and wait again until it has ended, too."""
    results = simulated(lambda: leave_the_loop(strategy, "evaluates"), workers=3).results
    assert used_by(results) == ONCE
    assert sum(each["repeated"] for each in results) == 0


@pytest.mark.parametrize("strategy", some(ELASTIC, 0, 3))
def test_the_others_take_over_if_a_worker_ends_early(strategy: str) -> None:
    results = simulated(lambda: leave_the_loop(strategy, "ends"), workers=3).results
    uses = used_by(results)
    assert uses.keys() == ONCE.keys()
    assert sum(uses.values()) - sum(ONCE.values()) <= sum(each["repeated"] for each in results)


# -- real processes ----------------------------------------------------------------------------


def lease_really(rank: int, size: int, readers: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # it may start reader processes
    return lease(epochs=3, seconds=(0.02, 0.02, 0.1), readers=readers)


@pytest.mark.parametrize("readers", [0, 2])
def test_real_workers_of_unequal_speed(readers: int) -> None:
    """Over a TCPStore, with and without reader processes: exactly once, and the slow takes less."""
    results = on_processes(lease_really, readers, workers=3)
    assert used_by(results) == ONCE
    steps = [each["steps"] for each in results]
    assert steps[2] < 0.75 * min(steps[:2])


# -- checkpoints -------------------------------------------------------------------------------


def first_part(stop: int) -> Any:
    """Train until a worker has taken ``stop`` steps, and save in a consensus."""
    model, optimizer, sync = attach()
    sampler = LeasedSampler(dataset(), 4, sync=sync, seed=5)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    used: list[list[int]] = [[], []]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            used[epoch] += train_on(model, optimizer, [batch])
            if sync.step >= stop:
                break
        if sync.step >= stop:
            break
    with sync.consensus():
        state = sampler.state_dict()
    sync.finish()
    return {"used": used, "state": state}


def second_part(state: Any) -> Any:
    model, optimizer, sync = attach()
    sampler = LeasedSampler(dataset(), 4, sync=sync, seed=5)
    sampler.load_state_dict(state)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    used: list[list[int]] = [[], []]
    for epoch in range(sampler.epoch, 2):
        sampler.set_epoch(epoch)
        used[epoch] += train_on(model, optimizer, loader)
    sync.finish()
    return {"used": used}


@pytest.mark.parametrize("stop", [1, 7, 14, 20, 26])
def test_another_number_of_workers_continues(stop: int) -> None:
    """Before, within and after the first epoch. Chunks that were begun are continued."""
    first = simulated(lambda: first_part(stop), workers=3, slowdown={1: 1.5}).results
    state = first[0]["state"]
    assert all(each["state"] == state for each in first)
    second = simulated(lambda: second_part(state), workers=2).results
    # What was left of epoch 0 may be used in epoch 0 or later; in all, each sample is used twice.
    assert samples_used([*first, *second]) == Counter({s: 2 for s in range(SAMPLES)})
    once_more = simulated(lambda: second_part(state), workers=2).results
    assert [each["used"] for each in once_more] == [each["used"] for each in second]


def save_twice(loaded: Any) -> dict[str, Any]:
    """Continue from a state, and save again before and within the first epoch."""
    model, optimizer, sync = attach()
    sampler = LeasedSampler(dataset(), 4, sync=sync, seed=5)
    sampler.load_state_dict(loaded)
    before = sampler.state_dict()
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    sampler.set_epoch(sampler.epoch)
    used = train_on(model, optimizer, islice(loader, 1))
    state = sampler.state_dict()
    sync.finish()
    return {"before": before, "used": [used], "state": state}


def test_a_state_may_be_saved_before_the_epochs_of_the_last_one_have_ended() -> None:
    """Worker 1 stops in epoch 0, with a chunk in hand, and the others in epoch 1."""
    first = simulated(lambda: first_part(5 if dist.get_rank() == 1 else 30), workers=3).results
    state = first[0]["state"]
    assert [epoch for epoch, ranges in state["left"].items() if ranges] == ["0", "1"]
    second = simulated(lambda: save_twice(state), workers=2).results
    for each in second:
        assert each["before"] == state
        assert each["state"] == second[0]["state"]
    third = simulated(lambda: second_part(second[0]["state"]), workers=2).results
    assert samples_used([*first, *second, *third]) == Counter({s: 2 for s in range(SAMPLES)})


def lose_and_save(record: dict[int, Any]) -> Any:
    """Worker 2 is killed in the epoch, and the others save after it has ended or within it."""
    rank = dist.get_rank()
    model, optimizer, sync = attach("bsp", min_workers=1, timeout_seconds=2.0)
    sampler = LeasedSampler(dataset(), 4, sync=sync, seed=5)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    used = record[rank] = {"used": [[], []]}
    for batch in loader:
        used["used"][0] += train_on(model, optimizer, [batch])
        if sync.step == 15:
            break
    with sync.consensus():
        state = sampler.state_dict()
    sync.finish()
    return state


def test_what_a_lost_worker_has_reported_is_not_left() -> None:
    record: dict[int, Any] = {}
    faults = (Kill(worker=2, at=0.12),)
    states = simulated(lambda: lose_and_save(record), workers=3, faults=faults).results
    assert states[0] == states[1]
    second = simulated(lambda: second_part(states[0]), workers=2).results
    uses = used_by([*record.values(), *second])
    assert uses.keys() == {(e, s) for e in range(2) for s in range(SAMPLES)}
    lost = Counter(record[2]["used"][0])
    assert 0 < sum(uses.values()) - 2 * SAMPLES < sum(lost.values()) / 2


def save_at_step_10() -> dict[str, Any]:
    """Save between two steps, outside of a consensus."""
    model, optimizer, sync = attach()
    sampler = LeasedSampler(dataset(), 4, sync=sync)
    loader = LeasedLoader(DataLoader(dataset(), batch_sampler=sampler))
    used: list[int] = []
    state: dict[str, Any] = {}
    for batch in loader:
        used += train_on(model, optimizer, [batch])
        if sync.step == 10:
            state = sampler.state_dict()
    sync.finish()
    return {"used": [used], "state": state, "model": flat(model)}


def test_workers_at_the_same_step_save_between_two_steps() -> None:
    """They may be in different rounds: a worker at step 10 completes those of the others first."""
    results = simulated(save_at_step_10, workers=3, slowdown={1: 1.5}, jitter=0.5).results
    assert samples_used(results) == Counter(range(SAMPLES))
    for each in results:
        assert torch.equal(each["model"], results[0]["model"])
        assert each["state"] == results[0]["state"]
        left = [n for start, end in each["state"]["left"]["0"] for n in range(start, end)]
        assert len(left) == 58 - 3 * 10


def test_a_batch_counts_as_used_from_the_next_step_on() -> None:
    """Also with several batches in a step: two of three batches were handed out since the step."""

    def worker() -> tuple[Any, Any]:
        model, optimizer, sync = attach()
        sampler = LeasedSampler(dataset(), 4, sync=sync)
        batches = iter(LeasedLoader(DataLoader(dataset(), batch_sampler=sampler)))
        train_on(model, optimizer, islice(batches, 1))
        for _ in range(2):
            next(batches)
        before = sampler.state_dict()["left"]
        optimizer.step()
        after = sampler.state_dict()["left"]
        sync.detach()
        return before, after

    (result,) = simulated(worker, workers=1).results
    assert result == ({"0": [[1, 58]]}, {"0": [[3, 58]]})


def test_a_state_of_other_data_is_refused() -> None:
    def worker() -> None:
        _, _, sync = attach()
        state = LeasedSampler(dataset(), 4, sync=sync, total_batches=9).state_dict()
        with pytest.raises(ValueError, match="saved with batch_size=4, this sampler has"):
            LeasedSampler(dataset(), 8, sync=sync).load_state_dict(state)
        with pytest.raises(ValueError, match="saved with total_batches=9, this sampler has"):
            LeasedSampler(dataset(), 4, sync=sync, total_batches=99).load_state_dict(state)
        sync.detach()

    simulated(worker, workers=1)
