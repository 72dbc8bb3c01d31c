"""All or nothing: sums under way are written when all have arrived, or none of them is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.fabric import Handle, Host
from offbeat.means.replica import Bucket

_SLOW_BYTES_PER_SECOND = 400e6  # of sums that arrive: a link of about 5 Gbit/s


@dataclass(eq=False)
class Landing:
    """A sum under way and where it goes.

    Attributes:
        handle: The sum.
        write: Puts it in its place, once it has arrived.
        swap: The same, keeping what was there; None: it cannot be undone.
        undo: After ``swap``: puts that back.
    """

    handle: Handle[Tensor]
    write: Callable[[], object]
    swap: Callable[[], object] | None = None
    undo: Callable[[], object] = lambda: None


def bucket_landing(handle: Handle[Tensor], bucket: Bucket, total: float) -> Landing:
    """Of the sum in the staging tensor of ``bucket``: its tensors become that, divided by total."""
    return Landing(
        handle,
        write=lambda: bucket.unpack(total),
        swap=lambda: bucket.swap(total),
        undo=bucket.unpack,
    )


def land(landings: Sequence[Landing], host: Host) -> None:
    """Wait for all and write them; if one fails, everything is as it was.

    Writing takes time, in which the network has nothing to do once the last sum has arrived. So
    over a slow link what has arrived is written while another is still under way, in a manner that
    can be undone: that costs the processor twice as much, which then has nothing else to do.

    Args:
        landings: In the order in which they were started.
        host: Its clock tells a slow link.

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
