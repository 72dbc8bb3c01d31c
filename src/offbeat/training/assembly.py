"""Creates, connects and closes the components that train a model on one worker.

- ``training.backward_hooks`` calls ``training.iteration`` at the end of every backward pass.
- ``training.hooks`` calls ``training.iteration`` before and after every optimizer step.
- ``training.iteration`` passes the step to the *flow*, the code that runs the strategy.
- ``training.consensus`` replaces the local model by the mean over all workers.
- ``training.checks`` compares the workers, and warns of misuse.
- ``training.stats_recorder`` updates the totals and writes the telemetry records.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from offbeat.averaging import AttachedOptimizer, NonFinite, Replica, Worker, flow_of
from offbeat.averaging.model_mean import copy_rank_0
from offbeat.checkpoint.worker_state import WorkerState
from offbeat.elastic.membership_changes import MembershipChanges
from offbeat.nodes.gradients import NodeMean
from offbeat.nodes.shards import Shards
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies.base import Gradients, Strategy
from offbeat.training.checks.loading import refuse_loading
from offbeat.training.checks.same_setup import describe, require_same_setup
from offbeat.training.checks.unfinished import UnfinishedWarning
from offbeat.training.consensus import Consensus
from offbeat.training.hooks import ScalerHooks, StepHooks, attached
from offbeat.training.iteration import Iteration
from offbeat.training.learning_rate.adam_correction import AdamCorrection
from offbeat.training.learning_rate.step_factor import StepFactor
from offbeat.training.stats_recorder import StatsRecorder
from offbeat.transport.team import Team


class Components:
    """Creates the components of one worker.

    The constructor is a collective of the workers that start together. On a worker that joins a
    running training, it receives the model from the others.

    Args:
        model: The model.
        optimizers: Its optimizers.
        strategy: The strategy.
        team: The workers.
        wrappers: The DistributedDataParallel wrappers of the model.
        shards: Parts of the model on this worker, if ``fully_shard`` has divided it.
        undo: Removes all hooks when it is closed.

    The other arguments are those of ``attach``.

    Attributes:
        joined: True if this worker has joined a running training.
        state: The state of this worker, for checkpoints and workers that join.
        membership_changes: The membership changes of elastic training; None if training is not
            elastic.
        device: Device of the trained parameters.
        leased_sampler_count: Number of ``LeasedSampler`` objects of this training.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[AttachedOptimizer],
        strategy: Strategy,
        team: Team,
        *,
        scaler: torch.amp.GradScaler | None,
        wire: Precision,
        adam_correction: bool,
        log: object,
        non_finite: NonFinite,
        min_workers: int | None,
        wrappers: Sequence[DistributedDataParallel],
        shards: Shards | None,
        undo: ExitStack,
    ) -> None:
        self.team, self.shards = team, shards
        full = replica = Replica(model, [p for p in model.parameters() if p.requires_grad])
        if shards is not None:
            trainable = [p for p in shards.parameters() if p.requires_grad]
            replica = Replica(shards, trainable, buffers_of=model)
        lines = [f"wire {wire!r}", f"non_finite {non_finite!r}", f"min_workers {min_workers}"]
        lines += [f"adam_correction {adam_correction}"]
        lines += describe(strategy, full, optimizers)
        self.joined = team.generation > 0  # the workers that start together have generation 0
        senders = team.replica_team if isinstance(strategy.averages(), Gradients) else team
        opened = Wire(senders)  # exact; ``changes.join`` replaces it on a worker that joins
        with team.account.paused():
            if not self.joined:
                require_same_setup(team.everyone, lines)
                copy_rank_0(team, replica.everything())
                opened = Wire(senders, wire)
        worker = self.worker = Worker(team, replica, optimizers, opened, non_finite)
        worker.scaled = scaler is not None and scaler.is_enabled()
        self.recorder = StatsRecorder(worker, log)
        flow = flow_of(strategy, worker)
        node = None
        if team.node is not None:  # ``fully_shard`` averages gradients itself
            averaged = worker.optimizers if shards is None else ()
            node = NodeMean(team.node.inside, model, averaged)
        self.iteration = Iteration(flow, worker, self._completed, node, wrappers)
        self.consensus = Consensus(worker, self.iteration, shards)
        self.state = WorkerState(
            *(model, worker, self.iteration, self.consensus, self.recorder),
            sharded=shards is not None,
        )
        self.membership_changes: MembershipChanges | None = None
        if not self.joined:
            flow.start()
        if min_workers is not None:
            self._make_elastic(wire, lines, min_workers)
        self.iteration.watch_backward()
        self.device = optimizers[0].parameters[0].device
        self._undo = undo
        refuse_loading(model, self.iteration, undo)
        self._hook_optimizers(adam_correction=adam_correction)
        if scaler is not None:
            undo.callback(ScalerHooks(scaler, self.iteration).remove)
        for object in (model, *(each.optimizer for each in optimizers)):
            attached.add(object)
            undo.callback(attached.discard, object)
        team.host.register_totals(lambda: self.recorder.stats)
        self.unfinished = UnfinishedWarning(self, team.everyone.rank)
        if team.everyone.size == 1:
            self.unfinished.cancel()
        self.iteration.guard.on_failure = self.unfinished.cancel
        self.leased_sampler_count = 0
        self.recorder.restart()
        self.consensus.note_start()

    def _make_elastic(self, wire: Precision, lines: Sequence[str], min_workers: int) -> None:
        """Let training continue when workers join or are lost. If ``joined``, receive the model.

        ``lines`` describe model and settings, and must be equal on all workers.
        """
        changes = self.membership_changes = MembershipChanges(
            *(self.iteration, self.state, self.recorder.exclude_time, wire, lines),
            min_workers=min_workers,
        )
        self.iteration.recover = changes
        self.iteration.guard.elastic = True
        if self.joined:
            with self.team.account.paused():
                changes.join()
        else:
            changes.record()

    def _hook_optimizers(self, *, adam_correction: bool) -> None:
        undo, lr_factor = self._undo, partial(attrgetter("flow.lr_factor"), self.iteration)
        for each in self.worker.optimizers:
            factor = None
            if adam_correction:
                correction = AdamCorrection(self.worker, each)
                factor = StepFactor(each.optimizer, lr_factor, undo, correction)
            elif isinstance(each.optimizer, SGD):
                factor = StepFactor(each.optimizer, lr_factor, undo)
            StepHooks(each, self.iteration, factor, undo, scaled=self.worker.scaled)

    def _completed(self, synced: bool) -> None:
        """Update the totals after an iteration. ``synced``: True if a mean took effect in it."""
        self.recorder.count_step(synced=synced)
        self.consensus.note_parameters()
        self.unfinished.steps += 1

    # -- end -------------------------------------------------------------------------------------

    def close(self, *, together: bool) -> None:
        """Remove all hooks and close the connections. ``together``: see ``Communicator.close``."""
        self.unfinished.cancel()
        self.iteration.close()
        self._undo.close()
        try:
            self.recorder.records.close()
        finally:
            if self.team.membership is not None and self.membership_changes is not None:
                self.team.membership.leave(ended=together)
            self.team.close(together=together)
