"""What the workers average, and when a mean takes effect: the result of ``Strategy.averages``.

There are three kinds of strategies: ``GlobalModel``, ``Gradients`` and ``CustomFlow``.
``offbeat.strategies.base`` explains the terms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class Outer:
    """Outer step: the step of the global model P along D, the mean of the workers' updates.

        v ← μ·v + D
        P ← P + η·(D + μ·v)

    Attributes:
        lr: Outer learning rate η > 0, or a function that computes it from the number of workers.
        momentum: Outer momentum μ ≥ 0. The velocity v is stored only if μ > 0.
    """

    lr: float | Callable[[int], float] = 1.0
    momentum: float = 0.0

    @property
    def plain(self) -> bool:
        """True if the step is P ← P + D."""
        return (self.lr, self.momentum) == (1.0, 0.0)


@dataclass(frozen=True)
class GlobalModel:
    """The workers average models. P is the global model, x the local model of a worker.

    To launch a part, every worker sends its update u = x − P of that part. D is the mean of the
    updates. At the landing P moves by Δ, and x by Δ − u, because x contains u already. The local
    steps since the launch stay in x:

        P ← P + Δ                           Δ = D with the default ``Outer()``
        x ← x + Δ − u

    With a quantized ``wire`` (see ``attach``) u is the quantized x − P. The quantization error
    stays in x − P, and the next update of the part contains it (error feedback). P has the same
    bits on all workers, even if x does not.

    Attributes:
        parts: Number of parts (≥ 1), or a function that computes it from the bytes of the trainable
            parameters. If ``fully_shard`` divides the model, these are the bytes of the worker that
            holds most. The parts have about equal bytes, and may begin inside a tensor. A tiny
            model may have fewer parts.
        lands: Time at which a part lands.

            - 0: before the next local step. Workers wait for the mean.
            - k > 0: k local steps after the launch, or before the next launch of the same part if
              that is earlier. Workers wait if the mean has not arrived then.
            - "arrived": at the first step boundary after the mean has arrived. A worker has one
              *message* in flight, which contains one or several parts. It launches the next
              message at the end of the step in which the previous one has landed. A large message
              takes several step boundaries.
        bound: Largest staleness in local steps, with "arrived". The staleness of a worker is the
            number of its local steps since the launch of the newest landed part. At the bound the
            worker waits until a newer part has landed. If no message is in flight, it launches one,
            even if ``due`` returns False.
        patience: With "arrived", the largest share of the training time (≥ 0) for which a worker
            waits at the end of steps for messages that are about to arrive. 0: it waits only at the
            bound.
        outer: Outer step, which determines Δ.
        stored: Storage of P and of the velocity v.

            - "float32": on the device of the parameters, in the dtype in which it computes.
            - "bfloat16": P in bfloat16. x moves by the exact Δ, so x − P contains what the rounding
              of P has lost, and the next update sends it. Requires the default ``outer``, because
              momentum would add this again and again, and ``lands`` other than 0.
            - "host": if the parameters are on a GPU, in page-locked memory of the host. A launch
              and a landing copy P and v of the part to the GPU, and a landing copies them back.
              The values are those of "float32". On the CPU there is no difference.
        gradient_norm: True: the flow measures ``gradient_norm_squared`` of ``WorkerView`` in every
            step.
        error_feedback: True: the flow measures ``squares`` of ``WorkerView``, and if ``outer`` has
            momentum, it calls ``outer_step`` for each launch. Despite its name it does not switch
            error feedback, which every quantized ``wire`` has.
    """

    parts: int | Callable[[int], int] = 1
    lands: int | Literal["arrived"] = 0
    bound: float = math.inf
    patience: float = 0.05
    outer: Outer = Outer()
    stored: Literal["float32", "bfloat16", "host"] = "float32"
    gradient_norm: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if not callable(self.parts) and self.parts < 1:
            raise ValueError(f"parts must be at least 1, got {self.parts}")
        if self.lands != "arrived" and self.lands < 0:
            raise ValueError(f'lands must be at least 0, or "arrived"; got {self.lands!r}')
        if self.stored == "bfloat16" and not (self.outer.plain and self.lands):
            raise ValueError(
                'stored="bfloat16" requires the default outer step, and lands other than 0: the '
                "next update has to send once what the rounding of P loses"
            )

    @cached_property
    def blocking(self) -> bool:
        """True if workers wait for each mean."""
        return self.lands == 0

    @cached_property
    def eager(self) -> bool:
        """True if parts land on arrival. Results then depend on the network's timing."""
        return self.lands == "arrived"


@dataclass(frozen=True)
class Gradients:
    """The workers average gradients in every step, at the end of backward.

    No other method of the strategy is called.
    """

    blocking: ClassVar[bool] = True
    """True, because workers wait for each mean."""


@dataclass(frozen=True)
class CustomFlow:
    """An algorithm that needs its own communication code, such as a parameter server or gossip.

    For such a strategy ``attach`` refuses these options: a ``wire`` other than "float32",
    ``node_group`` and ``min_workers``.

    Attributes:
        make: Function that receives the strategy and an ``offbeat.averaging.Worker``, and returns
            an ``offbeat.averaging.Flow``.
        check: Function that receives the number of workers, and raises ValueError or AttachError if
            this number cannot train with the strategy.
        blocking: True if all workers take their steps together: a worker waits for the others only
            in operations that all workers start in the same step.
        models: True if each worker takes local steps and the workers average models, so that
            ``adam_correction`` of ``attach`` applies.
    """

    make: Callable[[Any, Any], Any]
    check: Callable[[int], object] = lambda workers: None
    blocking: bool = False
    models: bool = False
