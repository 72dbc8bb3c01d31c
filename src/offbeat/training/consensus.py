"""Consensus: replace the local model by the mean over all workers.

The replacement is temporary (for an evaluation) or permanent (at the end of training). It begins
with a *barrier*: all workers wait for each other.

The argument ``also`` of several methods holds the tensors of further modules; see
``training.further_modules``.

``offbeat.strategies.base`` explains the terms.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from offbeat.averaging import Replica, Worker
from offbeat.averaging.model_mean import ModelMean, copy_rank_0
from offbeat.averaging.votes import ALSO, NEEDS_MEAN, NO_CONSENSUS, UNAVERAGED, Round
from offbeat.errors import (
    AttachError,
    CheckpointError,
    CommunicationError,
    EndedError,
    MismatchError,
)
from offbeat.nodes.shards import Shards
from offbeat.training.checks.same_tensors import TensorComparison
from offbeat.training.further_modules import agree_on_modules
from offbeat.training.iteration import Iteration

T = TypeVar("T")
Snapshot = tuple[list[Tensor], list[Tensor]]
"""Values of the local model and of the local modules given as ``also``."""


class Consensus:
    """Swaps the local model for the mean over all workers, and back.

    Attributes:
        complete: False if a worker took part in the last consensus while in ``finish``.
        ended: True if the model of this worker is the final mean. Other workers may not have the
            final mean yet.
    """

    def __init__(
        self,
        worker: Worker,
        iteration: Iteration,
        shards: Shards | None,
    ) -> None:
        self._worker, self._iteration, self._shards = worker, iteration, shards
        self._comparison = TensorComparison(worker)
        self.ended = False
        self.complete = True
        self._no_consensus = True  # this worker has not called consensus()
        self._versions: list[int] = []  # see note_parameters

    def _retry(self, function: Callable[[], T]) -> T:
        """Call ``function``. Elastic training calls it again in the next generation."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self._iteration.recover is None or isinstance(error, EndedError):
                    raise
                self._iteration.recover(error)

    # -- changes outside of a step ---------------------------------------------------------------

    def note_start(self) -> None:
        """Handle a model from which training starts or continues, equal on all workers."""
        self._comparison.note_start()
        self.note_parameters()

    def note_parameters(self) -> None:
        """Note that the model is the local one, and the version counters of its parameters.

        Torch increments a counter at each write. Called at the end of each step, and when the model
        was replaced.
        """
        self._worker.touched = self.ended = False
        self._versions = self._worker.replica.versions()

    def check_parameters(self) -> None:
        """Set ``worker.touched``: True if the parameters changed since ``note_parameters``.

        For example, schedule-free optimizers change the parameters in ``eval()`` and ``train()``.
        A worker without new steps usually has weight 0 in the mean. With ``touched`` it has its
        full weight, so that the mean contains the change.

        Raises AttachError if a parameter of the model was replaced, or has another dtype.
        """
        self._worker.touched |= self._versions != self._worker.replica.versions()
        replaced = self._worker.replica.replaced()
        if replaced:
            raise AttachError(
                f"parameter {replaced[0]!r} of the model was replaced or converted to another "
                "dtype after attach(), so it is no longer synchronized: detach() and attach again"
            )

    # -- means of numbers ------------------------------------------------------------------------

    def mean(self, numbers: Tensor) -> Tensor:
        """Return the mean over all workers of ``numbers``, a float64 tensor. A collective. Blocks.

        Inside a consensus the workers do not train, so that there is no barrier.
        """
        return self._retry(lambda: self._mean(numbers))

    def _mean(self, numbers: Tensor) -> Tensor:
        shown, everyone = self._iteration.shows_consensus, self._worker.team.everyone
        if not shown:
            self._wait_for_all("mean()")
        elif not self.complete:
            raise MismatchError(
                f"rank {everyone.rank}: mean() after another worker has called finish(): call "
                "mean() equally often on every rank"
            )
        rows = everyone.gather_values(numbers.flatten().tolist(), what="mean()")
        for rank, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise MismatchError(
                    f"rank {rank} has {len(row)} numbers in mean(), and rank 0 has "
                    f"{len(rows[0])}: give a value of the same shape on every rank"
                )
        return torch.tensor(rows, dtype=torch.float64).mean(0).reshape(numbers.shape)

    # -- consensus -------------------------------------------------------------------------------

    def _wait_for_all(self, call: str, also: Replica | None = None, bits: int = 0) -> Round:
        """Wait at a barrier until no worker takes a step. Returns the last round.

        Until then other workers may still take steps. Each of their rounds needs a vote of this
        worker, which the flow sends. ``call`` is the public call in ``votes.CALLS`` that this
        worker is in, and ``bits`` are further bits of the vote.
        """
        if self._shards is not None:
            self._shards.reshard()
        worker = self._worker
        worker.call, worker.call_bits = call, bits
        if also is not None:
            worker.call_bits += ALSO * bool(also.everything())
            worker.call_bits += UNAVERAGED * self._comparison.has_changed()
            worker.call_bits += NO_CONSENSUS * self._no_consensus
        try:
            if self._iteration.node is not None:
                self._iteration.node.average(0, stepping=False)
            return self._iteration.flow.wait_for_all()
        finally:
            worker.call, worker.call_bits = "", 0

    def before_save(self, call: str) -> None:
        """Land what is in flight, so that the state can be saved or replaced. A collective.

        ``call``: see ``_wait_for_all``.
        """

        def land() -> None:
            self._wait_for_all(call)
            self._iteration.flow.before_save()

        self._retry(land)

    def replace_by_mean(self, also: Replica) -> Snapshot:
        """Replace the model and ``also`` by their mean over all workers. A collective. Blocks.

        Returns the local values, for ``restore``.
        """

        def show() -> Snapshot:
            return self._show(self._wait_for_all("consensus()", also, NEEDS_MEAN), also)

        local = self._retry(show)
        self._no_consensus = False
        return local

    def pass_barrier(self, also: Replica) -> None:
        """Enter and leave a consensus of which this worker does not need the mean. Blocks.

        The model is averaged only if another worker needs the mean. Afterwards it is the local one.
        """

        def attempt() -> None:
            last = self._wait_for_all("consensus()", also)
            if last.wait().has(NEEDS_MEAN):
                self.restore(self._show(last, also), also)
            else:
                self.complete = not last.wait().is_in("finish()")

        self._retry(attempt)
        self._no_consensus = False

    def _show(self, last: Round, also: Replica, *, finishing: bool = False) -> Snapshot:
        averages_also = self._compare(last, also, finishing=finishing)
        self.complete = not last.wait().is_in("finish()")
        local = self._worker.replica.snapshot(), also.snapshot()
        try:
            self._average(last, also if averages_also else None, final=False)
        except BaseException:
            self.restore(local, also)
            raise
        return local

    def _compare(self, last: Round, also: Replica, *, finishing: bool) -> bool:
        """Compare the tensors that a consensus may combine. Returns True if ``also`` is averaged.

        ``last`` is the last round before the consensus; see ``agree_on_modules``.
        """
        averages_also = agree_on_modules(self._worker, last.wait(), also, finishing=finishing)
        self._comparison.include(last.wait())
        return averages_also

    def require_complete(self, what: str) -> None:
        """Raise CheckpointError in a consensus in which a worker takes part from ``finish``.

        Such a worker does not take part in further collectives, like that of the caller ``what``.
        """
        if self._iteration.shows_consensus and not self.complete:
            raise CheckpointError(
                f"{what} inside consensus(): another worker has called finish() and takes part in "
                "the consensus alone. The earlier checkpoints remain. Save before the first worker "
                "ends, or catch this error"
            )

    def _average(self, last: Round, also: Replica | None, *, final: bool) -> None:
        """Replace the model and ``also`` by their means. A failure may leave ``also`` half done."""
        team = self._worker.team
        self._iteration.flow.consensus(last, final=final)
        copy_rank_0(team, self._worker.replica.other_buffers())
        if also is not None and team.size > 1:
            ModelMean(team, also).show(1.0, team.size, what="consensus of the modules in also")
            copy_rank_0(team, also.other_buffers())

    def restore(self, local: Snapshot, also: Replica) -> None:
        """Replace the means by ``local``, the result of ``replace_by_mean(also)``."""
        if self._shards is not None:
            self._shards.reshard()
        self._worker.replica.restore(local[0])
        self._worker.replica.included = ()
        also.restore(local[1])
        self._versions = self._worker.replica.versions()  # and ``touched`` remains

    def finish(self, also: Replica) -> None:
        """Replace the model and ``also`` by the mean permanently. A collective."""
        local = also.snapshot()
        try:
            self._retry(lambda: self._finish(also, local))
        except EndedError:
            # The other workers have finished. If `ended` is set, this worker has the final mean
            # too, and only its last barrier has failed.
            if not self.ended:
                raise

    def _finish(self, also: Replica, local: Sequence[Tensor]) -> None:
        team, self.ended = self._worker.team, False
        also.restore(local)  # an attempt that failed may have averaged them
        last = self._wait_for_all("finish()", also)
        while last.wait().is_in("consensus()"):
            # Some workers have entered consensus() instead: take part in it, then wait again.
            if last.wait().has(NEEDS_MEAN):
                with team.account.paused():
                    self.restore(self._show(last, also, finishing=True), also)
            last = self._wait_for_all("finish()", also)
        with team.account.paused():
            averages_also = self._compare(last, also, finishing=True)
        self._average(last, also if averages_also else None, final=True)
        self.ended = True
        # No worker may leave before all have the final mean. If a worker is lost before that, the
        # others of an elastic training compute the mean again in a new generation.
        lost = () if self._iteration.recover is not None else (CommunicationError,)
        with contextlib.suppress(*lost), team.account.paused():
            self._comparison.compare_final(self._iteration.flow.strategy)
