"""Streaming averaging: the model travels in parts, always, and nobody waits for it.

In one file although it is long: what is launched and what lands are one algorithm. What is
measured and chosen besides is in ``pace``.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from typing_extensions import override

from offbeat.checkpoint import transient
from offbeat.fabric import Completed
from offbeat.fabric.wire import Precision
from offbeat.means import InFlight, Outer
from offbeat.means.parts import cut_evenly
from offbeat.strategies.base import (
    Averages,
    NonFinite,
    Part,
    Roll,
    Round,
    Rounds,
    Strategy,
    Vote,
    Worker,
    setting,
)
from offbeat.strategies.pace import Pace

logger = logging.getLogger("offbeat")

# Where the number of parts is chosen. Each costs operations, which take as long as rounding and
# adding some MB; but of two, one can be on the link while the other one's arrival is noticed.
_PART_BYTES = 2**22
_LEAST_BYTES = 2**16  # of each of two
_MOST_PARTS = 4
_PARTS_LIMIT = 1024
_MEMORY_STEPS = 50.0  # own steps in which the outer momentum fades to 1/e
_AGREED = ("precision", "tried", "counts", "patience")  # of ``Pace``
_MERGES = 5  # over so many passes of the model coherence is smoothed


@dataclass(frozen=True)
class Launch:
    """A part that all have agreed to launch next.

    Attributes:
        part: Its index.
        round: Which decided that.
        precision: None is that of the wire.
    """

    part: int
    round: Round
    precision: Precision | None


@dataclass
class StreamingState:
    """The parts, and where the worker stands in the stream of them."""

    parts: list[InFlight]
    next: int = 0  # the part whose turn it is
    pace: Pace = field(default_factory=Pace)
    launched: list[float] = field(default_factory=list)  # mean own step of each part's last launch
    sent_squared: float = 0.0  # ‖u‖² of a landing, smoothed
    mean_squared: float = 0.0  # ‖D‖², likewise
    gain: float = 1.0  # G
    pass_steps: float = 0.0  # own steps in which the model passes, when that was last counted
    round_step: int = 0  # own step of the last round
    unsent: int = 0  # parts that have to go once more, for all own steps to have been sent
    fresh_step: int = 0  # own step of the last launch that has landed
    landings: int = 0
    launches: int = 0
    landing_seconds: float = 0.0
    staleness: dict[int, int] = field(default_factory=dict)  # own steps past that: how often
    flying: list[int] = field(default_factory=list)  # parts under way, in order
    queue: list[Launch] = transient(default_factory=list)  # agreed, and not launched yet
    pausing: bool = transient(default=False)  # not stepping until all have come


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamingAveraging(Strategy):
    """The model travels in parts, of which some are always under way; nobody waits for them.

    **Update**. P is the shared model, the same on all workers, x a worker's own, f a part of it,
    C what the ``wire`` rounds to:

        launch:   u = C(x_f − P_f)
        landing:  D = Σ w·u / Σ w
                  v_f ← e^(−k/50)·v_f + D
                  Δ = D + (G − 1)·(1 − e^(−k/50))·v_f     k steps after f was launched before
                  P_f ← P_f + Δ
                  x_f ← x_f + Δ − u

    What C takes away is still in x_f − P_f after a landing. That is the error feedback: it needs no
    memory, and the next gradient is taken at a point that contains it.

    D is short where the workers' updates differ by noise. G follows it further, as far as a worker
    goes alone: ‖G·D‖ is the root of the mean square of ‖u‖. A momentum or Adam of the mean gradient
    would see less noise, too, and go further.

        G = √(mean‖u‖² / ‖D‖²), at least 1, at most √N, smoothed over five passes

    ``schedule="eager"``: parts are launched in turn, so many that the link never runs dry (the
    workers agree on how many as they go), and land at the first step boundary after they have
    arrived. The default ``wire`` is "int2"; with "auto" they are sent as exactly as lets the model
    pass in a few steps, see ``Pace``. ``schedule="cyclic"``: parts are launched in turn, the whole
    model in at most β = τ/2 own steps; each lands just before it is launched again, and is waited
    for if need be: the same bits in every run.

    Args:
        parts: How many, of equal bytes (1 to 1024). "auto": as many as have 4 MiB, at most 4;
            two where these have 64 KiB.
        staleness: τ: a worker waits when the last part that has landed is so many own steps old
            (cyclic: even, ≥ 2; eager ≥ 1).
        schedule: "eager" or "cyclic".
        outer_gain: G (≥ 1). "auto": see above. With 1 there is no v.

    *Communication*: one part a launch, and eleven numbers a round, which may launch several;
    overlapped with computing. *Memory*: P, v and, of the parts under way, the payloads; over an
    exact wire u and the sum. *State*: P, v, what the second stage of a lossy wire has rounded away
    (an N-th of a copy), what is under way, counters and choices.

    ``parts=1`` with ``outer_gain=1`` over an exact wire is ``AsyncAveraging``. *Differs from* CSER
    (Xie et al., 2020) and the delta rule of hivemind, whose residual is in the model, too: parts
    that overlap. *From* Streaming DiLoCo (Douillard et al., 2025): no period and no outer optimizer
    to tune. G is near the rule of FedExP (Jhunjhunwala, Wang & Joshi, 2023), mean‖u‖²/(2·‖D‖²).
    """

    name: ClassVar[str] = "streaming"
    averages: ClassVar[Averages] = "updates"
    rounds: ClassVar[Rounds] = "boundary"
    meets: ClassVar[bool] = False
    continues: ClassVar[bool] = True
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise", "leave_out")
    parts: int | Literal["auto"] = setting("auto", least=1)
    staleness: int = setting(64, least=1)
    schedule: Literal["eager", "cyclic"] = "eager"
    outer_gain: float | Literal["auto"] = setting("auto", least=1)

    keeps_nodes = True

    @property
    @override
    def repeatable(self) -> bool:
        return self.schedule == "cyclic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts != "auto" and self.parts > _PARTS_LIMIT:
            raise ValueError(f"parts must be at most {_PARTS_LIMIT}, got {self.parts}")
        if self.schedule == "cyclic" and (self.staleness < 2 or self.staleness % 2):
            raise ValueError(
                "staleness must be even and at least 2 with the cyclic schedule, whose cycles are "
                f"staleness/2 steps long; got {self.staleness}"
            )

    @property
    @override
    def default_wire(self) -> Precision:
        # Where seeds were repeated few bits were as good as many or better: docs/streaming.md.
        return "int2" if self.schedule == "eager" else "float32"

    @property
    @override
    def chooses(self) -> bool:
        return self.schedule == "eager"  # else every run would not be the same

    @property
    def divides(self) -> bool:  # type: ignore[override]
        """Into parts, unless there is one."""
        return self.parts != 1

    @override
    def start(self, worker: Worker) -> StreamingState:
        """Every worker holds P."""
        tensors = [p for _, p in worker.replica.parameters]
        size = worker.team.host.scale * sum(t.nbytes for t in tensors)
        cuts = cut_evenly(tensors, self._count(size))
        fades = worker.size > 1 and self.outer_gain != 1
        return StreamingState(
            [
                InFlight(
                    worker.team,
                    worker.wire,
                    tensors,
                    name=f"part {i}",
                    outer=Outer(momentum=float(fades)),  # each launch says how much
                    keeps_residual=True,
                    # They are few: the last part takes them along.
                    buffers=worker.replica.float_buffers if i == len(cuts) - 1 else tuple,
                    step=worker.step,
                )
                for i, tensors in enumerate(cuts)
            ],
            launched=[0.0] * len(cuts),
            round_step=worker.step,
            fresh_step=worker.step,
            pace=Pace(began=worker.step, landed=-len(cuts)),
        )

    @override
    def kept(self, worker: Worker) -> dict[str, Any]:
        """The choices, and from where the outer momentum fades."""
        state: StreamingState = worker.state
        pace = {name: getattr(state.pace, name) for name in _AGREED}
        return {"step": worker.step, "gain": state.gain, "pace": pace}

    @override
    def take_up(self, worker: Worker, kept: dict[str, Any]) -> None:
        state: StreamingState = worker.state
        state.launched = [float(kept["step"])] * len(state.parts)
        state.gain, state.pace = kept["gain"], replace(state.pace, **kept["pace"])

    def _count(self, model_bytes: float) -> int:
        if self.parts != "auto":
            return self.parts
        least = min(2, max(1, int(model_bytes / _LEAST_BYTES)))
        return max(least, min(_MOST_PARTS, int(model_bytes / _PART_BYTES)))

    # -- rounds ----------------------------------------------------------------------------------

    @override
    def iterated(self, worker: Worker) -> bool:
        """Eager: land what has arrived, and wait only at the bound; launch what had to wait."""
        state: StreamingState = worker.state
        pace, state.unsent, state.pausing = state.pace, len(state.parts), False
        past = worker.step - state.fresh_step
        state.staleness[past] = state.staleness.get(past, 0) + 1
        worker.record["staleness"] = past
        landed = False
        if self.schedule == "eager":
            now, *spent = worker.team.agree(worker.team.host.now(), *pace.spent)
            pace.spent.clear()
            while state.flying and (
                state.parts[state.flying[0]].arrived() or self._at_bound(worker)
            ):
                landed = self._land(worker)
            pace.step(now, spent, len(state.parts))
            ages = [worker.step - state.parts[part].launched_step for part in state.flying]
            # Workers are half a step apart, and a second stage starts at a boundary.
            stages = 1 + worker.wire.second_stage(pace.precision)
            pace.resize(ages, len(state.parts), prompt=1 + stages)
            self._launch(worker, wait=False)
        self._report(worker)
        return landed

    def _at_bound(self, worker: Worker) -> bool:
        past: int = worker.step - worker.state.fresh_step
        return past >= self.staleness

    @override
    def due(self, worker: Worker) -> bool:
        """Eager: whenever little is under way. Cyclic: when a part's turn has come."""
        state: StreamingState = worker.state
        if worker.size == 1:
            return False
        if self.schedule == "cyclic":
            return worker.step - state.round_step >= self._cycle(len(state.parts))[0]
        return not state.queue and self._room(state) >= 1

    @staticmethod
    def _room(state: StreamingState) -> float:
        return min(state.pace.window - len(state.flying), state.pace.allowance)

    def _cycle(self, parts: int) -> tuple[int, int]:
        """Cyclic: own steps between two rounds, and parts that each of them launches."""
        steps = self.staleness // 2
        return max(1, steps // parts), -(-parts // min(parts, steps))

    @override
    def finite(self, worker: Worker, part: int, *, stepping: bool) -> bool:
        """Of the part whose turn it is; a launch looks at further ones. At rest, of all."""
        state: StreamingState = worker.state
        parts = [state.parts[state.next]] if stepping else state.parts
        return all(part.finite() for part in parts)

    @override
    def restore(self, worker: Worker) -> None:
        """x ← P, all of it: other parts may not be finite either."""
        for part in worker.state.parts:
            part.restore()
        worker.forget_not_finite()

    @override
    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        """How many parts this worker would launch, and what it has measured."""
        state: StreamingState = worker.state
        weighs = stepping or not finishing or state.unsent > 0
        count, chosen = len(state.parts), worker.wire.chosen
        passes = state.pace.passes(worker.step, count, chooses=chosen) if stepping else None
        return Vote(
            weight=float(weighs),
            flag=passes is not None,
            measure=self._room(state) if stepping else 0.0,
            more=(
                passes or 0.0,
                float(worker.step if stepping else 0),
                state.sent_squared,
                state.mean_squared,
            ),
        )

    @override
    def act(self, worker: Worker, round: Round) -> bool | None:
        """Launch what is due, once all have called the roll."""
        state: StreamingState = worker.state
        eager = self.schedule == "eager"
        if eager and not round.done() and not self._at_bound(worker):
            return None
        count = len(state.parts)
        if eager:
            roll = round.wait()
            stepping = max(1, roll.stepping)
            # The nearest integer to the mean, computed alike on all; never none, or nobody would
            # have called the round.
            number = max(1, int(roll.measure / stepping + 0.5))
            if roll.flag == roll.stepping:
                self._measured(worker, roll.more[0] / stepping)
        else:
            number = self._cycle(count)[1]
        state.round_step = worker.step
        precision = state.pace.precision if worker.wire.chosen else None
        state.queue += [Launch((state.next + i) % count, round, precision) for i in range(number)]
        state.next = (state.next + number) % count
        self._launch(worker, wait=not eager or state.pausing)
        landed = False
        while eager and not state.pausing and state.flying and self._at_bound(worker):
            landed = self._land(worker)
        self._report(worker)
        return landed

    def _measured(self, worker: Worker, passes: float) -> None:
        """Another precision if the model passes too slowly, or so fast that more bits may do.

        Args:
            worker: This worker.
            passes: Own steps in which the whole model passes, the mean over the workers.
        """
        state: StreamingState = worker.state
        chosen, count, told = worker.wire.chosen, len(state.parts), bool(state.pass_steps)
        now = state.pace.precision if chosen else worker.wire.precision
        changed = chosen and state.pace.choose(passes, worker.step, worker.size, count)
        state.pass_steps = passes
        if not chosen:
            state.pace.count_anew(worker.step)
        if changed or not told:
            text = "the whole model (%d part%s in %s) passes every %.1f steps"
            text += f": {state.pace.precision} from now on" if changed else ""
            logger.info(text, count, "s" * (count > 1), now, passes)

    def _momentum(self, worker: Worker, part: int, roll: Roll) -> tuple[float, float]:
        """μ and a for the landing of a part that this roll has launched.

        All from sums of the roll, so that P stays the same on all workers.
        """
        state: StreamingState = worker.state
        _, steps, sent, mean = roll.more
        if self.outer_gain != "auto":
            state.gain = self.outer_gain
        elif mean > 0:
            state.gain = min(max(math.sqrt(sent / mean), 1.0), math.sqrt(worker.size))
        step = steps / max(1, roll.stepping)
        # When those ahead have finished the mean falls back; v must not grow by that.
        fade = math.exp(min(0.0, state.launched[part] - step) / _MEMORY_STEPS)
        state.launched[part] = step
        return fade, (state.gain - 1) * (1 - fade)

    def _launch(self, worker: Worker, *, wait: bool) -> None:
        """Launch what is in the queue, in order.

        Args:
            worker: This worker.
            wait: Whether to let a part land first that is still under way; else it has to wait.
        """
        state: StreamingState = worker.state
        while state.queue:
            launch = state.queue[0]
            part = state.parts[launch.part]
            while part.flying:
                if not wait:
                    return
                self._land(worker)
            state.launches += 1
            began = worker.team.host.now()
            # What has become NaN since the vote stays here; the next vote tells of it.
            sends = not worker.guarded or part.finite()
            if worker.leaves_out and not sends:
                self.restore(worker)
                worker.untold = True
            part.launch(
                launch.round.then(lambda roll: roll.weight),
                contribute=launch.round.own.weight != 0 and sends,
                step=worker.step,
                what=f"part {launch.part}, launch {state.launches}",
                precision=launch.precision,
                momentum=launch.round.then(partial(self._momentum, worker, launch.part)),
            )
            state.pace.spent.append(worker.team.host.now() - began)
            state.pace.allowance -= 1
            state.unsent = max(0, state.unsent - 1)
            worker.has_news = state.unsent > 0
            state.flying.append(launch.part)
            state.queue.pop(0)

    def _land(self, worker: Worker) -> bool:
        """Land the part that was launched first. Waits for it."""
        state: StreamingState = worker.state
        part = state.parts[state.flying[0]]
        part.wait()
        began = worker.team.host.now()
        part.land(worker.step)
        state.pace.spent.append(worker.team.host.now() - began)
        state.flying.pop(0)
        state.landings += 1
        state.pace.land(worker.step)
        keep = 1 - 1 / (_MERGES * len(state.parts))
        sent, mean = worker.team.over_shards(part.sent_squared, part.mean_squared)
        state.sent_squared = keep * state.sent_squared + sent
        state.mean_squared = keep * state.mean_squared + mean
        state.fresh_step = max(state.fresh_step, part.launched_step)
        state.landing_seconds += (part.arrived_seconds or 0.0) - part.launched_seconds
        worker.steps_since_sync = worker.step - state.fresh_step
        return True

    def _report(self, worker: Worker) -> None:
        state: StreamingState = worker.state
        worker.details.update(
            landings=state.landings,
            landing_seconds=state.landing_seconds / max(1, state.landings),
            parts=len(state.parts),
            window=state.pace.window,
            pass_steps=state.pass_steps,
            outer_gain=state.gain,
            staleness_max=max(state.staleness, default=0),
            staleness_histogram=state.staleness,
        )
        if worker.wire.chosen:
            worker.details["wire"] = state.pace.precision

    # -- moments ---------------------------------------------------------------------------------

    @override
    def bucket_ready(self, worker: Worker, part: Part, bucket: int) -> bool:
        """Let what is under way go on while backward runs: a second stage need not wait so long."""
        worker.wire.advance()
        return not worker.wire.exact

    @override
    def meet(self, worker: Worker, *, finishing: bool) -> None:
        """The others expect what has been agreed on, before the next round."""
        worker.state.pausing = True
        self._launch(worker, wait=True)

    def _settle(self, worker: Worker) -> None:
        """Land all that is under way."""
        self._launch(worker, wait=True)
        while worker.state.flying:
            self._land(worker)

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """The mean of all models with what is under way landed; a look leaves it under way."""
        if not final:
            for part in worker.state.flying:
                worker.state.parts[part].show(worker.step)
            worker.average_all(1.0, worker.size, final=False)
            return
        self._settle(worker)
        self._report(worker)
        if worker.wire.exact or worker.wire.precision == "bfloat16":
            worker.average_all(1.0, worker.size, final=True)
        else:
            self._end(worker)

    def _end(self, worker: Worker) -> None:
        """x ← P + mean(x − P), of which the mean travels in int8.

        It is small against P, which all have, so that waiting for the exact mean of whole models
        would gain nothing: a number is off by at most a 254th of its block's largest residual, and
        the second stage's rounding.
        """
        parts: list[InFlight] = worker.state.parts
        for i, part in enumerate(parts):
            part.launch(
                Completed(float(worker.size)),
                contribute=True,
                step=worker.step,
                what=f"final mean of part {i}",
                precision="int8",
                momentum=Completed((1.0, 0.0)),
            )
        for part in parts:  # all, before anything is written
            part.wait()
        for part in parts:
            part.land(worker.step)
            part.restore()
        worker.average_buffers(final=True)

    @override
    def before_save(self, worker: Worker, meet: Callable[[], object]) -> None:
        """Let all arrive. Eager workers may be at different parts: they meet first."""
        if self.schedule == "eager":
            meet()
        self._launch(worker, wait=True)
        for part in worker.state.parts:
            part.before_save()

    @override
    def after_load(self, worker: Worker) -> None:
        for part in worker.state.parts:
            part.after_load()
