"""Local SGD: average the models every ``period`` steps."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.strategies.base import GlobalModel, Strategy, WorkerView, setting


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Strategy):
    """Each worker takes ``period`` local steps, then all workers replace their model by the mean.

    **Update** of the parameters x with the gradient g, where T is the optimizer's step:

        x ← T(x, g)
        if steps since the last mean = H:  x ← mean(x)      H = 1 in the first warmup_steps steps

    With ``warmup_steps > 0`` this is post-local SGD (Lin et al., 2020). With ``period=1`` and the
    optimizer SGD it equals BSP up to rounding.

    Args:
        period: H, steps between two means (≥ 1).
        warmup_steps: Number of initial steps that are each followed by a mean (≥ 0). A step that
            only some of the workers take counts too.

    *Communication*: one mean of the model every ``period`` steps, for which the workers wait.
    *Memory*: one flat copy of the model. A quantized ``wire`` adds the last mean and the
    quantization errors. *State*: these two, and the number of steps since the last mean.
    """

    name: ClassVar[str] = "local"
    period: int = setting(least=1)
    warmup_steps: int = setting(0, least=0)

    @override
    def averages(self) -> GlobalModel:
        return GlobalModel()

    @override
    def due(self, worker: WorkerView) -> bool:
        # A mean follows each step of the warm-up, so ``launches`` counts the steps. It is equal on
        # all workers, also if they have taken different numbers of steps.
        warming_up = worker.start_step + worker.launches < self.warmup_steps
        return worker.since_launch >= (1 if warming_up else self.period)
