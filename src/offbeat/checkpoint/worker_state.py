"""The state of one worker: the same values for a checkpoint and for a worker that joins.

A state has plain values only. There are two kinds. Both contain the model, the optimizers, the
totals, and a description of what they belong to.

The state of a *worker* also contains the state of the strategy, such as the global model and its
velocity, the quantization errors, and the number of steps. Nothing is in flight in it. Only a
worker with the same strategy, wire, rank and number of workers can load it.

The state of a *consensus* contains nothing else. It is saved while every worker holds the mean of
the models: inside ``Synchronizer.consensus`` or after ``finish``. It can be loaded with any
strategy and any number of workers. Training then starts again from that mean, and only the totals
(``Stats``) continue. A worker that joins receives such a state, and the states of the script.
"""

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from offbeat.averaging import Worker
from offbeat.averaging.model_mean import copy_rank_0
from offbeat.averaging.replica import local_tensors
from offbeat.checkpoint.plain_values import read_values, restore, values_of, write_values
from offbeat.errors import CheckpointError
from offbeat.nodes.shards import is_sharded, local_parts, model_state, optimizer_state
from offbeat.telemetry import Stats
from offbeat.training.checks.same_setup import describe, first_difference
from offbeat.training.consensus import Consensus
from offbeat.training.iteration import Iteration
from offbeat.training.stats_recorder import StatsRecorder
from offbeat.transport.communicator import Communicator

FORMAT = 9
"""Version of the states. A release that changes them increases it."""

Values = dict[str, Any]
_TAG = 0  # of both messages of a transfer, during which no other messages are sent


class WorkerState:
    """Collects, checks and loads the state of one worker.

    Args:
        model: The attached model.
        worker: This worker.
        iteration: The step loop of this worker, which contains the flow.
        consensus: The consensus of this worker.
        recorder: Holds the totals.
        sharded: True if ``fully_shard`` has divided the model. A state then has the local shards.
    """

    def __init__(
        self,
        model: nn.Module,
        worker: Worker,
        iteration: Iteration,
        consensus: Consensus,
        recorder: StatsRecorder,
        *,
        sharded: bool,
    ) -> None:
        self._model, self._worker, self._iteration = model, worker, iteration
        self._consensus, self._recorder, self._sharded = consensus, recorder, sharded
        self._shared: list[Callable[[], Any]] = []  # functions that return states of the script
        self._received: list[Any] = []  # states of the script of another worker

    @property
    def stats(self) -> Stats:
        """The totals of this worker."""
        return self._recorder.stats

    # -- saving ------------------------------------------------------------------------------------

    def collect(self, *, whole: bool) -> Values:
        """Return the state of this worker, or that of a consensus if not ``whole``.

        Tensors are not copied. Nothing may be in flight.
        """
        worker = self._worker
        model = self._model.state_dict()
        optimizers = [each.optimizer.state_dict() for each in worker.optimizers]
        values: Values = {
            "format": FORMAT,
            "of": "worker" if whole else "consensus",
            "size": worker.team.everyone.size,
            "description": self._description(whole),
            "layout": self._layout(model),
            "model": local_parts(model) if self._sharded else model,
            "optimizer": local_parts(optimizers) if self._sharded else optimizers,
            "stats": dataclasses.asdict(self.stats),
        }
        if whole:
            values |= {"step": worker.step, "state": values_of(self._iteration.flow.state)}
        else:
            values["stats"]["details"] = {}  # they belong to the strategy
        return values

    def _layout(self, model: Values) -> Values:
        """Return what ``to_dcp`` reads. ``model`` is the model's ``state_dict()``."""
        worker, node = self._worker, self._worker.team.node
        names = {id(p): name for name, p in self._model.named_parameters()}
        return {
            # Names of each optimizer's parameters. Empty: the script has added the parameter later.
            "parameters": [
                [names.get(id(p), "") for g in each.optimizer.param_groups for p in g["params"]]
                for each in worker.optimizers
            ],
            "local": sorted(local_tensors(self._model)),
            "shards": {name: t.placements[0].dim for name, t in model.items() if is_sharded(t)},
            "place": [worker.team.rank, 0 if node is None else node.inside.rank],
        }

    def _description(self, whole: bool) -> list[str]:
        """Return lines that must be equal where a state is loaded."""
        worker, everyone = self._worker, self._worker.team.everyone
        strategy = self._iteration.flow.strategy if whole else None
        lines = describe(strategy, worker.replica, worker.optimizers)
        if whole:  # every process of a node has other shards
            rank = f"rank {everyone.rank} of {everyone.size} workers"
            lines[1:1] = [f"wire {worker.wire.precision!r}", rank]
        return lines

    # -- agreement of all workers ------------------------------------------------------------------

    @contextlib.contextmanager
    def agreement(self, what: str, where: str = "") -> Iterator[None]:
        """Return a context that ends on all workers with the same CheckpointError, or with none.

        Its end is a collective. ``what`` is the name of the caller. ``where`` begins the reason in
        the error.
        """
        reason = None
        try:
            yield
        except CheckpointError as error:
            reason = f"{where}{error}"
        reasons = self._worker.team.everyone.gather_values(reason, what=what)
        for rank, each in enumerate(reasons):
            if each is not None:
                raise CheckpointError(
                    f"rank {rank} cannot take part in {what}, so no worker does: {each}"
                )

    def require_same_step(self, what: str, values: Values) -> int:
        """Return the largest number of steps of all workers. A collective.

        Raises CheckpointError on every worker unless the states ``values`` are all of a consensus,
        or all of workers at the same step. ``what`` is the name of the caller.
        """
        own = values["of"], values["stats"]["steps"]
        answers = self._worker.team.everyone.gather_values(own, what=what)
        positions = [
            "a consensus" if of == "consensus" else f"a worker at step {steps}"
            for of, steps in answers
        ]
        for rank, position in enumerate(positions):
            if position != positions[0]:
                raise CheckpointError(
                    f"{what} on rank {rank} has the state of {position}, on rank 0 that of "
                    f"{positions[0]}: all workers save and load at the same step, or all in a "
                    "consensus"
                )
        return max(int(steps) for _, steps in answers)

    # -- loading -----------------------------------------------------------------------------------

    def check(self, values: Values) -> None:
        """Raise CheckpointError unless this worker can load ``values``.

        The state of a consensus can be loaded before the first step only.
        """
        require_format(values)
        flow, whole = self._iteration.flow, values["of"] == "worker"
        steps = max(self.stats.steps, self._worker.step)
        if steps and not whole:
            raise CheckpointError(
                "the state is that of a consensus, from which training starts again, and "
                f"{steps} steps were taken here: load it before the first step, or detach() and "
                "attach again"
            )
        require_equal(values["description"], self._description(whole))
        if whole:
            restore(flow.state, values["state"], check_only=True)

    def load(self, what: str, values: Values) -> None:
        """Load a state that has passed ``check`` on all workers, or load none. A collective.

        ``what`` is the name of the caller.
        """
        steps = self.require_same_step(what, values)
        flow, worker = self._iteration.flow, self._worker
        self._load_tensors(values)
        totals = copy.deepcopy(values["stats"])
        worker.details.clear()
        worker.details.update(totals.pop("details"))
        if values["of"] == "worker":
            worker.step = values["step"]
            restore(flow.state, values["state"])
            flow.after_load()
        else:
            totals["steps"] = steps  # all continue to count from the largest number
            copy_rank_0(worker.team, worker.replica.everything())
            flow.start()
            worker.barrier("the start from a consensus")
        self._recorder.stats = Stats(**totals, details=worker.details)
        self._consensus.note_start()

    def _load_tensors(self, values: Values) -> None:
        """Load model and optimizers."""
        optimizers = [each.optimizer for each in self._worker.optimizers]
        model, saved = values["model"], values["optimizer"]
        if self._sharded:
            model = model_state(self._model, model)
            saved = [optimizer_state(*each) for each in zip(optimizers, saved, strict=True)]
        with self._iteration.forbid_steps("the load of a state"):
            self._model.load_state_dict(model)
        for optimizer, each in zip(optimizers, saved, strict=True):
            optimizer.load_state_dict(each)

    # -- workers that join -------------------------------------------------------------------------

    def share(self, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """Add a state of the script; see ``Synchronizer.share_state``."""
        file = _written(save(), "the shared state")
        read_values(file, "the shared state")  # raises here rather than when a worker joins
        self._shared.append(save)
        if len(self._shared) <= len(self._received):
            load(self._received[len(self._shared) - 1])

    def send(self, communicator: Communicator, destinations: Sequence[int]) -> None:
        """Send the state to the ranks ``destinations``, which call ``receive``. Blocks.

        A transfer consists of two messages: the number of bytes, and what ``torch.save`` wrote.
        """
        values = self.collect(whole=False)
        # With those that ``state_dict`` leaves out. ``torch.save`` stores the others once.
        values["buffers"] = [buffer.detach() for buffer in self._model.buffers()]
        values["shared"], values["refused"] = self._states_of_script()
        what = "state for a worker that lacks it"
        payload = torch.frombuffer(_written(values, what).getbuffer(), dtype=torch.uint8)
        messages = torch.tensor([payload.numel()], device="cpu"), payload
        for future in [
            communicator.send(message, destination=rank, tag=_TAG, what=what)
            for rank in destinations
            for message in messages
        ]:
            future.wait()

    def _states_of_script(self) -> tuple[list[Any], str]:
        """Return the states of the script, or why the worker that joins cannot receive them.

        An error in a function of the script must not end this worker: the next one to send the
        state would end in the same way.
        """
        try:
            states = [save() for save in self._shared]
            _written(states, "the shared state")
        except Exception as error:
            return [], (
                f"share_state(): save failed on a worker that trains ({error!r}), so this worker "
                "cannot join: correct save"
            )
        return states, ""

    def receive(self, communicator: Communicator, source: int, *, fresh: bool) -> None:
        """Receive and load the state that rank ``source`` sends. Blocks.

        ``fresh`` is True if this worker has just joined. It then receives the number of steps and
        the states of the script, too.
        """
        what = f"state from rank {source}"
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        communicator.receive(length, source=source, tag=_TAG, what=what).wait()
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        communicator.receive(payload, source=source, tag=_TAG, what=what).wait()
        values = read_values(io.BytesIO(payload.numpy().data), f"rank {communicator.rank}: {what}")
        self._load_tensors(values)
        with torch.no_grad():
            for buffer, value in zip(self._model.buffers(), values["buffers"], strict=True):
                buffer.copy_(value)
        if fresh:
            if values["refused"]:
                raise CheckpointError(values["refused"])
            self.stats.steps = values["stats"]["steps"]
            self.stats.syncs = values["stats"]["syncs"]
            self._received = values["shared"]


def _written(values: Any, what: str) -> io.BytesIO:
    """Return a file in memory with ``values``. ``what`` names them in errors."""
    file = io.BytesIO()
    write_values(values, file, what)
    file.seek(0)
    return file


# -- checks ----------------------------------------------------------------------------------------


def require_format(values: Any) -> None:
    """Raise CheckpointError unless ``values`` are a state of this format."""
    if not isinstance(values, dict) or "format" not in values:
        raise CheckpointError(
            "this is not a state that sync.state_dict() or offbeat.save() has returned or written: "
            "give such a state, or load the model alone and start again"
        )
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"the state was saved in format {values['format']}, this version reads {FORMAT}: "
            "resume with the version that saved it"
        )


def require_equal(saved: Sequence[str], present: Sequence[str]) -> None:
    """Raise CheckpointError with the first difference between two descriptions."""
    if found := first_difference(saved, present):
        raise CheckpointError(
            f"the state was saved with {found[0]}, here is {found[1]}: build, attach and load as "
            "in the saved run, or load a state that was saved inside consensus(), which fits any "
            "strategy and number of workers"
        )
