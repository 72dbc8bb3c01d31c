"""``offbeat.save`` and ``offbeat.load``: checkpoints of a training run.

A checkpoint consists of one file per worker. Either all workers save (or load) it, or none does.
``checkpoint.files`` explains why a crash at any moment leaves a complete checkpoint. In a
*consensus* (``sync.consensus()``) the mean over all workers replaces the local model.
"""

import logging
import os
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from offbeat.arguments import require_integer
from offbeat.checkpoint.files import CheckpointKey, Files, read
from offbeat.checkpoint.worker_state import Values, require_equal
from offbeat.errors import CheckpointError
from offbeat.synchronizer import Synchronizer, between_steps, components_of
from offbeat.training.assembly import Components

logger = logging.getLogger("offbeat")
_SAVE, _LOAD = "offbeat.save()", "offbeat.load()"


class Stateful(Protocol):
    """An object with a state, such as a learning rate schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that ``state_dict`` returned."""


@dataclass(frozen=True)
class Loaded:
    """The result of ``load``.

    Attributes:
        step: Step at which the checkpoint was saved.
        path: File that this worker has loaded.
        extra: The argument ``extra`` of ``save``, from this file.
    """

    step: int
    path: Path
    extra: Any


def save(
    directory: str | os.PathLike[str],
    sync: Synchronizer,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    extra: Any = None,
    keep: int = 2,
) -> Path:
    """Save a checkpoint from which training continues, in one file per worker.

    A collective: every worker calls it between two steps, and all workers are at the same step. It
    first lands what is in flight. Inside ``sync.consensus()`` the model is the mean over all
    workers. There the workers may be at different steps, and the checkpoint can be loaded with any
    strategy and any number of workers. Training then starts again from the mean.

    The name of the file is ``step-STEP.rankRANK.pt``, or ``step-STEP-N.rankRANK.pt`` (N = 1, 2, …)
    if there is already a checkpoint of this step. The file contains

    - the state of this worker, as ``sync.state_dict()`` returns it, with model and optimizers,
    - the states of the schedulers and the scaler,
    - the states of the random generators of torch, numpy, Python and this worker's GPU,
    - ``extra``.

    ``torch.load`` reads it with ``weights_only=True``. After a crash at any moment, either this
    checkpoint or the one before is complete.

    The workers wait for each other. If a worker takes longer than ``timeout_seconds`` (see
    ``attach``) to write, the others raise a CommunicationError.

    Args:
        directory: Directory of the checkpoints, created if it does not exist. The workers may share
            it, or each may have a directory of that name on its own disk.
        sync: The synchronizer that ``attach`` returned.
        scheduler: One or several learning rate schedules. None: no schedule.
        scaler: The GradScaler. None: no scaler.
        extra: Further state of this worker, such as the state of its sampler: numbers, text,
            tensors, and lists and dictionaries of these.
        keep: Number of checkpoints to keep, including this one (≥ 1).

    Returns:
        The path of this worker's file.

    Raises:
        CheckpointError: a worker could not write its file, is at another step, or gave a value that
            cannot be saved. Or the directory contains a checkpoint of a later step. Or the call is
            inside ``consensus``, and another worker has called ``finish``. Raised on every worker
            that saves. The earlier checkpoints remain.
        AttachError: after ``finish`` or ``detach``, or in the middle of an iteration. Or inside
            ``consensus``, if ``fully_shard`` has divided the model.
    """
    require_integer("keep", keep, least=1)
    with between_steps(sync, _SAVE) as components:
        state, files = components.state, Files(Path(directory), sync.rank)
        if components.iteration.shows_consensus:  # there is no barrier, and others may train on
            what = f"{_SAVE} inside consensus(), which every rank must call,"
            components.team.everyone.meet(what=what)
        contents = {
            **state.collect(whole=not components.iteration.shows_consensus),
            "arguments": _kinds(scheduler, scaler),
            "scheduler": [each.state_dict() for each in _as_list(scheduler)],
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": _random_states(components.device),
            "extra": extra,
        }
        step = state.require_same_step(_SAVE, contents)
        own = [sorted(files.checkpoints()), secrets.token_hex(8)]
        answers = components.team.everyone.gather_values(own, what=_SAVE)
        all_keys = [{(step, number) for step, number in keys} for keys, _ in answers]
        # A worker without files may be one that the earlier run did not have.
        common = set.intersection(*filter(None, all_keys)) if any(all_keys) else set()
        later = max((saved_step for saved_step, _ in common), default=step)
        if later > step:
            raise CheckpointError(
                f"{files.folder} holds a checkpoint of step {later}, this is step {step}: continue "
                f"from it with {_LOAD}, or save to another directory"
            )
        repetitions = [n for keys in all_keys for saved_step, n in keys if saved_step == step]
        key = (step, max(repetitions, default=-1) + 1)
        contents["id"] = answers[0][1]  # rank 0's token: the same in all files of this checkpoint
        try:
            with state.agreement(_SAVE):
                files.write(key, contents)
        except CheckpointError:
            files.discard(key)
            raise
        files.rename(key)
        files.prune({*sorted({*common, key})[-keep:]}, sync.size)
        return files.path(key)


def load(
    directory: str | os.PathLike[str],
    sync: Synchronizer,
    *,
    scheduler: Stateful | Sequence[Stateful] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Loaded | None:
    """Continue from the newest checkpoint in ``directory`` that is complete on every worker.

    A collective, called after ``attach``. If a checkpoint lacks a file of some worker, or has a
    damaged one, all workers skip it and load an older checkpoint. They then rename the files of the
    skipped one to ``….damaged``.

    The run may have more workers than the saved run, if the checkpoint was saved inside
    ``sync.consensus()``. A worker without a file then loads rank 0's file, if it can read it, with
    rank 0's ``extra``. It keeps its own random states.

    Args:
        directory: Directory of the checkpoints, as given to ``save``.
        sync: The synchronizer that ``attach`` returned.
        scheduler: The learning rate schedules, as given to ``save``.
        scaler: The GradScaler, as given to ``save``.

    Returns:
        The loaded checkpoint. None: nothing was loaded, because no worker has a checkpoint yet, or
        because this worker has just joined a running training, whose state it has received.

    Raises:
        CheckpointError: ``directory`` is a file. Or no checkpoint is complete on all workers. Or
            the newest complete one does not belong to this training; see
            ``Synchronizer.load_state_dict``. Then raised on every worker. Nothing was loaded.
        AttachError: after ``finish`` or ``detach``, inside ``consensus``, or in the middle of an
            iteration.
    """
    components = components_of(sync, _LOAD)
    if components.joined and not components.unfinished.steps:  # the other workers take steps
        return None
    with between_steps(sync, _LOAD, loads=True):
        state, files = components.state, Files(Path(directory), sync.rank)
        if (found := _newest_complete(files, components)) is None:
            return None
        key, path, contents = found
        with state.agreement(_LOAD, f"{path}: "):
            state.check(contents)
            require_equal(contents["arguments"], _kinds(scheduler, scaler))
        state.load(_LOAD, contents)
        for each, values in zip(_as_list(scheduler), contents["scheduler"], strict=True):
            each.load_state_dict(values)
        if scaler is not None:
            scaler.load_state_dict(contents["scaler"])
        if path == files.path(key):
            # Rank 0's file would give another worker the random numbers of rank 0.
            _set_random_states(contents["random"], components.device)
        for later in files.checkpoints():
            # A newer checkpoint was skipped. Its remaining files could make save() fail, because
            # save() refuses a step before that of an existing checkpoint.
            if later > key:
                skipped = files.path(later)
                skipped.rename(skipped.with_name(f"{skipped.name}.damaged"))
        if files.rank == 0:
            logger.info("training continues from step %d, saved in %s", key[0], files.folder)
        return Loaded(key[0], path, contents["extra"])


# -- choice of a checkpoint ------------------------------------------------------------------------


def _newest_complete(
    files: Files, components: Components
) -> tuple[CheckpointKey, Path, Values] | None:
    """Return key, path and contents of the newest checkpoint that all workers can read.

    A collective. The file is this worker's, or else rank 0's. None if no worker has a checkpoint.
    """
    with components.state.agreement(_LOAD):
        if files.folder.is_file():
            raise CheckpointError(
                f"{files.folder} is a file: name the directory of the checkpoints"
            )
    own, gather = files.checkpoints(), partial(components.team.everyone.gather_values, what=_LOAD)
    saved = {(step, repetition) for keys in gather(sorted(own)) for step, repetition in keys}
    # A crash may have left this worker's file under its temporary name. If another worker has
    # renamed its file of this checkpoint, this one is complete, too; see ``checkpoint.files``.
    for key in saved & files.checkpoints(partial=True) - own:
        files.rename(key)
    reasons = []
    for key in sorted(saved, reverse=True):
        path, of_rank_0 = files.path(key), files.path(key, 0)
        borrows = not path.exists() and of_rank_0.exists()
        refused, contents = None, Values()
        try:
            contents = read(of_rank_0 if borrows else path)
            # Any worker can load rank 0's file of a consensus. For a rank that the saved run did
            # not have, a later check reports the different number of workers.
            if borrows and contents["of"] == "worker" and files.rank < contents["size"]:
                raise CheckpointError(f"there is no file of rank {files.rank} next to {of_rank_0}")
        except CheckpointError as error:
            refused = str(error)
        answers = gather([refused, contents.get("id")])
        refusals = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(answers) if reason]
        if not refusals and any(token != answers[0][1] for _, token in answers):
            refusals = ["the workers' files were not saved together"]
        if not refusals:
            return key, of_rank_0 if borrows else path, contents
        reasons.append(f"step {key[0]}: {refusals[0]}")
        if files.rank == 0:
            logger.warning("the checkpoint of step %d is skipped: %s", key[0], refusals[0])
    if not reasons:
        return None
    raise CheckpointError(
        f"no checkpoint in {files.folder} is whole on all workers: {'; '.join(reasons)}. Restore "
        "the files, or start again in another directory"
    )


# -- what only a file contains ---------------------------------------------------------------------


def _as_list(objects: Any) -> list[Any]:
    """Return ``objects`` as a list: the items of a sequence, one object, or nothing for None."""
    if objects is None:
        return []
    return list(objects) if isinstance(objects, Sequence) else [objects]


def _kinds(scheduler: Any, scaler: torch.amp.GradScaler | None) -> list[str]:
    """Return lines that must be equal in ``save`` and ``load``."""
    scaled = "no" if scaler is None else "an enabled" if scaler.is_enabled() else "a disabled"
    kinds = [type(each).__name__ for each in _as_list(scheduler)]
    return [f"{scaled} scaler", *(f"scheduler {i}: {kind}" for i, kind in enumerate(kinds))]


def _random_states(device: torch.device) -> Values:
    """Return the random states of torch, numpy, Python, and ``device`` if it is a CUDA device."""
    state: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [state[0], state[1].tolist(), *state[2:]],
        "python": random.getstate(),
    }


def _set_random_states(states: Values, device: torch.device) -> None:
    """Restore the random states that ``_random_states`` returned; CUDA's only on a CUDA device."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    np.random.set_state(tuple(states["numpy"]))
    random.setstate(states["python"])
