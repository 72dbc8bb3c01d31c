"""What the strategies with a parameter server share: the model as a vector, meetings, the end."""

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.arguments import require_integer
from offbeat.errors import OffbeatError
from offbeat.fabric.link import Pushes
from offbeat.fabric.parameter_server import ParameterServer, places_of
from offbeat.fabric.server import Server
from offbeat.fabric.shard import Rule
from offbeat.fabric.sliced_server import SlicedServer
from offbeat.means.replica import as_real, read, staging_dtype, unpack
from offbeat.significance import squared_norm
from offbeat.strategies.base import Averages, NonFinite, Roll, Strategy, Worker, transient

logger = logging.getLogger("offbeat")


@dataclass
class ServerState:
    """The worker's end of the server, and what the checkpoint holds of it."""

    server: Server = transient()
    tensors: list[Tensor] = transient()  # the model's parameters, in the order of the vector
    warned: bool = transient(default=False)  # of a push that is not finite
    saved: dict[str, Any] = field(default_factory=dict)  # the server, as it was when last saved
    reunited: bool = transient(default=False)  # the model is that of the next view


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerStrategy(Strategy):
    """Workers that never meet in training: each pushes to and pulls from a parameter server.

    The server's model is the one that counts: ``consensus`` shows it, ``finish`` leaves it on all
    workers. A look pushes nothing: what a worker has not pushed yet is not in it. Parameters are
    served; floating-point buffers stay local and are averaged at ``consensus`` and ``finish``.

    Over a lossy ``wire`` what travels between a worker and another rank's shard is rounded. Changes
    of the model keep with their sender what rounding took away; models go as their difference to a
    mirror that both ends keep. Looks, and what ``finish`` pushes of changes, travel as they are.

    In nodes of several workers each worker of a node has the server's model for one slice of the
    vector, together with its counterparts in the other nodes, and ``servers`` are numbers of nodes.

    Args:
        servers: The ranks that keep a shard of the model each, as in ``(0, 1)``, ``0/1`` in the
            text form; None is all of them, so that no single link carries everything.
    """

    averages: ClassVar[Averages] = "pushes"
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise")
    pushes: ClassVar[Pushes] = "changes"
    """What workers send to the server; over a lossy wire it matters."""
    meets: ClassVar[bool] = False
    keeps_nodes = True
    continues: ClassVar[bool] = True
    servers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers is None:
            return
        if isinstance(self.servers, int) and not isinstance(self.servers, bool):
            object.__setattr__(self, "servers", (self.servers,))
        if not isinstance(self.servers, tuple):
            raise TypeError(f"servers must be a tuple of ranks, got {self.servers!r}")
        for rank in self.servers:
            require_integer("a rank in servers", rank, least=0)
        if not self.servers or len(set(self.servers)) < len(self.servers):
            raise ValueError(f"servers must be at least one rank, none twice, got {self.servers}")

    @abstractmethod
    def rule(self, worker: Worker) -> Rule:
        """A new rule for this rank's shard."""

    def serve(self, worker: Worker) -> ServerState:
        """Start the server from the model that all workers hold.

        In a later view those of ``servers`` go on that are left; or all, if none is.

        Raises:
            ValueError: a rank in ``servers`` that there is not.
        """
        team, servers = worker.team, self.servers
        if servers is not None and team.view == 0 and max(servers) >= worker.size:
            raise ValueError(
                f"servers={servers} needs more workers than the {worker.size} there are: "
                f"ranks are 0 to {worker.size - 1}"
            )
        if servers is not None and team.view:
            servers = tuple(team.members.index(one) for one in servers if one in team.members)
        tensors: list[Tensor] = [p for _, p in worker.replica.parameters]
        vector = _vector_like(tensors)
        read(tensors, vector)
        if isinstance(worker.state, ServerState) and worker.state.server.view == team.view:
            worker.state.server.begin_anew(vector)
            return ServerState(worker.state.server, tensors)
        several = team.node is not None  # workers in each node, which hold the same bits
        server = (SlicedServer if several else ParameterServer)(
            team,
            vector,
            servers=servers or None,
            rule=lambda: self.rule(worker),
            precision=worker.wire.precision,
            pushes=self.pushes,
        )
        return ServerState(server, tensors)

    # -- another view ----------------------------------------------------------------------------

    @override
    def kept(self, worker: Worker) -> dict[str, Any]:
        """Which server this worker has had, and the pushes that its shard has taken in."""
        state: ServerState = worker.state
        server, shard = state.server, state.server.shard
        if shard is not None:
            shard.close()
        return {
            "served": -1 if state.reunited else server.view,
            "servers": [server.members[rank] for rank in server.servers],
            "taken": [] if shard is None else [*zip(server.members, shard.taken, strict=True)],
        }

    @override
    def reunite(
        self,
        worker: Worker,
        kept: Sequence[dict[str, Any] | None],
        mean: Callable[[], None],
    ) -> None:
        """Put together the shards that are left; the others are cut from the mean of the workers'.

            of a shard that is left:  x ← z
            of one that is lost:      x ← mean(x − S)       S what was not pushed

        S goes into the next server, and with it the last push, where it has not reached the shard.
        """
        own: ServerState | None = worker.state if kept[worker.rank] is not None else None
        if self.pushes == "models":
            mean()
        else:
            self._put_together(worker, kept, own)
        if own is not None:
            own.reunited = True

    def _put_together(
        self, worker: Worker, kept: Sequence[dict[str, Any] | None], own: ServerState | None
    ) -> None:
        team = worker.team
        tensors: list[Tensor] = [p for _, p in worker.replica.parameters]
        vector = _vector_like(tensors).zero_()
        told = {team.members[rank]: one for rank, one in enumerate(kept) if one is not None}
        views = {one["served"] for one in told.values()}
        whole = len(views) == 1 and -1 not in views  # else some have begun the view after, not all
        servers = next(iter(told.values()))["servers"] if whole else [-1]
        shares = [*zip(servers, places_of(vector.numel(), len(servers)), strict=True)]
        if own is not None:
            model = _vector_like(tensors)
            read(tensors, model)
            if not own.reunited:
                self.without_unsent(worker, model)
            for server, place in shares:
                if server not in told:
                    vector[place] = model[place] / len(told)
                elif server == team.member and own.server.shard is not None:
                    vector[place] = own.server.shard.values
        team.fabric.sum(vector, what="what is left of the parameter server").wait()
        what = "mean of the buffers at the beginning of a view"
        worker.models.average_buffers(float(own is not None), float(len(told)), what=what)
        unpack(vector, tensors)
        if own is None or own.reunited:
            return
        for server, place in shares:
            lost = server not in told
            taken = own.server.pushed if lost else dict(told[server]["taken"])[team.member]
            back = own.server.values[place] if taken < own.server.pushed else None
            self.carry(worker, place, None if own.server.lossy else back, lost=lost)

    def without_unsent(self, worker: Worker, model: Tensor) -> None:
        """Model ← x − S, given x, if S is part of it."""

    def carry(self, worker: Worker, place: slice, back: Tensor | None, *, lost: bool) -> None:
        """What of S goes into the next server, of one shard.

        Args:
            worker: This worker.
            place: Its part of the vector.
            back: The last push, if it has not reached it.
            lost: Whether it is lost, and the workers' models stand for it.
        """

    def flush(self, worker: Worker) -> None:
        """Push what has not been pushed; training is over."""

    def met(self, worker: Worker, clock: int) -> None:
        """Everyone has come; ``clock`` is that of the slowest."""

    def report(self, worker: Worker) -> None:
        """What was pulled, and what this rank's shard saw: into the details of ``Stats``."""
        shard = worker.state.server.shard
        worker.details["pulled_bytes"] = worker.state.server.pulled_bytes
        if shard is not None:
            worker.details.update(
                pushes_served=shard.version,
                staleness_max=max(shard.staleness, default=0),
                staleness_histogram=dict(shard.staleness),
            )

    @override
    def finite(self, worker: Worker, part: int, *, stepping: bool) -> bool:
        """What meets here is on the server already; see ``look``."""
        return True

    def look(self, worker: Worker, values: Tensor) -> None:
        """Look at what is about to be pushed. Reads it once.

        The server takes in one push after the other, so none of them can be left out of a mean.

        Raises:
            OffbeatError: it is not finite, and the run is to end before the server takes it in.
        """
        if worker.size == 1 or math.isfinite(squared_norm([values])):
            return
        worker.details["not_finite"] = worker.details.get("not_finite", 0) + 1
        found = f"rank {worker.rank} would push NaN or infinity to the parameter server at step "
        found += f"{worker.step}"
        if worker.guarded:
            raise OffbeatError(f'{found}; its model is as before (non_finite="raise")')
        if not worker.state.warned:
            worker.state.warned = True
            prevents = 'attach(..., non_finite="raise") prevents it'
            logger.warning("%s, and so to all workers; %s", found, prevents)

    @override
    def due(self, worker: Worker) -> bool:
        return False  # workers do not meet in training

    @override
    def meet(self, worker: Worker, *, finishing: bool) -> None:
        """Wait at the server until all have come; nobody waits for this worker's clock."""
        if finishing and worker.has_news:
            self.flush(worker)
        if finishing:
            worker.has_news = False
        self.met(worker, worker.state.server.arrive())

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """The server's model, and the mean of the buffers."""
        state: ServerState = worker.state
        unpack(state.server.look(), state.tensors)
        worker.average_buffers(final=final)
        worker.barrier("a look at the server's model")  # nobody pushes before all have pulled
        if final:
            self.report(worker)
            state.server.leave()

    @override
    def before_save(self, worker: Worker, meet: Callable[[], object]) -> None:
        """Keep a copy of the shard when all pushes have arrived, and of this worker's end.

        A collective.
        """
        state: ServerState = worker.state
        server = state.server
        server.stage()
        self.met(worker, server.arrive())
        state.saved = server.state_dict()
        worker.barrier("the state of the parameter server")  # nobody pushes before all have copied

    @override
    def after_load(self, worker: Worker) -> None:
        """Put the shard back. A collective."""
        state: ServerState = worker.state
        state.server.load_state_dict(state.saved)
        worker.barrier("the state of the parameter server")


def _vector_like(tensors: Sequence[Tensor]) -> Tensor:
    """Memory for all numbers of ``tensors``, in one vector."""
    double = any(staging_dtype(t) == torch.float64 for t in tensors)
    elements = sum(as_real(t.detach()).numel() for t in tensors)
    return torch.empty(elements, dtype=torch.float64 if double else torch.float32)
