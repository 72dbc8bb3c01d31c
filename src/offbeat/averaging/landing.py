"""Landing: write the results of several sums over the workers into tensors, all of them or none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.buckets import Bucket
from offbeat.transport.handle import Handle
from offbeat.transport.host import Host

# A link is slow if sums arrive at a lower rate. A link of about 5 Gbit/s reaches this rate.
_SLOW_BYTES_PER_SECOND = 400e6


@dataclass(eq=False)
class Landing:
    """A sum in flight, and the function that writes its result.

    Attributes:
        handle: The sum.
        write: Function that writes the result after it has arrived.
        swap: Function that writes the result and stores the previous values. None: a written
            result cannot be undone.
        undo: Function that restores the values from before ``swap``.
    """

    handle: Handle[Tensor]
    write: Callable[[], object]
    swap: Callable[[], object] | None = None
    undo: Callable[[], object] = lambda: None


def bucket_landing(handle: Handle[Tensor], bucket: Bucket, total: float) -> Landing:
    """Return a landing that replaces the tensors of ``bucket`` by their sum divided by ``total``.

    The sum must arrive in ``bucket.flat``.
    """
    return Landing(
        handle,
        write=lambda: bucket.unpack(total),
        swap=lambda: bucket.swap(total),
        undo=bucket.unpack,
    )


def land(landings: Sequence[Landing], host: Host) -> None:
    """Wait for all sums and write their results. If a sum fails, no tensor changes.

    Over a fast link the results are written after the last sum has arrived. Over a slow link the
    worker writes results while it waits for the next ones. It writes them with ``swap``, which can
    be undone if a later sum fails. ``swap`` takes twice the time of ``write``, but the worker would
    otherwise be idle.

    Args:
        landings: The landings, in the order in which their sums were started.
        host: Clock of this worker, which measures how fast the sums arrive.

    Raises:
        CommunicationError: a sum failed.
    """
    arrived: list[Landing] = []  # arrived, not yet written
    written: list[Landing] = []
    slow, before = False, host.now()
    try:
        for landing in landings:
            while slow and arrived and not landing.handle.done():
                early = arrived.pop(0)
                assert early.swap is not None
                early.swap()  # undoes itself if it is interrupted
                written.append(early)
            sums = landing.handle.wait()
            now = host.now()
            slow = sums.nbytes < (now - before) * _SLOW_BYTES_PER_SECOND
            before = now
            if landing.swap is not None:
                arrived.append(landing)
    except BaseException:
        for landing in written:
            landing.undo()
        raise
    for landing in landings:
        if landing not in written:
            landing.write()
