"""A cluster in virtual time, for the same jobs that run on real ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from offbeat.lab.train import Event, Job, train_worker
from offbeat.simulate import Compute, Network, Simulation, simulate
from offbeat.units import show_bandwidth, show_seconds


@dataclass
class VirtualCluster:
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

    def run(self, job: Job, on_event: Callable[[Event], None]) -> Simulation:
        """Run ``job`` with as many simulated workers; the events of rank 0 go to ``on_event``."""
        self.last = simulate(
            partial(train_worker, job, on_event),
            workers=job.workers,
            network=self.network,
            compute=self.compute,
            seed=job.seed,
        )
        return self.last
