"""Cut a shared model into parts, the groups of parameters that are averaged separately."""

from collections.abc import Callable, Sequence

from torch import Tensor

from offbeat.averaging.buckets import staged_bytes
from offbeat.averaging.parts.cuts import cut_by_bytes, cut_by_tensors
from offbeat.averaging.parts.part import Part
from offbeat.averaging.parts.snapshot_part import SnapshotPart
from offbeat.averaging.parts.update_part import UpdatePart
from offbeat.averaging.worker import Worker
from offbeat.strategies.base import Outer, SharedModel


def make_parts(worker: Worker, shared: SharedModel) -> list[Part]:
    """Make the parts of a model that is equal on all workers.

    The parts have about equal bytes. With ``shared.error_feedback`` a worker keeps the quantization
    error of an update in its local model and sends it with the next update. The parts may then
    begin inside a tensor. Without it, a part consists of whole tensors.

    A *node* is a group of processes on one machine. If they divide the model among them, each one
    cuts its own shards. All processes of a node have the same number of parts, because they start
    the sum of each part together. So some of these parts may be empty.
    """
    tensors, team = [p for _, p in worker.replica.parameters], worker.team
    size = sum(t.nbytes for t in tensors)
    if team.sharded:
        size = round(team.agree(size)[0])
    number = shared.parts(size) if callable(shared.parts) else shared.parts
    groups: list[Callable[[], Sequence[Tensor]]]
    if shared.error_feedback:
        groups = list(cut_by_bytes([t for t in tensors if t.numel()], number))
        count = int(*team.agree(len(groups))) if team.sharded else len(groups)
        groups += [_constant([])] * (max(1, count) - len(groups))
    else:
        groups = _tensor_groups(tensors, team.over_shards(*map(staged_bytes, tensors)), number)
    parts = []
    for index, group in enumerate(groups):
        parts.append(_make_part(worker, shared, group, index, last=index == len(groups) - 1))
        if len(groups) > 1:  # a part needs its staging tensors only while its sum is in flight
            parts[-1].release()
    return parts


def _tensor_groups(
    tensors: Sequence[Tensor], sizes: Sequence[float], parts: int
) -> list[Callable[[], Sequence[Tensor]]]:
    """Return the tensors of each part. No tensor is divided.

    ``sizes`` are the bytes of each parameter over all of its shards, equal on all processes of a
    node. So all of them put the same parameters into a part, even if their own shard is empty.
    """
    present = [(tensor, size) for tensor, size in zip(tensors, sizes, strict=True) if size]
    if not present:
        return [_constant([])]
    if parts > len(present):
        raise ValueError(
            f"the number of parts must be at most {len(present)}, the number of parameter tensors "
            f"of this model that are not empty, because a tensor is not divided; got {parts}"
        )
    groups = cut_by_tensors([t for t, _ in present], parts, [size for _, size in present])
    return [_constant(group) for group in groups]


def _constant(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
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
    # Buffers are small, so the last part sends all of them.
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
        # An anchored part stores P, the shared model. A worker with non-finite values sends an
        # update of 0, relative to P. A single worker stores no P. Its training has the same bits
        # as training without offbeat.
        anchored=worker.size > 1 and worker.guarded and shared.eager,
        keeps_steps=not shared.blocking,
        outer=shared.outer,
        buffers=buffers,
        step=worker.step,
    )
