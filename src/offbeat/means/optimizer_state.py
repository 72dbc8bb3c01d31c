"""The mean of the optimizers' state, for those who ask for ``optimizer_state="average"``."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.fabric import Team
from offbeat.means.landing import Landing, bucket_landing
from offbeat.means.replica import Bucket, make_buckets
from offbeat.significance import squared_norm


def forget_not_finite(optimizer: Optimizer) -> None:
    """The state of each parameter that holds NaN or infinity begins anew at the next step."""
    for parameter, state in [*optimizer.state.items()]:
        tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
        if not math.isfinite(squared_norm(tensors)):
            del optimizer.state[parameter]


class OptimizerState:
    """Momentum buffers, second moments and the like, of the parameters that are averaged.

    Counters named ``step`` are left alone. A worker may lack a tensor, of a layer it has not used
    yet: only what all workers have is averaged.

    Args:
        team: The workers.
        parameters: Name and tensor of each averaged parameter, the same on all workers.
        optimizers: Who keeps their state.
    """

    def __init__(
        self,
        team: Team,
        parameters: Sequence[tuple[str, Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._team, self._optimizers = team, optimizers
        self._names = {id(tensor): name for name, tensor in parameters}

    def launch(self, own: float, total: float) -> list[Landing]:
        """Start state ← Σ w·state / Σ w: the sums under way.

        Blocks while the workers find out what all of them have.

        *Communication*: as many bytes as the state has, exactly, whatever the wire, and 16.
        """
        found = self._present()
        common = self._common(sorted(found))
        what = "mean of the optimizer's state"

        def start(bucket: Bucket) -> Landing:
            handle = self._team.fabric.sum(bucket.pack(own), what=what)
            return bucket_landing(handle, bucket, total)

        return [start(bucket) for bucket in make_buckets(found[name] for name in common)]

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
        pair = torch.tensor([number, -number], device=self._team.fabric.control_device)
        handle = self._team.fabric.maximum(pair, what="comparison of states")
        largest, smallest = handle.wait().tolist()
        if largest == -smallest:
            return lines
        everyone = self._team.fabric.gather_bytes("\n".join(lines).encode(), what="list of states")
        sets = [set(payload.decode().split("\n")) for payload in everyone]
        return sorted(set.intersection(*sets) - {""})
