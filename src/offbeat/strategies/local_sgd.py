"""Local SGD: average the models every ``period`` steps."""

from dataclasses import dataclass
from typing import ClassVar

from offbeat.fabric import Handle
from offbeat.strategies.base import Roll, Strategy, Worker, require_integer, transient


@dataclass
class LocalSGDState:
    """Between two steps nothing but ``worker.steps_since_sync`` matters."""

    roll: Handle[Roll] | None = transient(default=None)  # called before this step


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
    period: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        require_integer("period", self.period, least=1)
        require_integer("warmup_steps", self.warmup_steps, least=0)

    @property
    def averages_state(self) -> bool:
        """At every mean."""
        return True

    def start(self, worker: Worker) -> LocalSGDState:
        """Everyone holds the same model."""
        worker.keep_reference()
        return LocalSGDState()

    def before_step(self, worker: Worker) -> None:
        """Call the roll while the optimizer steps, if this step ends a period."""
        period = 1 if worker.step < self.warmup_steps else self.period
        if worker.completes_iteration and worker.steps_since_sync + 1 >= period:
            worker.state.roll = worker.call_roll(stepping=True)

    def after_step(self, worker: Worker) -> bool:
        """x ← mean(x) at the end of a period."""
        if worker.state.roll is None:
            return False
        roll, worker.state.roll = worker.state.roll.wait(), None
        worker.average(roll)
        return True

    def answer(self, worker: Worker, *, finishing: bool) -> Roll:
        """Take part in the next mean, if there is one."""
        roll = worker.call_roll(stepping=False, finishing=finishing).wait()
        if roll.stepping:
            worker.average(roll)
        return roll
