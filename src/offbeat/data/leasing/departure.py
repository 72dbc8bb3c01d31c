"""Planned departure of a worker that receives SIGTERM in a loop over a ``LeasedLoader``.

It leaves before the next batch of the loop, and no step is lost or repeated. If the loop ends in
another way, by ``break`` or an exception, the process ends as if it were killed.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from offbeat.data.leasing.access import is_elastic, share_model
from offbeat.data.leasing.sampler import LeasedSampler

logger = logging.getLogger("offbeat")


def leave(sampler: LeasedSampler) -> None:
    """Leave an elastic training permanently, before the next batch. Blocks.

    The workers first share a model that contains all steps of this worker. Then this worker gives
    back what it has not trained on. If that fails, the others find a lost worker.
    """
    sync = sampler.sync
    try:
        share_model(sync)
        sampler.give_back()
    except RuntimeError as error:  # an OffbeatError, or the store is gone
        logger.warning("rank %d leaves without giving its leases back: %s", sync.rank, error)
    sync.detach()


@contextlib.contextmanager
def leaving_on_sigterm(sampler: LeasedSampler) -> Iterator[Callable[[], None]]:
    """Record SIGTERM in elastic training, unless the script handles it. A second one kills.

    Provides a function to call between two steps. After SIGTERM it calls ``leave`` and ends the
    process. Before that it does nothing.
    """
    process, received = os.getpid(), False

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != process:  # a process that the script has forked
            os.kill(os.getpid(), number)

    def leave_if_received() -> None:
        if received:
            leave(sampler)
            os.kill(process, signal.SIGTERM)

    main = threading.current_thread() is threading.main_thread()
    if main and is_elastic(sampler.sync) and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, record)
    try:
        yield leave_if_received
    finally:
        if signal.getsignal(signal.SIGTERM) is record:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:  # the loop has ended before the next batch
            os.kill(process, signal.SIGTERM)
