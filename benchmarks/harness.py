"""Interleaved timing, results as lines of a table and of JSON, and the folders they are in."""

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import offbeat

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
DATA = ROOT.parent / "shared" / "data"
"""Directory of the data sets, unless an environment variable names another one."""
MNIST = Path(os.environ.get("OFFBEAT_MNIST", DATA / "mnist"))
CIFAR10 = os.environ.get("OFFBEAT_CIFAR10", str(DATA / "cifar10"))


@dataclass
class Result:
    """One measured figure.

    Attributes:
        benchmark: Name of the benchmark.
        what: Description of the figure, one line.
        value: The figure; a ratio if there is no unit.
        target: Largest value that meets the target; None if there is no target.
        unit: Unit of ``value``; empty for a ratio.
        config: Settings needed to repeat the measurement.
        details: Medians and quartiles behind the figure.
    """

    benchmark: str
    what: str
    value: float
    target: float | None = None
    unit: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """True if the target is met; None if there is none."""
        return None if self.target is None else self.value <= self.target


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    repetitions: int,
    *,
    between: Callable[[], Any] = lambda: None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Call the functions in turn, ``repetitions`` times; return the seconds of each call.

    The order within a repetition is random, and the same in every process. ``between`` is called,
    unmeasured, before each function. Two repetitions come first as a warm-up.
    """
    generator = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(-2, repetitions):
        for name in generator.sample(list(functions), len(functions)):
            between()
            start = time.perf_counter()
            functions[name]()
            elapsed = time.perf_counter() - start
            if repetition >= 0:
                seconds[name].append(elapsed)
    return seconds


def compare(ours: list[float], theirs: list[float]) -> tuple[float, dict[str, Any]]:
    """Return the ratio of the medians, and the figures that it was computed from."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return statistics.median(ours) / statistics.median(theirs), {
        "ours_seconds": statistics.median(ours),
        "theirs_seconds": statistics.median(theirs),
        "ratio_of_minima": min(ours) / min(theirs),
        "paired_ratio_quartiles": [low, middle, high],
        "repetitions": len(ours),
    }


def machine() -> dict[str, Any]:
    """Return the machine and the versions that the figures depend on."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "offbeat": offbeat.__version__,
    }


HEADER = f"{'benchmark':10} {'what':66} {'measured':>10} {'target':>8}  met"


def report(results: Sequence[Result], *, save: bool = True) -> None:
    """Print each figure and append it as a JSON line to ``results/<benchmark>.jsonl``."""
    for result in results:
        target = "" if result.target is None else f"{result.target:g}"
        met = {None: "", True: "yes", False: "no"}[result.met]
        value = f"{result.value:.1f} {result.unit}" if result.unit else f"{result.value:.3f}"
        print(f"{result.benchmark:10} {result.what:66} {value:>10} {target:>8}  {met}", flush=True)
        if save:
            RESULTS.mkdir(exist_ok=True)
            line = {**asdict(result), "met": result.met, "machine": machine()}
            with (RESULTS / f"{result.benchmark}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
