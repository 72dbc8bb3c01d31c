"""The synchronizer: the object that ``attach`` returns, with the public methods.

``training.assembly`` creates the components that do the work, and explains them.
``checkpoint.worker_state`` collects and loads the state.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.arguments import require_number
from offbeat.averaging import Replica
from offbeat.errors import AttachError, CheckpointError
from offbeat.telemetry import Stats
from offbeat.training.assembly import Components
from offbeat.training.further_modules import tensors_of

Value = TypeVar("Value", float, Tensor)


class Synchronizer:
    """Synchronizes the training of this worker with the other workers.

    A context manager: a clean exit calls ``finish``, an exception calls ``detach``.
    """

    def __init__(self, components: Components) -> None:
        self._components, self._active, self._finished = components, True, False
        self._team, self._host = components.team, components.team.host
        self._worker, self._iteration = components.worker, components.iteration
        self._consensus, self._recorder = components.consensus, components.recorder

    # -- progress ----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of iterations so far, including iterations whose step a GradScaler skipped."""
        return self.stats.steps

    @property
    def stats(self) -> Stats:
        """Totals of this worker since ``attach``. Loading a checkpoint replaces them."""
        return self._recorder.stats

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self._team.everyone.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._team.everyone.size

    def record(self, **values: object) -> None:
        """Add ``values``, for example ``loss=loss``, to the telemetry record of the next step.

        Does not wait for a GPU: tensors are read when the record is written.

        Raises:
            TypeError: a value is not a number, a text, None, or a list or dictionary of these.
            ValueError: a name is reserved for a field of every record, such as ``step``.
        """
        self._recorder.records.add(values)

    # -- every step --------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Scale the gradients so that their total L2 norm is at most ``max_norm``.

        Under BSP ``backward()`` has averaged the gradients, so this method clips the mean. Unlike
        ``torch.nn.utils.clip_grad_norm_``, it includes in the norm all shards of a model that
        ``fully_shard`` has divided. With a GradScaler, call ``scaler.unscale_`` first.

        Args:
            max_norm: Largest norm that is left unchanged.
            optimizer: Optimizer whose gradients are clipped by their norm. None: the gradients of
                all optimizers are clipped by their total norm. Required if the optimizers step in
                turn, each after its own backward pass, as in a GAN.

        Returns:
            The total norm before clipping, a 0-dimensional tensor.

        Raises:
            AttachError: ``optimizer`` is not attached. Or ``optimizer`` is None, and some but not
                all optimizers have stepped in this iteration.
        """
        return self._iteration.clip_grad_norm(max_norm, optimizer)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``backward()`` only adds to the gradients of this worker.

        For gradient accumulation: run all backward passes of a step except the last one inside.

            for i, batch in enumerate(batches):
                with sync.no_sync() if i < len(batches) - 1 else contextlib.nullcontext():
                    loss_of(model, batch).backward()
            optimizer.step()

        Outside the context every backward pass averages the gradients, if the strategy is BSP or
        the worker belongs to a node. Other training does not need the context.
        ``optimizer.step()`` inside the context raises an AttachError.
        ``DistributedDataParallel.no_sync`` of a wrapper given to ``attach`` has the same effect.
        """
        return self._iteration.no_sync()

    # -- elastic training ----------------------------------------------------------------------

    def share_state(self, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """Let workers that join receive a state of the script, such as that of a scheduler.

        A worker that joins receives the model, the optimizers and ``step``, but no other state.
        Call this method on every worker, after ``attach`` and before the first step. If the script
        has several states, each worker calls it in the same order.
        If training is not elastic, no worker joins, and the method has no effect.

        Do not share the state of random number generators: a worker that joins would draw the
        numbers of another one.

        Args:
            save: Returns the state. Called now, and on one worker whenever another one joins:
                inside ``optimizer.step()``, ``consensus()`` or ``finish()``, when ``step`` steps
                are complete. The state has numbers, text, tensors, lists, tuples and dictionaries.
            load: Receives that state. Called now, and only on a worker that has joined. Tensors are
                on the CPU.

        Raises:
            AttachError: after ``finish`` or ``detach``, or after the first step of a worker.
            CheckpointError: the state has an object of another type. If a later ``save`` fails,
                ``attach`` raises this error on the worker that joins.
        """
        self._require_active("share_state()")
        if self._components.unfinished.steps:
            raise AttachError("share_state(): call it before the first step")
        if self._components.membership_changes is not None:
            self._components.state.share(save, load)

    # -- consensus and the end of training ---------------------------------------------------

    @contextlib.contextmanager
    def consensus(self, *, also: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Replace the model by the mean over all workers inside the context, for evaluation.

        The local model is restored when the context ends. A collective: every worker enters the
        context, each after any number of steps. Needs memory for one copy of the model. ``stats``
        counts neither time nor bytes of the context.

        Parameters, floating-point buffers and complex buffers become the mean. Signed integer
        buffers become their maximum. All other buffers (masks, bytes) become those of rank 0, and
        so do buffers that DDP is set to ignore, and the vectors of a spectral norm.
        Frozen parameters that the script has changed, and tensors created after ``attach``, are
        combined like buffers if they differ between the workers.

        To evaluate on one rank, test ``sync.rank`` inside the context; no barrier is needed. The
        other workers leave the context and train until they need this one, and then wait for at
        most ``timeout_seconds``. A collective of your own is safe inside the context, unless a
        worker is in ``finish``, where it does not take part in the collective. Outside the context
        call ``mean`` directly before the collective.

        The context is also a decorator: ``evaluate = sync.consensus()(evaluate)`` makes every call
        of ``evaluate`` run inside a consensus.

        Args:
            also: Further modules to replace by their mean in the same way, such as a moving average
                (EMA) that each worker computes of its local model. Frozen parameters are averaged,
                too. The training does not change these modules, and ``offbeat.save`` does not save
                them: pass their ``state_dict()`` as ``extra``. Needs memory for one copy of them.
                A worker that may call ``finish`` meanwhile must pass the same modules to it.

        Raises:
            AttachError: after ``finish`` or ``detach``, or inside another ``consensus``. Or a
                parameter of the model was replaced by another one. Or ``also`` was given and
                ``fully_shard`` has divided the model, or a module shares tensors with the model.
            MismatchError: another worker has given other modules as ``also``. Or it is in
                ``finish`` with more steps than this one, and has never called ``consensus``.
            TypeError: ``also`` is not a list of modules.
        """
        self._require_active("consensus()")
        self._iteration.require_own_model("consensus()")
        self._consensus.check_parameters()
        with _normal_mode():
            extra = self._tensors_of(also, "consensus")
        with self._recorder.paused():
            with _normal_mode(), self._iteration.guard:
                local = self._consensus.replace_by_mean(extra)
            try:
                with self._iteration.forbid_steps("consensus()"):
                    yield
            finally:
                self._consensus.restore(local, extra)

    def mean(self, value: Value) -> Value:
        """Return the mean of ``value`` over all workers, such as that of a loss or an accuracy.

        A collective: every worker calls it equally often, each after any number of steps. While it
        waits, this worker takes part in the communication of the workers that still train. In a
        collective of ``torch.distributed`` it would not, so that can deadlock outside of
        ``consensus``. May be called inside ``consensus``, too. ``mean(0.0)`` is a barrier.
        ``stats`` counts neither its time nor its bytes.

        Args:
            value: A number, or a small tensor of real numbers, which is not empty. It has equally
                many elements on all workers.

        Returns:
            A float for a number. For a tensor, a tensor of the same shape, dtype and device. The
            mean of integers has torch's default dtype.

        Raises:
            MismatchError: the number of elements differs between workers, or another worker has
                called ``finish``.
            AttachError: after ``finish`` or ``detach``.
            TypeError: ``value`` is not a number or a tensor of real numbers.
        """
        self._require_active("mean()")
        if not isinstance(value, Tensor):
            require_number("value", value)
        elif value.is_complex():
            raise TypeError(f"value must have real numbers, got a tensor of {value.dtype}")
        with _normal_mode(), self._recorder.paused():
            numbers = torch.as_tensor(value).detach().to("cpu", torch.float64)
            with self._iteration.guard:
                mean = self._consensus.mean(numbers)
        if not isinstance(value, Tensor):
            return mean.item()
        floating = value.is_floating_point()
        return mean.to(value.device, value.dtype if floating else torch.get_default_dtype())

    def finish(self, *, also: Sequence[nn.Module] = ()) -> None:
        """End training: replace the model by the mean over all workers, and remove the hooks.

        Parameters and buffers are combined as in ``consensus``. A collective: every worker calls
        it, each after any number of steps. The call returns when all workers have called it. While
        it waits, this worker takes part in the communication of the workers that still train.

        Args:
            also: Further modules to replace by their mean; see ``consensus``. If another worker may
                still call ``consensus(also=…)``, pass the same modules here.

        Raises:
            AttachError, MismatchError, TypeError: ``also`` is not valid; see ``consensus``.
        """
        if not self._active:
            return
        self._iteration.require_own_model("finish()")
        self._consensus.check_parameters()
        with _normal_mode():
            extra = self._tensors_of(also, "finish")
            with self._iteration.guard:
                self._consensus.finish(extra)
        self._recorder.count_remainder()
        self._finished, self._active = True, False
        self._components.close(together=True)

    def _tensors_of(self, also: Sequence[nn.Module], call: str) -> Replica:
        sharded = self._components.shards is not None
        return tensors_of(also, self._worker.replica, call, sharded=sharded)

    def detach(self) -> None:
        """Leave training with the local model as it is: remove all hooks and close connections.

        Not a collective. A worker that waits for this one raises a ``CommunicationError`` at once.
        In elastic training the other workers continue without this one.
        """
        if self._active:
            self._active = False
            self._components.close(together=False)

    def _require_active(self, what: str) -> None:
        if not self._active:
            advice = "attach again first"
            if what == "offbeat.save()":  # a new attach() begins at step 0, without the totals
                advice = "call it before, or inside consensus()"
            raise AttachError(f"{what} after finish() or detach(): {advice}")

    def __enter__(self) -> "Synchronizer":
        return self

    def __exit__(self, *exception: object) -> None:
        # After a failure of this worker alone, ``finish`` would wait for workers that still train.
        if exception[0] is None:
            self.finish()
        else:
            self.detach()

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this worker for ``torch.save``.

        It contains the model, the optimizers, the strategy's state and the totals. A collective:
        every worker calls this method at the same step, between two steps, and saves its result,
        which only a worker of the same rank can load. It first completes all averaging in progress.
        Tensors are not copied, as in torch's ``state_dict``.

        Inside ``consensus`` and after ``finish`` the result is the *state of a consensus*: it has
        no state of the strategy. It can be loaded with any strategy, ``wire`` and number of
        workers, and the call is not a collective.

        Raises:
            CheckpointError: the strategy cannot be saved.
            AttachError: after ``detach``, or in the middle of an iteration. Or inside
                ``consensus``, if ``fully_shard`` has divided the model.
        """
        if self._finished:
            return self._components.state.collect(whole=False)
        with between_steps(self, "state_dict()") as components:
            return components.state.collect(whole=not self._iteration.shows_consensus)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of ``state_dict``.

        A collective. Either all workers load their states, or none does. The state of a consensus
        must be loaded before the first step. All workers then start from rank 0's model, and only
        the totals of ``stats`` continue.

        Raises:
            CheckpointError: the state of a worker belongs to another strategy, ``wire``, number of
                workers, rank, model, optimizer or step; or the strategy cannot be saved. Raised on
                every worker.
            AttachError: after ``finish`` or ``detach``, inside ``consensus``, or in the middle of
                an iteration.
        """
        with between_steps(self, "load_state_dict()", loads=True) as components:
            with components.state.agreement("load_state_dict()"):
                components.state.check(state)
            components.state.load("load_state_dict()", state)


def pass_barrier(sync: Synchronizer) -> None:
    """Enter and leave a consensus. It averages the model only if another worker needs the mean."""
    sync._require_active("consensus()")
    sync._iteration.require_own_model("consensus()")
    sync._consensus.check_parameters()
    with sync._recorder.paused(), _normal_mode(), sync._iteration.guard:
        sync._consensus.pass_barrier(sync._tensors_of((), "consensus"))


@contextlib.contextmanager
def between_steps(sync: Synchronizer, what: str, *, loads: bool = False) -> Iterator[Components]:
    """Return a context in which a state is saved or loaded, between two steps.

    Outside of ``consensus``, entering the context is a collective that lands all parts in flight.
    ``stats`` counts neither time nor bytes of the context. ``what`` is the name of the caller in
    errors. ``loads`` is True if the caller replaces the local model.

    Raises:
        AttachError: after ``finish`` or ``detach``, or in the middle of an iteration. Or inside
            ``consensus``, if ``loads`` is set or ``fully_shard`` has divided the model.
        CheckpointError: the strategy cannot be saved and loaded. Or another worker has called
            ``finish``, and this one is inside ``consensus``.
    """
    components = components_of(sync, what)
    iteration, consensus, recorder = components.iteration, components.consensus, sync._recorder
    shown = iteration.shows_consensus
    if shown and components.shards is not None:
        raise AttachError(
            f"{what} inside consensus() with a model that fully_shard has divided: no worker "
            "would save all of it; save there with torch.distributed.checkpoint"
        )
    if loads:
        iteration.require_own_model(what)
    iteration.require_step_end(what)
    consensus.require_complete(what)
    if not shown and not iteration.flow.can_save:
        raise CheckpointError(
            f"{iteration.flow.strategy} cannot be saved or resumed: save inside consensus(), and "
            "load that model before attach()"
        )
    try:
        with recorder.paused():
            # The guard refuses all communication after an error inside it. A CheckpointError leaves
            # no operation out, so it is raised after the guard.
            refused: CheckpointError | None = None
            with iteration.guard:
                if not shown:
                    consensus.before_save(what)
                try:
                    yield components
                except CheckpointError as error:
                    refused = error
            if refused is not None:
                raise refused
            if loads and components.membership_changes is not None:
                components.membership_changes.record()
    finally:
        if loads:
            recorder.restart()


def _normal_mode() -> torch.inference_mode:
    """Return a context outside of torch.inference_mode(), whose tensors later steps cannot write.

    The user may call ``consensus`` in a function that evaluates in that mode.
    """
    return torch.inference_mode(False)


def components_of(sync: Synchronizer, what: str) -> Components:
    """Return the components of ``sync``. ``what`` names the caller.

    Raises:
        TypeError: ``sync`` is not a ``Synchronizer``.
        AttachError: after ``finish`` or ``detach``.
    """
    if not isinstance(sync, Synchronizer):
        raise TypeError(f"sync must be what offbeat.attach() returned, got {sync!r}")
    sync._require_active(what)
    return sync._components


def snapshot_of(sync: Synchronizer) -> list[Tensor]:
    """Return copies of the tensors that an evaluation needs from this worker (``Flow.snapshot``).

    Takes no training time.
    """
    with sync._recorder.paused():
        return sync._iteration.flow.snapshot()


def clock_of(sync: Synchronizer) -> Callable[[], float]:
    """Return a function that returns the seconds of this worker's clock.

    The clock is virtual in the simulator. All processes of a machine have the same clock.
    """
    return sync._host.now
