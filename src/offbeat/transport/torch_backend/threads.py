"""Calls that may block inside torch: they run in threads, so that the caller can give them up.

Python handles Ctrl-C on the main thread, and only while that thread is not blocked inside torch.

If a thread returned from torch while Python shuts down, the process would abort with "terminate
called without an active exception". So Python waits at exit for threads that were given up, for 3 s
in all: most of them end together with the other workers. A thread that is still inside torch then
sleeps when it returns. ``close_at_exit`` ends the other threads.

Gloo's own threads need Python's lock, too: after each collective, also one of the script, they
drop the Python objects of its tensors. A thread that waits for the lock when Python shuts down
aborts the process in the same way. So the main thread pauses at exit, and releases the lock.
"""

import atexit
import contextlib
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from offbeat.transport.host import start_thread

T = TypeVar("T")
_YIELD_SECONDS = 0.05  # pause at exit for gloo's threads
_EXIT_SECONDS = 3.0  # longest time for which Python waits at exit for all abandoned threads

_abandoned: list[threading.Thread] = []


def call_in_thread(
    function: Callable[[], T],
    *,
    name: str,
    poll: Callable[[], None],
    interval_seconds: float,
) -> T:
    """Call ``function`` in a new thread, and return its result. Blocks.

    Args:
        function: Function that may block inside torch.
        name: Name of the thread.
        poll: Function that the calling thread calls every ``interval_seconds``. If it raises an
            exception, the thread is abandoned, and Python waits for it at exit.
        interval_seconds: Time between two calls of ``poll``.

    Raises:
        Exception: ``function`` or ``poll`` raised it.
    """
    results: list[T] = []
    errors: list[Exception] = []
    ended = threading.Event()  # a Ctrl-C inside Thread.join() would mark the thread as ended

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:
            error.__traceback__ = None  # it would keep the operation and its process group alive
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=run, name=name, daemon=True)
    start_thread(thread)
    try:
        while not ended.wait(interval_seconds):
            poll()
    except BaseException:
        _abandoned[:] = [other for other in _abandoned if other.is_alive()]
        _abandoned.append(thread)
        raise
    if errors:
        raise errors.pop()
    return results.pop()


@atexit.register
def _join_abandoned() -> None:
    time.sleep(_YIELD_SECONDS)
    end = time.monotonic() + _EXIT_SECONDS
    for thread in _abandoned:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in _abandoned):
        _sleep_instead_of_aborting()


def _sleep_instead_of_aborting() -> None:
    """Let C++ call ``pause`` where it would abort the process.

    So a thread that cannot get Python's lock sleeps, as in Python 3.14, until the process ends.
    """
    library = "libc++abi.dylib" if sys.platform == "darwin" else "libstdc++.so.6"
    with contextlib.suppress(OSError, AttributeError):  # another C++ library: it aborts
        set_terminate = ctypes.CDLL(library)._ZSt13set_terminatePFvvE
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


def close_at_exit(resource: Any) -> None:
    """Call ``resource.close()`` when Python exits, unless ``resource`` was garbage-collected."""
    reference = weakref.ref(resource)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(resource, atexit.unregister, close).atexit = False
