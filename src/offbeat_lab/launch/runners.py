"""Runners: ways to run a job's workers, on real processes or in the simulator."""

import importlib
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat import Compute, Network, OffbeatError, Simulation, simulate
from offbeat.extend import Join, Kill, show_bandwidth, show_seconds
from offbeat_lab.evaluation import Snapshot, gather
from offbeat_lab.events import Event
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.cluster import Cluster, require_shapable
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.launch.elastic import evaluate_kept
from offbeat_lab.launch.processes import run_job
from offbeat_lab.methods.ideal import summed_speeds
from offbeat_lab.methods.registry import is_ideal, require_virtual
from offbeat_lab.scenario import Scenario
from offbeat_lab.train import Worker, choose_backend, planned_times, worker_device

_IDEAL_NETWORK = Network(1e30, latency=0.0)


class Runner(Protocol):
    """Runs jobs. ``str(runner)`` describes the network between the workers."""

    @property
    def simulated(self) -> bool:
        """True if all seconds are virtual time."""

    @property
    def machine(self) -> str:
        """Description of the hardware."""

    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        """Run ``job`` to its end, and pass the events of rank 0 to ``on_event``."""


class Loopback(Runner):
    """Runs each worker as a process on this machine, connected by the loopback interface."""

    simulated = False

    def __str__(self) -> str:
        return "loopback"

    @property
    @override
    def machine(self) -> str:
        return describe_machine()

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        if is_ideal(job.strategy) and Scenario.from_json(job.scenario).elastic:
            # No process dies: one worker trains, at the summed speed of the workers alive.
            assert job.step_seconds is not None
            compute = planned_times(job, job.step_seconds)
            VirtualCluster(_IDEAL_NETWORK, compute).run(job, on_event)
        else:
            run_job(job, on_event)


class ShapedLinks(Cluster, Loopback):
    """Runs each worker as a process on a node of an emulated ``Cluster`` with rate-limited links.

    The reference ``ideal`` runs over loopback instead, because its training time excludes
    communication.

    Args:
        workers: Number of nodes (1 to 200).
        bits_per_second: Rate of each link in each direction.
        changes: Rates in bits per second of single links, by the time from which they hold, in
            seconds since the start of the training, and by node.
    """

    def __init__(
        self,
        workers: int,
        bits_per_second: float,
        changes: Mapping[float, Mapping[int, float]] = {},
    ) -> None:
        super().__init__(workers, bits_per_second)
        for rates in changes.values():
            for rate in rates.values():
                require_shapable(rate)
        self._changes = changes

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        if is_ideal(job.strategy):
            Loopback.run(self, job, on_event)
            return
        changes = [
            (seconds, partial(self.reshape, rate, [node]))
            for seconds, rates in self._changes.items()
            for node, rate in rates.items()
        ]
        try:
            run_job(job, on_event, self, changes)
        finally:
            if changes:
                self.reshape(self.bits_per_second)


class ExternalLauncher(Runner):
    """Runs jobs on processes that torchrun or another launcher has started, this one included.

    A context manager: entering connects the processes. Rank 0 decides which jobs are run. Each
    other rank takes part in them while it enters its context, until rank 0 leaves its own.

    Args:
        timeout_seconds: Time limit of the connection, and of the operations between the processes.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds

    simulated = False

    def __str__(self) -> str:
        launcher = "torchrun" if dist.is_torchelastic_launched() else "external launcher"
        return f"{launcher}, {dist.get_backend()}"

    @property
    @override
    def machine(self) -> str:
        hosts = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device = worker_device()
        name = describe_machine()
        if device.type == "cuda":
            name += f", {torch.cuda.get_device_name(device)}"
        return name if hosts < 2 else f"{name}, {hosts} machines"

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        _from_rank_0(asdict(job))
        Worker(job, on_event).run()

    def __enter__(self) -> Self:
        # Torch imports this module with the first optimizer. If the process group existed by then,
        # default arguments in the module would keep it, so destroy_process_group would not end
        # gloo's threads. One that frees a tensor while Python exits aborts the process.
        importlib.import_module("torch.distributed.nn")
        limit, environment = timedelta(seconds=self._timeout_seconds), os.environ
        try:
            dist.init_process_group(choose_backend(), timeout=limit)
        except dist.DistError as error:
            raise OffbeatError(
                f"rank {environment['RANK']} of {environment['WORLD_SIZE']} could not connect to "
                f"the others that the launcher has started, at {environment.get('MASTER_ADDR')}:"
                f"{environment.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT) within --timeout "
                f"{self._timeout_seconds:g} s: {str(error).strip().splitlines()[0]}"
            ) from None
        try:
            share_cores(int(environment.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
            while dist.get_rank() > 0 and (values := _from_rank_0(None)) is not None:
                Worker(Job(**values), lambda event: None).run()
        except BaseException:
            dist.destroy_process_group()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            if dist.get_rank() == 0 and kind is None:
                _from_rank_0(None)
        finally:
            dist.destroy_process_group()


def _from_rank_0(value: Any) -> Any:
    """Return rank 0's ``value``. A collective."""
    return gather(value, worker_device(), "the next run of a comparison")[0]


@dataclass
class VirtualCluster(Runner):
    """Runs jobs on simulated workers.

    Attributes:
        network: Simulated network between the workers.
        compute: Computing time of the workers' steps.
        last: Simulation of the last job; None before the first.
    """

    network: Network
    compute: Compute
    last: Simulation | None = None

    simulated = True
    machine = "virtual time"

    def __str__(self) -> str:
        network, nodes = self.network, ""
        if network.inside is not None and network.inside_latency is not None:
            within = show_bandwidth(float(network.inside))
            within += f", {show_seconds(float(network.inside_latency))} latency"
            nodes = f" between nodes of {network.workers_per_node} ({within})"
        rate = show_bandwidth(network.bits_per_second(0, 0.0))
        latency, step = (show_seconds(float(each)) for each in (network.latency, self.compute.step))
        return f"{rate}{nodes}, {latency} latency, {step} a step"

    @override
    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        require_virtual(job.strategy)
        ideal, compute, workers = is_ideal(job.strategy), self.compute, job.workers
        scenario = Scenario.from_json(job.scenario)
        processes = scenario.processes(workers)
        elastic, kept = scenario.elastic and not ideal, list[Snapshot]()
        arguments: dict[str, Any] = {"keep": kept.append} if elastic else {}
        joins = [Join(at=process.start) for process in processes[workers:]]
        deaths = [
            Kill(worker=rank, at=process.end)
            for rank, process in enumerate(processes)
            if process.end < math.inf
        ]
        if ideal and job.partition == LEASED:  # one worker trains in place of all
            arguments["ideal_steps"] = summed_speeds(compute, processes, job.seed)
            compute, workers = Compute(compute.step), 1
        self.last = simulate(
            lambda: Worker(job, on_event, **arguments).run(),
            workers=workers,
            network=_IDEAL_NETWORK if ideal else self.network,
            compute=compute,
            seed=job.seed,
            faults=[*joins, *deaths] if elastic else [],
        )
        if elastic:
            evaluate_kept(job, kept, [*filter(None, self.last.stats)], on_event)


def describe_machine() -> str:
    """Return processor and number of cores, such as ``"Xeon Platinum 8481C, 2 cores"``."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"
