"""Operations with two stages, of which a background thread starts the second.

A worker that is busy computing therefore does not delay the second stage on the other workers. The
thread starts the second stages in the order in which the operations were started, which is the same
on all workers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Completed, Handle, explained
from offbeat.transport.host import Host, Promise

T = TypeVar("T")
_POLL_SECONDS = 0.0005


@dataclass(eq=False)
class _Job:
    """An operation whose first stage is in flight.

    Attributes:
        first: Handle of the first stage.
        stream: CUDA stream of the thread that started the operation. None for tensors on the CPU.
        second: Function that starts the second stage, with the result of the first one.
        started: Promise of the handle of the second stage, or of the exception that ``second`` or
            the first stage raised.
        next: Promise of the next job in the queue, or of None, which ends the queue.
    """

    first: Handle[Any]
    stream: torch.cuda.Stream | None
    second: Callable[[Any], Handle[Any]]
    started: Promise[Handle[Any] | Exception]
    next: Promise["_Job | None"]


class Stages:
    """Starts the second stages of operations in a background thread, which it spawns when needed.

    Args:
        communicator: Communicator of the first stages.
        name: Name of the thread.
    """

    def __init__(self, communicator: Communicator, name: str) -> None:
        self._communicator, self._name = communicator, name
        self._next: Promise[_Job | None] = communicator.host.promise()
        # The first promise, until the thread takes it. A longer life would keep all jobs in memory.
        self._first = [self._next]
        self._running = self._stopped = False
        self._failure: Exception | None = None  # of the first operation that failed

    def start(
        self, first: Handle[Any], second: Callable[[Any], Handle[T]], *, what: str, like: Tensor
    ) -> Handle[T]:
        """Queue the second stage of an operation whose first stage was started.

        Args:
            first: Handle of the first stage.
            second: Function that starts the second stage and returns its handle. The background
                thread calls it with the result of the first stage.
            what: Name of the operation.
            like: A tensor on the device of the operation.

        Returns:
            Handle of the second stage. Its ``wait`` also raises the exception of the first stage,
            of ``second``, or of an earlier operation that failed.

        Raises:
            CommunicationError: ``stop`` was called.
        """
        if self._stopped:
            raise CommunicationError(f"{what} after this worker has left: attach again")
        host = self._communicator.host
        if not self._running:
            self._running = True
            host.spawn(self._run, what=self._name)
        stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
        job = _Job(first, stream, second, host.promise(), host.promise())
        self._next.fulfil(job)
        self._next = job.next
        if self._failure is not None:  # the thread may have ended
            return _BothStages(Completed(self._failure), host)
        # Wait without a time limit here: each stage has one, and its error is more precise.
        started = self._communicator.await_promise(job.started, what=what, patient=True)
        return _BothStages(started, host)

    def stop(self) -> None:
        """Let the thread end after the operations in its queue."""
        if not self._stopped:
            self._stopped = True
            self._next.fulfil(None)

    def _run(self) -> None:
        """Start second stages in order, until ``stop`` or until the connections are closed.

        After a failure, the exception is the result of this job and of all later ones.
        """
        communicator, queue = self._communicator, self._first.pop()
        while True:
            try:
                job = communicator.await_promise(queue, what=self._name, patient=True).wait()
            except CommunicationError as error:  # a worker was lost, or the connections are closed
                error.__traceback__ = None
                self._failure = self._failure or error
                if not queue.fulfilled:  # ``start`` fulfils it before it reads ``_failure``
                    return
                job = queue.result
            if job is None:
                return
            if self._failure is None:
                try:
                    job.started.fulfil(_start_second(job, communicator))
                except Exception as error:  # any exception, because the main thread waits for it
                    error.__traceback__ = None  # it would keep the operation's tensors in memory
                    self._failure = error
            if self._failure is not None:
                job.started.fulfil(self._failure)
            queue = job.next
            del job  # frees the tensors before the wait for the next job


class _BothStages(Handle[T]):
    """Handle of an operation with two stages.

    Args:
        started: Handle of ``_Job.started``.
        host: Host of this worker.
    """

    def __init__(self, started: Handle[Handle[T] | Exception], host: Host) -> None:
        self._started, self._host = started, host

    @override
    def done(self) -> bool:
        if not self._started.done():
            return False
        second = self._started.wait()
        return isinstance(second, Exception) or second.done()

    @override
    def wait(self) -> T:
        second = self._started.wait()
        if isinstance(second, Exception):
            # A background thread that waits passes the failure on to the training thread.
            raise second if self._host.in_background else explained(second)
        return second.wait()


def _start_second(job: _Job, communicator: Communicator) -> Handle[Any]:
    """Wait for the first stage, then call ``job.second``.

    For an NCCL operation in progress, ``wait`` would block ``job.stream``, on which the main thread
    computes. So on a GPU the first stage is polled until it is done or the time limit has passed,
    before ``wait`` is called.
    """
    if job.stream is None:
        return job.second(job.first.wait())
    host = communicator.host
    deadline = host.now() + communicator.timeout_seconds
    while not job.first.done() and host.now() < deadline:
        host.sleep(_POLL_SECONDS, "polling the first stage of an operation")
    with torch.cuda.stream(job.stream):
        return job.second(job.first.wait())
