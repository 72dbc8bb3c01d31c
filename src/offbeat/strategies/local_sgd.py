"""Local SGD: average the models every ``period`` steps."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.strategies.base import NonFinite, Strategy, Worker, setting


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSGD(Strategy):
    """Each worker takes ``period`` steps by itself, then all take the mean of the models.

    **Update**:

        x ← T(x, g)
        if steps since the last mean = H:  x ← mean(x)      H = 1 in the first warmup_steps steps

    Post-local SGD is ``warmup_steps > 0`` (Lin et al., 2020). ``period=1`` with SGD equals BSP.

    Args:
        period: H, steps between two means (≥ 1).
        warmup_steps: How many steps at the start are averaged each (≥ 0).

    *Communication*: one mean of the model every ``period`` steps; blocking. *Memory*: one flat
    copy of the model. *State*: the steps since the last mean. A partial last period is averaged by
    ``finish``.
    """

    name: ClassVar[str] = "local"
    averages_state: ClassVar[bool] = True
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise", "leave_out")
    adapts: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    period: int = setting(least=1)
    warmup_steps: int = setting(0, least=0)

    @override
    def due(self, worker: Worker) -> bool:
        period = 1 if worker.step <= self.warmup_steps else self.period
        return worker.steps_since_sync >= period
