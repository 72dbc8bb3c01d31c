"""Operations with two stages, of which background threads start the second.

A worker that is busy computing therefore does not delay the second stage on the other workers. The
second stages start in the order in which the operations were started, which is the same on all
workers.

On a GPU the background threads launch kernels on a CUDA stream of their own, the *side stream*.
They wait only for the kernels that the training launched before ``start``, and the training waits
for them only when it waits for the future. Events order the two streams.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.transport.communicator import Communicator
from offbeat.transport.future import Future, explained
from offbeat.transport.host import Host, Promise

T = TypeVar("T")


class Stages:
    """Starts the second stages of operations in background threads, one thread per operation.

    Args:
        communicator: Communicator of the first stages.
        name: Name of the threads.
    """

    def __init__(self, communicator: Communicator, name: str) -> None:
        self._communicator, self._name = communicator, name
        self._side: torch.cuda.Stream | None = None
        # Fulfilled when ``second`` of the newest operation has returned or failed. The result is
        # the exception of the first operation that failed, or None.
        self._last: Promise[Exception | None] = communicator.host.promise()
        self._last.fulfil(None)

    def start(
        self, first: Future[Any], second: Callable[[Any], Future[T]], *, what: str, like: Tensor
    ) -> Future[T]:
        """Start a thread for the second stage of an operation whose first stage was started.

        Args:
            first: Future of the first stage.
            second: Function that starts the second stage and returns its future. The background
                thread calls it with the result of the first stage. On a GPU its kernels begin after
                those that were launched on the caller's current stream before this call.
            what: Name of the operation.
            like: A tensor on the device of the operation.

        Returns:
            Future of the second stage. Its ``wait`` also raises the exception of the first stage,
            of ``second``, or of an earlier operation that failed. On a GPU, ``wait`` makes the
            current stream wait for the kernels of ``second``.
        """
        communicator, host, before = self._communicator, self._communicator.host, self._last
        if like.is_cuda and self._side is None:
            self._side = torch.cuda.Stream(like.device)
        side = self._side if like.is_cuda else None
        launched = None if side is None else torch.cuda.current_stream(like.device).record_event()
        started: Promise[_Second[T] | Exception] = host.promise()
        ended: Promise[Exception | None] = host.promise()

        def run() -> None:
            # The thread before this one ends if a worker is lost, so this wait needs no check.
            before.wait(math.inf, what)
            failure = before.result
            if failure is None:
                try:
                    started.fulfil(_start_second(first, second, side, launched))
                except Exception as error:  # any exception, because the main thread waits for it
                    error.__traceback__ = None  # it would keep the operation's tensors in memory
                    failure = error
            if failure is not None:
                started.fulfil(failure)
            ended.fulfil(failure)

        host.spawn(run, what=self._name)
        self._last = ended
        # Wait without a time limit here: each stage has one, and its error is more precise.
        waiting = communicator.await_promise(started, what=what, patient=True)
        return _BothStages(waiting, host, like.device)

    def settle(self) -> None:
        """Let the current CUDA stream wait for all kernels launched so far on the side stream.

        Call it before tensors are freed that an abandoned second stage may use.
        """
        if self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)


class _Second(NamedTuple, Generic[T]):
    """A second stage that has started: its future, and the event after its kernels on a GPU."""

    future: Future[T]
    event: Any = None


class _BothStages(Future[T]):
    """Future of an operation with two stages.

    Args:
        started: Future of the started second stage, or of the exception that prevented it.
        host: Host of this worker.
        device: Device of the operation.
    """

    def __init__(
        self, started: Future[_Second[T] | Exception], host: Host, device: torch.device
    ) -> None:
        self._started, self._host, self._device = started, host, device

    @override
    def done(self) -> bool:
        if not self._started.done():
            return False
        second = self._started.wait()
        if isinstance(second, Exception):
            return True
        return second.future.done() and (second.event is None or second.event.query())

    @override
    def wait(self) -> T:
        second = self._started.wait()
        if isinstance(second, Exception):
            # A background thread that waits passes the failure on to the training thread.
            raise second if self._host.in_background else explained(second)
        result = second.future.wait()
        if second.event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(second.event)
            _record(result, current)
        return result


def _start_second(
    first: Future[Any],
    second: Callable[[Any], Future[T]],
    side: torch.cuda.Stream | None,
    launched: torch.cuda.Event | None,
) -> _Second[T]:
    """Wait for the first stage, then call ``second``, on the stream ``side`` of a GPU."""
    if side is None or launched is None:
        return _Second(second(first.wait()))
    with torch.cuda.stream(side):
        side.wait_event(launched)
        result = first.wait()
        _record(result, side)
        return _Second(second(result), side.record_event())


def _record(result: Any, stream: torch.cuda.Stream) -> None:
    """Let no other tensor have the memory of ``result`` before ``stream`` has finished with it."""
    for each in result if isinstance(result, list) else [result]:
        if isinstance(each, Tensor) and each.is_cuda:
            each.record_stream(stream)
