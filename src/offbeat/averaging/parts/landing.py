"""Landings: sums in flight are written when all have arrived, or none of them is written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.buckets import Bucket
from offbeat.transport.handle import Handle
from offbeat.transport.host import Host

_SLOW_BYTES_PER_SECOND = 400e6  # arrival rate of the sums over a link of about 5 Gbit/s


@dataclass(eq=False)
class Landing:
    """A sum in flight, and the function that writes its result.

    Attributes:
        handle: The sum.
        write: Function that writes the result, once it has arrived.
        swap: Function that writes the result and keeps the previous values. None: this landing
            cannot be undone.
        undo: Function that restores the values from before ``swap``.
    """

    handle: Handle[Tensor]
    write: Callable[[], object]
    swap: Callable[[], object] | None = None
    undo: Callable[[], object] = lambda: None


def bucket_landing(handle: Handle[Tensor], bucket: Bucket, total: float) -> Landing:
    """Return a landing that replaces the tensors of ``bucket`` by their sum divided by ``total``.

    The sum arrives in the staging tensor of the bucket.
    """
    return Landing(
        handle,
        write=lambda: bucket.unpack(total),
        swap=lambda: bucket.swap(total),
        undo=bucket.unpack,
    )


def land(landings: Sequence[Landing], host: Host) -> None:
    """Wait for all sums and write them. If one fails, no tensor changes.

    Writing after the last arrival would take time in which the network is idle. Over a slow link
    arrived sums are therefore written while others are in flight, by ``swap``, so that they can be
    undone. This takes twice the processor time, but the worker would wait during that time anyway.

    Args:
        landings: The landings, in the order in which their sums were started.
        host: Clock that shows if the link is slow.

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
            # A model scaled by ``Host.scale`` takes no time to write.
            slow = host.scale == 1 and sums.nbytes < (now - before) * _SLOW_BYTES_PER_SECOND
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
