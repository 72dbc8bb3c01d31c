"""What has messages of its own beside the training, and must know when this worker steps aside."""

from collections.abc import Callable
from typing import Any, Protocol

from offbeat.errors import AttachError
from offbeat.fabric import Team


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

    Args:
        team: The synchronizer's; a companion takes a ``twin`` of it.
        details: The totals of ``Stats.details``, to which companions add their own.
        step: Gives the iterations so far.

    Attributes:
        refuse: Why none can be taken in; empty if one can.
    """

    def __init__(self, team: Team, details: dict[str, Any], step: Callable[[], int]) -> None:
        self.team, self.details, self.step = team, details, step
        self.refuse = ""
        self._all: list[Companion] = []
        self._closed = False

    def add(self, companion: Companion) -> None:
        """Take one in.

        Raises:
            AttachError: after ``finish`` or ``detach``, or as ``refuse`` says.
        """
        if self.refuse:
            raise AttachError(self.refuse)
        if self._closed:
            raise AttachError("this synchronizer is finished or detached: attach again first")
        self._all.append(companion)

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self._all)

    def busy(self, busy: bool) -> None:
        """See ``Companion``."""
        for one in self._all:
            one.busy(busy)

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
        """See ``Companion``. Nobody is told of anything any more."""
        self._closed = True
        for one in self._all:
            one.close()
        self._all.clear()
        taken = self.step()
        self.step = lambda: taken  # what told them may hold this
