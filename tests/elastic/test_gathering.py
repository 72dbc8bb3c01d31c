"""Workers that gather at a store, as any launcher starts them, while some of them are killed.

A process that is killed and started again is two processes of ``run``: the second one waits for the
death of the first.
"""

import contextlib
import logging
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

import offbeat
from cells import some
from gathered import die, kill_at, meet, store
from loops import close, error_of, sgd
from offbeat.elastic import gathering, membership, silence
from offbeat.elastic.address import WorkerCount
from offbeat.elastic.agreement import Agreement, Decision
from offbeat.elastic.gathering import LATEST_TRAINING, Gathering, gathering_from_environment
from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.store import SharedStore, StoreLostError
from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout, EndedError
from offbeat.transport.membership import ModelLostError
from offbeat_lab.baselines import STRATEGIES
from problems import flat, gradients, loss_of, make_batch, make_model
from workers import run

TIMEOUT_SECONDS = 100.0  # more than a test may take, so that none ends by a time-out


def set_variables(workers: str, address: str | None = None) -> None:
    """Set the variables as a launcher does. Shorten what would make the tests wait."""
    membership._STORE_SECONDS = 0.1  # between two looks at the store
    silence.REFUSED_SECONDS = 0.5
    kept = ":".join((os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]))
    os.environ.update(
        OFFBEAT_KERNELS="0",  # numba is slow to import
        OFFBEAT_STORE=address or kept,
        OFFBEAT_WORKERS=workers,
        TEST_STORE=kept,
        **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    )


class Worker:
    """A worker that trains; the model begins from ``seed``."""

    def __init__(self, seed: int, text: str = "local:period=3", **options: Any) -> None:
        self.model = make_model(seed)
        self.optimizer = sgd(self.model)
        options = {"timeout_seconds": TIMEOUT_SECONDS, **options}
        strategy = offbeat.parse_strategy(text)
        self.sync = offbeat.attach(self.model, self.optimizer, strategy, **options)
        self.begun = self.sync.step

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, make_batch(self.sync.rank, self.sync.step)).backward()
        self.optimizer.step()

    def steps(self, number: int, size: int) -> "Worker":
        """Take steps until ``number`` of them were taken by ``size`` workers."""
        deadline = time.monotonic() + 40
        while number:
            assert time.monotonic() < deadline, (self.sync.stats, size)
            self.step()
            number -= self.sync.size == size
            time.sleep(0.002)
        return self

    def finish(self) -> Any:
        self.sync.finish()
        return flat(self.model), self.begun, self.sync.stats.details["members"], self.sync.rank


def check(results: list[Any], members: list[int] | None = None) -> None:
    """All end with one finite model, the same members and different ranks."""
    first = results[0]
    for rank, (model, _, others, _) in enumerate(results):
        assert torch.equal(model, first[0]), rank
        assert others == (first[2] if members is None else members)
    assert first[0].isfinite().all()
    assert sorted(rank for *_, rank in results) == list(range(len(results)))


def has_ended(kept: Any) -> bool:
    root = SharedStore(kept, "here")
    name = root.get(LATEST_TRAINING)
    return name is not None and root.within(name).get("ended") is not None


def attach(**options: Any) -> Any:
    model = make_model()
    return offbeat.attach(model, sgd(model), **{"strategy": offbeat.BSP(), **options})


# -- the variables --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [("4", (4, 4, 1)), ("2:4", (4, 2, 2)), ("1:1", (1, 1, 1))]
)
def test_the_number_of_workers_is_read(text: str, expected: tuple[int, int, int]) -> None:
    count = WorkerCount.parse(text)
    assert (count.most, count.least, count.min_workers) == expected


@pytest.mark.parametrize(
    ("address", "workers", "told"),
    [
        ("10.0.0.1", "4", "OFFBEAT_STORE: the address of a store is .* got '10.0.0.1'"),
        ("10.0.0.1:29500", None, "OFFBEAT_STORE is set and OFFBEAT_WORKERS is not"),
        ("10.0.0.1:29500", "", "OFFBEAT_STORE is set and OFFBEAT_WORKERS is not"),
        ("", "4", "OFFBEAT_WORKERS is set and OFFBEAT_STORE is not"),
        *(
            ("file:///store", workers, f"OFFBEAT_WORKERS: give a number .* got '{workers}'")
            for workers in ("0", "four", "4:2", "0:2", "2:", ":2", "-1", "2:3:4")
        ),
    ],
)
def test_malformed_variables_are_refused(
    address: str, workers: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line that names the variable."""
    monkeypatch.setenv("OFFBEAT_STORE", address)
    monkeypatch.delenv("OFFBEAT_WORKERS", raising=False)
    if workers is not None:
        monkeypatch.setenv("OFFBEAT_WORKERS", workers)
    with pytest.raises(AttachError, match=told) as caught:
        attach()
    assert "\n" not in str(caught.value)


def test_an_explicit_group_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are read only without ``group``, and not inside a simulation."""
    monkeypatch.setenv("OFFBEAT_STORE", "127.0.0.1:1")
    monkeypatch.setenv("OFFBEAT_WORKERS", "2")

    def train() -> int:
        with attach() as sync:
            return int(sync.size)

    results = offbeat.simulate(
        train, workers=2, network=offbeat.Network("1Mbit/s"), compute=offbeat.Compute("1ms")
    ).results
    assert results == [2, 2]
    other = Gathering("127.0.0.1:2", WorkerCount.parse("2"))
    with pytest.raises(CommunicationError, match=r"failed: no store answers at 127\.0\.0\.1:2"):
        attach(group=other, min_workers=1, timeout_seconds=0.2)


def test_a_process_group_is_refused() -> None:
    """In one line that names the way, also without a process group."""
    told = r"^offbeat\.attach\(\) with min_workers: .* with offbeat run, .*$"
    with pytest.raises(AttachError, match=told):
        attach(min_workers=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for group in (None, dist.group.WORLD):
            with pytest.raises(AttachError, match=told):
                attach(group=group, min_workers=1)
    finally:
        dist.destroy_process_group()


def test_what_is_not_elastic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what makes training elastic, unless it is about something else."""
    monkeypatch.setenv("OFFBEAT_STORE", "127.0.0.1:1")
    monkeypatch.setenv("OFFBEAT_WORKERS", "2")
    for strategy, options in (("ssp:staleness=2", {}), ("bsp", {"node_group": "auto"})):
        with pytest.raises(AttachError, match=r"^min_workers with .* OFFBEAT_STORE .* torchrun$"):
            attach(strategy=offbeat.parse_strategy(strategy, STRATEGIES), **options)
    with pytest.raises(AttachError, match=r"^adam_correction with bsp: .* leave it out$"):
        attach(strategy=offbeat.BSP(), adam_correction=True)


def test_a_missing_store_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFBEAT_WORKERS", "2")
    for address, told in (
        ("127.0.0.1:2", "gathering failed: no store answers at 127.0.0.1:2 within 0.2 s"),
        (f"file://{tmp_path}/none/store", "gathering failed: there is no directory .*/none for"),
    ):
        monkeypatch.setenv("OFFBEAT_STORE", address)
        with pytest.raises(CommunicationError, match=told):
            attach(timeout_seconds=0.2)


def have_a_default_group(rank: int, size: int) -> Any:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    set_variables("2")
    dist.init_process_group("gloo", store=store(), rank=rank, world_size=size)
    result = Worker(rank).steps(3, 2).finish()
    return result, [one for one in messages if "OFFBEAT_STORE" in one]


def test_a_default_group_of_several_causes_a_warning() -> None:
    results = run(have_a_default_group, workers=2, newcomers=0)
    check([result for result, _ in results])
    for _, (message,) in results:
        assert message.startswith("OFFBEAT_STORE is set, so attach() trains with the workers that")
        assert "not with the 2 workers of the default process group" in message


@pytest.mark.parametrize(("workers", "warnings"), [(1, 1), (2, 0)])
def test_a_sampler_that_does_not_divide_the_data_causes_a_warning(
    workers: int, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As scripts for torchrun create it from the default group, which has one member here."""
    sampler = DistributedSampler(range(8), num_replicas=workers, rank=0)
    monkeypatch.setenv("OFFBEAT_STORE", "127.0.0.1:1")
    monkeypatch.setenv("OFFBEAT_WORKERS", "2")
    gathering_from_environment()
    texts = [r.getMessage() for r in caplog.records if "LeasedSampler" in r.getMessage()]
    assert len(texts) == warnings, sampler


# -- first start and late start -------------------------------------------------------------------


def start(rank: int, _: int, default_group: bool, address: str | None) -> Any:
    set_variables("3", address)
    if default_group:
        dist.init_process_group("gloo")
        assert dist.get_world_size() == 1
    worker = Worker(rank, "bsp")
    for _ in range(5):
        worker.step()
    return *worker.finish(), rank


@pytest.mark.parametrize("default_group", [False, True])
def test_workers_gather(default_group: bool) -> None:
    """With or without a default group, which then has one member. The result is that of SGD."""
    results = run(start, default_group, None, workers=0, newcomers=3)
    check([one[:4] for one in results], [0, 1, 2])
    (seed,) = (seed for *_, rank, seed in results if rank == 0)
    model = make_model(seed)
    for step in range(5):
        all_gradients = [gradients(model, make_batch(rank, step)) for rank in range(3)]
        with torch.no_grad():
            for parameter, *each in zip(model.parameters(), *all_gradients, strict=True):
                parameter -= 0.05 * sum(each) / 3
    close(results[0][0], flat(model))


def test_workers_gather_at_a_file(tmp_path: Path) -> None:
    results = run(start, False, f"file://{tmp_path}/store", workers=0, newcomers=3)
    check([one[:4] for one in results], [0, 1, 2])
    assert has_ended(dist.FileStore(f"{tmp_path}/store"))


def begin_with_fewer(rank: int, _: int) -> Any:
    set_variables("2:4")
    workers = WorkerCount.parse("2:4")
    gathering.PATIENCE_SECONDS = 0.6
    transport = Gathering(os.environ["OFFBEAT_STORE"], workers)
    worker = Worker(rank, group=transport, min_workers=workers.min_workers)
    return worker.sync.size, worker.steps(3, 2).finish()


def test_training_begins_with_fewer_workers_after_a_while() -> None:
    results = run(begin_with_fewer, workers=0, newcomers=2)
    check([result for _, result in results], [0, 1])
    assert [size for size, _ in results] == [2, 2]


def wait_in_vain(rank: int, _: int) -> str:
    set_variables("3")
    with pytest.raises(CommunicationTimeout) as caught:
        Worker(rank, timeout_seconds=1.0)
    return str(caught.value)


def test_too_few_workers_raise() -> None:
    for text in run(wait_in_vain, workers=0, newcomers=2):
        assert re.match(
            r"gathering failed: [12] of 3 workers have come to 127.0.0.1:\d+ within "
            r"timeout_seconds=1$",
            text,
        )


def test_a_worker_that_does_not_begin_the_training_is_named(tmp_path: Path) -> None:
    """It has taken the lowest number, so it has to propose generation 0, and does not."""
    shared = SharedStore(dist.FileStore(f"{tmp_path}/store"), "here")
    name = shared.put_if_absent(LATEST_TRAINING, f"{LATEST_TRAINING}/one")
    suspended = Agreement(shared.within(name), 1.0)
    transport = Gathering(f"file://{tmp_path}/store", WorkerCount.parse("2"))
    with pytest.raises(CommunicationTimeout) as caught:
        transport.make_communicator(0.3)
    assert re.match(
        "gathering failed: 2 workers have come to file://.*/store, but rank 0 has not begun the "
        "training with them within timeout_seconds=0.3: it is suspended, or it cannot connect",
        str(caught.value),
    )
    suspended.heartbeats.close()


def lack_a_thread(rank: int, _: int, number: int) -> Any:
    set_variables("2")
    text, begin, started = "", threading.Thread.start, [0]

    def refuse(thread: threading.Thread) -> None:
        started[0] += 1
        if started[0] > number:
            raise RuntimeError("can't start new thread")
        begin(thread)

    if rank == 0:
        threading.Thread.start = refuse  # type: ignore[method-assign]
        text = error_of(lambda: Worker(rank))[1]
        threading.Thread.start = begin  # type: ignore[method-assign]
    return text, Worker(rank).steps(3, 2).finish()


@pytest.mark.parametrize("number", some(range(7), 0, 4))
def test_a_worker_that_lacks_a_thread_may_attach_again(number: int) -> None:
    """The error names the limit, and the other worker waits."""
    results = run(lack_a_thread, number, workers=0, newcomers=2)
    text = results[0][0]
    assert "can't start new thread. Raise the limit on threads (ulimit -u" in text
    assert "\n" not in text
    check([result for _, result in results])


# -- deaths and restarts --------------------------------------------------------------------------


PLACES = ["having a number", "before it gathers", "before it opens", "while all connect"]
PLACES += ["while the model is copied"]


def die_in_attach(rank: int, _: int, place: str) -> Any:
    set_variables("3")
    if rank == 1:
        kill_at(place)
    if rank == 3:
        store().wait(["died"])
    return Worker(rank).steps(8, 3).finish()


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_may_be_killed_in_attach(place: str) -> None:
    """At any step of it. The others begin with the process that is started instead."""
    results = run(die_in_attach, place, workers=0, newcomers=4, may_die=(1,))
    check([results[rank] for rank in (0, 2, 3)])


def take(address: str) -> socket.socket:
    """Listen at this address once the process that listens there has ended."""
    host, port = address.split(":")
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_server((host, int(port)))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def be_killed_with_all(rank: int, _: int, foreign: bool) -> Any:
    set_variables("3")
    if rank < 3:
        Worker(rank).steps(5, 3)
        store().set("name", store().get("offbeat/elastic"))
        meet("all train", rank, range(3))
        die(f"died{rank}")
    store().wait([f"died{other}" for other in range(3)])
    with contextlib.ExitStack() as listeners:
        if foreign:
            root = SharedStore(store(), "here")
            address = root.within(root.get("name")).get(f"address/{rank - 3}")
            listeners.enter_context(take(address.split(", ")[0]))
            meet("all listen", rank, range(3, 6))
        worker = Worker(rank).steps(5, 3)
    return worker.finish(), store().get("name") != store().get("offbeat/elastic")


@pytest.mark.parametrize("foreign", [False, True])
def test_all_workers_may_be_killed_and_started_again(foreign: bool) -> None:
    """They begin a new training, also if other processes have received ports of the killed ones."""
    results = run(be_killed_with_all, foreign, workers=0, newcomers=6, may_die=(0, 1, 2))[3:]
    check([result for result, _ in results], [0, 1, 2])
    assert all(replaced and result[1] == 0 for result, replaced in results)


def save_and_load(rank: int, _: int, folder: str) -> Any:
    set_variables("3")
    if rank == 3:
        store().wait(["saved"])
    if rank > 3:
        store().wait([f"died{other}" for other in range(4)])
    worker = Worker(rank)
    loaded = offbeat.load(folder, worker.sync)
    found = loaded and loaded.step, worker.sync.step, flat(worker.model)
    if rank < 3:
        worker.steps(4, 3)
        with worker.sync.consensus():
            offbeat.save(folder, worker.sync)
            saved = flat(worker.model)
        store().set("saved", "")
    if rank < 4:
        worker.steps(3, 4)
        if rank == 3:
            Path(folder, "joined").write_text(f"{loaded} {worker.begun > 0}")
        else:
            torch.save(saved, Path(folder, f"saved{rank}.pt"))
        with worker.sync.consensus():  # also answers the workers that still train
            meet("all have joined", rank, range(4))
        die(f"died{rank}")
    return found, worker.steps(3, 3).finish()


def test_a_script_that_loads_a_checkpoint_is_the_same_for_every_start(tmp_path: Path) -> None:
    """At the first start there is none, one that joins does not load, and a restart continues."""
    results = run(save_and_load, str(tmp_path), workers=0, newcomers=7, may_die=(0, 1, 2, 3))[4:]
    assert (tmp_path / "joined").read_text() == "None True"
    saved = torch.load(tmp_path / "saved0.pt")
    check([result for _, result in results], [0, 1, 2])
    for (loaded, step, model), _ in results:
        assert (loaded, step) == (4, 4)
        assert torch.equal(model, saved)


def be_too_few(rank: int, _: int) -> Any:
    set_variables("2:2")
    if rank > 1:
        store().wait(["given up"])
    worker = Worker(rank).steps(5, 2)
    if rank == 0:
        die()
    if rank == 1:
        with pytest.raises(CommunicationError, match="min_workers=2"):
            worker.steps(5, 1)
        store().set("given up", "")
        worker.sync.detach()
        return None
    return worker.finish()


def test_too_few_workers_give_up_and_gather_anew() -> None:
    """The least number of workers with which training continues is that with which it begins."""
    results = run(be_too_few, workers=0, newcomers=4, may_die=(0,))
    check(results[2:], [0, 1])
    assert [begun for _, begun, *_ in results[2:]] == [0, 0]


def lose_the_model(rank: int, _: int) -> Any:
    set_variables("2")
    if rank < 2:
        if rank == 0:
            propose = Agreement._propose

            def then_die(*args: Any) -> None:
                propose(*args)
                die()

            Agreement._propose = then_die  # type: ignore[method-assign]
        worker = Worker(rank).steps(3, 2)
        if rank == 1:
            store().set("come", "")
            store().wait(["asked2", "asked3"])
            membership.StoreMembership.enter = lambda *args: die("died too")  # type: ignore[method-assign]
        else:
            store().wait(["asked2", "asked3"])
        worker.steps(100, 2)
    store().wait(["come"])
    request = Agreement.request

    def ask(self: Any, *args: Any) -> None:
        store().set(f"asked{rank}", "")
        request(self, *args)

    Agreement.request = ask  # type: ignore[method-assign]
    return Worker(rank).steps(5, 2).finish()


def test_newcomers_without_a_member_gather_anew() -> None:
    """The members die after they have admitted the newcomers, who do not have the model yet."""
    results = run(lose_the_model, workers=0, newcomers=4, may_die=(0, 1))[2:]
    check(results, [0, 1])
    assert [begun for _, begun, *_ in results] == [0, 0]


# -- the end --------------------------------------------------------------------------------------


def come_after_the_end(rank: int, _: int) -> Any:
    set_variables("2")
    if rank < 2:
        worker = Worker(rank).steps(3, 2)
        assert not has_ended(store())
        if rank == 1:
            die()
        store().wait(["died"])
        return worker.finish()
    deadline = time.monotonic() + 20
    while not has_ended(store()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return error_of(lambda: Worker(rank))[1]


def test_a_worker_that_comes_after_the_end_is_told() -> None:
    """Also if another one was killed before the end."""
    (model, *_), _, text = run(come_after_the_end, workers=0, newcomers=3, may_die=(1,))
    assert model.isfinite().all()
    end = r" has ended\. For another one use a new store"
    assert re.fullmatch(rf"rank 2: joining failed: the training at 127.0.0.1:\d+{end}", text), text


# -- parts ----------------------------------------------------------------------------------------


def test_a_number_without_an_address_delays_no_one() -> None:
    """A worker may die between the two. The next decision considers it once more."""
    shared = SharedStore(dist.HashStore(), "here")
    others = [Agreement(shared, 1.0) for _ in range(2)]
    assert shared.next_number("numbers") == 2
    one = Agreement(shared, 1.0)
    decision = one.find_newcomers(Decision([0], 1))
    assert decision == Decision([1, 3], 4, unannounced=[2])
    assert [decision.considers(worker) for worker in range(1, 5)] == [True, False, True, False]
    shared.put("address/2", others[0].heartbeats.address)
    assert one.find_newcomers(decision) == Decision([2], 4)


def test_attempts_are_repeated_after_a_loss_only() -> None:
    """And not without end."""
    transport = Gathering("127.0.0.1:1", WorkerCount.parse("2"))
    errors: list[Exception] = [CommunicationError("a worker died"), ModelLostError("no model")]

    def fail() -> str:
        if errors:
            raise errors.pop()
        return "begun"

    assert transport.retry_after_losses(fail) == "begun"
    for kind in (CommunicationTimeout, StoreLostError, EndedError, AttachError):
        errors[:] = [kind("not repeated")]
        with pytest.raises(kind):
            transport.retry_after_losses(fail)
        assert errors == []
    errors[:] = [CommunicationError("a worker died")] * 100
    with pytest.raises(CommunicationError):
        transport.retry_after_losses(fail)
    assert len(errors) == 100 - gathering._ATTEMPTS


def come_with_a_bad_address(rank: int, _: int) -> Any:
    set_variables("2")
    if rank == 2:
        store().wait(["come"])
        init = HeartbeatConnections.__init__

        def at_a_closed_port(self: Any, timeout_seconds: float) -> None:
            init(self, timeout_seconds)
            self.address = "127.0.0.1:1"

        HeartbeatConnections.__init__ = at_a_closed_port  # type: ignore[method-assign]
        with pytest.raises(CommunicationError, match="GLOO_SOCKET_IFNAME"):
            Worker(rank)
        shared = SharedStore(store(), "here")
        assert shared.within(shared.get("offbeat/elastic")).get("numbers") == 3
        store().set("told", "")
        return None
    worker = Worker(rank).steps(3, 2)
    store().set("come", "")
    while not store().check(["told"]):
        worker.step()
        time.sleep(0.002)
    return worker.finish()


def test_a_worker_that_cannot_be_reached_is_told() -> None:
    """The others continue."""
    results = run(come_with_a_bad_address, workers=0, newcomers=3)
    check(results[:2], [0, 1])
