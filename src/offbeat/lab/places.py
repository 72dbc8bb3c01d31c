"""Where a job can run: on loopback, on shaped links, on a launcher's processes, in virtual time."""

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat.lab.cluster import Cluster
from offbeat.lab.evaluation import MAX_EVALUATIONS, gather
from offbeat.lab.events import Evaluation, Event, Start, Step
from offbeat.lab.job import Job
from offbeat.lab.launch import Nodes, run_job
from offbeat.lab.methods.registry import is_ideal, require_virtual
from offbeat.lab.train import own_device, train_worker
from offbeat.simulate import Compute, Network, Simulation, simulate
from offbeat.units import show_bandwidth, show_seconds

_FREE = Network(1e30, latency=0.0)


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
    def command(self, rank: int, argv: Sequence[str]) -> list[str] | None:
        return None


class ShapedLinks(Cluster, _Processes):
    """Worker processes on the nodes of a ``Cluster``, one each.

    The ideal runs over loopback: what its network costs does not count, and it takes all gradients.

    Args:
        workers: Number of nodes (1 to 200).
        bits_per_second: Rate of each link, each way.
        later: Their rate in the second half of a run's steps, as rank 0 takes them; None: the same.
    """

    def __init__(self, workers: int, bits_per_second: float, later: float | None = None) -> None:
        super().__init__(workers, bits_per_second)
        self._later = later

    @override
    def __str__(self) -> str:
        after = "" if self._later is None else f", {show_bandwidth(self._later)} in the second half"
        return f"{super().__str__()}{after}"

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        if is_ideal(job.strategy):
            run_job(job, on_event, Loopback())
            return
        if self._later is None:
            run_job(job, on_event, self)
            return
        try:
            run_job(job, at_half(partial(self.reshape, self._later), on_event), self)
        finally:
            self.reshape(self.bits_per_second)


def at_half(act: Callable[[], None], on_event: Callable[[Event], None]) -> Callable[[Event], None]:
    """``on_event``, with ``act`` called once, before the event of the step in the middle."""
    half = math.inf

    def listen(event: Event) -> None:
        nonlocal half
        match event:
            case Start():
                half = event.steps / 2
            case Step() | Evaluation() if event.step >= half:
                half = math.inf
                act()
        on_event(event)

    return listen


class Launched(Place):
    """The worker processes that a launcher has started, of which this is one.

    The default process group must exist. Rank 0 runs jobs; the others ``follow`` it until it says
    ``end``.

    Args:
        launcher: Its name, for captions.
    """

    simulated = False

    def __init__(self, launcher: str = "torchrun") -> None:
        self._launcher = launcher

    def __str__(self) -> str:
        return f"{self._launcher}, {dist.get_backend()}"

    @property
    @override
    def machine(self) -> str:
        hosts = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device = own_device()
        name = describe_machine()
        if device.type == "cuda":
            name += f", {torch.cuda.get_device_name(device)}"
        return name if hosts < 2 else f"{name}, {hosts} machines"

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        _announce(asdict(job))
        train_worker(job, on_event)

    def follow(self) -> None:
        """Take part in the jobs of rank 0."""
        while (told := _announce(None)) is not None:
            train_worker(Job(**told), lambda event: None)

    def end(self) -> None:
        """Let the others go. Not after a job that has failed: they are no longer listening."""
        _announce(None)


def _announce(own: Any) -> Any:
    """What rank 0 says."""
    return gather(own, own_device(), "the next run of a comparison")[0]


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
        step, inside, late = self.compute.step, self.network.inside, self.network.inside_latency
        nodes = ""
        if inside is not None and late is not None:
            within = f"{show_bandwidth(inside)}, {show_seconds(late)} latency"
            nodes = f" between nodes of {self.network.workers_per_node} ({within})"
        return f"{rate}{nodes}, {show_seconds(latency)} latency, {show_seconds(step)} a step"

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
        require_virtual(job.strategy)
        if job.evaluations is None:  # they are free here, and two runs are the same
            job = replace(job, evaluations=MAX_EVALUATIONS)
        self.last = simulate(
            partial(train_worker, job, on_event),
            workers=job.workers,
            network=_FREE if is_ideal(job.strategy) else self.network,
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
