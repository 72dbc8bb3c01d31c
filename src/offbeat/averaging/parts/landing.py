"""All or nothing: sums in flight are written when all have arrived, or none of them is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.buckets import Bucket
from offbeat.transport.handle import Handle
from offbeat.transport.host import Host

_SLOW_BYTES_PER_SECOND = 400e6  # of arriving sums; a link of about 5 Gbit/s


@dataclass(eq=False)
class Landing:
    """A sum in flight and where its result goes.

    Attributes:
        handle: The sum.
        write: Writes the result to its place, once it has arrived.
        swap: Like ``write``, but keeps what it overwrites. None: this landing cannot be undone.
        undo: Puts back what ``swap`` has overwritten.
    """

    handle: Handle[Tensor]
    write: Callable[[], object]
    swap: Callable[[], object] | None = None
    undo: Callable[[], object] = lambda: None


def bucket_landing(handle: Handle[Tensor], bucket: Bucket, total: float) -> Landing:
    """Replace the tensors of ``bucket`` by the sum in its staging tensor, divided by ``total``."""
    return Landing(
        handle,
        write=lambda: bucket.unpack(total),
        swap=lambda: bucket.swap(total),
        undo=bucket.unpack,
    )


def land(landings: Sequence[Landing], host: Host) -> None:
    """Wait for all sums and write them. If one fails, all tensors are as before.

    Writing takes time in which the network is idle, if it begins after the last arrival. Over a
    slow link, therefore, sums that have arrived are written while others travel, in a way that can
    be undone. That costs twice the processor time, which is free while the worker waits.

    Args:
        landings: In the order in which the sums were started.
        host: Its clock shows whether the link is slow.

    Raises:
        CommunicationError: a sum failed.
    """
    arrived: list[Landing] = []  # and not written
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
            # A scaled model takes no time to write (``Host.scale``).
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
