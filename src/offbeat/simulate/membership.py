"""Membership of a simulated training: which workers take part, and how that changes.

A *view* is one composition of the workers. A *view change* leads to the next view, for example
after a worker was lost, or when a *newcomer* wants to join. Real workers agree on views through a
key-value store. In a simulation, one ``MembershipService`` decides.
"""

from typing_extensions import override

from offbeat.errors import CommunicationError, EndedError
from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.simulate.connections import NOTICE_SECONDS
from offbeat.simulate.host import SimulatedHost
from offbeat.simulate.kernel import Signal
from offbeat.transport.board import LocalBoard
from offbeat.transport.membership import Membership, View

# A context is a number that separates the operations of different communicators. First views have
# contexts below this number. All later views have contexts above it.
_FIRST_CONTEXT = 1_000_000


class _Request(Signal):
    """A worker's request for the next view. It fires when the view begins, or with a failure."""

    opened: SimulatedCommunicator  # of the worker in the next view, once that has begun


class MembershipService:
    """Decides the views of one training, for all of its workers.

    A view change starts when a member asks for the next view. It ends when all members have asked,
    except those known to be lost, and after ``timeout_seconds`` at the latest. The next view
    consists of the members that have asked and the newcomers.

    Args:
        cluster: The simulated cluster.
        number: Number of earlier trainings in this simulation.
        timeout_seconds: Time-out of view changes and of operations, seconds.
    """

    def __init__(self, cluster: SimulatedCluster, number: int, timeout_seconds: float) -> None:
        self.cluster, self._number, self._timeout_seconds = cluster, number, timeout_seconds
        self._group = cluster.connections.open(range(cluster.size))
        self._hosts: dict[int, SimulatedHost] = {}
        self._view = 0
        self._arrived: dict[int, _Request] = {}  # members that wait for the next view
        self._joining: dict[int, _Request] = {}  # newcomers that wait for the next view
        self._lost: set[int] = set()
        self._boards: dict[str, LocalBoard] = {}
        self._ended = False

    def start(self, member: int) -> SimulatedCommunicator:
        """Return the communicator of a worker in its first view.

        An initial worker never blocks here. A newcomer blocks until it is admitted.

        Raises:
            EndedError: Training has ended, so no newcomer is admitted.
            CommunicationError: The newcomer was not admitted within the time-out.
        """
        if member < self.cluster.size:
            return self._open(member, self._number + 1)
        if self._ended:
            raise EndedError(f"worker {member} cannot join: training has ended")
        request = self._joining[member] = _Request()
        what = "joining the training"
        self.cluster.connections.fail_after(request, self._timeout_seconds, what)
        return self._wait(request, member, what)

    def wanted(self) -> bool:
        """Return True if another worker waits for the next view."""
        # The training is elastic, so a view change may end operations.
        self.cluster.connections.faulty = True
        return bool(self._joining or self._arrived)

    def regroup(self, member: int, view: int) -> SimulatedCommunicator:
        """Ask for the view that follows ``view``, and block until it begins.

        Returns:
            The worker's communicator in the new view.

        Raises:
            EndedError: Training has ended.
            CommunicationError: The other members continue without ``member``.
        """
        kernel = self.cluster.workers.kernel
        if self._ended:
            raise EndedError(f"worker {member}: training has ended")
        if member not in self._group.members or view != self._view:
            raise CommunicationError(
                f"worker {member} was left behind at view {view}: it was silent for too long, and "
                f"the others are in view {self._view}; attach again to join them"
            )
        request = self._arrived[member] = _Request()
        if len(self._arrived) == 1:
            number = self._view
            kernel.at(
                kernel.now + self._timeout_seconds,
                lambda: self._decide(number),
                f"view change {number + 1} times out",
            )
        self._decide_if_complete()
        return self._wait(request, member, f"view {view + 1}")

    def lose(self, member: int) -> None:
        """Let view changes no longer wait for ``member``. The current view still contains it."""
        self._lost.add(member)
        self._joining.pop(member, None)
        self._arrived.pop(member, None)
        self._decide_if_complete()

    def end(self) -> None:
        """End the training. Workers that wait for a view, now or later, raise EndedError."""
        self._ended = True
        for member, request in [*self._joining.items(), *self._arrived.items()]:
            request.fail(EndedError(f"worker {member}: training has ended"))
        self._joining.clear()
        self._arrived.clear()

    def _decide_if_complete(self) -> None:
        if self._arrived and set(self._group.members) <= {*self._arrived, *self._lost}:
            self._decide(self._view)

    def _decide(self, number: int) -> None:
        """End view ``number`` if a member waits. Does nothing if the view has ended already."""
        if number != self._view or not self._arrived:
            return
        members = tuple(sorted({*self._arrived, *self._joining}))
        self._group, self._view = self.cluster.connections.open(members), number + 1
        requests = self._arrived | self._joining
        self._arrived, self._joining = {}, {}
        context = _FIRST_CONTEXT + 1000 * self._number + self._view

        def begin() -> None:
            for member, request in requests.items():
                request.opened = self._open(member, context)
                request.fire()

        kernel = self.cluster.workers.kernel
        kernel.at(kernel.now + NOTICE_SECONDS, begin, f"view {number + 1} begins")

    def _open(self, member: int, context: int) -> SimulatedCommunicator:
        """Return the communicator of ``member`` in the current view."""
        communicator = SimulatedCommunicator(
            self.cluster,
            member,
            self._group,
            context,
            self._hosts.setdefault(member, SimulatedHost(self.cluster, member)),
            self._timeout_seconds,
        )
        communicator.boards = self._boards
        view = View(self._view, self._group.members, communicator)
        communicator.membership = SimulatedMembership(self, member, view)
        return communicator

    def _wait(self, request: _Request, member: int, what: str) -> SimulatedCommunicator:
        self.cluster.wait(member, request, what)
        if request.failure is None:
            return request.opened
        self._joining.pop(member, None)
        if isinstance(request.failure, EndedError):
            raise request.failure
        raise CommunicationError(f"worker {member}: {what} failed: {request.failure}")


class SimulatedMembership(Membership):
    """Membership of one worker in one view. The worker asks it for the next view."""

    def __init__(self, service: MembershipService, member: int, view: View) -> None:
        self._service, self._member, self._view = service, member, view

    @property
    @override
    def view(self) -> View:
        return self._view

    @override
    def change_requested(self) -> bool:
        return self._service.wanted()

    @override
    def next_view(self, *, step: int) -> View:
        view: View = self._service.regroup(self._member, self._view.number).membership.view
        return view

    @override
    def leave(self, *, ended: bool) -> None:
        if ended:
            self._service.end()
        else:
            self._service.lose(self._member)
