"""Streaming averaging: parts of the model are always in flight, and no worker waits for them."""

import logging
import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.strategies.base import (
    Launch,
    Outer,
    Precision,
    SharedModel,
    Strategy,
    Tally,
    WorkerView,
    common,
    setting,
)
from offbeat.strategies.rate_control import RateControl

logger = logging.getLogger("offbeat")

# Automatic number of parts. Each part costs operations that take as long as rounding and adding a
# few MB. But with two parts, one can be on the link while the arrival of the other is noticed.
_PART_BYTES = 2**22
_LEAST_PART_BYTES = 2**16  # of each of two parts
_MOST_AUTO_PARTS = 4
_MOST_PARTS = 1024
_MOMENTUM_STEPS = 50.0  # local steps in which the outer momentum decays to 1/e


@dataclass
class StreamingState:
    """Rate control and outer gain.

    Attributes:
        rate: Window, CPU budget and precision of this worker.
        launch_steps: Mean local step of the workers at the last launch of each part.
        gain: G of the last landing.
        pass_steps: Local steps of the last counted pass of the model; 0 before the first.
    """

    rate: RateControl
    launch_steps: list[float]
    gain: float = common(default=1.0)
    pass_steps: float = field(default=0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamingAveraging(Strategy):
    """The model is averaged in parts; some are always in flight, and no worker waits for them.

    **Update**. P is the shared model, x the model of a worker, f a part, C the quantization of the
    ``wire``, k the local steps since the last launch of f:

        launch:   u = C(x_f − P_f)
        landing:  D = Σ w·u / Σ w
                  v_f ← e^(−k/50)·v_f + D
                  Δ = D + (G − 1)·(1 − e^(−k/50))·v_f
                  P_f ← P_f + Δ
                  x_f ← x_f + Δ − u

    The quantization error stays in x_f − P_f (error feedback). It needs no memory, and the next
    gradient is computed at a point that contains it.

    D is shorter than the workers' updates where these differ by noise. The outer gain G lengthens
    it to what one worker would move alone, ‖G·D‖² = mean‖u‖²:

        G = √(mean‖u‖² / ‖D‖²), at least 1, at most √N, smoothed over five passes of the model

    ``schedule="eager"``: parts are launched in turn, as many as keep the link busy, and land at the
    first step boundary after their arrival. The default ``wire`` is "int2"; with "auto" the rate
    control chooses the precision so that the model passes in a few steps. ``schedule="cyclic"``:
    parts are launched in turn, the whole model in at most β = τ/2 local steps. Each lands just
    before it is launched again and is waited for if need be, so every run gives the same bits.

    Args:
        parts: Number of parts of equal bytes (1 to 1024). "auto": one for each 4 MiB, at most 4;
            at least two if these have 64 KiB each.
        staleness: τ. A worker waits once its last landed launch is τ local steps old (cyclic: even,
            ≥ 2; eager: ≥ 1).
        schedule: "eager" or "cyclic".
        outer_gain: G ≥ 1. "auto": as above. With 1 there is no v.

    *Communication*: one part a launch and eleven numbers a round, which may launch several parts;
    overlapped with computing. *Memory*: P, v, and the payloads of the parts in flight; over an
    exact wire u and the sum. *State*: P, v, the quantization errors of the second stage (an N-th of
    a copy), what is in flight, counters.

    ``parts=1`` with ``outer_gain=1`` over an exact wire is ``AsyncAveraging``. *Differs from* CSER
    (Xie et al., 2020) and the delta rule of hivemind, which also keep the residual in the model:
    here parts overlap. *Differs from* Streaming DiLoCo (Douillard et al., 2025): no period and no
    outer optimizer to tune. G is close to the rule of FedExP (Jhunjhunwala, Wang & Joshi, 2023),
    mean‖u‖²/(2·‖D‖²).
    """

    name: ClassVar[str] = "streaming"
    parts: int | Literal["auto"] = setting("auto", least=1)
    staleness: int = setting(64, least=1)
    schedule: Literal["eager", "cyclic"] = "eager"
    outer_gain: float | Literal["auto"] = setting("auto", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts != "auto" and self.parts > _MOST_PARTS:
            raise ValueError(f"parts must be at most {_MOST_PARTS}, got {self.parts}")
        if self.schedule == "cyclic" and (self.staleness < 2 or self.staleness % 2):
            raise ValueError(
                "staleness must be even and at least 2 with the cyclic schedule, whose cycles are "
                f"staleness/2 steps long; got {self.staleness}"
            )

    @property
    @override
    def default_wire(self) -> Precision:
        # Over repeated seeds few bits were as good as many or better: docs/streaming.md.
        return "int2" if self.schedule == "eager" else "float32"

    @override
    def averages(self) -> SharedModel:
        return SharedModel(
            parts=self._auto_parts if self.parts == "auto" else self.parts,
            lands="arrived" if self.schedule == "eager" else self.staleness // 2,
            bound=self.staleness,
            outer=Outer(momentum=float(self.outer_gain != 1)),  # each launch says how much
            error_feedback=True,
        )

    @staticmethod
    def _auto_parts(model_bytes: int) -> int:
        least = min(2, max(1, model_bytes // _LEAST_PART_BYTES))
        return max(least, min(_MOST_AUTO_PARTS, model_bytes // _PART_BYTES))

    def _cycle(self, parts: int) -> tuple[int, int]:
        """Cyclic: local steps between two rounds, and parts that each of them launches."""
        steps = self.staleness // 2
        return max(1, steps // parts), -(-parts // min(parts, steps))

    @override
    def state(self, worker: WorkerView) -> StreamingState:
        rate = RateControl(start_step=worker.step, landed=-worker.count)
        return StreamingState(rate, [float(worker.start_step)] * worker.count)

    @override
    def due(self, worker: WorkerView) -> float:
        if worker.size == 1:
            return 0.0
        if self.schedule == "cyclic":
            return float(worker.since_launch >= self._cycle(worker.count)[0])
        room = self._room(worker)
        return room if room >= 1 else 0.0

    @staticmethod
    def _room(worker: WorkerView) -> float:
        """Number of parts that window and CPU budget still allow."""
        rate = _counted(worker)
        return min(rate.window - len(worker.in_flight_steps), rate.budget)

    @override
    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """Steps of a pass (∞ if unknown), local step, ‖u‖² and ‖D‖²."""
        if not worker.stepping:
            return 0.0, 0.0, worker.sent_squared, worker.mean_squared
        chooses = worker.precision is None
        passes = _counted(worker).pass_steps(worker.step, worker.count, chooses=chooses)
        known = math.inf if passes is None else passes
        return known, float(worker.step), worker.sent_squared, worker.mean_squared

    @override
    def decide(self, worker: WorkerView, tally: Tally) -> Launch:
        if self.schedule == "cyclic":
            return Launch(parts=self._cycle(worker.count)[1])
        stepping = max(1, tally.stepping)
        passes = tally.votes[0] / stepping
        if math.isfinite(passes):
            self._passed(worker, passes)
        # The mean, rounded to nearest, so that all workers compute the same. At least one: every
        # worker had room for one when it started the round.
        number = max(1, int(tally.wanted / stepping + 0.5))
        return Launch(number, worker.state.rate.precision if worker.precision is None else None)

    def _passed(self, worker: WorkerView, steps: float) -> None:
        """All workers know how many local ``steps`` a pass of the model takes: choose by it."""
        state: StreamingState = worker.state
        rate, first, changed = _counted(worker), not state.pass_steps, False
        if worker.precision is None:
            changed = rate.choose(steps, worker.step, worker.bits, worker.count)
        else:
            rate.restart_count(worker.step)
        state.pass_steps = steps
        if first or changed:
            text = "the whole model (%d part%s) passes every %.1f steps"
            text += f": {rate.precision} from now on" if changed else ""
            logger.info(text, worker.count, "s" * (worker.count > 1), steps)

    @override
    def outer_step(self, worker: WorkerView, part: int, tally: Tally) -> tuple[float, float]:
        """Computed from sums only, so that P stays the same on all workers."""
        state: StreamingState = worker.state
        _, steps, sent, mean = tally.votes
        if self.outer_gain != "auto":
            state.gain = self.outer_gain
        elif mean > 0:
            state.gain = min(max(math.sqrt(sent / mean), 1.0), math.sqrt(worker.size))
        step = steps / max(1, tally.stepping)
        # Once the fastest workers have finished, the mean step falls; v must not grow by that.
        fade = math.exp(min(0.0, state.launch_steps[part] - step) / _MOMENTUM_STEPS)
        state.launch_steps[part] = step
        return fade, (state.gain - 1) * (1 - fade)

    @override
    def after_step(self, worker: WorkerView) -> None:
        state: StreamingState = worker.state
        worker.details.update(outer_gain=state.gain)
        if self.schedule == "cyclic":
            return
        rate = _counted(worker)
        rate.step(worker.clock, worker.spent, worker.count)
        # Workers are half a step apart, and a second stage starts at a step boundary.
        prompt_age = 3 if (worker.precision or rate.precision) in worker.two_stages else 2
        rate.resize(worker.ages, worker.count, prompt_age=prompt_age)
        worker.details.update(window=rate.window, pass_steps=state.pass_steps)
        if worker.precision is None:
            worker.details["wire"] = rate.precision


def _counted(worker: WorkerView) -> RateControl:
    """The rate control, after it has counted the flow's launches and landings."""
    rate: RateControl = worker.state.rate
    rate.count(worker.launches, worker.landings, worker.step)
    return rate
