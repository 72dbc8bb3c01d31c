"""Cuts a model into parts, and describes it to the strategy."""

from collections.abc import Callable, Sequence

from torch import Tensor

from offbeat.averaging.parts.cuts import cut_by_bytes, cut_by_tensors, summed_bytes
from offbeat.averaging.parts.part import Part
from offbeat.averaging.parts.snapshot_part import SnapshotPart
from offbeat.averaging.parts.update_part import UpdatePart
from offbeat.averaging.worker import Worker
from offbeat.quantization.payloads import update_bits, uses_single_stage
from offbeat.strategies.base import Outer, SharedModel, WorkerView

_LOSSY = ("bfloat16", "int8", "int4", "int2")


def make_parts(worker: Worker, shared: SharedModel) -> list[Part]:
    """The parts of a model that all workers hold.

    In a node whose workers hold shards, each worker cuts its own shards, which its counterparts in
    the other nodes hold, too. The number of parts must be the same on all workers of the node, and
    a worker with fewer parts adds empty ones. Parts of whole tensors are those of the whole model,
    so they hold the same parameters as without shards; parts of equal bytes are cut from the shards
    of each worker, so that all workers of the node send equally much.

    Raises:
        ValueError: there are more parts than parameter tensors, which are not divided.
    """
    tensors, team = [p for _, p in worker.replica.parameters], worker.team
    size = round(team.host.scale * sum(t.nbytes for t in tensors))
    if team.sharded:
        size = round(team.agree(size)[0])
    wanted = shared.parts(size) if callable(shared.parts) else shared.parts
    groups: list[Callable[[], Sequence[Tensor]]]
    if shared.error_feedback:
        groups = list(cut_by_bytes([t for t in tensors if t.numel()], wanted))
        count = int(*team.agree(len(groups))) if team.sharded else len(groups)
        groups += [_returns([])] * (max(1, count) - len(groups))
    else:
        groups = _whole_tensors(tensors, team.over_shards(*map(summed_bytes, tensors)), wanted)
    parts = []
    for index, group in enumerate(groups):
        parts.append(_make_part(worker, shared, group, index, last=index == len(groups) - 1))
        if len(groups) > 1:  # P was copied from the staging memory, which they need one at a time
            parts[-1].release()
    return parts


def _whole_tensors(
    tensors: Sequence[Tensor], sizes: Sequence[float], parts: int
) -> list[Callable[[], Sequence[Tensor]]]:
    """Parts of whole tensors.

    Args:
        tensors: In order. A shard may be empty.
        sizes: Bytes of each whole tensor.
        parts: Their number.
    """
    kept = [(tensor, size) for tensor, size in zip(tensors, sizes, strict=True) if size]
    if not kept:
        return [_returns([])]
    if parts > len(kept):
        raise ValueError(
            f"the number of parts must be at most {len(kept)}, the number of parameter tensors of "
            f"this model, because a tensor is not divided; got {parts}"
        )
    cut = cut_by_tensors([tensor for tensor, _ in kept], parts, [size for _, size in kept])
    return [_returns(group) for group in cut]


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
        precision=None if wire.strategy_sets_precision else wire.precision,
        bits={one: update_bits(one, size) for one in ("float32", *_LOSSY)},
        two_stages=frozenset(one for one in lossy if not uses_single_stage(one, size)),
        record=worker.record,
        details=worker.details,
    )
