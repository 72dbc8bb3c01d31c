"""Cuts a model into parts, and describes it to the strategy."""

from collections.abc import Callable, Sequence

from torch import Tensor

from offbeat.averaging.cuts import cut_by_bytes, cut_by_tensors
from offbeat.averaging.part import Part
from offbeat.averaging.snapshot_part import SnapshotPart
from offbeat.averaging.update_part import UpdatePart
from offbeat.averaging.worker import Worker
from offbeat.fabric.coding import gathers, update_bits
from offbeat.strategies.base import Outer, SharedModel, WorkerView

_LOSSY = ("bfloat16", "int8", "int4", "int2")


def make_parts(worker: Worker, shared: SharedModel) -> list[Part]:
    """The parts of a model that all workers hold.

    In a node whose workers hold shards, each worker cuts its own shards, which its counterparts in
    the other nodes hold, too. The number of parts must be the same on all workers of the node: the
    largest shard decides, and a worker with fewer parts adds empty ones.

    Raises:
        ValueError: there are more parts than parameter tensors, which are not divided.
    """
    tensors = [p for _, p in worker.replica.parameters if p.numel()]
    team = worker.team
    size = round(team.host.scale * sum(t.nbytes for t in tensors))
    if team.sharded:
        size = round(team.agree(size)[0])
    wanted = shared.parts(size) if callable(shared.parts) else shared.parts
    groups: list[Callable[[], Sequence[Tensor]]]
    (most,) = team.agree(len(tensors)) if team.sharded else [float(len(tensors))]
    if shared.error_feedback or not most:
        groups = list(cut_by_bytes(tensors, wanted))
    else:
        if wanted > most:
            raise ValueError(
                f"the number of parts must be at most {most:.0f}, the number of parameter tensors "
                f"of this model, because a tensor is not divided; got {wanted}"
            )
        groups = [_returns(g) for g in cut_by_tensors(tensors, min(wanted, len(tensors)))]
    (count,) = team.agree(len(groups)) if team.sharded else [float(len(groups))]
    groups += [_returns([])] * (max(1, int(count)) - len(groups))
    return [
        _make_part(worker, shared, group, index, last=index == len(groups) - 1)
        for index, group in enumerate(groups)
    ]


def _returns(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    return lambda: tensors


def _make_part(
    worker: Worker,
    shared: SharedModel,
    tensors: Callable[[], Sequence[Tensor]],
    index: int,
    *,
    last: bool,
) -> Part:
    name = f"part {index}"
    # There are few buffers: they travel with the last part.
    buffers = worker.replica.float_buffers if last else tuple
    if shared.error_feedback:
        outer = shared.outer if worker.size > 1 else Outer()
        return UpdatePart(
            worker.team,
            worker.wire,
            tensors,
            name=name,
            outer=outer,
            buffers=buffers,
            step=worker.step,
        )
    return SnapshotPart(
        worker.team,
        worker.wire,
        tensors,
        name=name,
        # A worker that is excluded, or that has nothing finite to send, continues from P. Without
        # peers it trains as if alone, to the last bit.
        anchored=worker.size > 1
        and not shared.blocking
        and (worker.excludes or (worker.guarded and shared.eager)),
        keeps_steps=not shared.blocking,
        outer=shared.outer,
        buffers=buffers,
        step=worker.step,
    )


def view_of(worker: Worker) -> WorkerView:
    """What a strategy sees of a worker whose view begins."""
    wire, size = worker.wire, worker.size
    lossy = [] if wire.exact else _LOSSY
    return WorkerView(
        rank=worker.rank,
        size=size,
        step=worker.step,
        start_step=worker.step,
        launch_step=worker.step,
        precision=None if wire.chosen else wire.precision,
        bits={one: update_bits(one, size) for one in ("float32", *_LOSSY)},
        two_stages=frozenset(one for one in lossy if not gathers(one, size)),
        record=worker.record,
        details=worker.details,
    )
