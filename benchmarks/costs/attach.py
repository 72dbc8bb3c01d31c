"""Cost of ``attach`` per step with a strategy that does nothing: hooks, accounting, ``Stats``.

Two models of one small parameter take SGD steps in turn: one attached, one plain. The figure is the
difference of the medians.
"""

import statistics
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import offbeat
from benchmarks.harness import Result, interleave
from benchmarks.processes import run
from offbeat.strategies.base import GlobalModel, Strategy, WorkerView


@dataclass(frozen=True, kw_only=True, repr=False)
class Nothing(Strategy):
    """A strategy that never communicates."""

    name: ClassVar[str] = "nothing"

    def averages(self) -> GlobalModel:
        return GlobalModel()

    def due(self, worker: WorkerView) -> float:
        return 0.0


def measure(repetitions: int) -> dict[str, list[float]]:
    """Measure the seconds of ten optimizer steps, attached and plain. Runs on both workers."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.zeros_like(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    _, plain = make()
    model, optimizer = make()
    sync = offbeat.attach(model, optimizer, Nothing())

    def ten(one: torch.optim.Optimizer) -> Any:
        for _ in range(10):
            one.step()

    functions = {"attached": lambda: ten(optimizer), "plain": lambda: ten(plain)}
    seconds = interleave(functions, repetitions)
    sync.finish()
    return seconds


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    repetitions = 200 if quick else 2000
    seconds = run(measure, workers=2, repetitions=repetitions)[0]
    median = {name: statistics.median(times) / 10 * 1e6 for name, times in seconds.items()}
    return [
        Result(
            "attach",
            "attach with a strategy that does nothing, per step",
            median["attached"] - median["plain"],
            20,
            "µs",
            config={"repetitions": repetitions},
            details={f"{name}_microseconds": value for name, value in median.items()},
        )
    ]
