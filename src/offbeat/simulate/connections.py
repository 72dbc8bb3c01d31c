"""Connections between simulated workers, and their failures.

A failure is the loss of a worker, or a time-out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate.kernel import Kernel, Signal

NOTICE_SECONDS = 0.05
"""Virtual seconds from the end of a connection until the other workers notice it."""


class PendingOperation:
    """A collective or message in progress. It fails if one of its participants is lost.

    Attributes:
        participants: Global ranks of the workers that take part.
        signal: Fires when the operation ends or fails.
        doomed: True once a participant is lost. The operation fails ``NOTICE_SECONDS`` later.
        deliver: Function that stores the result of a collective on the given ranks, even if the
            collective is doomed. Set in runs with faults, once all participants have joined.
    """

    def __init__(self, participants: Iterable[int], signal: Signal) -> None:
        self.participants, self.signal = frozenset(participants), signal
        self.doomed = False
        self.deliver: Callable[[Iterable[int]], None] | None = None

    @property
    def can_succeed(self) -> bool:
        """True while the operation has neither ended nor lost a participant."""
        return not (self.doomed or self.signal.happened)


@dataclass(eq=False)
class Group:
    """Connected workers, and the state of their connections.

    Several communicators may share a group. Each of them has a *context*, as in MPI: a number that
    separates its operations from those of the others.

    Attributes:
        members: Global ranks of the workers, by their rank in the group.
        sharing: Number of groups that use the links of the nodes at the same time. Example: nodes
            of 8 workers are connected by 8 groups, each with one worker of every node.
        gone: Members whose connections have ended.
        pending: Operations that may still be in progress; empty in a run without faults.
    """

    members: tuple[int, ...]
    sharing: int = 1
    gone: set[int] = field(default_factory=set)
    pending: list[PendingOperation] = field(default_factory=list)


class Connections:
    """All groups of one simulation, and the failures of their connections.

    Args:
        kernel: The virtual clock.
        faulty: True if the run has faults or an elastic training. If False, losses have no effect.
    """

    def __init__(self, kernel: Kernel, *, faulty: bool) -> None:
        self._kernel, self.faulty = kernel, faulty
        self._groups: list[Group] = []
        self._subgroups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self._contexts: dict[tuple[int, int | tuple[int, ...]], int] = {}
        self._dead: set[int] = set()

    # -- groups ----------------------------------------------------------------------------------

    def open(self, members: Sequence[int], sharing: int = 1) -> Group:
        """Connect ``members`` in a new group."""
        group = Group(tuple(members), sharing, gone=self._dead & {*members})
        if self.faulty:
            self._groups.append(group)
        return group

    def subgroup(self, context: int, members: tuple[int, ...], sharing: int) -> Group:
        """Return the group of some workers of a communicator.

        The same arguments give the same object. ``context`` is that of the communicator.
        """
        if (context, members) not in self._subgroups:
            self._subgroups[context, members] = self.open(members, sharing)
        return self._subgroups[context, members]

    def derived_context(self, context: int, key: int | tuple[int, ...]) -> int:
        """Return the context of a duplicate or a subgroup of the communicator with ``context``.

        ``key`` is the number of the duplicate, or the members of the subgroup. The same arguments
        give the same context on all workers.
        """
        return self._contexts.setdefault((context, key), -1 - len(self._contexts))

    # -- failures --------------------------------------------------------------------------------

    def track(self, group: Group, operation: PendingOperation) -> None:
        """Make ``operation`` fail once a participant is lost. Without faults, do nothing."""
        if self.faulty and operation.can_succeed:
            group.pending = [pending for pending in group.pending if pending.can_succeed]
            group.pending.append(operation)
            if group.gone & operation.participants:
                operation.doomed = True
                self._fail_later(group, [operation], frozenset())

    def disconnect(self, group: Group, member: int, spared: Iterable[int] = ()) -> None:
        """End the connections of ``member`` in ``group``.

        Pending operations with this worker fail ``NOTICE_SECONDS`` later. Exception: a collective
        that all participants have joined succeeds on the workers ``spared`` (global ranks).
        """
        if member not in group.members or member in group.gone:
            return
        group.gone.add(member)
        doomed = [
            operation
            for operation in group.pending
            if member in operation.participants and operation.can_succeed
        ]
        for operation in doomed:
            operation.doomed = True
        self._fail_later(group, doomed, frozenset(spared))

    def lose(self, member: int, spared: Iterable[int] = ()) -> None:
        """End all connections of ``member``, whose process has ended; see ``disconnect``."""
        self._dead.add(member)
        for group in self._groups:
            self.disconnect(group, member, spared)

    def _fail_later(
        self, group: Group, doomed: Sequence[PendingOperation], spared: frozenset[int]
    ) -> None:
        """Fail the operations ``doomed`` after ``NOTICE_SECONDS``."""

        def notice() -> None:
            ranks = sorted(group.members.index(member) for member in group.gone)
            gone = ", ".join(map(str, ranks))
            text = f"lost the connection to rank {gone}, which died, gave up or was cut off"
            for operation in doomed:
                receivers: frozenset[int] = frozenset()
                if operation.deliver is not None:
                    receivers = spared & operation.participants
                    if not operation.signal.happened:
                        operation.deliver(sorted(receivers))
                operation.signal.fail(CommunicationError(text), spared=receivers)

        self._kernel.at(self._kernel.now + NOTICE_SECONDS, notice, "a loss is noticed")

    def fail_after(self, signal: Signal, seconds: float, what: str) -> None:
        """Fail ``signal`` with a time-out unless it fires within ``seconds``."""
        if not signal.happened:
            failure = CommunicationTimeout(
                f"no answer. The time-out is timeout_seconds={seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
            end = self._kernel.now + seconds
            self._kernel.at(end, lambda: signal.fail(failure), f"{what} times out")
