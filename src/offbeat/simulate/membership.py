"""Who goes on in a simulated training: what a store does for real workers."""

from dataclasses import dataclass

from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.simulate.cluster import NOTICE_SECONDS, SimulatedCluster
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.simulate.host import SimulatedHost
from offbeat.simulate.kernel import Signal
from offbeat.transport.membership import EndedError, Membership, View

_GROUPS = 1_000_000  # of later views; those before have small numbers


@dataclass
class _Arrival:
    """Somebody waits for the next view.

    Attributes:
        signal: It is there, or will not come.
        view: It.
        error: Why it will not come.
    """

    signal: Signal
    view: "_Entered | None" = None
    error: Exception | None = None


@dataclass(frozen=True)
class _Entered:
    """A view, and the communicator of one of its workers."""

    view: View
    communicator: SimulatedCommunicator


class Roster:
    """The members of one training, whom all its workers ask.

    A view change ends when every member has come that is not known to be lost, or
    ``timeout_seconds`` after the first one has: who comes later is left behind.

    Args:
        cluster: What the workers share.
        number: Of the training: how many the workers have attached to before.
        timeout_seconds: See above; also of operations.
    """

    def __init__(self, cluster: SimulatedCluster, number: int, timeout_seconds: float) -> None:
        self.cluster, self._number, self._timeout_seconds = cluster, number, timeout_seconds
        self._line = cluster.open(range(cluster.size))
        self._hosts: dict[int, SimulatedHost] = {}
        self._view = 0
        self._here: dict[int, _Arrival] = {}
        self._asking: dict[int, _Arrival] = {}
        self._lost: set[int] = set()
        self._ended = False

    def begin(self, member: int) -> SimulatedCommunicator:
        """The communicator of a worker of the first view, or of one that joins. Blocks that one.

        Raises:
            CommunicationError: nobody has taken it in.
        """
        if member < self.cluster.size:
            return self._enter(member, self._number + 1, frozenset()).communicator
        arrival = self._asking[member] = _Arrival(Signal())
        if self._ended:
            raise EndedError(f"worker {member} cannot join: training has ended")
        return self._wait(arrival, member, "being taken in").communicator

    def wanted(self, member: int) -> bool:
        """Whether the next view has been begun, or should be."""
        reachable = self.cluster.cut_until([member]) <= self.cluster.workers.kernel.now
        return reachable and bool(self._asking or self._here)

    def regroup(self, member: int, view: int) -> View:
        """Wait for the next view; see ``Membership``."""
        kernel = self.cluster.workers.kernel
        cut = min(self.cluster.cut_until([member]) - kernel.now, self._timeout_seconds)
        if cut > 0:
            self.cluster.nap(member, cut, "a network that is cut")
            if self.cluster.cut_until([member]) > kernel.now:
                raise CommunicationError(
                    f"worker {member}: nobody could be reached for "
                    f"timeout_seconds={self._timeout_seconds:g}"
                )
        if self._ended:
            raise EndedError(f"worker {member}: training has ended")
        if member not in self._line.members or view != self._view:
            raise CommunicationError(
                f"worker {member} was left behind at view {view}: it was silent for too long, and "
                f"the others are in view {self._view}; attach again to join them"
            )
        arrival = self._here[member] = _Arrival(Signal())
        if len(self._here) == 1:
            number = self._view
            kernel.at(
                kernel.now + self._timeout_seconds,
                lambda: self._decide(number),
                f"view {number + 1} waits no longer",
            )
        self._look()
        return self._wait(arrival, member, f"view {view + 1}").view

    def lose(self, member: int) -> None:
        """A member has gone for good."""
        self._lost.add(member)
        self._asking.pop(member, None)
        self._here.pop(member, None)
        self._look()

    def end(self) -> None:
        """Training has ended, for all."""
        self._ended = True
        for member, arrival in [*self._asking.items(), *self._here.items()]:
            arrival.error = EndedError(f"worker {member}: training has ended")
            arrival.signal.fire()
        self._asking.clear()
        self._here.clear()

    def _look(self) -> None:
        """Decide, if all have come that can."""
        if self._here and set(self._line.members) <= {*self._here, *self._lost}:
            self._decide(self._view)

    def _decide(self, number: int) -> None:
        """Form the view after this one of those that are here, and of those that ask."""
        if number != self._view or not self._here:
            return
        newcomers = frozenset(self._asking)
        members = tuple(sorted({*self._here, *newcomers}))
        self._line, self._view = self.cluster.open(members), number + 1
        arrivals = self._here | self._asking
        self._here, self._asking = {}, {}
        group = _GROUPS + 1000 * self._number + self._view

        def begin() -> None:
            for member, one in arrivals.items():
                one.view = self._enter(member, group, newcomers)
                one.signal.fire()

        kernel = self.cluster.workers.kernel
        kernel.at(kernel.now + NOTICE_SECONDS, begin, f"view {number + 1} begins")

    def _enter(self, member: int, group: int, newcomers: frozenset[int]) -> _Entered:
        """Open the communicator of a worker in the view that is now."""
        communicator = SimulatedCommunicator(
            self.cluster,
            member,
            self._line,
            group,
            self._hosts.setdefault(member, SimulatedHost(self.cluster, member)),
            self._timeout_seconds,
        )
        view = View(self._view, self._line.members, communicator, newcomers)
        communicator.membership = SimulatedMembership(self, member, view)
        return _Entered(view, communicator)

    def _wait(self, arrival: _Arrival, member: int, what: str) -> _Entered:
        if member in self._asking:
            self.cluster.limit(arrival.signal, self._timeout_seconds, what)
        self.cluster.wait(member, arrival.signal, what)
        if arrival.error is not None:
            raise arrival.error
        if arrival.view is None:
            self._asking.pop(member, None)
            raise CommunicationError(
                f"worker {member}: {what} failed: nobody has answered for "
                f"timeout_seconds={self._timeout_seconds:g}"
            )
        return arrival.view


class SimulatedMembership(Membership):
    """One worker's end of the roster.

    Args:
        roster: Whom it asks.
        member: This worker.
        view: Of its communicator.
    """

    def __init__(self, roster: Roster, member: int, view: View) -> None:
        self._roster, self._member, self._view = roster, member, view

    @property
    @override
    def view(self) -> View:
        return self._view

    @override
    def change_requested(self) -> bool:
        return self._roster.wanted(self._member)

    @override
    def next_view(self, *, view: int, step: int) -> View:
        return self._roster.regroup(self._member, view)

    @override
    def leave(self, *, ended: bool) -> None:
        if ended:
            self._roster.end()
        else:
            self._roster.lose(self._member)
