"""Connections between simulated workers, and what breaks them: losses, interruptions, time-outs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate.kernel import Kernel, Signal

NOTICE_SECONDS = 0.05
"""Virtual seconds from the end of a connection until the peers notice it."""


class PendingOperation:
    """A collective or message in progress, which fails if one of its participants is lost.

    Attributes:
        participants: Ranks of the workers that take part.
        signal: Fires at the end of the operation.
        doomed: True once a participant is lost. The operation then never succeeds.
        deliver: Hands the result to some participants; None until the result is certain. Set if
            workers can be lost.
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
    """The workers of one communicator and its twins, and the state of their connections.

    A communicator has a group and a *context*: a number that separates its operations from those
    of the other communicators of the same group, as in MPI.

    Attributes:
        members: Global ranks of the workers, by their rank in the group.
        sharing: Number of groups like this one that use the links of the nodes concurrently.
        gone: Members whose connections have ended.
        pending: Operations in progress. Empty unless workers can be lost.
    """

    members: tuple[int, ...]
    sharing: int = 1
    gone: set[int] = field(default_factory=set)
    pending: list[PendingOperation] = field(default_factory=list)


class Connections:
    """All groups of one simulation, and the failures of their connections.

    Args:
        kernel: The virtual clock.
        faulty: True if workers may be lost. Operations then have time-outs.
    """

    def __init__(self, kernel: Kernel, *, faulty: bool) -> None:
        self._kernel, self.faulty = kernel, faulty
        self._groups: list[Group] = []
        self._subgroups: dict[tuple[int, tuple[int, ...]], Group] = {}
        self._contexts: dict[tuple[int, int | tuple[int, ...]], int] = {}
        self._dead: set[int] = set()
        self._cuts: list[tuple[int, float, float]] = []  # rank, start, end

    # -- groups ----------------------------------------------------------------------------------

    def open(self, members: Sequence[int]) -> Group:
        """Connect ``members`` in a new group."""
        group = Group(tuple(members), gone=self._dead & {*members})
        if self.faulty:
            self._groups.append(group)
        return group

    def subgroup(self, context: int, members: tuple[int, ...], sharing: int) -> Group:
        """Return the group of ``members`` derived from ``context``: one object for all of them."""
        if (context, members) not in self._subgroups:
            self._subgroups[context, members] = self.open(members)
            self._subgroups[context, members].sharing = sharing
        return self._subgroups[context, members]

    def derived_context(self, context: int, key: int | tuple[int, ...]) -> int:
        """Return the context derived from ``context`` by ``key``: the same for all workers."""
        return self._contexts.setdefault((context, key), -1 - len(self._contexts))

    # -- failures --------------------------------------------------------------------------------

    def track(self, group: Group, operation: PendingOperation) -> None:
        """Make ``operation`` fail if one of its participants is lost, or is lost already."""
        if self.faulty and operation.can_succeed:
            group.pending = [one for one in group.pending if one.can_succeed]
            group.pending.append(operation)
            if group.gone & operation.participants:
                operation.doomed = True
                self._fail_later(group, [operation], frozenset())

    def disconnect(self, group: Group, member: int, spared: Iterable[int] = ()) -> None:
        """End the connections of ``member`` in ``group``: its pending operations fail.

        Args:
            group: The group.
            member: Global rank of the worker.
            spared: Global ranks of workers for which a collective succeeds if every worker had
                joined it.
        """
        if member not in group.members or member in group.gone:
            return
        group.gone.add(member)
        doomed = [one for one in group.pending if member in one.participants and one.can_succeed]
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
        """Fail ``doomed`` operations when the workers notice the loss."""

        def notice() -> None:
            ranks = sorted(group.members.index(member) for member in group.gone)
            gone = ", ".join(map(str, ranks))
            text = f"lost the connection to rank {gone}, which died, gave up or was cut off"
            for operation in doomed:
                lucky: frozenset[int] = frozenset()
                if operation.deliver is not None:
                    lucky = spared & operation.participants
                    if not operation.signal.happened:
                        operation.deliver(sorted(lucky))
                operation.signal.fail(CommunicationError(text), spared=lucky)

        self._kernel.at(self._kernel.now + NOTICE_SECONDS, notice, "a loss is noticed")

    def fail_after(self, signal: Signal, seconds: float, what: str) -> None:
        """Fail ``signal`` with a time-out unless it happens within ``seconds``."""
        if not signal.happened:
            failure = CommunicationTimeout(
                f"no answer. The time-out is timeout_seconds={seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
            end = self._kernel.now + seconds
            self._kernel.at(end, lambda: signal.fail(failure), f"{what} times out")

    # -- interruptions ---------------------------------------------------------------------------

    def cut(self, member: int, seconds: float) -> None:
        """Interrupt all traffic of ``member`` for ``seconds`` from now on."""
        self._cuts.append((member, self._kernel.now, self._kernel.now + seconds))

    def cut_until(self, members: Iterable[int]) -> float:
        """Return the time at which traffic between ``members`` resumes; ≤ now if it flows."""
        now, ranks = self._kernel.now, frozenset(members)
        ends = (end for one, start, end in self._cuts if one in ranks and start <= now)
        return max(ends, default=0)

    def deliver_at(
        self, seconds: float, ranks: Sequence[int], action: Callable[[], None], label: str
    ) -> None:
        """Schedule an arrival; it is postponed while the traffic of one of ``ranks`` is cut."""
        if not self.faulty:
            return self._kernel.at(seconds, action, label)

        def arrive() -> None:
            resumed = self.cut_until(ranks)
            if resumed > self._kernel.now:
                self._kernel.at(resumed, arrive, label)
            else:
                action()

        self._kernel.at(seconds, arrive, label)
