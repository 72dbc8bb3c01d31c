"""The pipeline through which one worker averages the parts of the shared model P.

``part.py`` explains the terms. Launches that a round has decided are *queued* until they start. A
part has *arrived* when the sum of its updates has arrived.
"""

import math
from dataclasses import dataclass, field

import torch

from offbeat.averaging.parts.landing import Landing
from offbeat.averaging.parts.part import Part
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import Worker
from offbeat.strategies.base import SharedModel, Strategy, WorkerView, transient
from offbeat.transport.handle import Completed

# With error feedback the pipeline adds up ‖u‖² and ‖D‖² over the landings, where D is the mean
# update. A summand decays to 1/e while each part of the model lands this many times.
_SMOOTHED_PASSES = 5


@dataclass(frozen=True)
class QueuedLaunch:
    """A launch that a round has decided and that has not started.

    Attributes:
        part: Index of the part.
        round: The round that decided the launch. The sum of its votes contains Σ w, the sum of the
            workers' weights.
    """

    part: int
    round: Round


@dataclass
class PipelineState:
    """State of a ``Pipeline``.

    Attributes:
        parts: The parts of the shared model.
        next_part: Index of the part that the next round launches first.
        in_flight: Indices of the parts in flight, the oldest first.
        flight_seconds: Seconds from launch to arrival, summed over all landings.
        queue: Launches that were decided and have not started, the oldest first.
        spent: Seconds spent on each launch and landing since the last step boundary, without waits.
            Empty unless ``lands="arrived"``.
    """

    parts: list[Part]
    next_part: int = 0
    in_flight: list[int] = field(default_factory=list)
    flight_seconds: float = 0.0
    queue: list[QueuedLaunch] = transient(default_factory=list)
    spent: list[float] = transient(default_factory=list)


class Pipeline:
    """Launches and lands the parts of one worker in the order that the rounds decide.

    ``shared`` gives the time at which ``parts`` land, and their outer step. The pipeline updates
    the fields of ``view`` about parts, launches and landings.

    Attributes:
        state: State for checkpoints.
        changed: True if a part was queued, launched or landed since the flow reset this flag.
        report_non_finite: True if the next vote must report non-finite values, because a part was
            found non-finite at its launch, after the vote.
    """

    def __init__(
        self,
        worker: Worker,
        strategy: Strategy,
        shared: SharedModel,
        parts: list[Part],
        view: WorkerView,
    ) -> None:
        self._worker, self._strategy, self._shared = worker, strategy, shared
        self._view = view
        self.changed, self.report_non_finite = True, False
        self.state = PipelineState(parts)
        view.count = len(self.state.parts)

    @property
    def parts(self) -> list[Part]:
        """The parts of the shared model."""
        return self.state.parts

    @property
    def next_part(self) -> Part:
        """The part that the next round launches first."""
        return self.state.parts[self.state.next_part]

    @property
    def oldest(self) -> Part | None:
        """The part in flight that was launched first; None if no part is in flight."""
        return self.state.parts[self.state.in_flight[0]] if self.state.in_flight else None

    @property
    def unsynced(self) -> bool:
        """True if the model contains local changes that were not sent (``lands=0``: not landed)."""
        step = self._worker.step
        return self._worker.touched or any(step > part.synced_step for part in self.parts)

    def step_skipped(self) -> None:
        """Do not count the current step as unsynchronized: it has not changed the model."""
        step = self._worker.step
        for part in self.parts:
            if part.synced_step == step - 1:
                part.synced_step = step

    def arrived(self) -> int:
        """Return the number of parts that can land now, in the order of launches. Never blocks."""
        count = 0
        for index in self.state.in_flight:
            if not self.parts[index].arrived():
                break
            count += 1
        return count

    def finite(self, part: Part) -> bool:
        """Return True if all parameters and buffers of ``part`` are finite, on all shards.

        ``Worker.finite_buffers`` checks the buffers.
        """
        if any(bucket.buffers for bucket in part.buckets) and not self._worker.finite_buffers():
            return False
        (squared,) = self._worker.team.over_shards(part.squared_norm())
        return math.isfinite(squared)

    # -- launching -------------------------------------------------------------------------------

    def add(self, parts: float, round: Round) -> None:
        """Queue the launches of a round: the next ``parts`` parts in cyclic order, or all (inf)."""
        state, count = self.state, len(self.parts)
        number = count if parts == math.inf else int(parts)
        state.queue += [QueuedLaunch((state.next_part + i) % count, round) for i in range(number)]
        state.next_part = (state.next_part + number) % count
        self._update_view()

    def launch_queued(self, *, wait: bool) -> None:
        """Launch the queued parts, in order.

        Args:
            wait: What to do if a queued part is still in flight. True: wait until it has landed,
                then launch it. False: leave it and the rest of the queue to a later call.
        """
        while self.state.queue:
            queued = self.state.queue[0]
            while self.parts[queued.part].in_flight:
                if not wait:
                    return
                self.land()
            self._launch(queued)
            self.state.in_flight.append(queued.part)
            self.state.queue.pop(0)
            self._update_view()

    def _update_view(self) -> None:
        """Update the strategy's view, and set ``changed``."""
        state, view, self.changed = self.state, self._view, True
        view.in_flight_steps = [self.parts[i].launched_step for i in state.in_flight]
        view.ready = not self.next_part.in_flight

    def _launch(self, queued: QueuedLaunch) -> None:
        worker, shared, view = self._worker, self._shared, self._view
        part, round = self.parts[queued.part], queued.round
        view.launches += 1
        began = self._time_at(part)
        weight = round.own.weight
        if part.keeps_base and worker.guarded and worker.size > 1 and not self.finite(part):
            # The vote has announced this worker's weight, so it cannot drop out of the mean. It
            # sends an update of 0, and buffers of 0.
            weight, self.report_non_finite = 0.0, True
        outer_step = None
        if shared.error_feedback and shared.outer.momentum:
            strategy, index = self._strategy, queued.part
            outer_step = round.then(lambda _: strategy.outer_step(view, index, round.tally()))
        part.launch(
            round.then(lambda sums: sums.weight),
            weight=weight,
            step=worker.step,
            what=f"launch {view.launches} (part {queued.part}) at step {worker.step}",
            outer_step=outer_step,
        )
        if not shared.blocking:
            # With lands=0 a part is synchronized only when it lands: if a worker is lost before, no
            # other model contains the local steps.
            part.synced_step = worker.step
        self._spend(began)

    def _time_at(self, part: Part) -> float:
        """Return the time at which the GPU of ``part`` has done the work in its queue, or now.

        That work belongs to the training, so the cost of a launch or landing must not contain it.
        """
        if self._shared.eager:
            for device in {bucket.tensors[0].device for bucket in part.buckets}:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
        return self._worker.team.host.now()

    def _spend(self, began: float) -> None:
        """Record the duration of a launch or landing that began at time ``began``."""
        if self._shared.eager:
            self.state.spent.append(self._worker.team.host.now() - began)

    # -- landing ---------------------------------------------------------------------------------

    def land(self, *, take: bool = True) -> None:
        """Wait for the oldest part in flight, and land it.

        Args:
            take: True to apply the mean to the local model. False to discard the mean, which is
                allowed only if P is not stored.
        """
        state, view, worker = self.state, self._view, self._worker
        view.step = worker.step  # for ``outer_step``, which may be called now
        part = self.parts[state.in_flight[0]]
        if not self._shared.blocking:
            part.wait()
        began = self._time_at(part)
        if take:
            part.land(worker.model_version, extra=self._optimizer_state_with(part))
        else:
            part.discard()
        self._spend(began)
        state.in_flight.pop(0)
        self._update_view()
        view.landings += 1
        view.fresh_step = max(view.fresh_step, part.launched_step)
        if self._shared.blocking and take and part.weight:
            part.synced_step = worker.step
        if len(self.parts) > 1:
            part.release()
        state.flight_seconds += (part.arrived_seconds or 0.0) - part.launched_seconds
        if self._shared.error_feedback:
            keep = 1 - 1 / (_SMOOTHED_PASSES * len(self.parts))
            sent, mean = worker.team.over_shards(part.sent_squared, part.mean_squared)
            view.sent_squared = keep * view.sent_squared + sent
            view.mean_squared = keep * view.mean_squared + mean

    def _optimizer_state_with(self, part: Part) -> list[Landing]:
        """Start the mean of the optimizers' state if ``part`` is the last part, and return it."""
        if not self._shared.optimizer_state or part is not self.parts[-1]:
            return []
        own, total = part.weights()
        return self._worker.optimizer_state.launch(own, total) if total else []

    def settle(self) -> None:
        """Launch all queued parts, land all parts in flight, and free the staging tensors."""
        self.launch_queued(wait=True)
        while self.state.in_flight:
            self.land()
        for part in self.parts:
            part.release()

    def show(self) -> None:
        """Wait, then change the model as if all parts in flight had landed.

        The caller restores the model afterwards.
        """
        self._view.step = self._worker.step
        for index in self.state.in_flight:
            self.parts[index].show(self._worker.model_version)

    def average_residuals(self) -> None:
        """x ← P + mean(x − P), where x − P is sent in int8.

        Requires error feedback, and that no part is in flight. int8 is precise enough: its error is
        small compared to x − P, which is small compared to the model.
        """
        worker = self._worker
        for index, part in enumerate(self.parts):
            part.launch(
                Completed(float(worker.size)),
                weight=1.0,
                step=worker.step,
                what=f"final mean (part {index})",
                precision="int8",
                outer_step=Completed((1.0, 0.0)),
            )
        for part in self.parts:
            part.wait()  # if a worker is lost now, no part has changed
        for part in self.parts:
            part.land(worker.step)
            part.restore(worker.step)

    # -- checkpoints -----------------------------------------------------------------------------

    def before_save(self) -> None:
        """Launch the queued parts, and wait for all sums in flight."""
        self.launch_queued(wait=True)
        for index in self.state.in_flight:  # the order of ``outer_step`` is equal on all workers
            self.parts[index].before_save()

    def after_load(self) -> None:
        """Continue from ``state``, into which a checkpoint was loaded."""
        for part in self.parts:
            part.after_load()
        self._update_view()
