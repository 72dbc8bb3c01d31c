"""The ideal and torch's methods in the training loop: values, clocks, rejected options."""

import os
import re
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import workers
from lab import tiny
from offbeat import Stats
from offbeat.errors import CommunicationError
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import End, Evaluation, Event, Step
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import Loopback
from offbeat_lab.methods.registry import REFERENCES, parse_method, require_virtual
from offbeat_lab.timing import step_time
from offbeat_lab.train import Worker

METHODS = (
    "bsp",
    "ideal",
    "local:period=3,warmup_steps=1",
    "torch:ddp",
    "torch:ddp --lr-scale 0.5",
    "torch:ddp,hook=fp16",
    "torch:ddp,hook=bf16",
    "torch:postlocal,period=3,warmup_steps=2",
    "torch:postlocal,period=3",
)
SLOW = "torch:ddp slow to evaluate"
EVALUATION_SECONDS = 0.3
LIMITED = "torch:ddp with a limit"


@dataclass
class Run:
    """Outcome of a run on one worker. Only rank 0 has events."""

    events: list[Event]
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    wall_seconds: float

    @property
    def points(self) -> list[Evaluation]:
        return [event for event in self.events if isinstance(event, Evaluation)]

    @property
    def curve(self) -> list[float]:
        return [point.metric for point in self.points]

    @property
    def end(self) -> End:
        (found,) = (event for event in self.events if isinstance(event, End))
        return found


def train(text: str, size: int, evaluations: int = tiny.STEPS, **settings: Any) -> Run:
    settings = {"evaluations": evaluations, "timeout_seconds": 20.0, **settings}
    job = Job("tiny", "bsp", size, **settings).under(text)
    events: list[Event] = []
    began = time.perf_counter()
    Worker(job, events.append).run()
    taken = time.perf_counter() - began
    model = tiny.built[-1].model
    tensors = [[t.detach() for t in one] for one in (model.parameters(), model.buffers())]
    return Run(events, *tensors, taken)


def train_all(rank: int, size: int) -> dict[str, Run]:
    """Run all methods one after the other in one process group, as under torchrun."""
    tiny.install()
    step_time.REFERENCE = step_time.Duration(5, 10, 0.1)
    runs = {text: train(text, size) for text in METHODS}
    tiny.evaluation_seconds = EVALUATION_SECONDS / 2  # of a batch
    runs[SLOW] = train("torch:ddp", size, evaluations=3)
    tiny.evaluation_seconds = 0.0
    step_time.PADDING = step_time.Duration(3, 10, 0.0)
    for text in ("ideal", "torch:ddp"):
        runs[f"{text} padded"] = train(text, size, 2, step_seconds=0.01, slow="1=2")
    runs[LIMITED] = train("torch:ddp", size, max_seconds=1e-6)
    return runs


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Run]]:
    """Return the runs by rank and method."""
    return workers.run(train_all, workers=2)


CURVES = {
    "bsp": tiny.mean_gradient,
    "ideal": tiny.mean_gradient,
    "torch:ddp": tiny.mean_gradient,
    "torch:ddp --lr-scale 0.5": lambda: tiny.mean_gradient(lr_scale=0.5),
    "local:period=3,warmup_steps=1": lambda: tiny.post_local(3, 0),
    "torch:postlocal,period=3,warmup_steps=2": lambda: tiny.post_local(3, 2),
    "torch:postlocal,period=3": lambda: tiny.post_local(3, 0),
}


@pytest.mark.sampled
@pytest.mark.parametrize("text", CURVES)
def test_the_mean_model_is_evaluated(text: str, runs: list[dict[str, Run]]) -> None:
    """After each step it equals a reference in one process, with clipping and schedule."""
    assert runs[0][text].curve == pytest.approx(CURVES[text](), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("text", METHODS)
def test_all_workers_end_with_one_model(text: str, runs: list[dict[str, Run]]) -> None:
    """Parameters and buffers are equal, and are those of the last evaluation."""
    one, other = (run[text] for run in runs)
    for a, b in zip(
        [*one.parameters, *one.buffers], [*other.parameters, *other.buffers], strict=True
    ):
        assert torch.equal(a, b)
    assert one.points[-1].metric == pytest.approx(tiny.size_of(one.parameters), abs=1e-9)
    last = one.points[-1].metrics["statistics"]
    assert last == pytest.approx(tiny.size_of(one.buffers), abs=1e-9)


@pytest.mark.parametrize(("hook", "least", "most"), [("fp16", 1e-8, 1e-3), ("bf16", 1e-7, 1e-2)])
def test_hooks_quantize(hook: str, least: float, most: float, runs: list[dict[str, Run]]) -> None:
    """Parameters are close to those of exact gradients, but differ."""
    exact, rounded = (runs[0][name].parameters for name in ("bsp", f"torch:ddp,hook={hook}"))
    distance = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    assert least < distance < most


def test_training_seconds_are_without_evaluation(runs: list[dict[str, Run]]) -> None:
    """Evaluation takes most of the time of this run. Times increase."""
    run = runs[0][SLOW]
    seconds = [point.seconds for point in run.points]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert seconds[-1] < run.wall_seconds - 3 * EVALUATION_SECONDS / 2  # a batch a worker
    assert max(one.details["seconds"] for one in run.end.stats) == seconds[-1]
    assert [one.steps for one in run.end.stats] == [tiny.STEPS] * 2


def test_evaluations_do_not_change_a_peer(runs: list[dict[str, Run]]) -> None:
    """Nine evaluations and three end with the same bits."""
    often, seldom = (runs[0][text].parameters for text in ("torch:ddp", SLOW))
    assert all(torch.equal(a, b) for a, b in zip(often, seldom, strict=True))


def test_padded_steps_of_the_ideal_take_exactly_the_step_time(
    runs: list[dict[str, Run]],
) -> None:
    """The mean over workers with steps of 10 and 20 ms; the values are those without padding."""
    run = runs[0]["ideal padded"]
    assert [one.seconds for one in run.points] == pytest.approx([4 * 0.015, 9 * 0.015])
    assert run.curve[-1] == runs[0]["ideal"].curve[-1]
    for one in runs[0]["torch:ddp padded"].end.stats:
        assert 0 <= one.details["late_steps"] <= tiny.STEPS
    assert runs[0]["torch:ddp padded"].curve[-1] == runs[0]["torch:ddp"].curve[-1]


def test_a_limit_ends_all_workers_of_a_peer_at_one_step(runs: list[dict[str, Run]]) -> None:
    """The clocks of the first step are known at the second."""
    assert [point.step for point in runs[0][LIMITED].points] == [1, 2]
    assert [one.steps for one in runs[0][LIMITED].end.stats] == [2, 2]


def test_every_step_of_the_ideal_counts_the_same(runs: list[dict[str, Run]]) -> None:
    """During the run the first measurement counts, at the end both."""
    run = runs[0]["ideal"]
    *points, last = run.points
    alone = points[0].seconds
    assert alone > 0
    assert [one.seconds for one in points] == pytest.approx([one.step * alone for one in points])
    assert run.end.step_seconds is not None
    assert last.seconds == pytest.approx(tiny.STEPS * run.end.step_seconds)
    assert run.end.step_seconds != alone, "the second stretch counts"
    assert last.seconds < run.wall_seconds
    for one in run.end.stats:
        assert one.wait_seconds == 0
        assert one.compute_seconds == pytest.approx(last.seconds)


def fail_in_the_middle(rank: int, size: int) -> str:
    tiny.install()
    job = Job("tiny", "torch:ddp", size, evaluations=tiny.STEPS)

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == 3:
            raise KeyboardInterrupt

    try:
        Worker(job, stop).run()
    except CommunicationError as error:
        return str(error)
    except KeyboardInterrupt:  # rank 0
        os._exit(1)
    return ""


def test_a_lost_worker_is_explained() -> None:
    """The error names rank, operation and option, which torch's own message does not."""
    _, text = workers.run(fail_in_the_middle, workers=2, may_die=(0,))
    assert re.fullmatch(r"rank 1 failed in batch 4 of torch:ddp: .* which --timeout raises", text)


# What they say of themselves


def test_unknown_values_are_null_in_a_result() -> None:
    """The line is read back as the same result."""

    class Told(Loopback):
        def run(self, job: Job, on_event: object) -> None:
            on_event(Evaluation(9, 2.0, 0.5, {"size": 0.5}))  # type: ignore[operator]
            on_event(End((Stats(steps=9, details={"seconds": 2.0}),) * 2))  # type: ignore[operator]

    one = run_and_record(Job("tiny", "torch:ddp", 2), lambda event: None, Told())
    line = one.to_dict()
    assert (line["lssr"], line["payload_bytes"], line["idle"]) == (None, None, None)
    assert line["stats"] == [{"steps": 9, "details": {"seconds": 2.0}}] * 2
    assert type(one).from_dict(line) == one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch:", "unknown reference 'torch:'.*; there are ideal, torch:ddp, .*"),
        (
            "torch:dpp",
            r"unknown reference 'torch:dpp' \(did you mean 'torch:ddp'\?\); .*",
        ),
        (
            "torch:ddp:hook=fp16",
            "unknown reference 'torch:ddp:hook=fp16'.*; .*torch:ddp,hook=bf16",
        ),
        ("torch:ddp,hook=int8", 'hook must be None, "fp16" or "bf16", got .*'),
        ("torch:ddp,hook", ".*'hook' is not of the form setting=value"),
        ("torch:ddp,period=8", "torch:ddp has no setting 'period'; it has hook"),
        ("torch:postlocal", "torch:postlocal needs period, as in torch:postlocal,period=8"),
        ("torch:postlocal,period=1", "period must be at least 2, got 1"),
        ("torch:ddp --wire int8", "--wire int8: torch:ddp cannot honour it, leave it out"),
        ("torch:ddp --injection 0.5,0.5", "--injection 0.5,0.5: torch:ddp cannot honour it, .*"),
        ("ideal --injection 0.5,0.5", "--injection 0.5,0.5: ideal cannot honour it, leave it out"),
    ],
)
def test_invalid_settings_are_rejected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        Job("digits", "bsp", 2).under(text).check_method()
    assert re.fullmatch(message, str(caught.value))


def test_references_reject_records() -> None:
    for text in ("ideal", "torch:ddp"):
        with pytest.raises(ValueError, match=f"--records runs/a: {text} cannot honour it"):
            Job("digits", text, 2, log="runs/a").check_method()


@pytest.mark.parametrize("name", REFERENCES)
def test_references_are_parsed_by_name(name: str) -> None:
    """Only the ideal can be simulated."""
    text = name + ",period=4" * (name == "torch:postlocal")
    assert type(parse_method(text)) is REFERENCES[name]
    if name == "ideal":
        require_virtual(text)
    else:
        with pytest.raises(ValueError, match=f"{text} runs its own code on real processes, not"):
            require_virtual(text)
