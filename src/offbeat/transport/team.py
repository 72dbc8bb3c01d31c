"""The team: the workers that train together, with rank, size and communicator.

In elastic training each generation has its own communicator; see ``transport/membership.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offbeat.transport.accounting import Account
from offbeat.transport.communicator import Communicator
from offbeat.transport.host import Host
from offbeat.transport.membership import Generation, Membership
from offbeat.transport.stages import Stages

_POLL_SECONDS = 0.0005


@dataclass(frozen=True, eq=False)
class Node:
    """Processes of one machine that act as a single worker towards other nodes.

    Each process averages a share of the model with its *counterparts*, the processes of the other
    nodes that average the same share.

    Attributes:
        everyone: Communicator between all processes of all nodes.
        inside: Communicator between the processes of this node.
        sharded: True if a process holds only its share of the model, as under ``fully_shard``.
            False if it holds the whole model.
    """

    everyone: Communicator
    inside: Communicator
    sharded: bool = False


class Team:
    """The workers that train together, as seen by one of them.

    A worker is one process or, with ``node``, a node of several processes. Rank, size and
    communicator change in ``enter``. So other objects must not store them for longer than a
    generation.

    Args:
        communicator: Communicator between the workers in the first generation of this worker. With
            ``node``: between this process and its counterparts.
        node: Node of this process; None if the process is a worker by itself.
        account: Account to which the communicators add; None creates one.

    Attributes:
        generation: Number of the current generation; 0 if the training is not elastic.
        members: Identity of each worker, by rank. The identity is the worker's rank in the first
            generation (generation 0), or a new number if the worker joined later. It never changes.
            Example: after worker 1 of 3 is lost, ``members`` is (0, 2).
        communicator: Communicator between the workers. It adds its bytes and waits to ``account``.
        stages: Starts the second stages of sums of the current generation, in background threads.
        landings: Moves the global model by sums that have arrived, in other background threads.
        host: Clock and background threads of this worker.
        account: Bytes sent and time waited in all generations.
        membership: Interface for agreeing on the next generation; None if the training is not
            elastic.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        node: Node | None = None,
        account: Account | None = None,
    ) -> None:
        self.node = node
        self.account = Account() if account is None else account
        self._replica_team: Team | None = None
        if communicator.membership is None:
            self._begin(Generation(0, tuple(range(communicator.size)), communicator))
        else:
            self._begin(communicator.membership.generation)

    def enter(self, generation: Generation) -> None:
        """Replace the current generation, which the caller has closed, by ``generation``."""
        self._settle()
        self._begin(generation)

    def _begin(self, generation: Generation) -> None:
        self.generation, self.members = generation.number, generation.members
        self.membership: Membership | None = generation.communicator.membership
        self.communicator = generation.communicator
        self.communicator.account = self.account
        self.host: Host = generation.communicator.host
        self.stages = Stages(generation.communicator, "second stages of sums")
        self.landings = Stages(generation.communicator, "landings of parts")

    @property
    def rank(self) -> int:
        """Rank of this worker in the current generation."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """Number of workers in the current generation."""
        return len(self.members)

    @property
    def ranks(self) -> range:
        """Ranks of all workers in the current generation."""
        return range(self.size)

    @property
    def identity(self) -> int:
        """Number of this process, the same in all generations.

        Without a node it is this worker's entry in ``members``. With a node it is the rank of the
        process among all processes of all nodes.
        """
        return self.members[self.rank] if self.node is None else self.node.everyone.rank

    @property
    def everyone(self) -> Communicator:
        """Communicator between all processes of all nodes; without nodes, between all workers."""
        return self.communicator if self.node is None else self.node.everyone

    @property
    def sharded(self) -> bool:
        """True if each process of a node holds only one shard of the model."""
        return self.node is not None and self.node.sharded

    def wait_while(self, busy: Callable[[], bool], seconds: float, what: str) -> float:
        """Wait while ``busy()`` is True, for ``seconds`` at most. Return the time waited.

        The time counts as waiting. ``what`` names the wait in a simulation's timeline. This method
        does not notice that a worker was lost.
        """
        began = now = self.host.now()
        end, pause = began + seconds, max(_POLL_SECONDS, seconds / 50)
        while busy() and now < end:
            self.host.sleep(min(pause, end - now), what)
            now = self.host.now()
        self.account.waited(now - began)
        return now - began

    @property
    def models_per_node(self) -> int:
        """Number of models in a node: one, or one for each process that holds the whole model."""
        return 1 if self.node is None or self.node.sharded else self.node.inside.size

    @property
    def replica_team(self) -> "Team":
        """A team with one member for each copy of the model, or of this process's shard of it.

        Its members are the workers or, if each process of a node holds the whole model, all
        processes.
        """
        if self.node is None or self.models_per_node == 1:
            return self
        if self._replica_team is None:
            self._replica_team = Team(self.node.everyone, account=self.account)
            self.node.everyone.senders = self.models_per_node
        return self._replica_team

    def sum_over_shards(self, *values: float) -> list[float]:
        """Return the sum of each value over the shards of the model in this node.

        A collective of the node; blocks. If the model is not sharded, returns the values.
        """
        return self.sum_over_node(*values) if self.sharded else list(values)

    def sum_over_node(self, *values: float) -> list[float]:
        """Return the sum of each value over the processes of this node.

        A collective of the node; blocks. Without a node, returns the values.
        """
        if self.node is None:
            return list(values)
        inside = self.node.inside
        return inside.sum(_numbers(values), what="sum over a node").wait().tolist()

    def maximum_over_node(self, *values: float) -> list[float]:
        """Return the maximum of each value over the processes of this node.

        Use it if processes measure different values, such as times, and must act on the same one. A
        collective of the node; blocks. Without a node, returns the values.
        """
        if self.node is None:
            return list(values)
        inside = self.node.inside
        largest = inside.maximum(_numbers(values), what="maximum over a node")
        with self.communicator.waiting():
            return largest.wait().tolist()

    def _settle(self) -> None:
        """Order the GPU's work in the background before what this thread launches from now on."""
        for each in self.stages, self.landings:
            each.settle()

    def close(self, *, together: bool = False) -> None:
        """Close the communicators of this team and of its node; see ``Communicator.close``."""
        try:
            self.communicator.close(together=together)
        finally:  # also after a Ctrl-C
            self._settle()
        if self.node is not None:
            self.node.inside.close(together=together)
            self.node.everyone.close(together=together)


def _numbers(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
