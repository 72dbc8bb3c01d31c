"""``offbeat.save`` and ``offbeat.load``: checkpoints of a training run.

A checkpoint consists of one file per worker. Either all workers save (or load) it, or none does.
``checkpoint.files`` explains why a crash at any moment leaves a complete checkpoint. In a
*consensus* (``sync.consensus()``) the mean over all workers replaces the local model.
"""

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.arguments import require_integer
from offbeat.checkpoint.contents import (
    Stateful,
    as_list,
    random_states,
    require_same_kinds,
    require_same_tensors,
    set_random_states,
    states_of,
)
from offbeat.checkpoint.files import (
    CheckpointKey,
    common_keys,
    discard,
    files_of,
    partial_files_of,
    path_of,
    prune,
    read,
    rename,
    with_digest,
    write,
)
from offbeat.checkpoint.step_boundary import StepBoundary, step_boundary
from offbeat.errors import CheckpointError
from offbeat.nodes.shards import local_parts, model_state, optimizer_state
from offbeat.synchronizer import Synchronizer, has_joined

logger = logging.getLogger("offbeat")


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
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
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

    - the states of the model, the optimizers, the schedulers, the scaler and ``sync``,
    - the states of the random generators of torch, numpy, Python and this worker's GPU,
    - ``extra``, and a checksum of all values.

    ``torch.load`` reads it with ``weights_only=True``. After a crash at any moment, either this
    checkpoint or the one before is complete.

    The workers wait for each other. If a worker takes longer than ``timeout_seconds`` (see
    ``attach``) to write, the others raise a CommunicationError.

    Args:
        directory: Directory of the checkpoints, created if it does not exist. The workers may share
            it, or each may have a directory of that name on its own disk.
        sync: The synchronizer that ``attach`` returned.
        model: The model. None: the attached model.
        optimizer: One or several optimizers. None: the attached optimizers.
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
    with step_boundary(sync, "offbeat.save()") as boundary:
        state, folder, rank = sync.state_dict(), Path(directory), boundary.rank
        refused, contents = None, {}
        local: Callable[[Any], Any] = local_parts if boundary.sharded else lambda values: values
        optimizers = boundary.optimizers if optimizer is None else optimizer
        try:
            contents = with_digest(
                {
                    "sync": state,
                    "model": local(_module(model, boundary).state_dict()),
                    "optimizer": local(states_of(optimizers)),
                    "scheduler": states_of(scheduler),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "random": random_states(boundary.device),
                    "extra": extra,
                }
            )
        except CheckpointError as error:
            refused = str(error)
        keys = sorted(files_of(folder, rank))
        steps = [state["stats"]["steps"], state.get("step")]
        answer = [refused, state["of"], steps, keys, secrets.token_hex(8)]
        answers = boundary.gather(answer, "offbeat.save()")
        _require_all("save", [refusal for refusal, *_ in answers])
        all_keys = [keys for *_, keys, _ in answers]
        # A worker without files may be one that the earlier run did not have.
        common = common_keys(filter(None, all_keys))
        step = _common_step(folder, answers, common)
        repetitions = [
            repetition for keys in all_keys for saved_step, repetition in keys if saved_step == step
        ]
        key = (step, max(repetitions, default=-1) + 1)
        path = path_of(folder, key, rank)
        contents["id"] = answers[0][-1]  # rank 0's token: the same in all files of this checkpoint
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(path, contents)
        except (OSError, RuntimeError) as error:
            refused = f"{path} could not be written: {error}"
        refusals = boundary.gather(refused, "offbeat.save()")
        if any(refusals) and refused is None:
            discard(path)
        _require_all("save", refusals)
        rename(path)
        prune(folder, {*sorted({*common, key})[-keep:]}, rank, boundary.size)
        return path


def load(
    directory: str | os.PathLike[str],
    sync: Synchronizer,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
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
        model: The model. None: the attached model.
        optimizer: The optimizers, as given to ``save``. None: the attached optimizers.
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
    if has_joined(sync):  # the other workers take steps
        return None
    folder, refused = Path(directory), None
    if folder.is_file():
        refused = f"{folder} is a file: name the directory of the checkpoints"
    with step_boundary(sync, "offbeat.load()", loads=True) as boundary:
        rank = boundary.rank
        _require_all("load", boundary.gather(refused, "offbeat.load()"))
        # A worker without a file can load rank 0's file of a consensus.
        paths = {**files_of(folder, 0), **files_of(folder, rank)}
        all_keys = _exchange_keys(folder, paths, boundary)
        if not any(all_keys):
            return None
        key, contents = _newest_complete(folder, paths, all_keys, boundary)
        module = _module(model, boundary)
        targets = {
            "optimizer": as_list(boundary.optimizers if optimizer is None else optimizer),
            "scheduler": as_list(scheduler),
        }
        try:
            for name, objects in targets.items():
                require_same_kinds(name, contents[name], objects)
            if (contents["scaler"] is None) != (scaler is None):
                raise CheckpointError(
                    f"it was saved {'without' if contents['scaler'] is None else 'with'} a scaler, "
                    "and load() was called the other way: give the same as to save()"
                )
            if scaler is not None and scaler.is_enabled() and not contents["scaler"]:
                raise CheckpointError(
                    "it was saved with a disabled scaler, and here the scaler is enabled: disable "
                    "it, too"
                )
            present = module.state_dict()
            require_same_tensors(
                local_parts(present) if boundary.sharded else present, contents["model"]
            )
            boundary.check(contents["sync"])
        except CheckpointError as error:
            refused = f"{paths[key]}: {error}"
        _require_all("load", boundary.gather(refused, "offbeat.load()"))
        if boundary.sharded:
            contents["model"] = model_state(module, contents["model"])
            pairs = zip(targets["optimizer"], contents["optimizer"], strict=True)
            contents["optimizer"] = [
                (kind, optimizer_state(o, values)) for o, (kind, values) in pairs
            ]
        module.load_state_dict(contents["model"])
        for name, objects in targets.items():
            for each, (_, values) in zip(objects, contents[name], strict=True):
                each.load_state_dict(values)
        if scaler is not None:
            scaler.load_state_dict(contents["scaler"])
        sync.load_state_dict(contents["sync"])
        if paths[key] in files_of(folder, rank).values():
            # Rank 0's file would give another worker the random numbers of rank 0.
            set_random_states(contents["random"], boundary.device)
        for later, path in files_of(folder, rank).items():
            # A newer checkpoint was skipped. Its remaining files could make save() fail, because
            # save() refuses a step before that of an existing checkpoint.
            if later > key:
                path.rename(path.with_name(f"{path.name}.damaged"))
        if rank == 0:
            logger.info("training continues from step %d, saved in %s", key[0], folder)
        return Loaded(key[0], paths[key], contents["extra"])


def _module(model: nn.Module | None, boundary: StepBoundary) -> nn.Module:
    return boundary.model if model is None else model


def _require_all(what: str, refusals: Sequence[str | None]) -> None:
    """Raise CheckpointError if a worker refuses. ``refusals`` are the workers' reasons or None."""
    for rank, refused in enumerate(refusals):
        if refused is not None:
            raise CheckpointError(f"rank {rank} cannot {what}, so no worker does: {refused}")


def _common_step(folder: Path, answers: Sequence[Any], common: set[CheckpointKey]) -> int:
    """Return the step of a new checkpoint: the workers' common step, or the largest in a consensus.

    The second and third entries of each worker's answer are the kind of its state ("worker" or
    "consensus"), and its steps in the whole training and since ``attach``. ``common`` are the
    checkpoints that all workers have.
    """
    first = answers[0][1:3]
    for rank, (_, of, steps, *_) in enumerate(answers):
        if [of, steps] != first and (of, first[0]) != ("consensus", "consensus"):
            raise CheckpointError(
                f"rank {rank} saves the state of a {of} at step {_text(*steps)}, rank 0 that of a "
                f"{first[0]} at step {_text(*first[1])}: all workers save at the same step"
            )
    reached = max(int(steps[0]) for _, _, steps, *_ in answers)
    later = [saved_step for saved_step, _ in common if saved_step > reached]
    if later:
        raise CheckpointError(
            f"{folder} holds a checkpoint of step {max(later)}, this is step {reached}: continue "
            "from it with offbeat.load(), or save to another directory"
        )
    return reached


def _text(step: int, since_attach: int | None) -> str:
    """Return a step of a worker as text, with its number since ``attach`` if that differs."""
    same = since_attach in (None, step)
    return f"{step}" if same else f"{step} ({since_attach} since attach)"


def _exchange_keys(
    folder: Path, paths: dict[CheckpointKey, Path], boundary: StepBoundary
) -> list[list[CheckpointKey]]:
    """Return the keys of the checkpoints that each worker has. Complete interrupted renames.

    A crash may have left this worker's file of a checkpoint under its temporary name. If another
    worker has renamed its file of this checkpoint, this worker's file is complete (see
    ``checkpoint.files``). This function then renames it and adds it to ``paths``.
    """
    rank = boundary.rank
    partial = partial_files_of(folder, rank)
    answers = boundary.gather([sorted(paths), sorted(partial)], "offbeat.load()")
    pairs = [[[(step, repeat) for step, repeat in keys] for keys in answer] for answer in answers]
    renamed = {key for keys, _ in pairs for key in keys}
    for key in renamed & (partial.keys() - files_of(folder, rank).keys()):
        rename(partial[key])
        paths[key] = partial[key]
    return [sorted({*keys, *renamed.intersection(others)}) for keys, others in pairs]


def _newest_complete(
    folder: Path,
    paths: dict[CheckpointKey, Path],
    all_keys: Sequence[Sequence[CheckpointKey]],
    boundary: StepBoundary,
) -> tuple[CheckpointKey, dict[str, Any]]:
    """Return the key and the contents of the newest checkpoint that all workers can read.

    A collective. ``paths`` contains the file that this worker can load, by checkpoint: its own
    file, or else rank 0's. ``all_keys`` are the checkpoints that each worker has.
    """
    reasons = [
        f"rank {rank} has {', '.join(f'step {step}' for step, _ in keys) or 'none'}"
        for rank, keys in enumerate(all_keys)
    ]
    common = common_keys(all_keys)
    for key in sorted(common, reverse=True):
        refused, contents = None, {}
        try:
            contents = read(paths[key])
            _require_own_file(contents["sync"], paths[key], folder, boundary.rank)
        except CheckpointError as error:
            refused = str(error)
        answers = boundary.gather([refused, contents.get("id")], "offbeat.load()")
        refusals = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(answers) if reason]
        if not refusals and any(token != answers[0][1] for _, token in answers):
            refusals = ["the workers' files were not saved together"]
        if not refusals:
            return key, contents
        reasons = [f"step {key[0]}: {refusals[0]}", *(reasons if len(common) == 1 else ())]
        if boundary.rank == 0:
            logger.warning("the checkpoint of step %d is skipped: %s", key[0], refusals[0])
    raise CheckpointError(
        f"no checkpoint in {folder} is whole on all workers: {'; '.join(reasons)}. Restore the "
        "files, or start again in another directory"
    )


def _require_own_file(state: dict[str, Any], path: Path, folder: Path, rank: int) -> None:
    """Raise CheckpointError if ``path`` is rank 0's file and this worker needs its own file.

    Any worker can load rank 0's file of a consensus. For a rank that the saved run did not have, a
    later check reports the different number of workers.
    """
    own = files_of(folder, rank).values()
    if path not in own and state["of"] == "worker" and rank < state["size"]:
        raise CheckpointError(f"there is no file of rank {rank} next to {path}")
