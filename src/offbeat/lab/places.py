"""Where a job can run: on this machine's loopback, on its shaped links, or in virtual time."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from offbeat.lab.cluster import Cluster
from offbeat.lab.events import Event
from offbeat.lab.job import Job
from offbeat.lab.launch import Nodes, run_job
from offbeat.lab.train import train_worker
from offbeat.simulate import Compute, Network, Simulation, simulate
from offbeat.units import show_bandwidth, show_seconds


class Place(Protocol):
    """Where a job runs. As text it says what joins the workers."""

    @property
    def simulated(self) -> bool:
        """Whether all seconds are virtual."""

    @property
    def machine(self) -> str:
        """What computes."""

    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        """Run ``job`` to its end; the events of rank 0 go to ``on_event``."""


class _Processes(Place, Nodes):
    """A place where workers are processes of this machine."""

    simulated = False

    @property
    @override
    def machine(self) -> str:
        return describe_machine()

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        run_job(job, on_event, self)


class Loopback(_Processes):
    """Worker processes joined by the loopback interface, which no slow link comes near."""

    interface = "lo"

    def __str__(self) -> str:
        return "loopback"

    @override
    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        return list(argv)


class ShapedLinks(Cluster, _Processes):
    """Worker processes on the nodes of a ``Cluster``, one each."""


@dataclass
class VirtualCluster(Place):
    """Simulated workers behind ``network`` whose steps take ``compute``.

    Attributes:
        last: The last run.
    """

    network: Network
    compute: Compute
    last: Simulation | None = None

    def __str__(self) -> str:
        rate, latency = show_bandwidth(8 * self.network.up(0)), self.network.latency
        step = self.compute.step
        return f"{rate}, {show_seconds(latency)} latency, {show_seconds(step)} a step"

    @property
    @override
    def simulated(self) -> bool:
        return True

    @property
    @override
    def machine(self) -> str:
        return "virtual time"

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        self.last = simulate(
            partial(train_worker, job, on_event),
            workers=job.workers,
            network=self.network,
            compute=self.compute,
            seed=job.seed,
        )


def describe_machine() -> str:
    """Processor and number of cores, as in ``"Xeon Platinum 8481C, 2 cores"``."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"
