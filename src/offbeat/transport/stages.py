"""Operations with two stages, of which background threads start the second.

A worker that is busy computing therefore does not delay the second stage on the other workers. The
second stages start in the order in which the operations were started, which is the same on all
workers.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.transport.communicator import Communicator
from offbeat.transport.future import Future, explained
from offbeat.transport.host import Host, Promise

T = TypeVar("T")
_POLL_SECONDS = 0.0005


class Stages:
    """Starts the second stages of operations in background threads, one thread per operation.

    Args:
        communicator: Communicator of the first stages.
        name: Name of the threads.
    """

    def __init__(self, communicator: Communicator, name: str) -> None:
        self._communicator, self._name = communicator, name
        # Fulfilled when the last second stage has started. The result is the exception of the first
        # operation that failed, or None.
        self._last: Promise[Exception | None] = communicator.host.promise()
        self._last.fulfil(None)

    def start(
        self, first: Future[Any], second: Callable[[Any], Future[T]], *, what: str, like: Tensor
    ) -> Future[T]:
        """Start a thread for the second stage of an operation whose first stage was started.

        Args:
            first: Future of the first stage.
            second: Function that starts the second stage and returns its future. The background
                thread calls it with the result of the first stage.
            what: Name of the operation.
            like: A tensor on the device of the operation.

        Returns:
            Future of the second stage. Its ``wait`` also raises the exception of the first stage,
            of ``second``, or of an earlier operation that failed.
        """
        communicator, host, before = self._communicator, self._communicator.host, self._last
        stream = torch.cuda.current_stream(like.device) if like.is_cuda else None
        started: Promise[Future[T] | Exception] = host.promise()
        ended: Promise[Exception | None] = host.promise()
        self._last = ended

        def run() -> None:
            # The thread before this one ends if a worker is lost, so this wait needs no check.
            before.wait(math.inf, what)
            failure = before.result
            if failure is None:
                try:
                    started.fulfil(_start_second(first, second, stream, communicator))
                except Exception as error:  # any exception, because the main thread waits for it
                    error.__traceback__ = None  # it would keep the operation's tensors in memory
                    failure = error
            if failure is not None:
                started.fulfil(failure)
            ended.fulfil(failure)

        host.spawn(run, what=self._name)
        # Wait without a time limit here: each stage has one, and its error is more precise.
        waiting = communicator.await_promise(started, what=what, patient=True)
        return _BothStages(waiting, host)


class _BothStages(Future[T]):
    """Future of an operation with two stages.

    Args:
        started: Future of the promise of the future of the second stage, or of an exception.
        host: Host of this worker.
    """

    def __init__(self, started: Future[Future[T] | Exception], host: Host) -> None:
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


def _start_second(
    first: Future[Any],
    second: Callable[[Any], Future[T]],
    stream: torch.cuda.Stream | None,
    communicator: Communicator,
) -> Future[T]:
    """Wait for the first stage, then call ``second``.

    ``stream`` is the CUDA stream of the thread that started the operation; None for tensors on the
    CPU. For an NCCL operation in progress, ``wait`` would block this stream, on which the main
    thread computes. So on a GPU the first stage is polled until it is done or the time limit has
    passed, before ``wait`` is called.
    """
    if stream is None:
        return second(first.wait())
    host = communicator.host
    deadline = host.now() + communicator.timeout_seconds
    while not first.done() and host.now() < deadline:
        host.sleep(_POLL_SECONDS, "polling the first stage of an operation")
    with torch.cuda.stream(stream):
        return second(first.wait())
