"""What a simulated run took and gave."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.plots import new_figure
from offbeat.simulate.cluster import SimulatedCluster, Span
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.telemetry import Stats


@dataclass(frozen=True)
class Simulation:
    """A simulated run. All times are virtual seconds.

    Attributes:
        seconds: When the last worker ended.
        results: What ``worker()`` returned, by rank.
        stats: The ``Stats`` of each worker's (last) synchronizer; None without one.
        idle: Waiting / (waiting + computing), over all workers and the whole run, set-up and
            evaluation included (``stats[n].idle`` is that of the training).
        timeline: Who computed, waited and sent, when: in the order in which it ended.
        sent_bytes: Bytes each worker put on the wire.
        configuration: Workers, network, compute and seed, as plain values.
    """

    seconds: float
    results: list[Any]
    stats: list[Stats | None]
    idle: float
    timeline: list[Span]
    sent_bytes: list[float]
    configuration: dict[str, Any]

    @classmethod
    def of(
        cls, cluster: SimulatedCluster, attached: Sequence[Sequence[SimulatedCommunicator]]
    ) -> "Simulation":
        """Collect a finished run, and verify what must hold in every one."""
        ends = [float(worker.finished_seconds or 0.0) for worker in cluster.workers.all]
        spans = sorted(cluster.spans, key=lambda span: (span.end, span.start, span.rank))
        _verify(spans, [worker.started_seconds for worker in cluster.workers.all], ends)
        spent = {
            kind: sum(s.end - s.start for s in spans if s.kind == kind)
            for kind in ("compute", "wait")
        }
        busy = spent["compute"] + spent["wait"]
        stats: list[Stats | None] = []
        for communicators in attached:
            totals = [total() for one in communicators for total in one.host.totals]
            stats.append(totals[-1] if totals and isinstance(totals[-1], Stats) else None)
        return cls(
            seconds=max(ends),
            results=[worker.result for worker in cluster.workers.all],
            stats=stats,
            idle=spent["wait"] / busy if busy else 0.0,
            timeline=spans,
            sent_bytes=[sum(s.sent for s in spans if s.rank == r) for r in range(len(ends))],
            configuration={
                "workers": cluster.size,
                "network": cluster.network.to_dict(),
                "compute": cluster.compute.to_dict(),
                "seed": cluster.seed,
            },
        )

    def to_json(self) -> str:
        """Everything but the results, as JSON; the same bytes for the same run."""
        return json.dumps(
            {
                "simulated": True,
                "configuration": self.configuration,
                "seconds": self.seconds,
                "idle": self.idle,
                "stats": [None if one is None else one.to_dict() for one in self.stats],
                "sent_bytes": self.sent_bytes,
                "timeline": [vars(span) for span in self.timeline],
            }
        )

    def plot(self, path: str | Path, *, start: float = 0.0, end: float | None = None) -> None:
        """Draw one lane a worker (computing, waiting, and the network below) as a PNG.

        Args:
            path: Where to.
            start: First virtual second shown.
            end: Last one; None is the end of the run.

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


def _verify(spans: Sequence[Span], starts: Sequence[float], ends: Sequence[float]) -> None:
    """Time never runs backwards, computing and waiting fill it, and no byte is lost.

    A breach is a mistake of the simulator, so these are assertions.
    """
    for rank, (clock, end) in enumerate(zip(starts, ends, strict=True)):
        for span in spans:
            if span.rank == rank and span.kind != "transfer":
                assert abs(span.start - clock) <= 1e-9 * max(1.0, clock), (rank, clock, span)
                assert span.end >= span.start
                clock = span.end
        assert abs(clock - end) <= 1e-9 * max(1.0, end), (rank, clock, end)
    sent, received = sum(s.sent for s in spans), sum(s.received for s in spans)
    assert abs(sent - received) <= 1e-6 * max(1.0, sent), (sent, received)
