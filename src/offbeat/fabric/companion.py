"""What has messages of its own beside the training, and must know when this worker steps aside."""

from collections.abc import Callable
from typing import Any, Protocol

from offbeat.errors import AttachError
from offbeat.fabric.communicator import Communicator


class Companion(Protocol):
    """Something beside the training, such as ``DataInjection``."""

    def busy(self, busy: bool) -> None:
        """From now on the strategy is at work, and may wait for others; or no more."""

    def away(self) -> None:
        """This worker takes no step until all workers have come."""

    def back(self) -> None:
        """All have come. Every worker counts the same meetings."""

    def leave(self) -> None:
        """All have finished."""

    def close(self) -> None:
        """This worker stops here, perhaps alone, perhaps after a failure. Raises nothing."""


class Companions:
    """The companions of one synchronizer, which tells them all at once.

    Inside of it as a context manager the strategy is at work.

    Args:
        fabric: The synchronizer's communicator; a companion takes a ``twin`` of it.
        details: The totals of ``Stats.details``, to which companions add their own.
        step: Gives the iterations so far.
    """

    def __init__(
        self, fabric: Communicator, details: dict[str, Any], step: Callable[[], int]
    ) -> None:
        self.fabric, self.details, self.step = fabric, details, step
        self._all: list[Companion] = []
        self._closed = False

    def add(self, companion: Companion) -> None:
        """Take one in.

        Raises:
            AttachError: after ``finish`` or ``detach``.
        """
        if self._closed:
            raise AttachError("this synchronizer is finished or detached: attach again first")
        self._all.append(companion)

    def __enter__(self) -> None:
        for one in self._all:
            one.busy(True)

    def __exit__(self, *error: object) -> None:
        for one in self._all:
            one.busy(False)

    def away(self) -> None:
        """See ``Companion``."""
        for one in self._all:
            one.away()

    def back(self) -> None:
        """See ``Companion``."""
        for one in self._all:
            one.back()

    def leave(self) -> None:
        """See ``Companion``."""
        self._closed = True
        for one in self._all:
            one.leave()

    def close(self) -> None:
        """See ``Companion``."""
        self._closed = True
        for one in self._all:
            one.close()
