"""The mean of the optimizers' state, for those who ask for ``optimizer_state="average"``."""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.averaging.norm import squared_norm
from offbeat.averaging.parts.landing import Landing, bucket_landing
from offbeat.averaging.replica import Bucket, make_buckets
from offbeat.errors import AttachError
from offbeat.transport.team import Team


def forget_non_finite(optimizer: Optimizer, over_shards: Callable[..., list[float]]) -> None:
    """The state of each parameter that holds NaN or infinity begins anew at the next step.

    Args:
        optimizer: The optimizer.
        over_shards: Sums numbers over the shards of the parameters, so that all workers that hold
            a shard of one parameter decide alike.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    squares = [squared_norm(_local_values(optimizer.state.get(p, {}))) for p in parameters]
    for parameter, squared in zip(parameters, over_shards(*squares), strict=True):
        if not math.isfinite(squared):
            optimizer.state.pop(parameter, None)


def _local_values(state: dict[str, Any]) -> list[Tensor]:
    """The floating-point tensors of a state; the local shard of each DTensor.

    Reading a DTensor itself would be a collective inside the node.
    """
    tensors = [v for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
    return [v.to_local() if hasattr(v, "to_local") else v for v in tensors]


def _is_coded(value: Tensor) -> bool:
    """Whether other numbers are meant: bitsandbytes' bytes, torchao's tensors around such."""
    if type(value) not in (Tensor, nn.Parameter):
        return True
    return value.dtype in (torch.uint8, torch.int8) and value.numel() > 1


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
            handle = self._team.communicator.sum(bucket.pack(own), what=what)
            return bucket_landing(handle, bucket, total)

        return [start(bucket) for bucket in make_buckets(found[name] for name in common)]

    def _present(self) -> dict[str, Tensor]:
        """Tensors by a line that describes them.

        Raises:
            AttachError: some are codes of numbers, of which there is no mean.
        """
        found: dict[str, Tensor] = {}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if id(parameter) not in self._names:
                    continue
                for key, value in state.items():
                    if not isinstance(value, Tensor) or key == "step":
                        continue
                    name = self._names[id(parameter)]
                    if _is_coded(value):
                        raise AttachError(
                            f'optimizer_state="average": {key!r} of parameter {name!r} in this '
                            f"{type(optimizer).__name__} is quantised, and a mean of its codes "
                            'means nothing; use optimizer_state="local"'
                        )
                    if value.is_floating_point() or value.is_complex():
                        found[f"{name} {key} {tuple(value.shape)} {value.dtype}"] = value
        return found

    def _common(self, lines: list[str]) -> list[str]:
        """What all workers have, in order; found out by a hash where they have the same."""
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        pair = torch.tensor([number, -number], device=self._team.communicator.control_device)
        handle = self._team.communicator.maximum(pair, what="comparison of states")
        largest, smallest = handle.wait().tolist()
        if largest == -smallest:
            return lines
        everyone = self._team.communicator.gather_bytes(
            "\n".join(lines).encode(), what="list of states"
        )
        sets = [set(payload.decode().split("\n")) for payload in everyone]
        return sorted(set.intersection(*sets) - {""})
