"""Membership of a simulated training: which workers take part, and how that changes.

A *generation* is one composition of the workers. A *membership change* leads to the next
generation, for example after a worker was lost, or when a *newcomer* wants to join. Real workers
agree on generations through a key-value store. In a simulation, one ``MembershipService`` decides.
"""

from typing_extensions import override

from offbeat.errors import CommunicationError, EndedError
from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.simulate.connections import NOTICE_SECONDS
from offbeat.simulate.host import SimulatedHost
from offbeat.simulate.kernel import Signal
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.membership import Generation, Membership

# A context is a number that separates the operations of different communicators. First generations
# have contexts below this number. All later generations have contexts above it.
_FIRST_CONTEXT = 1_000_000


class _Request(Signal):
    """A worker's request for the next generation. It fires at its beginning or with a failure."""

    opened: SimulatedCommunicator  # of the worker in the next generation, once that has begun


class MembershipService:
    """Decides the generations of one training, for all of its workers.

    A membership change starts when a member asks for the next generation. It ends when all members
    have asked, except those known to be lost, and after ``timeout_seconds`` at the latest. The next
    generation consists of the members that have asked and the newcomers.

    Args:
        cluster: The simulated cluster.
        number: Number of earlier trainings in this simulation.
        timeout_seconds: Time-out of membership changes and of operations, seconds.
    """

    def __init__(self, cluster: SimulatedCluster, number: int, timeout_seconds: float) -> None:
        self.cluster, self._number, self._timeout_seconds = cluster, number, timeout_seconds
        self._group = cluster.connections.open(range(cluster.size))
        self._hosts: dict[int, SimulatedHost] = {}
        self._generation = 0
        self._arrived: dict[int, _Request] = {}  # members that wait for the next generation
        self._joining: dict[int, _Request] = {}  # newcomers that wait for the next generation
        self._lost: set[int] = set()
        self._stores: dict[str, KeyValueStore] = {}
        self._ended = False

    def start(self, member: int) -> SimulatedCommunicator:
        """Return the communicator of a worker in its first generation.

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
        """Return True if another worker waits for the next generation."""
        # The training is elastic, so a membership change may end operations.
        self.cluster.connections.faulty = True
        return bool(self._joining or self._arrived)

    def regroup(self, member: int, generation: int) -> SimulatedCommunicator:
        """Ask for the generation that follows ``generation``, and block until it begins.

        Returns:
            The worker's communicator in the new generation.

        Raises:
            EndedError: Training has ended.
            CommunicationError: The other members continue without ``member``.
        """
        kernel = self.cluster.workers.kernel
        if self._ended:
            raise EndedError(f"worker {member}: training has ended")
        if member not in self._group.members or generation != self._generation:
            raise CommunicationError(
                f"worker {member} was left behind at generation {generation}: it was silent for "
                f"too long, and the others are in generation {self._generation}; attach again "
                "to join them"
            )
        request = self._arrived[member] = _Request()
        if len(self._arrived) == 1:
            number = self._generation
            kernel.at(
                kernel.now + self._timeout_seconds,
                lambda: self._decide(number),
                f"membership change {number + 1} times out",
            )
        self._decide_if_complete()
        return self._wait(request, member, f"generation {generation + 1}")

    def lose(self, member: int) -> None:
        """Let membership changes no longer wait for ``member``, which stays in this generation."""
        self._lost.add(member)
        self._joining.pop(member, None)
        self._arrived.pop(member, None)
        self._decide_if_complete()

    def end(self) -> None:
        """End the training. Workers that wait for a generation, now or later, raise EndedError."""
        self._ended = True
        for member, request in [*self._joining.items(), *self._arrived.items()]:
            request.fail(EndedError(f"worker {member}: training has ended"))
        self._joining.clear()
        self._arrived.clear()

    def _decide_if_complete(self) -> None:
        if self._arrived and set(self._group.members) <= {*self._arrived, *self._lost}:
            self._decide(self._generation)

    def _decide(self, number: int) -> None:
        """End generation ``number`` if a member waits and it has not ended already."""
        if number != self._generation or not self._arrived:
            return
        members = tuple(sorted({*self._arrived, *self._joining}))
        self._group, self._generation = self.cluster.connections.open(members), number + 1
        requests = self._arrived | self._joining
        self._arrived, self._joining = {}, {}
        context = _FIRST_CONTEXT + 1000 * self._number + self._generation

        def begin() -> None:
            for member, request in requests.items():
                request.opened = self._open(member, context)
                request.fire()

        kernel = self.cluster.workers.kernel
        kernel.at(kernel.now + NOTICE_SECONDS, begin, f"generation {number + 1} begins")

    def _open(self, member: int, context: int) -> SimulatedCommunicator:
        """Return the communicator of ``member`` in the current generation."""
        communicator = SimulatedCommunicator(
            self.cluster,
            member,
            self._group,
            context,
            self._hosts.setdefault(member, SimulatedHost(self.cluster, member)),
            self._timeout_seconds,
        )
        communicator.stores = self._stores
        generation = Generation(self._generation, self._group.members, communicator)
        communicator.membership = SimulatedMembership(self, member, generation)
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
    """Membership of one worker in one generation. The worker asks it for the next generation."""

    def __init__(self, service: MembershipService, member: int, generation: Generation) -> None:
        self._service, self._member, self._generation = service, member, generation

    @property
    @override
    def generation(self) -> Generation:
        return self._generation

    @override
    def change_requested(self) -> bool:
        return self._service.wanted()

    @override
    def next_generation(self, *, step: int) -> Generation:
        generation: Generation = self._service.regroup(
            self._member, self._generation.number
        ).membership.generation
        return generation

    @override
    def leave(self, *, ended: bool) -> None:
        if ended:
            self._service.end()
        else:
            self._service.lose(self._member)
