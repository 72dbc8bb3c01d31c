"""The process of one worker of a run on this machine."""

import io
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from offbeat import OffbeatError
from offbeat_lab.evaluation import Snapshot
from offbeat_lab.job import Job
from offbeat_lab.launch.cluster import enter_namespace
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.train import Worker

_EXPECTED = (OffbeatError, ValueError, TypeError, OSError, ImportError)
"""Errors whose text suffices."""


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
    """

    job: Job
    rank: int
    folder: str
    elastic: bool
    node: str | None
    environment: Mapping[str, str]

    def run(self, pipe: Connection) -> None:
        """Run the worker in this new process. Never returns.

        It sends messages through the pipe, each of which is a pickled object: an event; bytes, a
        snapshot; a dictionary, its totals so far (``Stats.to_dict``); or a text, the error of a
        worker that fails. The exit status is then 1.
        """

        def send(message: Any) -> None:
            pipe.send_bytes(pickle.dumps(message))

        self._set_up_process()
        status = 0
        try:
            self._train(send)
        except BaseException as error:
            text = "" if isinstance(error, _EXPECTED) else f"{type(error).__name__}: "
            send(f"{text}{error}")
            status = 1
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
        # Other code prints, such as gloo of torch 2.9, which reports its connections.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)

    def _train(self, send: Callable[[Any], None]) -> None:
        job, rank = self.job, self.rank
        if self.node is not None:
            enter_namespace(self.node)
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

        def keep(snapshot: Snapshot) -> None:
            buffer = io.BytesIO()
            torch.save(vars(snapshot), buffer)
            send(buffer.getvalue())

        elastic: dict[str, Any] = {"keep": keep, "count": send} if self.elastic else {}
        Worker(job, send, rank=rank, **elastic).run()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)
