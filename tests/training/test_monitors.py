"""distance_every: how far apart the models are, under every strategy, at nobody's expense."""

import itertools
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
import workers
import worlds
from loops import Sink, attach, error_of
from offbeat.fabric import Communicator, open_communicator
from offbeat.fabric.faults import Fault, Faults
from offbeat.training import distance
from problems import Simulated, flat, make_batch, make_model, make_wide, train_step, wide_loss
from worlds import run, simulated

KEYS = ("distance", "distance_largest", "distance_step")
UNTIMED = [
    "bsp",
    "local:period=4",
    "fedavg:period=3,fraction=0.67",
    "selsync:delta=0.05",
    "selsync:delta=0.05,flags=deferred",
    "selsync:delta=0.05,aggregate=gradients",
    "diloco:period=5,fragments=3,overlap=2",
]
FREE = [
    "async:staleness=4",
    "async:staleness=3,schedule=eager",
    "ssp:staleness=2",
    "downpour",
    "easgd:period=2",
]


def apart(models: list[Tensor]) -> tuple[float, float]:
    """Mean distance to the mean, and the largest of a pair, from the definition."""
    mean = torch.stack(models).mean(0)
    pairs = [float((a - b).norm()) for a, b in itertools.combinations(models, 2)]
    return sum(float((model - mean).norm()) for model in models) / len(models), max(pairs)


def train(
    rank: int, size: int, text: str, counts: list[int], looks: int | None = None, every: Any = 3
) -> dict[str, Any]:
    """Own data, ``counts[rank]`` steps, a look at the consensus after so many of them."""
    model, sink, after = make_model(seed=rank), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, log=sink, distance_every=every)
    optimizer.register_step_post_hook(lambda *_: after.append(flat(model)))
    for step in range(counts[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        if step + 1 == looks:
            with sync.consensus():
                pass
    bytes_so_far = sync.stats.payload_bytes
    sync.finish()
    found = [{key: r[key] for key in KEYS} for r in sink.records if "distance" in r]
    return {
        "found": found,
        "end": flat(model),
        "own": sync.stats.details,
        "bytes": (bytes_so_far, sync.stats.payload_bytes),
        "waited": [r["wait_seconds"] for r in sink.records],
    }


def test_what_is_measured_is_the_distance_before_the_mean() -> None:
    """Of the models after every fifth own step, before LocalSGD averages those of the fourth."""
    results = run(train, "local:period=4", [40] * 3, None, 5, workers=3)
    sim = Simulated.start(3, "sgd")
    want = {}
    for step in range(40):
        sim.step(step)
        want[step + 1] = apart(sim.flat())
        if (step + 1) % 4 == 0:
            sim.average()
    for result in results:
        steps = [one["distance_step"] for one in result["found"]]
        if worlds.world == "simulated":  # else it depends on time which are left out
            assert steps == [*range(5, 40, 5)]
        assert {*steps} <= {*range(5, 41, 5)}
        for one in result["found"]:
            mean, largest = want[one["distance_step"]]
            assert one["distance"] == pytest.approx(mean, rel=1e-9)
            assert one["distance_largest"] == pytest.approx(largest, rel=1e-9)
        assert result["found"] == results[0]["found"]
        if worlds.world == "simulated":
            assert result["own"]["distance_step"] == 40, "finish waits for what is under way"
            assert result["own"]["distances_measured"] == 8


@pytest.mark.sampled
@pytest.mark.parametrize("text", UNTIMED)
def test_measuring_changes_nothing_of_the_training(text: str) -> None:
    """The same bits at the end, and the same bytes, with and without."""
    measured = run(train, text, [20] * 3, 11, workers=3)
    plain = run(train, text, [20] * 3, 11, None, workers=3)
    for a, b in zip(measured, plain, strict=True):
        assert torch.equal(a["end"], b["end"])
        assert a["bytes"] == b["bytes"]
        assert not b["found"]
        assert a["own"]["distances_measured"] >= 2
    if text == "bsp":
        assert {one[key] for one in measured[0]["found"] for key in KEYS[:2]} == {0.0}
    else:
        assert all(one["distance_largest"] > 0 for one in measured[0]["found"])


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*UNTIMED, *FREE])
def test_workers_may_take_different_numbers_of_steps(text: str) -> None:
    """Nobody hangs, and all find the same; a triangle bounds the one distance by the other."""
    results = run(train, text, [7, 26, 15], 5, workers=3)
    for result in results:
        assert result["own"]["distances_measured"] >= 1
        assert {key: result["own"][key] for key in KEYS[:2]} == {
            key: results[0]["own"][key] for key in KEYS[:2]
        }
        for one in result["found"]:
            assert 0 <= one["distance"] <= one["distance_largest"] < math.inf


@pytest.mark.parametrize("text", ["local:period=50", "async:staleness=8", "downpour"])
def test_a_measurement_in_every_step_needs_no_more_than_one_copy(text: str) -> None:
    """If the one before is under way it is left out: over a slow link, some of 40 steps are."""

    def worker(rank: int, size: int) -> Any:
        model = make_wide(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        copies = []
        kept = distance.Distance._copy

        def count(self: Any) -> list[Tensor]:
            copies.append(self._free)
            return kept(self)

        distance.Distance._copy = count  # type: ignore[method-assign]
        try:
            with attach(model, optimizer, text, distance_every=1) as sync:
                for step in range(40):
                    optimizer.zero_grad()
                    wide_loss(model, rank, step).backward()
                    optimizer.step()
        finally:
            distance.Distance._copy = kept  # type: ignore[method-assign]
        return all(copies), sync.stats.details["distances_measured"]

    results = simulated(worker, workers=2)
    assert all(free for free, _ in results)
    assert {measured for _, measured in results} == {results[0][1]}
    assert 5 <= results[0][1] < 40


class Half(nn.Module):
    """Parameters of several dtypes, sizes that three workers cannot divide, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(7, dtype=torch.float16))
        self.b = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
        self.c = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.d = nn.Parameter(torch.zeros(0))


def mixed(rank: int, size: int) -> Any:
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = attach(model, optimizer, "local:period=9", distance_every=1)
    model.a.grad = torch.full_like(model.a, -rank)
    model.b.grad = torch.full_like(model.b, 2j * rank)
    model.c.grad = torch.full_like(model.c, 3.0 * rank)
    optimizer.step()
    sync.finish()
    return sync.stats.details


@pytest.mark.parametrize("size", [1, 3])
def test_every_dtype_and_size_counts(size: int) -> None:
    """Worker n is n·√(7 + 4·4 + 9) from zero: distances by hand; alone there is none."""
    length = math.sqrt(7 * 1 + 4 * 4 + 9)
    for details in run(mixed, workers=size):
        assert details["distances_measured"] == 1
        assert details["distance"] == pytest.approx(length * 2 / 3 if size == 3 else 0)
        assert details["distance_largest"] == pytest.approx(length * 2 if size == 3 else 0)


@pytest.mark.parametrize("text", ["selsync:delta=0.05", "ssp:staleness=2"])
def test_processes_find_what_the_simulator_finds(text: str) -> None:
    """Over gloo: the same numbers where they do not depend on time, and no hang where they do."""
    found = workers.run(train, text, [14, 20], 9, workers=2)
    simulation = simulated(train, text, [14, 20], 9, workers=2)
    for result in found:
        assert result["own"]["distances_measured"] >= 1
        if text.startswith("selsync"):
            for key in KEYS:
                assert result["own"][key] == pytest.approx(simulation[0]["own"][key])


class Broken:
    """Communicators of which the second, beside the training, fails on rank 1 at one operation."""

    def __init__(self, operation: int) -> None:
        self._operation, self._made = operation, 0

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        made = open_communicator(None, timeout_seconds, what="a test")
        self._made += 1
        fault = Fault("fail", rank=1, operation=self._operation)
        return made if self._made == 1 else Faults(made, [fault])


@pytest.mark.sampled
@pytest.mark.parametrize("text", ["local:period=2", "ssp:staleness=1"])
@pytest.mark.parametrize("operation", [0, 1, 2, 3, 4])
def test_a_measurement_that_fails_ends_the_measuring_alone(text: str, operation: int) -> None:
    """A warning on every worker, at the latest when all meet; training goes on as without."""
    told: list[str] = []

    def worker(rank: int, size: int, every: int | None) -> Any:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options = {"distance_every": every, "group": Broken(operation)}
        sync = attach(model, optimizer, text, **options)
        for step in range(12):
            train_step(model, optimizer, make_batch(rank, step))
            if step == 8:
                with sync.consensus():
                    pass
        sync.finish()
        return flat(model)

    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("offbeat")
    logger.addHandler(handler)
    try:
        ends = simulated(worker, 3, workers=2)
    finally:
        logger.removeHandler(handler)
    told = [line for line in told if "not measured any more" in line]
    assert len(told) == 2
    assert any(line.startswith("rank 1: ") and "failed on purpose" in line for line in told)
    assert torch.equal(ends[0], ends[1])
    if text.startswith("local"):
        assert torch.equal(ends[0], simulated(worker, None, workers=2)[0])


def disagree(rank: int, size: int) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return error_of(lambda: attach(model, optimizer, "bsp", distance_every=5 if rank else None))


def test_workers_must_ask_alike() -> None:
    """It is a collective: another number elsewhere is refused by all."""
    for kinds, text in run(disagree, workers=2):
        assert kinds[0] == "MismatchError"
        assert "has distance_every 5; rank 0 has distance_every None" in text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"distance_every": 0}, ValueError, "distance_every must be at least 1, got 0"),
        ({"distance_every": 1.5}, TypeError, "distance_every must be an integer of at least 1"),
        ({"gradient_change": 1}, TypeError, "gradient_change must be true or false, got 1"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """At once, before anything is sent."""
    model = make_model()
    with pytest.raises(error, match=words):
        offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), offbeat.BSP(), **options)


def test_records_are_json(tmp_path: Path) -> None:
    """The numbers are plain ones."""

    def worker(rank: int, size: int) -> None:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        log = str(tmp_path / "run.jsonl")
        with attach(
            model, optimizer, "local:period=3", log=log, distance_every=2, gradient_change=True
        ):
            for step in range(8):
                train_step(model, optimizer, make_batch(rank, step))

    simulated(worker, workers=2)
    lines = (tmp_path / "run.rank1.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[0]["relative_change"] == "inf"
    assert any(record.get("distance", 0) > 0 for record in records)
