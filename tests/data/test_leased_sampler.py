"""LeasedSampler in training: shares, waits, deaths, checkpoints, loaders with processes."""

import multiprocessing
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import offbeat
from cells import some
from loops import sgd
from offbeat import Compute, Network, simulate
from offbeat.averaging.model_mean import ModelMean
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat.errors import (
    AttachError,
    CommunicationError,
    CommunicationTimeout,
    MismatchError,
)
from offbeat.simulate import Join, Kill, Simulation
from offbeat.transport.torch_backend.torch_store import TorchStore
from offbeat_lab import baselines
from problems import flat, loss_of, make_batch, make_model
from workers import run as on_processes

SAMPLES, TIMES = 230, 12
STRATEGIES = [
    "streaming",
    "bsp",
    "local:period=4",
    "selsync:target_lssr=0.5",
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


class Worker:
    """A worker that trains on leased data.

    Attributes:
        used: The samples in the order of their use, by epoch.
    """

    def __init__(
        self,
        strategy: str = "streaming",
        *,
        elastic: bool = False,
        timeout_seconds: float = 20,
        readers: int = 0,
        **options: Any,
    ) -> None:
        self.model = make_model(0)
        self.optimizer = sgd(self.model, lr=0.01)
        self.sync: Any = offbeat.attach(
            self.model,
            self.optimizer,
            offbeat.parse_strategy(strategy, baselines.STRATEGIES),
            timeout_seconds=timeout_seconds,
            min_workers=1 if elastic else None,
        )
        options = {"batch_size": 4, **options}
        self.sampler = LeasedSampler(dataset(), sync=self.sync, **options)
        loader = DataLoader(dataset(), batch_sampler=self.sampler, num_workers=readers)
        self.loader = LeasedLoader(loader)
        self.used: dict[int, list[int]] = defaultdict(list)

    def train(self, epoch: int, batches: Iterable[Any], seconds: float = 0.0) -> None:
        for x, y, indices in batches:
            self.optimizer.zero_grad()
            loss_of(self.model, (x, y)).backward()
            time.sleep(seconds)
            self.optimizer.step()
            self.used[epoch] += indices.tolist()

    def batches(self, epochs: int) -> Iterator[int]:
        """Train to the end of so many epochs. Yields the epoch after each batch."""
        for epoch in range(self.sampler.epoch, epochs):
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                self.train(epoch, [batch])
                yield epoch

    def epochs(self, number: int, seconds: float = 0.0) -> None:
        """Train to the end of so many epochs. A step takes so many seconds more."""
        for epoch in range(self.sampler.epoch, number):
            self.sampler.set_epoch(epoch)
            self.train(epoch, self.loader, seconds)

    def finish(self, **more: Any) -> dict[str, Any]:
        self.sync.finish()
        stats = self.sync.stats
        return {
            "used": self.used,
            "steps": self.sync.step,
            "model": flat(self.model),
            "repeated": self.sampler.repeated,
            "clock": stats.wait_seconds + stats.compute_seconds,
            **more,
        }


def lease(
    strategy: str = "streaming", epochs: int = 3, seconds: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Train on leased data for some epochs."""
    worker, progress = Worker(strategy, **options), []
    for epoch in range(epochs):
        worker.epochs(epoch + 1, seconds)
        progress.append(worker.sampler.progress)
    return worker.finish(progress=progress, wait=worker.sync.stats.wait_seconds)


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
        for epoch, samples in each["used"].items()
        for sample in samples
    )


ONCE = Counter((epoch, sample) for epoch in range(3) for sample in range(SAMPLES))


# -- shares and waits --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", some(STRATEGIES, 0, 1, 2, 4))
def test_every_sample_is_used_once_in_each_epoch(strategy: str) -> None:
    """Also with a slow worker. In lock step it takes as many, up to a chunk in each epoch."""
    results = simulated(lambda: lease(strategy), slowdown={3: 2.0}).results
    assert used_by(results) == ONCE
    for each in results:
        assert torch.equal(each["model"], results[0]["model"])
        assert each["repeated"] == 0
        assert each["progress"] == pytest.approx([1, 2, 3], abs=0.15)
    steps = [each["steps"] for each in results]
    own_speed = strategy.partition(":")[0] in ("streaming", "async", "downpour")
    assert (max(steps) - min(steps) > 15) == own_speed, (strategy, steps)


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


def test_the_number_of_batches_can_be_limited() -> None:
    """The second epoch ends early, and later ones are empty."""
    results = simulated(lambda: lease(total_batches=58 + 10), workers=2).results
    count = Counter(epoch for epoch, _ in used_by(results).elements())
    assert count == {0: SAMPLES, 1: 40}


def test_no_shuffle_and_drop_last() -> None:
    (result,) = simulated(lambda: lease(shuffle=False, drop_last=True, epochs=1), workers=1).results
    assert result["used"][0] == list(range(228))


def test_a_single_process_needs_no_store() -> None:
    worker = Worker(batch_size=32)
    assert (len(worker.sampler), worker.sampler.batches) == (8, 8)
    for epoch in range(2):
        worker.train(epoch, worker.loader)
        assert sorted(worker.used[epoch]) == list(range(SAMPLES))
        assert worker.sampler.epoch == epoch + 1  # without set_epoch, the next epoch follows
    worker.sync.finish()


def test_a_loop_that_is_left_early_continues() -> None:
    """The batches that were read ahead and not used come first in the next iteration."""

    def worker() -> Any:
        own = Worker()
        for _ in own.batches(1):
            if len(own.used[0]) >= 20:
                break
        own.epochs(1)
        return own.finish()

    results = simulated(worker, workers=2).results
    assert used_by(results) == Counter((0, sample) for sample in range(SAMPLES))


# -- mistakes ----------------------------------------------------------------------------------


def test_mistakes_are_named() -> None:
    def worker() -> None:
        own = Worker()
        sync, sampler = own.sync, own.sampler
        with pytest.raises(TypeError, match="batch_size"):
            LeasedSampler(dataset(), 1.5, sync=sync)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="sync must be"):
            LeasedSampler(dataset(), 4, sync=None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="230 samples give no batch of 300 after drop_last"):
            LeasedSampler(dataset(), 300, sync=sync, drop_last=True)
        with pytest.raises(TypeError, match="must be a DataLoader with batch_sampler"):
            LeasedLoader(DataLoader(dataset(), batch_size=4))
        with pytest.raises(TypeError, match=r"or with batch_size=None .* with .*BatchSampler"):
            LeasedLoader(DataLoader(dataset(), sampler=sampler, batch_size=1))
        plain = DataLoader(dataset(), batch_sampler=LeasedSampler(dataset(), 4, sync=sync))
        with pytest.raises(AttachError, match="needs a LeasedLoader around the DataLoader"):
            next(iter(plain))
        disordered = DataLoader(dataset(), batch_sampler=sampler, num_workers=1, in_order=False)
        with pytest.raises(ValueError, match="in_order=False changes the order"):
            LeasedLoader(disordered)
        own.epochs(1)
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
        model = make_model()
        sync = offbeat.attach(model, sgd(model), offbeat.LocalSGD(period=1), node_group="auto")
        with pytest.raises(AttachError, match="LeasedSampler with node_group"):
            LeasedSampler(dataset(), 4, sync=sync)
        sync.detach()

    simulate(worker, workers=4, network=Network("1Gbit/s", workers_per_node=2))


@pytest.mark.parametrize("name", ["batch_size", "total_batches"])
def test_different_settings_are_found(name: str) -> None:
    def worker() -> None:
        options = {"batch_size": 4, "total_batches": 100}
        options[name] += dist.get_rank()
        next(iter(Worker(**options).loader))

    with pytest.raises(MismatchError, match="the workers lease different data"):
        simulated(worker, workers=2)


class LostStore(TorchStore):
    """A store that has ended."""

    def lost(self, key: str, value: Any) -> Any:
        raise RuntimeError("Connection reset by peer\nException raised from …")

    put = add = lost


class SilentStore(TorchStore):
    """A store that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    @override
    def add(self, key: str, amount: int) -> int:
        self.released.wait(20)
        return super().add(key, amount)


def loader_with(store: TorchStore, **options: Any) -> LeasedLoader:
    worker = Worker(**options)
    worker.sampler._leases._store = store
    return worker.loader


def test_a_lost_store_is_named() -> None:
    """When the next chunk is needed, and at the end of an epoch of elastic training."""
    loader = loader_with(LostStore())
    for _ in range(2):
        with pytest.raises(CommunicationError, match=LOST):
            next(iter(loader))
    loader.sampler.sync.detach()

    def worker() -> None:
        loader = loader_with(TorchStore(), elastic=True)
        with pytest.raises(CommunicationError, match=LOST):  # noqa: PT012
            for _ in loader:
                loader.sampler._leases._store = LostStore()
        loader.sampler.sync.detach()

    simulated(worker, workers=1)


LOST = r"^rank 0: leasing data failed: the store .* \(Connection reset by peer\)$"


def test_a_silent_store_raises_a_timeout() -> None:
    store = SilentStore()
    loader = loader_with(store, timeout_seconds=0.2)
    text = "rank 0: leasing data failed: .* has not answered within timeout_seconds=0.2"
    with pytest.raises(CommunicationTimeout, match=text):
        next(iter(loader))
    store.released.set()
    loader.sampler.sync.detach()


def test_nothing_is_leased_after_the_end() -> None:
    loader = loader_with(TorchStore())
    batches = iter(loader)
    next(batches)
    loader.sampler.sync.detach()
    with pytest.raises(AttachError, match=r"LeasedSampler after finish\(\) or detach\(\)"):
        list(batches)


# -- deaths ------------------------------------------------------------------------------------


def lease_elastically(strategy: str, record: dict[int, Any]) -> dict[str, Any]:
    """Train with possible losses. ``record`` also keeps what killed workers have used."""
    worker = Worker(strategy, elastic=True, timeout_seconds=2.0)
    record[dist.get_rank()] = {"used": worker.used}
    worker.epochs(3)
    return worker.finish(ended=worker.sync._team.host.now())


def samples_used(results: Iterable[Any]) -> Counter[int]:
    return Counter(s for each in results for epoch in each["used"].values() for s in epoch)


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


@pytest.mark.parametrize("strategy", some(ELASTIC, 0, 2, 3))
def test_the_others_train_on_what_killed_workers_have_left(strategy: str) -> None:
    """At any time, also while the others wait at the end of an epoch, and in ``finish``.

    Worker 2 is killed, and soon after it worker 1, while the others take over and one joins.
    """
    _, undisturbed = elastic(strategy)
    end = max(each["ended"] for each in undisturbed)
    repeated = 0
    for number in range(TIMES):
        at = 0.02 + (end - 0.1) * number / TIMES
        faults = Kill(worker=2, at=at), Kill(worker=1, at=at + 0.015), Join(at=at + 0.01)
        record, alive = elastic(strategy, *faults)
        assert len(alive) == 3
        repeated += check_use(record, alive)
    assert 0 < repeated < 80 * TIMES


def train_with_consensus(epochs: int = 6) -> dict[str, Any]:
    """Train, and enter a consensus after each epoch."""
    worker = Worker(elastic=True)
    first, means = worker.sampler.epoch, {}
    for epoch in range(first, epochs):
        worker.epochs(epoch + 1)
        with worker.sync.consensus():
            means[epoch] = flat(worker.model)
    return worker.finish(first=first, means=means)


@pytest.mark.parametrize("at", [0.3, 0.4, 0.5, 0.6])
def test_a_worker_that_joins_starts_from_the_epoch_of_the_others(at: float) -> None:
    """It enters the same consensus as the others after each epoch."""
    results = simulated(train_with_consensus, workers=3, faults=(Join(at=at),)).results
    assert used_by(results) == Counter((e, s) for e in range(6) for s in range(SAMPLES))
    joined = results[3]
    assert joined["first"] >= 1
    assert all(joined["used"][epoch] for epoch in range(joined["first"] + 1, 6))
    for epoch, mean in joined["means"].items():
        assert torch.equal(mean, results[0]["means"][epoch])


def leave_the_loop(strategy: str, kind: str) -> dict[str, Any]:
    """Worker 1 evaluates in the middle of the second epoch, or ends training there."""
    worker = Worker(strategy, elastic=True)
    for epoch in worker.batches(3):
        if dist.get_rank() == 1 and epoch == 1 and len(worker.used[1]) == 20:
            if kind == "ends":
                break
            with worker.sync.consensus():
                pass
    return worker.finish()


@pytest.mark.parametrize("strategy", some(ELASTIC, 0, 3))
def test_a_worker_may_evaluate_in_the_middle_of_an_epoch(strategy: str) -> None:
    """The others take part at the end of the epoch, and wait again until it has ended, too."""
    results = simulated(lambda: leave_the_loop(strategy, "evaluates"), workers=3).results
    assert used_by(results) == ONCE
    assert sum(each["repeated"] for each in results) == 0


def evaluate_at_the_end_of_others() -> dict[str, Any]:
    """Worker 1 shows the mean in the middle of the epoch, while the others wait at its end."""
    worker = Worker("local:period=1000", elastic=True)
    shown, last = None, None
    for _ in worker.batches(1):
        last = flat(worker.model)
        if dist.get_rank() == 1 and len(worker.used[0]) == 20:
            with worker.sync.consensus():
                shown = flat(worker.model)
            assert torch.equal(flat(worker.model), last)
            before = last
    return worker.finish(shown=shown, last=before if dist.get_rank() == 1 else last)


def test_workers_at_the_end_of_an_epoch_take_part_in_the_mean_of_another_one() -> None:
    results = simulated(evaluate_at_the_end_of_others, workers=3).results
    mean = torch.stack([each["last"] for each in results]).mean(0)
    torch.testing.assert_close(results[1]["shown"], mean)


def test_the_end_of_an_epoch_averages_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers exchange which batches are left. A consensus that shows the mean averages."""
    means, show = [], ModelMean.show

    def noted(*arguments: Any, **options: Any) -> None:
        means.append(dist.get_rank())
        show(*arguments, **options)

    monkeypatch.setattr(ModelMean, "show", noted)
    record: dict[int, Any] = {}
    simulated(lambda: lease_elastically("local:period=1000", record), workers=3)
    assert used_by([*record.values()]) == ONCE
    assert not means
    simulated(evaluate_at_the_end_of_others, workers=3)
    assert sorted(means) == [0, 1, 2]


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
    return lease(epochs=3, seconds=0.1 if rank == 2 else 0.02, readers=readers)


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
    worker = Worker(seed=5)
    for _ in worker.batches(2):
        if worker.sync.step >= stop:
            break
    with worker.sync.consensus():
        state = worker.sampler.state_dict()
    return worker.finish(state=state)


def second_part(state: Any) -> Any:
    worker = Worker(seed=5)
    worker.sampler.load_state_dict(state)
    worker.epochs(2)
    return worker.finish()


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
    worker = Worker(seed=5)
    worker.sampler.load_state_dict(loaded)
    before = worker.sampler.state_dict()
    worker.train(worker.sampler.epoch, islice(worker.loader, 1))
    return worker.finish(before=before, state=worker.sampler.state_dict())


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
    worker = Worker("bsp", elastic=True, timeout_seconds=2.0, seed=5)
    record[dist.get_rank()] = {"used": worker.used}
    for _ in worker.batches(1):
        if worker.sync.step == 15:
            break
    with worker.sync.consensus():
        state = worker.sampler.state_dict()
    worker.sync.finish()
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
    worker, state = Worker(), {}
    for _ in worker.batches(1):
        if worker.sync.step == 10:
            state = worker.sampler.state_dict()
    return worker.finish(state=state)


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
        own = Worker()
        batches = iter(own.loader)
        own.train(0, islice(batches, 1))
        for _ in range(2):
            next(batches)
        before = own.sampler.state_dict()["left"]
        own.optimizer.step()
        after = own.sampler.state_dict()["left"]
        own.sync.detach()
        return before, after

    (result,) = simulated(worker, workers=1).results
    assert result == ({"0": [[1, 58]]}, {"0": [[3, 58]]})


def test_a_state_of_other_data_is_refused() -> None:
    def worker() -> None:
        sync = Worker().sync
        state = LeasedSampler(dataset(), 4, sync=sync, total_batches=9).state_dict()
        with pytest.raises(ValueError, match="saved with batch_size=4, this sampler has"):
            LeasedSampler(dataset(), 8, sync=sync).load_state_dict(state)
        with pytest.raises(ValueError, match="saved with total_batches=9, this sampler has"):
            LeasedSampler(dataset(), 4, sync=sync, total_batches=99).load_state_dict(state)
        sync.detach()

    simulated(worker, workers=1)
