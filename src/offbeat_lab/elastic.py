"""A worker of ``offbeat train --elastic``: the launcher restarts it if it is lost.

The workers lease their data, so that a restarted worker takes part in the rest. Each worker has a
default process group of its own, so ``train_worker`` emits the events of this worker alone, and
each worker evaluates the final model, which is the same on all, by itself.
"""

import json
import os
import sys
import time

import torch.distributed as dist

from offbeat_lab.events import End, Evaluation, Event, Start, Step
from offbeat_lab.job import Job
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.recipes import find_recipe
from offbeat_lab.train import train_worker

_PROGRESS_SECONDS = 5.0  # time between two lines of progress


def main() -> None:
    """Run one worker of the job in ``sys.argv[1]``, which is JSON."""
    job = Job(**json.loads(sys.argv[1]))
    number, restarts = int(os.environ["LOCAL_RANK"]), int(os.environ["OFFBEAT_RESTARTS"])
    dist.init_process_group("gloo")
    try:
        share_cores(job.workers, number)
        # A restarted worker draws other random numbers than its earlier process.
        rank = number + restarts * job.workers
        train_worker(job, _Progress(job, first=number == 0), rank=rank)
    finally:
        dist.destroy_process_group()


class _Progress:
    """Prints the progress of a run, if this is its first worker, and the result.

    Args:
        job: Configuration of the run.
        first: True if this is the first worker of the machine.
    """

    def __init__(self, job: Job, *, first: bool) -> None:
        self._metric, self._first = find_recipe(job.recipe).metric, first
        self._steps = 0
        self._next = time.monotonic()
        self._result = ""

    def __call__(self, event: Event) -> None:
        match event:
            case Start():
                self._steps = event.steps
            # The loss is read once per second.
            case Step(loss=float(loss)) if self._first and time.monotonic() >= self._next:
                self._next = time.monotonic() + _PROGRESS_SECONDS
                print(f"step {event.step:,} of {self._steps:,}, loss {loss:.4g}")  # noqa: T201
            case Evaluation():
                self._result = f"{self._metric} {event.metric:.4g}"
            case End():
                steps = event.stats[0].steps
                print(f"{self._result} after {steps:,} steps of this worker")  # noqa: T201


if __name__ == "__main__":
    main()
