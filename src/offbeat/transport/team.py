"""The workers that train together: rank, size and communicator of the current view."""

from dataclasses import dataclass

import torch

from offbeat.transport.accounting import Account, Accounting
from offbeat.transport.communicator import Communicator
from offbeat.transport.host import Host
from offbeat.transport.membership import Membership, View, membership_of


@dataclass(frozen=True, eq=False)
class Node:
    """A node of several processes, as seen by one of them.

    Attributes:
        everyone: Communicator of all processes of all nodes.
        inside: Communicator of the processes of this node.
        sharded: True if each process of a node holds one shard of the model and trains it with its
            counterparts in the other nodes; False if all hold the whole model.
    """

    everyone: Communicator
    inside: Communicator
    sharded: bool = False

    def close(self, *, together: bool) -> None:
        """See ``Communicator.close``."""
        self.inside.close(together=together)
        self.everyone.close(together=together)


class Team:
    """The workers of a training, as seen by one of them.

    It is the only holder of the communicator, which changes with the view. Other objects read
    ``size`` when they need it, or are created again for each view. If nodes of several processes
    train together, each node is one worker.

    Attributes:
        view: Number of the current view.
        members: Identities by rank: the rank in view 0, or a new number for a worker that joined.
        communicator: Communicator between the workers, counted in ``account``.
        account: Totals of bytes and waiting time of the training.
        membership: Membership of the current view; None if the training is not elastic.
        node: Node of this process; None if the process is a worker by itself.
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
        """Enter the next view, and abandon everything in flight in this one."""
        self.account.before_waiting.clear()
        self._take(view)

    @property
    def rank(self) -> int:
        """Rank of this worker in the current view."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.members)

    @property
    def ranks(self) -> range:
        """Ranks of all workers."""
        return range(self.size)

    @property
    def member(self) -> int:
        """Identity of this process, which is the same in all views."""
        return self.members[self.rank] if self.node is None else self.node.everyone.rank

    @property
    def everyone(self) -> Communicator:
        """Communicator of all processes, for state that each process has separately."""
        return self.communicator if self.node is None else self.node.everyone

    @property
    def host(self) -> Host:
        """Clock and background threads of this worker."""
        return self.communicator.host

    @property
    def sharded(self) -> bool:
        """True if the processes of a node hold one shard of the model each."""
        return self.node is not None and self.node.sharded

    def over_shards(self, *values: float) -> list[float]:
        """Return the sum of each value over the shards of the model in this node.

        Returns the values themselves if the model is not sharded. A collective of the node. Blocks.
        """
        if self.node is None or not self.node.sharded:
            return list(values)
        inside = self.node.inside
        own = torch.tensor(values, dtype=torch.float64, device=inside.control_device)
        sums: list[float] = inside.sum(own, what="sum over shards").wait().tolist()
        return sums

    def agree(self, *values: float) -> list[float]:
        """Return the maximum of each value over the processes of this node.

        Returns the values themselves without a node. A collective of the node. Blocks, and counts
        the time as waiting.
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
        """Communicator for background tasks, whose bytes and waiting time do not count."""
        return self.communicator.inner

    def twin(self) -> "Team":
        """Return a duplicate with an independent order of operations and the same account.

        A collective.
        """
        return Team(self.communicator.inner.twin(), account=self.account, node=self.node)

    def close(self, *, together: bool = False) -> None:
        """Release connections, threads and descriptors; see ``Communicator.close``."""
        self.communicator.close(together=together)
        if self.node is not None:
            self.node.close(together=together)
