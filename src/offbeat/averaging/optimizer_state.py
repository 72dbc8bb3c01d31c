"""The mean of the optimizers' state over the workers, for ``optimizer_state="average"``."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.averaging.exact_mean import ExactMean
from offbeat.errors import AttachError
from offbeat.transport.team import Team

_COUNTERS = ("step", "mu_product")  # state that counts steps, the same on all workers


def _is_quantized(value: Tensor) -> bool:
    """Return True if a tensor may be quantized, as those of bitsandbytes and torchao are."""
    if type(value) not in (Tensor, nn.Parameter):
        return True
    return value.dtype in (torch.uint8, torch.int8) and value.numel() > 1


class OptimizerState:
    """Averages the floating-point state of the averaged parameters, such as momentum.

    Counters named ``step`` are not averaged. Only tensors that exist on all workers are averaged: a
    worker has no state for a layer that it has not used yet.
    """

    def __init__(
        self,
        team: Team,
        mean: ExactMean,
        parameters: Sequence[tuple[str, Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._team, self._mean = team.replica_team, mean
        self._optimizers = optimizers
        self._names = {id(tensor): name for name, tensor in parameters}

    def average(self, weight: float, total: float) -> None:
        """state ← Σ w·state / Σ w. A collective. Blocks.

        *Communication*: sums of the state, never quantized, and 16 bytes for a comparison of the
        lists of tensors. If the lists differ, the workers also exchange the lists.

        Args:
            weight: Weight w of this worker (≥ 0).
            total: Sum of w over the workers, > 0.
        """
        tensors = self._tensors()
        common = [tensors[line] for line in self._common(sorted(tensors))]
        self._mean.average_tensors(common, weight, total, what="mean of the optimizer's state")

    def _tensors(self) -> dict[str, Tensor]:
        """Return the state tensors of this worker, by a line of text that describes the tensor."""
        tensors: dict[str, Tensor] = {}
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if id(parameter) not in self._names:
                    continue
                for key, value in state.items():
                    if not isinstance(value, Tensor) or key in _COUNTERS:
                        continue
                    name = self._names[id(parameter)]
                    if _is_quantized(value):
                        raise AttachError(
                            f'optimizer_state="average": {key!r} of parameter {name!r} in this '
                            f"{type(optimizer).__name__} is quantized, and quantized values cannot "
                            'be averaged; use optimizer_state="local", or an optimizer with exact '
                            "state"
                        )
                    if value.is_floating_point() or value.is_complex():
                        tensors[f"{name} {key} {tuple(value.shape)} {value.dtype}"] = value
        return tensors

    def _common(self, lines: list[str]) -> list[str]:
        """Return those of ``lines`` that all workers have, in order. A collective."""
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        pair = torch.tensor([number, -number], device=self._team.communicator.control_device)
        future = self._team.communicator.maximum(pair, what="comparison of states")
        # The second number is −(smallest hash).
        largest, smallest = future.wait().tolist()
        if largest == -smallest:
            return lines
        payloads = self._team.communicator.gather_bytes(
            "\n".join(lines).encode(), what="list of states"
        )
        sets = [set(payload.decode().split("\n")) for payload in payloads]
        return sorted(set.intersection(*sets) - {""})
