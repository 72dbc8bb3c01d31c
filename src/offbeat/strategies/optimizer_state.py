"""The mean of the optimizers' state, for those who ask for ``optimizer_state="average"``."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.fabric import Communicator
from offbeat.replica import make_buckets


class OptimizerState:
    """Momentum buffers, second moments and the like, of the parameters that are averaged.

    Counters named ``step`` are left alone. A worker may lack a tensor, of a layer it has not used
    yet: only what all workers have is averaged.

    Args:
        fabric: The communicator.
        parameters: Name and tensor of each averaged parameter, the same on all workers.
        optimizers: Who keeps their state.
    """

    def __init__(
        self,
        fabric: Communicator,
        parameters: Sequence[tuple[str, Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._fabric, self._optimizers = fabric, optimizers
        self._names = {id(tensor): name for name, tensor in parameters}

    def average(self, own_weight: float, weight: float, *, take: bool) -> None:
        """state ← Σ w·state / Σ w, in place; ``take`` False only contributes. Blocks.

        *Communication*: as many bytes as the state has, exactly, whatever the wire, and 16.
        """
        found = self._present()
        common = self._common(sorted(found))
        buckets = make_buckets(found[name] for name in common)
        what = "mean of the optimizer's state"
        handles = [self._fabric.sum(bucket.pack(own_weight), what=what) for bucket in buckets]
        for bucket, handle in zip(buckets, handles, strict=True):
            handle.wait()
            if take:
                bucket.unpack(weight)

    def _present(self) -> dict[str, Tensor]:
        """Tensors by a line that describes them."""
        return {
            f"{self._names[id(parameter)]} {key} {tuple(value.shape)} {value.dtype}": value
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            if id(parameter) in self._names
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point() and key != "step"
        }

    def _common(self, lines: list[str]) -> list[str]:
        """What all workers have, in order; found out by a hash where they have the same."""
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        pair = torch.tensor([number, -number], device=self._fabric.control_device)
        largest, smallest = self._fabric.maximum(pair, what="comparison of states").wait().tolist()
        if largest == -smallest:
            return lines
        everyone = self._fabric.gather_bytes("\n".join(lines).encode(), what="list of states")
        sets = [set(payload.decode().split("\n")) for payload in everyone]
        return sorted(set.intersection(*sets) - {""})
