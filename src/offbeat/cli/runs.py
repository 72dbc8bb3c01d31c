"""The commands that train: ``offbeat train``, ``simulate`` and ``compare``."""

import contextlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from offbeat.arguments import require_integer
from offbeat.cli.checks import check_method, parse_lr_scales, refuse_twice, refuse_virtual
from offbeat.cli.outputs import require_file, require_folder, require_picture
from offbeat.cli.view import Bar, console, show_narrow
from offbeat.errors import OffbeatError
from offbeat.lab import compare as comparison
from offbeat.lab import report, slurm
from offbeat.lab.job import Job
from offbeat.lab.measure import measure_recipe
from offbeat.lab.methods.registry import require_virtual
from offbeat.lab.places import Launched, Loopback, Place, ShapedLinks, VirtualCluster
from offbeat.lab.results import Result
from offbeat.lab.train import choose_backend, share_cores
from offbeat.lab.uneven import parse_slow
from offbeat.simulate import Compute, Network
from offbeat.units import parse_bandwidth, show_seconds

_MOST_SEEDS = 1000


def train(job: Job, bandwidth: str | None) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of a launcher."""
    job = _sized(job)

    def check() -> None:
        _check_records(job)
        job.check()

    with _real(job, bandwidth, check) as place:
        if place is None:
            return
        with Bar() as bar:
            bar.start(job)
            result = comparison.run_and_record(job, bar.event, place)
        _show([result])


def simulate(
    job: Job,
    bandwidth: str,
    latency: str,
    step_time: str | None,
    jitter: float,
    workers_per_node: int,
    inside: str | None,
    inside_latency: str | None,
    timeline: Path | None,
    as_json: Path | None,
) -> None:
    """Train a recipe on simulated workers in this process: real training, virtual seconds."""
    _refuse_launcher("offbeat simulate")
    require_virtual(job.strategy)
    require_picture("--timeline", timeline)
    require_file("--json", as_json)
    if timeline is not None and timeline == as_json:
        raise ValueError(f"--timeline and --json are the same file: {timeline}")
    job = replace(job, workers_per_node=workers_per_node)
    job.check()
    network = Network(
        bandwidth,
        latency=latency,
        workers_per_node=workers_per_node,
        inside=inside,
        inside_latency=inside_latency,
    )
    place = _virtual(job, network, step_time, jitter)
    for path in (timeline, as_json):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    with Bar() as bar:
        bar.start(job)
        result = comparison.run_and_record(job, bar.event, place)
    _show([result])
    assert place.last is not None
    if timeline is not None:
        place.last.plot(timeline)
        _say_where("timeline", timeline)
    if as_json is not None:
        as_json.write_text(place.last.to_json(), encoding="utf-8")
        _say_where("json    ", as_json)


def compare(
    job: Job,
    strategy: list[str],
    seeds: int,
    bandwidth: str | None,
    output: Path | None,
    simulated: bool,
    latency: str,
    step_time: str | None,
    jitter: float,
    workers_per_node: int,
    inside: str | None,
    inside_latency: str | None,
    slow: str | None,
    lr_scale: str,
    turns: bool,
) -> None:
    """Run strategies one after the other under the same seeds; write table, plot and report."""
    require_integer("seeds", seeds, least=1)
    if seeds > _MOST_SEEDS:
        raise ValueError(f"seeds must be at most {_MOST_SEEDS}, got {seeds}")
    scales = parse_lr_scales(lr_scale)
    job = replace(_sized(job), lr_scale=scales[0], jitter=jitter, slow=slow)
    job = replace(job, measure_links=not simulated, workers_per_node=workers_per_node)
    job = replace(job, measure_alone=turns)
    if simulated:
        if turns:
            raise ValueError("--turns: no speed varies in virtual time, leave it away")
        _refuse_launcher("--simulate")

    def check() -> None:
        task = None
        for scale in scales:
            refuse_twice(replace(job, lr_scale=scale), strategy)
        if not simulated:
            refuse_virtual(
                latency=latency,
                step_time=step_time,
                workers_per_node=workers_per_node,
                inside=inside,
                inside_latency=inside_latency,
            )
        if output is not None:
            require_folder("--output", output)
        for text in strategy:
            for scale in scales:
                one = replace(job, lr_scale=scale)
                if simulated:
                    require_virtual(one.under(text).strategy)
                task = check_method(one, text, task)

    folder = output
    if folder is None:
        folder = Path("runs", f"{_file_name(job.recipe)}-{time.strftime('%Y%m%d-%H%M%S')}")
    with contextlib.ExitStack() as stack:
        place: Place | None
        if simulated:
            check()
            network = Network(
                "1Gbit/s" if bandwidth is None else bandwidth,
                latency=latency,
                workers_per_node=workers_per_node,
                inside=inside,
                inside_latency=inside_latency,
            )
            place = _virtual(job, network, step_time, jitter, slow)
        else:
            place = stack.enter_context(_real(job, bandwidth, check))
            if place is None:
                return
        with Bar(comparison.count_runs(job, strategy, seeds, scales)) as bar:
            results = comparison.compare(
                job,
                strategy,
                seeds=seeds,
                lr_scales=scales,
                place=place,
                output=folder,
                on_start=bar.start,
                on_event=bar.event,
                on_kept=bar.keep,
                command=_command(),
            )
        _show(results)
        written = report.write_report(results, folder)
        for what, path in written.items():
            _say_where(f"{what:7}", path)
        if "plot" not in written:
            console.print(
                "plot    none: it needs matplotlib, pip install 'offbeat[plot]'", markup=False
            )


def _check_records(job: Job) -> None:
    if job.log is not None:
        require_file("--records", Path(job.log))


def _command() -> str:
    """What was typed, to be typed again."""
    program = ["offbeat"]
    if _is_launched():
        local = os.environ.get("LOCAL_WORLD_SIZE", "1")
        program = ["torchrun", "--nproc-per-node", local, "-m", "offbeat.cli"]
        if slurm.is_task(os.environ):
            program = ["srun", "--ntasks", os.environ["WORLD_SIZE"], "offbeat"]
    return shlex.join([*program, *sys.argv[1:]])


def _file_name(recipe: str) -> str:
    """Of a folder for the results of ``recipe``."""
    return re.sub(r"[^\w-]+", "-", recipe.rpartition("/")[2].replace(".py", "")).strip("-")


def _is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _refuse_launcher(what: str) -> None:
    if _is_launched():
        raise ValueError(f"{what} simulates all workers in one process: start it once, by itself")


def _sized(job: Job) -> Job:
    """The job with as many workers as a launcher has started, if one has."""
    if not _is_launched():
        return job
    started = int(os.environ["WORLD_SIZE"])
    if job.workers not in (started, Job.workers):
        raise ValueError(
            f"--workers {job.workers}: the launcher has started {started}, leave the option away"
        )
    return replace(job, workers=started)


@contextlib.contextmanager
def _real(job: Job, bandwidth: str | None, check: Callable[[], object]) -> Iterator[Place | None]:
    """Where real processes run jobs like this, once ``check`` has found no mistake.

    Under torchrun or srun that is where this process is one, and None on all but rank 0: they have
    taken part in all of its runs.
    """
    if not _is_launched():
        check()
        with _links(bandwidth, job.workers) as links:
            yield links
        return
    if bandwidth is not None:
        raise ValueError("--bandwidth shapes the links of processes that offbeat starts itself")
    if os.environ["RANK"] == "0":
        check()
    limit = timedelta(seconds=job.timeout_seconds)
    launcher = "Slurm" if slurm.is_task(os.environ) else "torchrun"
    try:
        dist.init_process_group(choose_backend(), timeout=limit)
    except dist.DistError as error:
        raise OffbeatError(
            f"rank {os.environ['RANK']} of {job.workers} did not meet the others that {launcher} "
            f"has started, at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            f"(MASTER_ADDR, MASTER_PORT) within --timeout {job.timeout_seconds:g}: "
            f"{str(error).strip().splitlines()[0]}"
        ) from None
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", job.workers))
    share_cores(slurm.sharing(os.environ, workers))
    place = Launched(launcher)
    try:
        if dist.get_rank() > 0:
            place.follow()
            yield None
        else:
            console.print(f"joined the {job.workers} processes that {launcher} has started")
            yield place
            place.end()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _links(bandwidth: str | None, workers: int) -> Iterator[Place]:
    """Where the processes run: behind shaped links, if a bandwidth is given."""
    if bandwidth is None:
        yield Loopback()
        return
    with ShapedLinks(workers, parse_bandwidth(bandwidth)) as nodes:
        yield nodes


def _virtual(
    job: Job,
    network: Network,
    step_time: str | None,
    jitter: float,
    slow: str | None = None,
) -> VirtualCluster:
    told = "1s" if step_time is None else step_time
    slowdown = parse_slow(slow, job.workers)
    compute = Compute(
        told, jitter=jitter, slowdown=slowdown
    )  # mistakes show before anything is measured
    if step_time is None:
        _, seconds = measure_recipe(job.recipe, data=job.setup().data)
        console.print(f"a step of {job.recipe} takes {show_seconds(seconds)} here", highlight=False)
        compute = Compute(seconds, jitter=jitter, slowdown=slowdown)
    return VirtualCluster(network, compute)


def _show(results: list[Result]) -> None:
    console.print()
    show_narrow(report.table(results, ranges=False))  # there is no room for them
    for note in report.notes(results):
        console.print(f"{note}\n", style="dim", highlight=False)
    for table in (report.times_to_targets(results, ranges=False), report.differences(results)):
        if table is not None and len(results) > 1:
            show_narrow(table)


def _say_where(what: str, path: Path) -> None:
    console.print(f"{what} {path}", highlight=False, soft_wrap=True)
