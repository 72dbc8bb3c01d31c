"""Who trains together now: the one holder of the communicator, which everyone else asks."""

from dataclasses import dataclass

import torch

from offbeat.transport.accounting import Account, Accounting
from offbeat.transport.communicator import Communicator
from offbeat.transport.host import Host
from offbeat.transport.membership import Membership, View, membership_of


@dataclass(frozen=True, eq=False)
class Node:
    """One node of several workers, as one of them sees it.

    Attributes:
        everyone: All workers of all nodes, for what each process has of its own.
        inside: Those of this node.
        sharded: Whether each of them holds a part of the model, and trains it with its counterparts
            in the other nodes; else all hold the same.
    """

    everyone: Communicator
    inside: Communicator
    sharded: bool = False

    def close(self, *, together: bool) -> None:
        """See ``Communicator.close``."""
        self.inside.close(together=together)
        self.everyone.close(together=together)


class Team:
    """The workers of a training, as one of them sees them.

    What depends on how many there are reads ``size`` when it is used, or is made anew in each view.
    Where nodes of several processes train together, each node is one worker.

    Attributes:
        view: Number of this composition of the team; another one for each change.
        members: Who they are, by rank: their ranks in view 0, and further numbers for those that
            have joined.
        communicator: The communicator. Its bytes and waits are counted in ``account``.
        account: What the training has sent and waited.
        membership: Agrees on the next view; None: there is none.
        node: The processes that are this worker; None: it is this one alone.
    """

    communicator: Accounting

    def __init__(
        self,
        communicator: Communicator,
        *,
        account: Account | None = None,
        node: Node | None = None,
    ) -> None:
        self.node = node
        if account is None:
            account = Account(1 if node is None or node.sharded else node.inside.size)
        self.account = account
        membership = membership_of(communicator)
        if membership is None:
            self._take(View(0, tuple(range(communicator.size)), communicator))
        else:
            self._take(membership.view)

    def _take(self, view: View) -> None:
        self.view, self.members = view.number, view.members
        self.membership: Membership | None = membership_of(view.communicator)
        self.communicator = Accounting(view.communicator, self.account)

    def enter(self, view: View) -> None:
        """The next view; what is under way in this one is abandoned."""
        self.account.before_waiting.clear()
        self._take(view)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.members)

    @property
    def ranks(self) -> range:
        """The numbers of all workers."""
        return range(self.size)

    @property
    def member(self) -> int:
        """Who this process is, whatever its number in this view."""
        return self.members[self.rank] if self.node is None else self.node.everyone.rank

    @property
    def everyone(self) -> Communicator:
        """The communicator of all processes, for what each of them has of its own."""
        return self.communicator if self.node is None else self.node.everyone

    @property
    def host(self) -> Host:
        """This worker's clock and activities."""
        return self.communicator.host

    @property
    def sharded(self) -> bool:
        """Whether this worker holds a part of the model, and others of its node the rest."""
        return self.node is not None and self.node.sharded

    def over_shards(self, *values: float) -> list[float]:
        """Sums of numbers over the parts of the model in this node; themselves if it is whole.

        Blocks. All workers of the node get the same.
        """
        if self.node is None or not self.node.sharded:
            return list(values)
        inside = self.node.inside
        own = torch.tensor(values, dtype=torch.float64, device=inside.control_device)
        sums: list[float] = inside.sum(own, what="sum over shards").wait().tolist()
        return sums

    def agree(self, *values: float) -> list[float]:
        """The maximum of each number over the workers of this node.

        All of them call it alike. Without a node it returns the values. Blocks; the time counts as
        waiting.
        """
        if self.node is None:
            return list(values)
        inside = self.node.inside
        own = torch.tensor(values, dtype=torch.float64, device=inside.control_device)
        started = self.host.now()
        # With NCCL it is tolist() that blocks.
        largest: list[float] = inside.maximum(own, what="agreement of a node").wait().tolist()
        self.account.waited(self.host.now() - started)
        return largest

    @property
    def uncounted(self) -> Communicator:
        """The communicator for activities beside the training: bytes and waits of their own."""
        return self.communicator.inner

    def twin(self) -> "Team":
        """The same workers with an order of operations of their own, counted together.

        A collective.
        """
        return Team(self.communicator.inner.twin(), account=self.account, node=self.node)

    def close(self, *, together: bool = False) -> None:
        """Give connections, threads and descriptors back; see ``Communicator.close``."""
        self.communicator.close(together=together)
        if self.node is not None:
            self.node.close(together=together)
