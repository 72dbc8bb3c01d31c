"""Streaming averaging: the workers average the model in parts while they compute.

A *pass* of the model is complete when every part has landed once.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.strategies.base import (
    GlobalModel,
    Outer,
    Precision,
    Strategy,
    SummedVotes,
    WorkerView,
    common,
    setting,
)

# Automatic number of parts: one for each _PART_BYTES of the model, within these limits.
_PART_BYTES = 2**25
_USUAL_PARTS = 16
_MOST_PARTS = 1024

_PATIENCE = 0.05
_LEAST_GAIN = 0.5  # with four workers it ended best of 0.25, 0.5, 0.7 and 1
_LONGEST_STEP = 4.0  # of a local step, in steps of a single worker
_MOMENTUM_STEPS = 50.0  # local steps in which the outer momentum decays to 1/e


@dataclass
class StreamingState:
    """State of ``StreamingAveraging`` on one worker.

    Attributes:
        launch_steps: For each part, the mean of the workers' local steps at its last launch.
        gain: Newest outer gain G.
    """

    launch_steps: list[float]
    gain: float = common(default=1.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamingAveraging(Strategy):
    """Average the model in parts, which are in flight while the workers compute.

    **Update**. P is the global model, which has the same bits on all workers. x is the local model
    of one worker. f is a part, w the weight of a worker (1, or 0 if it has nothing new to send), C
    the quantization at the precision ``wire`` (see ``attach``), and k the workers' mean number of
    local steps since the previous launch of f. In the eager schedule a worker at a barrier with
    nothing new to send has u = 0, and w = 1 until all senders have taken more steps. Then w = 0.

        launch:   u = C(x_f − P_f)
        landing:  D = Σ w·u / Σ w
                  v_f ← e^(−k/50)·v_f + D
                  Δ = D + (G − 1)·(1 − e^(−k/50))·v_f
                  P_f ← P_f + Δ
                  x_f ← x_f + Δ − u

    The quantization error of u stays in x_f − P_f, so it takes no extra memory, and the next
    launch of f sends it (error feedback).

    The mean D is shorter than the updates of the N workers, because their noise averages out. The
    outer gain G is the factor that gives D the length of one worker's update, ‖G·D‖² = mean‖u‖². A
    D that stays the same moves P by G·D, and the noise of D is lengthened less:

        G = √(mean‖u‖² / ‖D‖²), at least 1, at most √N, smoothed over five passes of the model

    With SGD, G alone would act like a larger learning rate. So each worker divides the learning
    rate of its local steps of SGD by √G, where G contains its own ‖u‖² in place of the mean.
    Shorter local steps also keep the local models close to each other. Other optimizers keep their
    learning rates.

    With ``adam_correction`` of ``attach`` the opposite ends better: G = "lookahead". This is ½ with
    up to 4 workers, √N/4 with up to 16, and 1 with more or with one. Each local step is 1/G times
    as long, so P moves as far as with G = 1. The correction also lengthens it, by √N at most, so
    both lengthen it 4 times at most with up to 16 workers. This is the outer step of Lookahead
    (Zhang et al., 2019), and there is no v: Δ = G·D.

    ``schedule="eager"``: the parts take turns. A *message* contains the updates of one or several
    parts, and each worker has at most one message in flight. The message lands at the end of the
    local step in which its sum arrives, and the worker launches the next one at once. The sum
    starts when the last worker has launched. The workers' votes travel in the message. They
    determine G, k and the number of parts of the next message. A worker spends at most 5 % of its
    time on launching and landing. docs/streaming.md gives the reasons. The default ``wire`` is
    "int2".

    ``schedule="cyclic"``: the parts take turns, and the workers launch each part once in at most
    β = τ/2 local steps. A part lands just before its next launch. The workers wait if its mean has
    not arrived by then, so the result does not depend on the network. The default ``wire`` is
    "float32".

    Args:
        parts: Number of parts of equal bytes (1 to 1024). "auto": 16, but one for each 32 MiB in a
            model of more than 512 MiB. A small model has fewer, because a part contains at least
            512·N numbers if messages are quantized.
        staleness: τ, the largest staleness in local steps (cyclic: even, ≥ 2; eager: ≥ 1). The
            staleness of a worker is the number of its local steps since the launch of the newest
            landed part. In the eager schedule a worker with the staleness τ waits for a landing.
            This bound has priority over the limit of the time for launching and landing.
        schedule: Times of launches and landings: "eager" or "cyclic".
        patience: Largest share of the training time (0 to 0.5) for which a worker waits for
            messages that are about to arrive, at most one step each. 0: it waits only if its
            staleness is τ. Requires the eager schedule.
        outer_gain: G ≥ 0.1, or "lookahead", or "auto": "lookahead" with ``adam_correction``, which
            already makes up for the shorter mean; otherwise the formula of G ≥ 1. A G below 1
            multiplies the learning rates of SGD and of a corrected Adam by 1/G; with other
            optimizers P moves less. A fixed G above 1 changes no learning rate. Up to 1 there is
            no v.
        stored: Dtype of P: "float32" (float64 for such a model), or "bfloat16", which takes half
            the memory (docs/quantization.md has the cost) and requires ``outer_gain=1``. With
            "host", P and v of a model on a GPU are in page-locked memory of the host, with the same
            values. Each pass of the model then copies 12 bytes per parameter between the two, or 20
            with v. On the CPU it changes nothing.

    *Communication*: the updates of the parts, and the vote of each worker: twelve numbers in each
    message of the eager schedule, eleven for each launch of the cyclic one. Both overlap with
    computation.
    *Memory*: P, v, and for the parts in flight the quantized messages, or u and its sum over the
    workers if ``wire`` is "float32". In the eager schedule also Δ − u of a message that lands. With
    float16 and bfloat16 parameters their rounding errors, 2 bytes for each.
    *State* in checkpoints: P, v, counters, the rounding errors, and the quantization errors of the
    sums that the worker sends (at most 1/N of a copy of the model). Saving first lands the parts in
    flight.

    With ``parts=1``, ``outer_gain=1`` and ``wire="float32"`` this is ``AsyncAveraging`` with the
    same schedule and staleness. CSER (Xie et al., 2020) and the delta rule of hivemind also keep
    the quantization error in the model. G is close to the rule of FedExP (Jhunjhunwala, Wang &
    Joshi, 2023), mean‖u‖²/(2·‖D‖²).
    """

    name: ClassVar[str] = "streaming"
    parts: int | Literal["auto"] = setting("auto", least=1)
    staleness: int = setting(64, least=1)
    schedule: Literal["eager", "cyclic"] = "eager"
    patience: float = setting(_PATIENCE, least=0, most=0.5)
    outer_gain: float | Literal["auto", "lookahead"] = setting("auto", least=0.1)
    stored: Literal["float32", "bfloat16", "host"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts != "auto" and self.parts > _MOST_PARTS:
            raise ValueError(f"parts must be at most {_MOST_PARTS}, got {self.parts}")
        if self.schedule == "cyclic" and (self.staleness < 2 or self.staleness % 2):
            raise ValueError(
                "staleness must be even and at least 2 with the cyclic schedule, because a cycle "
                f"has staleness/2 steps; got {self.staleness}"
            )
        if self.schedule == "cyclic" and self.patience != _PATIENCE:
            raise ValueError("patience requires the eager schedule: leave it out")

        if self.stored == "bfloat16" and self.outer_gain != 1:
            raise ValueError(
                'stored="bfloat16" requires outer_gain=1: a larger gain would lengthen what the '
                "rounding of P loses, again and again, and a smaller one would lose a part of it"
            )

    @property
    @override
    def default_wire(self) -> Precision:
        # "int2" ended best with a CNN; with a transformer "int4" was a little better:
        # docs/evidence.md.
        return "int2" if self.schedule == "eager" else "float32"

    @override
    def averages(self) -> GlobalModel:
        return GlobalModel(
            parts=self._auto_parts if self.parts == "auto" else self.parts,
            lands="arrived" if self.schedule == "eager" else self.staleness // 2,
            bound=self.staleness,
            patience=self.patience,
            outer=self._outer,
            stored=self.stored,
            error_feedback=True,
        )

    @property
    def _outer(self) -> Outer:
        if self.outer_gain == "lookahead":
            return Outer(self._gain)
        if self.outer_gain == "auto" or self.outer_gain > 1:
            return Outer(momentum=1.0)  # any momentum above 0: ``outer_step`` is called
        return Outer(float(self.outer_gain))

    def _gain(self, workers: int) -> float:
        """Return G, unless it is automatic. A single worker takes no outer step."""
        if workers == 1 or self.outer_gain == "auto":
            return 1.0
        if self.outer_gain == "lookahead":
            return min(max(math.sqrt(workers) / _LONGEST_STEP, _LEAST_GAIN), 1.0)
        return float(self.outer_gain)

    @override
    def with_adam_correction(self) -> "StreamingAveraging":
        return replace(self, outer_gain="lookahead") if self.outer_gain == "auto" else self

    @staticmethod
    def _auto_parts(model_bytes: int) -> int:
        most = max(_USUAL_PARTS, model_bytes // _PART_BYTES)
        return min(most, _MOST_PARTS)

    def _cycle(self, parts: int) -> tuple[int, int]:
        """Return the steps between two rounds of the cyclic schedule, and the parts per round."""
        steps = self.staleness // 2
        return max(1, steps // parts), -(-parts // min(parts, steps))

    @override
    def state(self, worker: WorkerView) -> StreamingState:
        worker.lr_factor = 1 / min(self._gain(worker.size), 1.0)
        return StreamingState([float(worker.start_step)] * worker.count)

    @override
    def due(self, worker: WorkerView) -> bool:
        if self.schedule == "eager":
            return True
        return worker.size > 1 and worker.since_launch >= self._cycle(worker.count)[0]

    @override
    def vote(self, worker: WorkerView) -> tuple[float, ...]:
        """Return the local step (0 if not stepping), ‖u‖² and ‖D‖²."""
        step = float(worker.step) if worker.stepping else 0.0
        return step, *worker.squares

    @override
    def decide(self, worker: WorkerView, sums: SummedVotes) -> float:
        """Return the number of parts: fixed in the cyclic schedule, automatic in the eager one."""
        return math.inf if self.schedule == "eager" else self._cycle(worker.count)[1]

    @override
    def outer_step(self, worker: WorkerView, part: int, sums: SummedVotes) -> tuple[float, float]:
        """Return e^(−k/50) and (G − 1)·(1 − e^(−k/50)). The summed votes determine k and G."""
        state: StreamingState = worker.state
        steps, sent, mean = sums.votes
        if self.outer_gain != "auto":
            state.gain = self._gain(worker.size)
        elif mean > 0:
            state.gain = min(max(math.sqrt(sent / mean), 1.0), math.sqrt(worker.size))
        # No worker steps in the last message of a barrier, and before the first message.
        step = steps / sums.stepping if sums.stepping else state.launch_steps[part]
        # The mean step of the workers may decrease when the fastest ones run out of data. The decay
        # must not exceed 1 then.
        decay = math.exp(min(0.0, state.launch_steps[part] - step) / _MOMENTUM_STEPS)
        state.launch_steps[part] = step
        return decay, (state.gain - 1) * (1 - decay)

    @override
    def after_step(self, worker: WorkerView) -> None:
        """With the automatic G, set ``lr_factor`` to 1/√G, with G of this worker's updates."""
        auto = self.outer_gain == "auto"
        worker.details.update(outer_gain=worker.state.gain if auto else self._gain(worker.size))
        if auto:
            sent, mean = worker.squares
            worker.lr_factor = 1.0
            if sent > mean > 0:
                worker.lr_factor = math.sqrt(math.sqrt(max(mean / sent, 1 / worker.size)))
