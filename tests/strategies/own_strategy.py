"""A strategy as a user writes it: a name and two methods."""

from dataclasses import dataclass
from typing import ClassVar

from offbeat.strategies.base import Outer, SharedModel, Strategy, WorkerView, setting


@dataclass(frozen=True, kw_only=True, repr=False)
class GrowingPeriod(Strategy):
    """Average the models after 1, 2, 4, … further steps, at last after every ``most`` steps.

    The shared model moves by a part η of the mean update: P ← P + η·D, x ← P.
    """

    name: ClassVar[str] = "growing"
    most: int = setting(64, least=1)
    outer_lr: float = setting(0.75, above=0)

    def averages(self) -> SharedModel:
        return SharedModel(outer=Outer(self.outer_lr))

    def due(self, worker: WorkerView) -> float:
        return float(worker.since_launch >= min(2**worker.launches, self.most))
