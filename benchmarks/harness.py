"""Interleaved timing, and results as lines of a table and of JSON."""

import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import offbeat

RESULTS = Path(__file__).parent / "results"


@dataclass
class Result:
    """One measured figure.

    Attributes:
        benchmark: Module that measured it.
        what: What was measured, one line.
        value: The figure: a ratio, or with ``unit`` a quantity.
        target: The most it may be; None for a figure given for information.
        unit: Unit of ``value``; empty for a ratio.
        config: Everything needed to repeat it.
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
        """Whether the target is met; None without one."""
        return None if self.target is None else self.value <= self.target


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    repetitions: int,
    *,
    between: Callable[[], Any] = lambda: None,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Seconds of each function, one after the other in a random order, ``repetitions`` times.

    ``between`` runs, unmeasured, before each. The order is the same in every process.
    """
    generator = random.Random(seed)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(-2, repetitions):  # two rounds to warm up
        for name in generator.sample(list(functions), len(functions)):
            between()
            start = time.perf_counter()
            functions[name]()
            elapsed = time.perf_counter() - start
            if repetition >= 0:
                seconds[name].append(elapsed)
    return seconds


def slowest(workers: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Per function and repetition the time of the slowest worker."""
    return {
        name: [max(times) for times in zip(*(w[name] for w in workers), strict=True)]
        for name in workers[0]
    }


def compare(ours: list[float], theirs: list[float]) -> tuple[float, dict[str, Any]]:
    """Median of ours / median of theirs, and what it was computed from."""
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
    """What the figures depend on besides the configuration."""
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
    """Print lines of the table and append one JSON line each to ``results/<benchmark>.jsonl``."""
    for result in results:
        target = "" if result.target is None else f"{result.target:g}"
        met = {None: "", True: "yes", False: "no"}[result.met]
        shown = f"{result.value:.3f}" if not result.unit else f"{result.value:.1f} {result.unit}"
        print(f"{result.benchmark:10} {result.what:66} {shown:>10} {target:>8}  {met}", flush=True)
        if save:
            RESULTS.mkdir(exist_ok=True)
            line = {**asdict(result), "met": result.met, "machine": machine()}
            with (RESULTS / f"{result.benchmark}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def markdown(names: Sequence[str]) -> str:
    """The latest saved figure of everything, as a Markdown table."""
    lines = ["| benchmark | what | measured | target |", "|---|---|---|---|"]
    for name in names:
        latest: dict[str, dict[str, Any]] = {}
        path = RESULTS / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            one = json.loads(line)
            what = re.sub(r" \(measured [0-9.]+\), [0-9]+Mbit/s", "", one["what"])
            latest[what] = one
        for what, one in latest.items():
            shown = (
                f"{one['value']:.3f}" if not one["unit"] else f"{one['value']:.1f} {one['unit']}"
            )
            target = "" if one["target"] is None else f"≤ {one['target']:g}"
            met = {None: "", True: " ✓", False: " ✗"}[one["met"]]
            lines.append(f"| {name} | {what} | {shown}{met} | {target} |")
    return "\n".join(lines)
