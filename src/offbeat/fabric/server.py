"""What a strategy sees of a parameter server, whose vector is for all to push and pull.

A worker waits for the answer, or it lets a request run beside its training: ``begin``, and ``take``
once the answer has come. One request is under way at a time.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from offbeat.fabric.handle import Handle
from offbeat.fabric.shard import NEVER, Answer, RequestKind, Shard


class Server(ABC):
    """One worker's end.

    Attributes:
        values: 1-D, on the CPU; where a worker puts what it pushes and finds what it has pulled.
            Written and read between ``stage`` and the next request, or after ``take``. Where
            changes are pushed over a lossy wire they are what was last pulled.
        shard: What this worker keeps of the vector; None if it does not serve.
        servers: The ranks that do.
        view: In which it was made: it serves no other.
        members: Of that view.
    """

    values: Tensor
    shard: Shard | None
    servers: list[int]
    view: int
    members: tuple[int, ...]

    @property
    @abstractmethod
    def lossy(self) -> bool:
        """Whether anything that this worker sends is rounded."""

    @property
    @abstractmethod
    def pushed(self) -> int:
        """How often this worker has begun to push, to all shards alike."""

    @property
    @abstractmethod
    def pulled_bytes(self) -> int:
        """Bytes of the answers this worker has asked other ranks for."""

    # -- the worker's side -----------------------------------------------------------------------

    @abstractmethod
    def stage(self) -> Tensor:
        """``values``, free to be written: the last push has left."""

    @abstractmethod
    def hand_over(self, changes: Tensor) -> None:
        """Stage changes; those that rounding keeps from the next push stay in ``changes``."""

    @abstractmethod
    def push(self, *, clock: int = -1) -> None:
        """Send ``values`` and go on. They must not be written before ``stage``."""

    @abstractmethod
    def push_last(self, *, clock: int = -1) -> None:
        """Send ``values`` as they are, whatever the wire, and go on. Only looks may follow."""

    @abstractmethod
    def push_pull(self, *, clock: int = -1, least: int = -NEVER) -> Handle[Answer]:
        """Send ``values`` and start to replace them by what the rule answers.

        Args:
            clock: This worker's clock from now on.
            least: Wait until the slowest worker's clock is at least this.
        """

    @abstractmethod
    def pull(self, *, least: int = -NEVER) -> Handle[Answer]:
        """Start to replace ``values`` by the vector."""

    @abstractmethod
    def look(self) -> Tensor:
        """The vector as it is, whatever the wire, in a tensor of its own.

        ``values`` and ``pulled_bytes`` stay as they are.
        """

    @abstractmethod
    def wait_for(self, clock: int) -> None:
        """Wait until the slowest worker's clock is at least this.

        A time-out counts from the last time that it rose.
        """

    # -- requests beside the training ------------------------------------------------------------

    @property
    @abstractmethod
    def free(self) -> bool:
        """Whether nothing is under way, and no answer waits to be taken: ``values`` are free."""

    @abstractmethod
    def begin(self, kind: RequestKind, *, clock: int = -1, least: int = -NEVER) -> None:
        """Start a request that nobody waits for before ``take``; the server must be ``free``.

        ``values`` must be left alone until then. A request with ``least`` is answered when the
        slowest worker's clock is that, however long it takes; the time-out is that of ``take``.
        Any other is answered at once, or it fails after the time-out of an operation.

        Args:
            kind: "push", "pull" or "push_pull".
            clock: See ``push_pull``.
            least: See ``push_pull``.
        """

    @abstractmethod
    def settle(self, *, now: bool = False) -> None:
        """Wait until what was begun has ended; its answer stays to be taken.

        Args:
            now: It shall be answered at once, whatever clock it is waiting for.
        """

    @abstractmethod
    def take(self, *, wait: bool = False) -> Answer | None:
        """The answer to what was begun, if it has come; with ``wait``, when it has come.

        ``values`` are then those of the answer. None also where nothing was begun.
        """

    # -- meeting and leaving ---------------------------------------------------------------------

    @abstractmethod
    def arrive(self) -> int:
        """Wait until everyone has arrived. Meanwhile nobody waits for this worker's clock.

        What was begun has been answered then, whatever clock it was waiting for; the answer stays
        to be taken. Returns the slowest worker's clock.

        A time-out counts from the last sign of life of any other worker at this server.
        """

    @abstractmethod
    def leave(self) -> None:
        """The last request: the servers' threads end when all workers have left."""

    # -- checkpoints -----------------------------------------------------------------------------

    @abstractmethod
    def begin_anew(self, vector: Tensor) -> None:
        """``vector``, the same on all workers, is the initial value. Nothing was pushed yet."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """This worker's end and its shard, while no request is under way."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
