"""Bulk synchronous parallel: every step uses the mean gradient of all workers."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.strategies.base import Gradients, Strategy


@dataclass(frozen=True, kw_only=True, repr=False)
class BSP(Strategy):
    """Average the gradients of all workers in every step, like torch's DDP.

    **Update** of the parameters x with the gradient g, where T is the optimizer's step:

        g ← mean(g)
        x ← T(x, g)

    *Communication*: one all-reduce of the gradients in each step, in buckets. With one optimizer
    and without ``node_group`` all buckets but the last are sent while backward still runs. Every
    backward pass outside ``Synchronizer.no_sync`` averages the gradients, also when a step has
    several. All workers must run equally many of these passes. Sparse gradients are sent as dense
    ones. *Memory*: one copy of the gradients, with a quantized ``wire`` also the quantization
    errors. *State*: these errors.
    """

    name: ClassVar[str] = "bsp"

    @override
    def averages(self) -> Gradients:
        return Gradients()
