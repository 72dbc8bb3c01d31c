"""The process of one worker of a run on this machine."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from offbeat import OffbeatError
from offbeat_lab.events import Event, to_json
from offbeat_lab.job import Job
from offbeat_lab.launch.cluster import enter_namespace
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.launch.elastic import WorkerFiles
from offbeat_lab.train import Worker


@dataclass(frozen=True)
class WorkerProcess:
    """What a worker process does.

    Attributes:
        job: The run.
        rank: Rank of the process.
        folder: Folder for the files of the run.
        elastic: True if workers die and join. They then gather at a store in a file.
        node: Name of the network namespace in which the process runs. None: that of its parent.
        environment: Environment. Variables that libraries read when they are imported, such as
            ``OMP_NUM_THREADS``, have no effect, because the fork server has imported them.
        events: Pipe to which the process writes its events as lines of JSON. None: nowhere.
    """

    job: Job
    rank: int
    folder: str
    elastic: bool
    node: str | None
    environment: Mapping[str, str]
    events: Connection | None

    @property
    def errors(self) -> str:
        """Path of the file for standard output and error."""
        return f"{self.folder}/stderr{self.rank}"

    def run(self) -> None:
        """Run the worker in this new process. Never returns.

        An expected error is written as one line to standard error, and the exit status is 1.
        """
        self._set_up_process()
        status = 0
        try:
            self._train()
        except (OffbeatError, ValueError, TypeError, OSError, ImportError) as error:
            sys.stderr.write(f"error: {error}\n")
            status = 1
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a normal exit runs gloo's destructors, which wait for ended workers

    def _set_up_process(self) -> None:
        # In its own process group, the worker does not receive the terminal's Ctrl-C, and can be
        # killed with the processes that it has started.
        os.setpgid(0, 0)
        threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Otherwise the processes of a DataLoader would be started as this one was.
        multiprocessing.set_start_method(None, force=True)
        os.environ.clear()
        os.environ.update(self.environment)
        # What other code prints goes to the same file, such as the lines in which gloo of torch 2.9
        # reports its connections.
        with open(self.errors, "ab") as errors:
            os.dup2(errors.fileno(), 1)
            os.dup2(errors.fileno(), 2)
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)

    def _train(self) -> None:
        job, rank = self.job, self.rank
        if self.node is not None:
            enter_namespace(self.node)
        files = WorkerFiles(self.folder, rank) if self.elastic else None
        # Elastic workers each have a default process group of their own.
        path = f"{self.folder}/rendezvous{rank if self.elastic else ''}"
        size = 1 if self.elastic else job.workers
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(path, size),  # type: ignore[attr-defined]
            rank=0 if self.elastic else rank,
            world_size=size,
            timeout=timedelta(seconds=job.timeout_seconds),
        )
        share_cores(job.workers, rank)
        keep, count = (None, None) if files is None else (files.keep, files.count)
        Worker(job, self._emit, rank=rank, keep=keep, count=count).run()

    def _emit(self, event: Event) -> None:
        if self.events is not None:
            # Several elastic workers share the pipe. A line is one write, which is not divided.
            os.write(self.events.fileno(), f"{to_json(event)}\n".encode())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
