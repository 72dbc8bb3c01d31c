"""The background threads of a GPU have streams of their own, which do not race; on a double."""

import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpu as double
import offbeat
import streams
from cells import some
from loops import attach, sgd
from offbeat import Compute, Network, simulate
from offbeat.simulate import Join, Kill
from offbeat.transport.future import Completed
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.stages import Stages
from problems import make_batch, make_wide, train_step
from worlds import simulated

CASES = [  # strategy, precision, with the Triton kernels
    ("streaming:parts=4", "int2", True),
    ("streaming:schedule=cyclic,staleness=4,parts=4", "int2", False),
    ("async:staleness=4", "float32", False),
    ("diloco:period=4,fragments=4,overlap=3", "int4", False),  # several messages in flight
    ("streaming:parts=4,stored=host", "int4", False),
    ("streaming:parts=4", "float32", False),
    ("local:period=2", "int4", False),
    ("bsp", "int4", False),
    ("selsync:target_lssr=0.5", "int4", False),
]


def train(rank: int, size: int, strategy: str, wire: str) -> None:
    """Train, show a consensus, save, load, train on."""
    model = make_wide(rank)
    double.move_to_gpu(model)
    optimizer = sgd(model)
    sync, file = attach(model, optimizer, strategy, wire=wire), io.BytesIO()
    for step in range(10):
        train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))
        if step == 3:
            with sync.consensus():
                pass
        if step == 4:
            torch.save(sync.state_dict(), file)
        if step == 6:
            sync.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    sync.finish()


@pytest.mark.parametrize("case", some(CASES, 0, 1, 2, 3, 4), ids=str)
def test_the_streams_do_not_race(
    case: tuple[str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers, whose sums take two stages if they are quantized."""
    strategy, wire, kernels = case
    gpu = double.install(monkeypatch)
    if kernels:
        double.install_kernels(monkeypatch)
    simulated(train, strategy, wire, workers=3)
    assert gpu.streams.races == []
    assert len(gpu.streams.all) > 3 or wire == "float32"


def lose() -> None:
    """Train while a worker dies and another one joins."""
    rank = dist.get_rank()
    model = make_wide(rank)
    double.move_to_gpu(model)
    optimizer = sgd(model)
    strategy = offbeat.StreamingAveraging(parts=4)
    sync = offbeat.attach(
        model, optimizer, strategy, wire="int2", min_workers=1, timeout_seconds=2.0
    )
    for step in range(sync.step, 20):
        train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))
    sync.finish()


def elastic() -> None:
    simulate(
        lose,
        workers=4,
        network=Network("10Mbit/s"),
        compute=Compute("10ms", jitter=0.2),
        faults=(Kill(worker=1, at=0.225), Join(at=0.24)),
    )


def test_the_streams_do_not_race_if_a_worker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = double.install(monkeypatch)
    elastic()
    assert gpu.streams.races == []


def abandon() -> None:
    """Free memory that a background thread has used, without a wait for its result."""
    stages = Stages(SingleCommunicator(1.0), "background")
    memory, used = [double.on_gpu(torch.zeros(4))], double.gpu.streams
    used.allocate(memory[0])

    def work(_: None) -> Completed[None]:
        used.operation([], [memory[0]], "work")
        return Completed(None)

    future = stages.start(Completed(None), work, what="work", like=memory[0])
    while not future.done():
        time.sleep(0.001)
    stages.settle()
    memory.clear()
    used.operation([], [double.on_gpu(torch.zeros(4))], "the next owner")


def test_memory_of_an_abandoned_operation_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = double.install(monkeypatch)
    abandon()
    assert gpu.streams.races == []


def hand_over() -> None:
    """Use the result of a background thread, and free it, while the thread works on."""
    stages, used = Stages(SingleCommunicator(1.0), "background"), double.gpu.streams

    def work(_: None) -> Completed[Any]:
        result = double.on_gpu(torch.zeros(4))
        used.operation([], [result], "work")
        return Completed(result)

    future = stages.start(Completed(None), work, what="work", like=double.on_gpu(torch.zeros(1)))
    used.operation([future.wait()], [], "the training")
    del future
    with torch.cuda.stream(stages._side):
        used.operation([], [double.on_gpu(torch.zeros(4))], "the next work")


def test_a_result_of_a_background_thread_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = double.install(monkeypatch)
    hand_over()
    assert gpu.streams.races == []


def nothing(*arguments: Any) -> None:
    pass


MISSING: dict[str, tuple[Any, str, Callable[[], Any]]] = {
    "events": (
        streams.Stream,
        "wait_event",
        lambda: simulated(train, "streaming", "int2", workers=3),
    ),
    "records": (
        streams.Streams,
        "record",
        lambda: simulated(train, "async:staleness=4", "int2", workers=3),
    ),
    "records of results": (streams.Streams, "record", hand_over),
    "settling": (streams.Stream, "wait_stream", abandon),
}


@pytest.mark.parametrize("what", MISSING)
def test_the_double_notices_a_race(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one kind of calls has no effect."""
    gpu = double.install(monkeypatch)
    kind, name, run = MISSING[what]
    monkeypatch.setattr(kind, name, nothing)
    run()
    assert gpu.streams.races
