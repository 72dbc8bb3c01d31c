"""What flies when: four steps of BSP and of streaming averaging on the same simulated link.

``python -m benchmarks.flights`` writes ``docs/images/streaming.png``. The model is 4 MB in four
layers, a step 50 ms ± 10 %, links 150 Mbit/s, everything in int8 and in four parts; the whole model
takes 84 ms. Computing, waiting and the link are from the simulator's timeline; landings are where
the workers say that they had one more. The second stage of a sum is paler.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat
from offbeat import Compute, Network, simulate
from offbeat.display.plots import new_figure
from offbeat.simulate.cluster import Span

WORKERS, PARTS, SIDE = 4, 4, 512
FIRST, STEPS = 30, 4  # which steps are shown
STEP_SECONDS = 0.05
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "streaming.png"
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")  # of the parts, told apart by all eyes
COMPUTING, WAITING, BUCKETS = "#c9d3dd", "#d55e00", "#7f7f7f"


@dataclass(frozen=True)
class Flight:
    """A run, in milliseconds since the first step shown of worker 0.

    Attributes:
        spans: Of the timeline, those shown.
        boundaries: When each worker ends each of the steps shown.
        landings: (worker, step shown, parts landed at its end).
    """

    spans: list[Span]
    boundaries: list[list[float]]
    landings: list[tuple[int, int, list[int]]]


def train(strategy: offbeat.strategies.Strategy) -> list[tuple[float, int]]:
    """Seconds since ``attach`` and landings so far, after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(PARTS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    told = []
    with offbeat.attach(model, optimizer, strategy, wire="int8") as sync:
        for _ in range(FIRST + STEPS + 2):
            optimizer.zero_grad()
            model(torch.randn(2, SIDE)).square().mean().backward()
            optimizer.step()
            stats = sync.stats
            seconds = stats.compute_seconds + stats.wait_seconds
            told.append((seconds, stats.details.get("landings", 0)))
    return told


def fly(strategy: offbeat.strategies.Strategy) -> Flight:
    """Run it."""
    run = simulate(
        lambda: train(strategy),
        workers=WORKERS,
        network=Network("150Mbit/s", latency="100us"),
        compute=Compute(STEP_SECONDS, jitter=0.1),
        seed=3,
    )
    began = [
        min(span.start for span in run.timeline if span.rank == rank and span.kind == "compute")
        for rank in range(WORKERS)
    ]
    ends = [[began[rank] + seconds for seconds, _ in told] for rank, told in enumerate(run.results)]
    start = ends[0][FIRST - 1]
    last = start + 1.02 * STEPS * STEP_SECONDS
    landings = []
    for rank, told in enumerate(run.results):
        counts = [landed for _, landed in told]
        for step in range(FIRST - 2, len(told)):
            here = [number % PARTS for number in range(counts[step - 1], counts[step])]
            if here and start + 0.004 <= ends[rank][step] <= last:
                landings.append((rank, step, here))
    return Flight(
        [_moved(span, start) for span in run.timeline if span.start < last],
        [[1000 * (seconds - start) for seconds in one] for one in ends],
        landings,
    )


def _moved(span: Span, start: float) -> Span:
    begin, end = 1000 * (span.start - start), 1000 * (span.end - start)
    return Span(span.rank, span.kind, begin, end, span.what)


def _parts(flight: Flight) -> Iterator[tuple[Span, str, bool]]:
    """What the link of worker 0 carries, but for rolls: alike on all, as the sums are.

    With its colour, and whether it is the second stage of a part.
    """
    begun: set[str] = set()
    for span in flight.spans:
        found = re.match(r"part (\d+)", span.what)
        if span.rank == 0 and span.kind == "transfer" and found:
            yield span, COLOURS[int(found[1])], span.what in begun
            begun.add(span.what)
        elif span.rank == 0 and span.kind == "transfer" and span.what.startswith("mean"):
            yield span, BUCKETS, False


def draw(axes: Any, flight: Flight, top: float, name: str) -> None:
    """One lane a worker below ``top``, and the link below them."""
    axes.text(0, top - 0.55, name, fontsize=15, fontweight="bold", va="center")
    for rank in range(WORKERS):
        for kind, colour in (("compute", COMPUTING), ("wait", WAITING)):
            boxes = [
                (span.start, span.end - span.start)
                for span in flight.spans
                if span.rank == rank and span.kind == kind
            ]
            axes.broken_barh(boxes, (top + rank, 0.8), facecolors=colour)
        for end in flight.boundaries[rank]:
            axes.plot([end, end], [top + rank, top + rank + 0.8], color="white", linewidth=2.5)
    for rank, step, landed in flight.landings:
        for place, part in enumerate(landed):
            axes.plot(
                flight.boundaries[rank][step] + 3.6 * (place - (len(landed) - 1) / 2),
                top + rank + 0.4,
                marker="v",
                markersize=11,
                color=COLOURS[part],
                markeredgecolor="white",
            )
    for span, colour, second in _parts(flight):
        box, paler = [(span.start, span.end - span.start)], 0.5 if second else 1.0
        axes.broken_barh(
            box, (top + WORKERS, 0.8), facecolors=colour, edgecolor="white", alpha=paler
        )


def main() -> None:
    """Draw both, one below the other."""
    figure, axes = new_figure(6.4, 7.6, dpi=150)
    lanes = WORKERS + 2.2
    streaming = offbeat.StreamingAveraging(parts=PARTS)
    for place, (name, strategy) in enumerate(
        {"BSP": offbeat.BSP(), "StreamingAveraging": streaming}.items()
    ):
        draw(axes, fly(strategy), place * lanes, name)
    shown = [("computing", COMPUTING), ("waiting", WAITING), ("gradients", BUCKETS)]
    shown += [(f"part {part}", colour) for part, colour in enumerate(COLOURS)]
    handles = [axes.broken_barh([], (0, 0), facecolors=colour) for _, colour in shown]
    handles += axes.plot([], [], "v", color="black", markersize=11)
    names = [*(label for label, _ in shown), "landing"]
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=12)
    axes.set_xlim(0, 1000 * 1.02 * STEPS * STEP_SECONDS)
    axes.set_ylim(2 * lanes - 1.1, -1)
    ticks = [place * lanes + lane + 0.4 for place in range(2) for lane in range(WORKERS + 1)]
    labels = [*(f"worker {rank}" for rank in range(WORKERS)), "the link"] * 2
    axes.set_yticks(ticks, labels, fontsize=12)
    axes.tick_params(axis="x", labelsize=12)
    axes.set_xlabel("milliseconds (simulated)", fontsize=12)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.savefig(IMAGE)


if __name__ == "__main__":
    main()
