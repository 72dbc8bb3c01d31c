"""The global model in page-locked memory of the host, on a double of a GPU."""

import io
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

import gpu as double
import offbeat
from cells import some
from loops import attach, sgd
from offbeat import Compute, DiLoCo, Network, parse_strategy, simulate
from offbeat.averaging import flat as storage
from offbeat.extend import GlobalModel
from offbeat.quantization.block_format import BLOCK
from offbeat.simulate import Join, Kill
from problems import flat, make_batch, make_wide, train_step
from worlds import simulated


@dataclass(frozen=True, kw_only=True, repr=False)
class HostDiLoCo(DiLoCo):
    """DiLoCo with P and v in host memory."""

    @override
    def averages(self) -> GlobalModel:
        return replace(super().averages(), stored="host")


def both(text: str) -> tuple[Any, Any]:
    """Return the strategy with P on the GPU, and with P in host memory."""
    strategy: Any = parse_strategy(text)
    if isinstance(strategy, DiLoCo):
        return strategy, HostDiLoCo(**{f.name: getattr(strategy, f.name) for f in fields(strategy)})
    return strategy, replace(strategy, stored="host")


def step_of(model: Any, optimizer: Any, rank: int, step: int) -> None:
    train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))


def train(
    rank: int, size: int, strategy: Any, wire: Any, device: str = "cuda"
) -> tuple[list[Tensor], list[bool]]:
    """Train, show a consensus, save, load. Returns what was seen, and where P and v are."""
    model = make_wide(rank)
    if device == "cuda":
        double.move_to_gpu(model)
    optimizer = sgd(model)
    sync = attach(model, optimizer, strategy, wire=wire)
    seen, file = [], io.BytesIO()
    for step in range(9):
        step_of(model, optimizer, rank, step)
        if step == 3:  # with an overlap, parts that have landed are in flight again
            with sync.consensus():
                seen.append(flat(model))
        if step == 4:
            torch.save(sync.state_dict(), file)
        if step == 6:
            sync.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        if step == 7:
            for parameter in model.parameters():  # as by model.cpu() and model.cuda()
                parameter.data = parameter.data.clone()
    state = sync._iteration.flow.state
    places = [each.is_cuda for each in (*state.shared, *state.velocity)]
    values = sync.state_dict()["state"]
    seen += [each.clone() for name in ("shared", "velocity") for each in values[name]]
    sync.finish()
    return [*seen, flat(model)], places


GRID = [  # strategy, precision, with the Triton kernels
    ("streaming:parts=4", "int2", True),
    ("streaming:parts=4", "float32", False),
    ("diloco:period=2,overlap=1", "int4", False),  # a consensus with a part in flight
    ("diloco:period=2", "float32", False),  # x ← P
    ("streaming:parts=4", "int2", False),
    ("streaming:outer_gain=1", "int4", True),
    ("diloco:period=2,overlap=1", "int4", True),
    ("streaming:schedule=cyclic,staleness=4", "int4", True),
]


@pytest.mark.parametrize("case", some(GRID, 0, 1, 2, 3), ids=str)
def test_the_values_are_those_of_p_on_the_gpu(
    case: tuple[str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: models, consensus, saved and loaded P and v, and a model that has moved."""
    text, wire, kernels = case
    double.install(monkeypatch)
    if kernels:
        double.install_kernels(monkeypatch)
    on_device, on_host = both(text)
    want = simulated(train, on_device, wire, workers=2)
    found = simulated(train, on_host, wire, workers=2)
    for (seen, places), (expected, usual) in zip(found, want, strict=True):
        assert len(usual) == len(places) == (1 if "gain=1" in text else 2)
        assert all(usual)
        assert not any(places)
        for value, number in zip(seen, expected, strict=True):
            assert value.isfinite().all()
            assert torch.equal(value, number)


@pytest.mark.parametrize("settings", ["stored=host", "outer_gain=1,stored=bfloat16"])
def test_a_part_is_copied_in_pieces(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ``STAGED`` numbers at a time, also of P in bfloat16, with the bits of one piece."""
    double.install(monkeypatch)
    launches = double.install_kernels(monkeypatch)
    strategy = f"streaming:parts=1,schedule=cyclic,staleness=4,{settings}"
    counts, found = [], []
    for numbers in (2**22, 2 * BLOCK):
        monkeypatch.setattr(storage, "STAGED", numbers)
        found.append(simulated(train, strategy, "int4", workers=2))
        counts.append(dict(launches))
        launches.clear()
    for (want, _), (seen, _) in zip(*found, strict=True):
        assert all(map(torch.equal, want, seen))
    assert all(counts[1][name] > 2 * counts[0][name] for name in ("encode", "move"))


def test_what_is_not_finite_is_found_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, by the Triton kernels, which encode against a copy of P in float32."""

    def overflow(rank: int, size: int) -> int:
        model = make_wide(rank)
        double.move_to_gpu(model)
        optimizer = sgd(model)
        text = "streaming:outer_gain=1,stored=bfloat16"
        sync = attach(model, optimizer, text, wire="int4", non_finite="warn")
        for step in range(6):
            step_of(model, optimizer, rank, step)
            if rank == step == 1:
                next(model.parameters()).data.fill_(math.inf)
        found: int = sync.stats.details.get("non_finite", 0)
        sync.finish()
        return found

    double.install(monkeypatch)
    double.install_kernels(monkeypatch)
    _, wrong = simulated(overflow, workers=2)
    assert wrong > 0


def join(stored: str) -> tuple[Tensor, int, bool]:
    """Train in elastic training. Returns the model, this worker's first step, and where P is."""
    rank = dist.get_rank()
    model = make_wide(rank)
    double.move_to_gpu(model)
    optimizer = sgd(model)
    strategy = offbeat.StreamingAveraging(parts=4, stored=stored)
    sync = offbeat.attach(model, optimizer, strategy, min_workers=1, timeout_seconds=2.0)
    first = sync.step
    for step in range(first, 8):
        step_of(model, optimizer, rank, step)
    places = [each.is_cuda for each in sync._iteration.flow.state.shared]
    sync.finish()
    return flat(model), first, any(places)


def test_a_worker_that_joins_gets_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """P and v of the new generation are in host memory, too, and the values those of the GPU."""
    double.install(monkeypatch)
    double.install_kernels(monkeypatch)
    network, faults = Network("10Mbit/s"), (Kill(worker=1, at=0.031), Join(at=0.04))
    want, found = (
        simulate(
            lambda stored=stored: join(stored),
            workers=2,
            network=network,
            compute=Compute("10ms", jitter=0.2),
            faults=faults,
        ).results
        for stored in ("float32", "host")
    )
    assert found[1] is want[1] is None
    assert found[2][1] > 0
    for rank in (0, 2):
        model, first, on_gpu = found[rank]
        assert (first, on_gpu) == (want[rank][1], False)
        assert model.isfinite().all()
        assert torch.equal(model, want[rank][0])


def test_on_the_cpu_it_changes_nothing() -> None:
    want, found = (
        simulated(train, strategy, "int4", "cpu", workers=2)
        for strategy in both("streaming:parts=4")
    )
    for (seen, _), (expected, _) in zip(found, want, strict=True):
        assert all(map(torch.equal, seen, expected))
