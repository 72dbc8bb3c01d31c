"""The pipeline of the parts of a shared model: queued, launched, in flight, landed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from loops import Recorded
from offbeat.averaging.parts.make_parts import make_parts
from offbeat.averaging.parts.pipeline import Pipeline
from offbeat.averaging.replica import Replica
from offbeat.averaging.votes import Round, Sums, Vote
from offbeat.averaging.worker import AttachedOptimizer, NonFinite, Worker
from offbeat.quantization.wire import Wire
from offbeat.strategies.base import Outer, SharedModel, Strategy, Tally, WorkerView
from offbeat.transport.handle import Completed
from offbeat.transport.team import Team
from worlds import simulated


class Model(nn.Module):
    """Four tensors of 6, 6, 6 and 12 numbers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name, n in zip("abcd", (6, 6, 6, 12), strict=True):
            self.register_parameter(name, nn.Parameter(torch.zeros(n)))
        self.register_buffer("statistic", torch.zeros(2))


class Asked(Strategy):
    """Records the calls of ``outer_step``: ``wanted`` of the tally, the part, and the step."""

    def __init__(self, shared: SharedModel) -> None:
        object.__setattr__(self, "shared", shared)
        object.__setattr__(self, "asked", [])

    def averages(self) -> SharedModel:
        return self.shared

    def outer_step(self, worker: WorkerView, part: int, tally: Tally) -> tuple[float, float]:
        self.asked.append((tally.wanted, part, worker.step))
        return 0.5, 0.5


class Line:
    """One worker's pipeline, and a record of its launches and landings."""

    def __init__(
        self, shared: SharedModel, *, wire: Any = "float32", non_finite: NonFinite = "warn"
    ) -> None:
        recorded = Recorded()
        team, self.model = Team(recorded.make_communicator(20)), Model()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(parameters, lr=0.1)
        attached = AttachedOptimizer(0, self.optimizer, parameters)
        replica = Replica(self.model, parameters)
        self.worker = Worker(team, replica, [attached], Wire(team, wire), non_finite)
        self.view = self.worker.strategy_view()
        self.strategy = Asked(shared)
        parts = make_parts(self.worker, shared)
        self.pipeline = Pipeline(self.worker, self.strategy, shared, parts, self.view)
        self.events: list[str] = []
        for index, part in enumerate(self.pipeline.parts):
            self.note(part, "launch", index)
            self.note(part, "land", index)

    def note(self, part: Any, name: str, index: int) -> None:
        method: Callable[..., Any] = getattr(part, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(f"{name} {index}")
            return method(*args, **kwargs)

        setattr(part, name, noted)

    def decide(self, parts: float, *, weight: float = 1.0, wanted: float = 0.0) -> None:
        vote = Vote(weight, True, False, 0.0, 0, 0, True, 0)
        sums = Sums(self.worker.size * weight, self.worker.size, 0, wanted)
        self.pipeline.add(parts, Round(0, vote, Completed(sums)))

    def happened(self) -> list[str]:
        events, self.events = self.events, []
        return events


def alone(check: Callable[[Line], object], shared: SharedModel, **options: Any) -> Any:
    """Call ``check`` with a pipeline of a worker without peers, whose parts arrive at once."""
    return simulated(lambda rank, size: check(Line(shared, **options)), workers=1)[0]


THREE = SharedModel(parts=3, lands="arrived", bound=8, error_feedback=True)


def test_parts_are_launched_in_turn_and_land_in_the_order_of_launches() -> None:
    """A part that is still in flight from its last launch blocks the queue."""

    def check(line: Line) -> None:
        line.decide(2)
        line.decide(2)
        line.pipeline.launch_queued(wait=False)
        assert line.happened() == ["launch 0", "launch 1", "launch 2"]
        assert [queued.part for queued in line.pipeline.state.queue] == [0]
        assert line.pipeline.next_part is line.pipeline.parts[1]
        assert line.pipeline.oldest is line.pipeline.parts[0]
        line.pipeline.land()
        line.pipeline.launch_queued(wait=False)
        assert line.happened() == ["land 0", "launch 0"]
        assert line.pipeline.state.in_flight == [1, 2, 0]
        assert (line.view.launches, line.view.landings) == (4, 1)

    alone(check, THREE)


def test_a_queue_that_must_be_launched_lands_older_parts_first() -> None:
    """This happens before a barrier and with a fixed delay. Settling then lands all parts."""

    def check(line: Line) -> None:
        line.decide(2)
        line.pipeline.launch_queued(wait=True)
        line.decide(float("inf"))
        line.happened()
        line.pipeline.launch_queued(wait=True)
        assert line.happened() == ["launch 2", "land 0", "launch 0", "land 1", "launch 1"]
        line.decide(1)
        line.pipeline.settle()
        assert line.happened() == ["land 2", "launch 2", "land 0", "land 1", "land 2"]
        assert line.pipeline.oldest is None

    alone(check, THREE)


def test_outer_steps_are_asked_for_in_the_order_of_launches_also_by_a_checkpoint() -> None:
    """A strategy may depend on that order, and other workers may have landed some of the parts."""

    def check(line: Line) -> None:
        for _ in range(2):
            line.decide(2)
            line.pipeline.launch_queued(wait=False)
            line.pipeline.land()
        assert line.pipeline.state.in_flight == [2, 0]
        line.pipeline.before_save()
        assert [part for _, part, _ in line.strategy.asked] == [0, 1, 2, 0]

    momentum = SharedModel(parts=3, lands="arrived", error_feedback=True, outer=Outer(momentum=1))
    alone(check, momentum)


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_what_becomes_non_finite_after_its_vote_is_not_sent(policy: NonFinite) -> None:
    """A finite peer receives nothing of it with "raise", and the next vote reports it."""

    def check(rank: int, size: int) -> tuple[float, bool]:
        line = Line(THREE, non_finite=policy)
        with torch.no_grad():
            line.model.a.fill_(torch.inf if rank == 1 else 2.0)
        line.worker.step = 1
        line.decide(1)
        line.pipeline.launch_queued(wait=False)
        line.pipeline.land()
        base = float(line.pipeline.parts[0].base[0][0])
        return base, line.pipeline.report_non_finite

    (base, healthy), (_, sick) = simulated(check, workers=2)
    assert not healthy
    assert base == (float("inf") if policy == "warn" else 1.0)
    assert sick == (policy == "raise")


# -- the parts of a model -------------------------------------------------------------------------


def sizes(line: Line) -> list[tuple[list[int], list[int]]]:
    """Numbers of parameters and of buffers, of each part."""
    return [
        (
            [p.numel() for b in part.buckets for p in b.parameters],
            [p.numel() for b in part.buckets for p in b.buffers],
        )
        for part in line.pipeline.parts
    ]


@pytest.mark.parametrize(
    ("shared", "parts"),
    [
        (SharedModel(), [[6, 6, 6, 12]]),
        (SharedModel(parts=2), [[6, 6], [6, 12]]),
        (SharedModel(parts=4), [[6], [6], [6], [12]]),
        (SharedModel(parts=4, error_feedback=True), [[6, 2], [4, 3], [3, 5], [7]]),
        (SharedModel(parts=lambda size: size // 60, error_feedback=True), [[6, 6, 3], [3, 12]]),
        (SharedModel(parts=99, error_feedback=True), [[1]] * 30),
    ],
)
def test_a_model_is_cut_into_parts(shared: SharedModel, parts: Sequence[list[int]]) -> None:
    """By whole tensors, or with error feedback by bytes. The last part sends the buffers."""

    def check(line: Line) -> None:
        want = [(part, [2] if i == len(parts) - 1 else []) for i, part in enumerate(parts)]
        assert sizes(line) == want
        assert line.view.count == len(parts)

    alone(check, shared)


def test_more_parts_than_tensors_are_refused() -> None:
    def check(rank: int, size: int) -> str:
        with pytest.raises(ValueError) as caught:
            Line(SharedModel(parts=5))
        return str(caught.value)

    for text in simulated(check, workers=2):
        assert text.startswith("the number of parts must be at most 4, the number of parameter te")


@pytest.mark.parametrize(
    ("shared", "policy", "keeps"),
    [
        (SharedModel(), "raise", False),
        (SharedModel(lands=2), "raise", False),
        (SharedModel(lands="arrived"), "raise", True),
        (SharedModel(lands="arrived"), "warn", False),
        (SharedModel(outer=Outer(0.5)), "warn", True),
        (THREE, "warn", True),
    ],
)
def test_p_is_kept_where_something_needs_it(
    shared: SharedModel, policy: NonFinite, keeps: bool
) -> None:
    """A worker that has nothing finite to send sends an update of 0, relative to P."""

    def kept(rank: int, size: int, wire: str) -> bool:
        line = Line(shared, wire=wire, non_finite=policy)
        return all(part.keeps_base for part in make_parts(line.worker, shared))

    assert simulated(kept, "float32", workers=2) == [keeps] * 2
    assert simulated(kept, "int8", workers=2) == [True] * 2, "only updates are quantized"
    always = shared.error_feedback or not shared.outer.plain
    assert simulated(kept, "float32", workers=1) == [always], "it sends nothing"
