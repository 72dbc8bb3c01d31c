"""Timeline of four steps of BSP and of streaming averaging on the same simulated links.

``python -m benchmarks.timeline`` writes ``docs/images/streaming.png``. The model has 4 MB in four
layers; a step takes 50 ms ± 10 %; on links of 150 Mbit/s, in int8 and four parts, the mean of the
model takes 84 ms. Computing, waiting and transfers are from the simulator's timeline; landings are
from the workers' statistics. The second stage of a sum is paler.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import offbeat
from benchmarks.harness import IMAGES
from offbeat import Compute, Network, simulate
from offbeat.extend import new_figure
from offbeat.simulate.cluster import Span

WORKERS, PARTS, SIDE = 4, 4, 512
FIRST, STEPS = 30, 4  # first step that is shown, and how many
STEP_SECONDS = 0.05
IMAGE = IMAGES / "streaming.png"
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
)  # of the parts; safe for colour-blind readers
COMPUTING, WAITING, BUCKETS = "#c9d3dd", "#d55e00", "#7f7f7f"


@dataclass(frozen=True)
class Timeline:
    """A run, in milliseconds since the start of worker 0's first shown step.

    Attributes:
        spans: Spans of the simulator's timeline up to the last shown step.
        boundaries: End of each step of each worker.
        landings: (worker, step, parts that land at its end).
    """

    spans: list[Span]
    boundaries: list[list[float]]
    landings: list[tuple[int, int, list[int]]]


def train(strategy: offbeat.strategies.Strategy) -> list[tuple[float, int]]:
    """Train; return the seconds since ``attach`` and the landings so far, after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(PARTS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = []
    with offbeat.attach(model, optimizer, strategy, wire="int8") as sync:
        for _ in range(FIRST + STEPS + 2):
            optimizer.zero_grad()
            model(torch.randn(2, SIDE)).square().mean().backward()
            optimizer.step()
            stats = sync.stats
            seconds = stats.compute_seconds + stats.wait_seconds
            steps.append((seconds, stats.details.get("landings", 0)))
    return steps


def record(strategy: offbeat.strategies.Strategy) -> Timeline:
    """Simulate a strategy."""
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
    ends = [
        [began[rank] + seconds for seconds, _ in steps] for rank, steps in enumerate(run.results)
    ]
    start = ends[0][FIRST - 1]
    last = start + 1.02 * STEPS * STEP_SECONDS
    landings = []
    for rank, steps in enumerate(run.results):
        counts = [landed for _, landed in steps]
        for step in range(FIRST - 2, len(steps)):
            here = [number % PARTS for number in range(counts[step - 1], counts[step])]
            if here and start + 0.004 <= ends[rank][step] <= last:
                landings.append((rank, step, here))
    return Timeline(
        [_moved(span, start) for span in run.timeline if span.start < last],
        [[1000 * (seconds - start) for seconds in one] for one in ends],
        landings,
    )


def _moved(span: Span, start: float) -> Span:
    begin, end = 1000 * (span.start - start), 1000 * (span.end - start)
    return Span(span.rank, span.kind, begin, end, span.what)


def transfers(timeline: Timeline) -> Iterator[tuple[Span, str, bool]]:
    """Yield the transfers of worker 0 without votes, with colour and True for a second stage.

    They are the same on all workers. A message of several parts is divided equally among them.
    """
    begun: set[str] = set()
    for span in timeline.spans:
        found = re.match(r"launch (\d+) \(part ([\d, ]+)\)", span.what)
        if span.rank == 0 and span.kind == "transfer" and found:
            parts = [int(part) for part in found[2].split(", ")]
            seconds = (span.end - span.start) / len(parts)
            for place, part in enumerate(parts):
                start = span.start + place * seconds
                one = Span(span.rank, span.kind, start, start + seconds, span.what)
                yield one, COLOURS[part], found[1] in begun
            begun.add(found[1])
        elif span.rank == 0 and span.kind == "transfer" and span.what.startswith("mean"):
            yield span, BUCKETS, False


def draw(axes: Any, timeline: Timeline, top: float, name: str) -> None:
    """Draw a lane for each worker below ``top``, and the link below them."""
    axes.text(0, top - 0.55, name, fontsize=15, fontweight="bold", va="center")
    for rank in range(WORKERS):
        for kind, colour in (("compute", COMPUTING), ("wait", WAITING)):
            boxes = [
                (span.start, span.end - span.start)
                for span in timeline.spans
                if span.rank == rank and span.kind == kind
            ]
            axes.broken_barh(boxes, (top + rank, 0.8), facecolors=colour)
        for end in timeline.boundaries[rank]:
            axes.plot([end, end], [top + rank, top + rank + 0.8], color="white", linewidth=2.5)
    for rank, step, landed in timeline.landings:
        for place, part in enumerate(landed):
            axes.plot(
                timeline.boundaries[rank][step] + 3.6 * (place - (len(landed) - 1) / 2),
                top + rank + 0.4,
                marker="v",
                markersize=11,
                color=COLOURS[part],
                markeredgecolor="white",
            )
    for span, colour, second in transfers(timeline):
        box, paler = [(span.start, span.end - span.start)], 0.5 if second else 1.0
        axes.broken_barh(
            box, (top + WORKERS, 0.8), facecolors=colour, edgecolor="white", alpha=paler
        )


def main() -> None:
    """Draw both strategies, one below the other."""
    figure, axes = new_figure(6.4, 7.6, dpi=150)
    lanes = WORKERS + 2.2
    streaming = offbeat.StreamingAveraging(parts=PARTS)
    for place, (name, strategy) in enumerate(
        {"BSP": offbeat.BSP(), "Streaming averaging": streaming}.items()
    ):
        draw(axes, record(strategy), place * lanes, name)
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
