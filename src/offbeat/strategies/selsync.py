"""SelSync: synchronize when the gradient changes, go on locally when it does not."""

import math
from dataclasses import astuple, dataclass, field
from typing import ClassVar, Literal

from offbeat.fabric import Completed, Handle
from offbeat.significance import RelativeChange, ThresholdController, squared_norm
from offbeat.strategies.base import (
    Roll,
    Strategy,
    Worker,
    require_integer,
    require_number,
    transient,
)
from offbeat.strategies.gradient_mean import GradientMean


@dataclass
class SelSyncState:
    """The trigger (one an optimizer with ``aggregate="gradients"``) and the rolls under way."""

    changes: list[RelativeChange]
    rounds: list[int]  # since the last synchronization; the same on all workers
    controller: ThresholdController | None
    means: list[GradientMean] = transient()  # one an optimizer, with aggregate="gradients"
    order: list[int] = transient()  # optimizers as they stepped last
    stepped: list[int] = transient(default_factory=list)  # optimizers that stepped just now
    squared: float = transient(default=0.0)  # ‖g‖² of this iteration so far
    synced: bool = transient(default=False)  # gradients were averaged in this iteration
    roll: Handle[Roll] | None = transient(default=None)  # called in this round
    # With deferred flags the rolls of the round before, by optimizer; `late` once checkpointed.
    pending: dict[int, Handle[Roll]] = transient(default_factory=dict)
    late: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, repr=False)
class SelSync(Strategy):
    """Selective synchronization by the relative change of the gradient.

    **Update**, on each worker, N workers:

        s = ‖g‖²                                    before clipping, after AMP unscaling
        m_i = (1 − a)·m_{i−1} + a·s,  m_0 = s       a = N/100 unless ``smoothing`` is given
        Δ = |m_i − m_{i−1}| / m_{i−1}               ∞ at the first step, 0/0 = 0
        flag = Δ ≥ δ                                one number from each worker, every step
        aggregate="parameters":  x ← T(x, g);  if any flag: x ← mean(x)
        aggregate="gradients":   if any flag: g ← mean(g);  x ← T(x, g)

    Args:
        delta: δ ≥ 0. 0 synchronizes every step (BSP), ``inf`` never. Not portable between models,
            batch sizes and smoothings: prefer ``target_lssr``.
        target_lssr: Wanted share of local steps in (0, 1). δ is then set to the workers' mean Δ as
            soon as one is known, and follows the decisions from there, the same on all workers.
        aggregate: What a synchronization averages. The paper found parameters better: gradients
            leave the workers' models apart.
        smoothing: a in (0, 1]; None is N/100, at most 1.
        window: Smooth over this many last steps only, instead of all (the paper uses 25).
        max_interval: Synchronize at the latest this many steps after the last time (≥ 1).
        warmup_steps: Synchronize each of the first steps.
        flags: "blocking" waits for the others' flags, exchanged while the optimizer steps;
            "deferred" acts one step later on flags that have had a whole step to arrive; its first
            step never synchronizes.

    *Communication*: five numbers a step, and the model (or gradient) when any worker's flag is
    set; 1/(1 − LSSR) times less than BSP. *Memory*: one flat copy of the model. *State*: m, the
    threshold, the steps since the last synchronization; kept in checkpoints.

    *Differs from the paper*: ``target_lssr``, ``max_interval``, ``warmup_steps`` and deferred flags
    are ours. From its published code, where that contradicts the paper, in all of it: the local
    update comes first, norms are squared and smoothed once, Δ is taken before clipping.

    Source: Tyagi & Swany, arXiv 2307.07950, Algorithm 1 and Equations 1-2.
    """

    name: ClassVar[str] = "selsync"
    delta: float = 0.3
    target_lssr: float | None = None
    aggregate: Literal["parameters", "gradients"] = "parameters"
    smoothing: float | None = None
    window: int | None = None
    max_interval: int | None = None
    warmup_steps: int = 0
    flags: Literal["blocking", "deferred"] = "blocking"

    def __post_init__(self) -> None:
        require_number("delta", self.delta)
        if not self.delta >= 0:
            raise ValueError(
                f"delta must be at least 0 (0 is BSP, inf never syncs), got {self.delta}"
            )
        if self.target_lssr is not None:
            require_number("target_lssr", self.target_lssr)
            if not 0 < self.target_lssr < 1:
                raise ValueError(f"target_lssr must be between 0 and 1, got {self.target_lssr}")
            if self.delta != type(self).delta:
                raise ValueError(
                    "target_lssr finds the threshold itself: give delta or target_lssr, not both"
                )
        if self.aggregate not in ("parameters", "gradients"):
            raise ValueError(
                f'aggregate must be "parameters" or "gradients", got {self.aggregate!r}'
            )
        if self.flags not in ("blocking", "deferred"):
            raise ValueError(f'flags must be "blocking" or "deferred", got {self.flags!r}')
        if self.smoothing is not None:
            require_number("smoothing", self.smoothing)
            if not 0 < self.smoothing <= 1:
                raise ValueError(f"smoothing must be in (0, 1], got {self.smoothing}")
        if self.window is not None:
            require_integer("window", self.window, least=1)
        if self.max_interval is not None:
            require_integer("max_interval", self.max_interval, least=1)
        require_integer("warmup_steps", self.warmup_steps, least=0)

    @property
    def averages_state(self) -> bool:
        """At every mean of the parameters."""
        return self.aggregate == "parameters"

    def start(self, worker: Worker) -> SelSyncState:
        """A fresh trigger."""
        if self.aggregate == "parameters":
            worker.keep_reference()
        a = min(1.0, worker.size / 100) if self.smoothing is None else self.smoothing
        averaged = worker.parts if self.aggregate == "gradients" else []
        target, count = self.target_lssr, len(averaged) or 1
        return SelSyncState(
            changes=[RelativeChange(a, self.window) for _ in range(count)],
            rounds=[int(self.flags == "deferred")] * count,  # its first step acts on no round
            controller=None if target is None else ThresholdController(target, self.delta),
            means=[
                GradientMean(
                    worker.fabric,
                    part.parameters,
                    wire=worker.wire,
                    name=f"gradients of optimizer {i}, bucket",
                    overlap=False,
                )
                for i, part in enumerate(averaged)
            ],
            order=list(range(len(worker.parts))),
        )

    def before_step(self, worker: Worker) -> None:
        """Measure Δ and send the flag; with gradients, decide and average at once."""
        state: SelSyncState = worker.state
        squared = squared_norm(worker.parts[worker.part].gradients())
        state.squared += squared
        if self.aggregate == "gradients":
            self._send_flag(worker, state.changes[worker.part].update(squared))
            self._average_gradients(worker, worker.part, contribute=math.isfinite(squared))
            state.stepped.append(worker.part)
        elif worker.completes_iteration:
            worker.norm_squared = state.squared
            self._send_flag(worker, state.changes[0].update(state.squared))
        if worker.completes_iteration:
            state.squared = 0.0

    def _send_flag(self, worker: Worker, change: float) -> None:
        """Call the roll: whether this worker asks for a synchronization, and its Δ."""
        state: SelSyncState = worker.state
        delta = self.delta if state.controller is None else state.controller.delta
        # Δ is ∞ at the first step, and ∞ ≥ ∞: a threshold that nothing reaches must stay so.
        flag = change >= delta and delta != math.inf
        worker.record.update(change=change, threshold=delta, flag=flag)
        state.roll = worker.call_roll(
            stepping=True,
            flag=flag or worker.step < self.warmup_steps,
            measure=change if math.isfinite(change) else 0.0,
        )

    def after_step(self, worker: Worker) -> bool:
        """With parameters: take the mean if any flag is set."""
        state: SelSyncState = worker.state
        if self.aggregate == "parameters":
            return self._average_models(worker)[1]
        state.order, state.stepped = list(dict.fromkeys(state.stepped)), []
        synced, state.synced = state.synced, False
        if synced:
            worker.steps_since_sync = 0
        return synced

    def answer(self, worker: Worker, *, finishing: bool) -> Roll | None:
        """Send no flag, and take part in the mean that others ask for."""
        state: SelSyncState = worker.state
        roll = None
        for part in state.order if self.aggregate == "gradients" else [0]:
            state.roll = worker.call_roll(stepping=False, finishing=finishing)
            if self.aggregate == "gradients":
                roll = self._average_gradients(worker, part, contribute=False)
            else:
                roll, _ = self._average_models(worker)
            if roll is not None and roll.stepping == 0:
                # Everyone has arrived; a deferred roll called since says the same, more recently.
                newest = state.pending.pop(part, None)
                return roll if newest is None else newest.wait()
        return roll

    def _decide(self, worker: Worker, part: int) -> tuple[Roll | None, bool]:
        """The roll to act on, None in the first round with deferred flags; whether to synchronize.

        Every worker takes part in every round, so all decide alike.
        """
        state: SelSyncState = worker.state
        handle, state.roll = state.roll, None
        if self.flags == "deferred" and handle is not None:
            if part in state.late:  # loaded from a checkpoint
                late = state.late.pop(part)
                state.pending.setdefault(part, Completed(Roll.read(late[:-1], late[-1])))
            before = state.pending.get(part)
            state.pending[part], handle = handle, before
        roll = None if handle is None else handle.wait()
        if roll is None or roll.stepping == 0:
            return roll, False
        state.rounds[part] += 1
        due = self.max_interval is not None and state.rounds[part] >= self.max_interval
        synced = roll.flag > 0 or due
        if synced:
            state.rounds[part] = 0
        if state.controller is not None:
            state.controller.update(synced, roll.measure / roll.stepping)
        return roll, synced

    def settle(self, worker: Worker) -> None:
        """Keep the deferred rolls, which the next step will act on."""
        state: SelSyncState = worker.state
        state.late |= {part: list(astuple(p.wait())) for part, p in state.pending.items()}

    def _average_models(self, worker: Worker) -> tuple[Roll | None, bool]:
        """x ← mean(x), if any flag is set."""
        roll, synced = self._decide(worker, 0)
        if synced and roll is not None:
            # Deferred flags are a step old: since then a worker that has finished may have been
            # averaged, and must not count again.
            now = worker.call_roll(stepping=False).wait() if self.flags == "deferred" else roll
            worker.average(now)
        return roll, synced

    def _average_gradients(self, worker: Worker, part: int, *, contribute: bool) -> Roll | None:
        """g ← mean(g) over the workers whose gradient is finite, if any flag is set."""
        roll, synced = self._decide(worker, part)
        if synced:
            worker.state.means[part].reduce([], contribute=contribute)
            worker.state.synced = True
        return roll
