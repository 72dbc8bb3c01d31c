"""The result of a simulated run: duration, results, timeline, and their display."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.display.plots import new_figure
from offbeat.simulate.cluster import SimulatedCluster, Span
from offbeat.simulate.compute import Compute
from offbeat.simulate.network import Network
from offbeat.telemetry import Stats
from offbeat.units import show_seconds


@dataclass(frozen=True, repr=False)
class Simulation:
    """Result of a simulated run. All times are virtual seconds, from the simulator's clock.

    Attributes:
        seconds: Time at which the last worker finished.
        results: Return value of ``worker()``, by rank; None for a killed worker.
        stats: ``Stats`` of the last synchronizer of each worker, by rank; None for a worker without
            a synchronizer.
        idle: Waiting / (waiting + computing), over all workers and the whole run, including set-up
            and evaluation. ``stats[n].idle`` is the same for the training of worker n.
        timeline: Activities of all workers, in the order of their ends.
        sent_bytes: Bytes that each worker sent, without those that stayed inside its node.
        configuration: Workers, network, compute and seed. A function is represented by its name, so
            that JSON can represent them.
    """

    seconds: float
    results: list[Any]
    stats: list[Stats | None]
    idle: float
    timeline: list[Span]
    sent_bytes: list[float]
    configuration: dict[str, Any]

    @classmethod
    def of(cls, cluster: SimulatedCluster) -> "Simulation":
        """Return the result of a finished run."""
        ends = [float(worker.finished_seconds or 0.0) for worker in cluster.workers.all]
        spans = sorted(cluster.spans, key=lambda span: (span.end, span.start, span.rank))
        spent = {
            kind: sum(s.end - s.start for s in spans if s.kind == kind)
            for kind in ("compute", "wait")
        }
        busy = spent["compute"] + spent["wait"]
        sent = [0.0] * len(ends)
        for span in spans:
            if not span.inside:
                sent[span.rank] += span.sent
        stats: list[Stats | None] = []
        for worker in cluster.workers.all:
            total = cluster.totals[worker.rank]() if worker.rank in cluster.totals else None
            stats.append(total if isinstance(total, Stats) else None)
        return cls(
            seconds=max(ends),
            results=[worker.result for worker in cluster.workers.all],
            stats=stats,
            idle=spent["wait"] / busy if busy else 0.0,
            timeline=spans,
            sent_bytes=sent,
            configuration={
                "workers": cluster.size,
                "network": _described(cluster.network),
                "compute": _described(cluster.compute),
                "seed": cluster.seed,
            },
        )

    def to_json(self) -> str:
        """Return all attributes except ``results`` as JSON. Equal runs give equal text."""
        return json.dumps(
            {
                "simulated": True,
                "configuration": self.configuration,
                "seconds": self.seconds,
                "idle": self.idle,
                "stats": [None if each is None else each.to_dict() for each in self.stats],
                "sent_bytes": self.sent_bytes,
                "timeline": [vars(span) for span in self.timeline],
            }
        )

    def plot(self, path: str | Path, *, start: float = 0.0, end: float | None = None) -> None:
        """Draw the timeline into an image file: one lane per worker, with its transfers below.

        Args:
            path: Path of the file. Its suffix selects the format, for example ".png".
            start: First virtual second shown.
            end: Last virtual second shown; None is the end of the run.

        Raises:
            ImportError: matplotlib is not installed.
        """
        last = self.seconds if end is None else end
        workers = len(self.results)
        figure, axes = new_figure(10, 1 + 0.5 * workers, dpi=120)
        lanes = {"compute": (0.0, 0.5), "wait": (0.0, 0.5), "transfer": (0.52, 0.2)}
        colours = {"compute": "tab:blue", "wait": "tab:red", "transfer": "tab:grey"}
        for kind, (offset, height) in lanes.items():
            for rank in range(workers):
                shown = [
                    (span.start, span.end - span.start)
                    for span in self.timeline
                    if span.rank == rank and span.kind == kind
                    if span.end >= start and span.start <= last
                ]
                label = kind if rank == 0 else None
                box = (rank + offset, height)
                axes.broken_barh(shown, box, facecolors=colours[kind], label=label)
        axes.set_xlim(start, last)
        axes.set_ylim(workers, -0.3)
        axes.set_yticks([rank + 0.3 for rank in range(workers)], [str(r) for r in range(workers)])
        axes.set(xlabel="virtual seconds", ylabel="worker", title="simulated")
        axes.legend(loc="upper right", ncols=3, fontsize="small")
        figure.savefig(path)

    def __repr__(self) -> str:
        """Return workers, duration and idle share. The timeline may have thousands of entries."""
        workers, seconds = len(self.results), show_seconds(self.seconds)
        return f"<Simulation: {workers} workers, {seconds} of virtual time, idle {self.idle:.0%}>"


def _described(settings: Network | Compute) -> dict[str, Any]:
    """Return all settings. The name of a function takes its place."""
    return {
        name: getattr(value, "__qualname__", type(value).__name__) if callable(value) else value
        for name, value in vars(settings).items()
    }
