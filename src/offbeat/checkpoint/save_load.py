"""``offbeat.save`` and ``offbeat.load``: what training needs to go on, on all workers or none."""

import logging
import os
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.arguments import require_integer
from offbeat.checkpoint.files import (
    Number,
    discard,
    files_of,
    give_name,
    held_by_all,
    path_of,
    prune,
    read,
    sealed,
    unnamed_of,
    write,
)
from offbeat.errors import CheckpointError
from offbeat.nodes.shards import local_parts, model_state, optimizer_state
from offbeat.synchronizer import Synchronizer, between_steps
from offbeat.training.between_steps import BetweenSteps

logger = logging.getLogger("offbeat")


class Stateful(Protocol):
    """What has a state, such as a schedule of the learning rate."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Continue from that."""


@dataclass(frozen=True)
class Loaded:
    """What ``load`` has found.

    Attributes:
        step: The step at which it was saved.
        path: This worker's file.
        extra: What this worker gave to ``save`` as ``extra``.
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
    """Save all that this training needs to go on, in a file for each worker.

    A collective: every worker calls it, between two steps, at the same step. Inside
    ``sync.consensus()`` it saves the model that all workers hold there, which training with any
    number of workers, and any strategy, can begin from.

    The file is ``step-STEP.rankRANK.pt``. It is written under another name, and gets its own when
    those of all workers are on the disk; older ones are deleted then. Whatever crashes meanwhile,
    either this checkpoint or the one before is whole. It holds a digest, and ``torch.load`` reads
    it with ``weights_only=True``. The random states of torch, numpy and Python are saved, too. The
    time that all of this takes does not count in ``stats``; a worker that takes longer to write
    than ``timeout_seconds`` lets the others fail.

    Args:
        directory: Where to; made if it is not there. All workers may share it, or each may have one
            of that name on its own disk.
        sync: What ``attach`` returned.
        model: None is the attached one.
        optimizer: One or several; None are the attached ones.
        scheduler: One or several, if there are any.
        scaler: The GradScaler, if there is one.
        extra: What else this worker needs, such as the state of its sampler: numbers, text,
            tensors, and lists and dictionaries of them.
        keep: How many checkpoints to keep (≥ 1), this one among them.

    Returns:
        This worker's file.

    Raises:
        CheckpointError: on every worker, if one of them could not write, is at another step, or
            gave something that cannot be saved, or if the directory holds a later step. What was
            there before is still there.
        AttachError: after ``finish`` or ``detach``, or in the middle of an iteration.
    """
    require_integer("keep", keep, least=1)
    with between_steps(sync, "offbeat.save()") as between:
        state, folder, refused, contents = between.state(), Path(directory), None, {}
        here = files_of(folder, between.rank)
        own = local_parts if between.divided else lambda values: values
        try:
            contents = sealed(
                {
                    "sync": state,
                    "model": own(_module(model, between).state_dict()),
                    "optimizer": own(
                        _states(between.optimizers if optimizer is None else optimizer)
                    ),
                    "scheduler": _states(scheduler),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "random": _random_states(between.device),
                    "extra": extra,
                }
            )
        except CheckpointError as error:
            refused = str(error)
        told = [refused, state["of"], state["stats"]["steps"], sorted(here), secrets.token_hex(8)]
        answers = between.gather(told, "offbeat.save()")
        _require_all("save", [one[0] for one in answers])
        common = held_by_all([one[3] for one in answers])
        step = _common_step(folder, answers, common)
        times = [number[1] for one in answers for number in one[3] if number[0] == step]
        number = (step, max(times, default=-1) + 1)
        path = path_of(folder, number, between.rank)
        contents["id"] = answers[0][4]  # the same in all files of this checkpoint
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(path, contents)
        except (OSError, RuntimeError) as error:
            refused = f"{path} could not be written: {error}"
        answers = between.gather(refused, "offbeat.save()")
        if any(answers) and refused is None:
            discard(path)
        _require_all("save", answers)
        give_name(path)
        prune(folder, {*sorted({*common, number})[-keep:]}, between.rank, between.size)
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
    """Go on from the newest checkpoint in ``directory`` that every worker has whole.

    A collective, after ``attach``. A step that one worker has not, or damaged, is passed over by
    all, with a warning, and its files are renamed. The log says from which step training goes on.

    Args:
        directory: See ``save``.
        sync: What ``attach`` returned.
        model: None is the attached one.
        optimizer: As given to ``save``; None are the attached ones.
        scheduler: As given to ``save``.
        scaler: As given to ``save``.

    Returns:
        What was found; None if there is no checkpoint yet, on any worker.

    Raises:
        CheckpointError: on every worker, if no step is whole on all of them, or one does not belong
            to this training; see ``Synchronizer.load_state_dict``. Nothing was loaded then.
        AttachError: after ``finish`` or ``detach``, inside ``consensus``, or in the middle of an
            iteration.
    """
    with between_steps(sync, "offbeat.load()", loads=True) as between:
        folder = Path(directory)
        here = {
            **files_of(folder, 0),
            **files_of(folder, between.rank),
        }  # of a consensus any will do
        lists = _meet_on(folder, here, between)
        if not any(lists):
            return None
        number, contents = _newest_whole(folder, here, held_by_all(lists), lists, between)
        refused = None
        targets = {
            "optimizer": _listed(between.optimizers if optimizer is None else optimizer),
            "scheduler": _listed(scheduler),
        }
        module = _module(model, between)
        try:
            for name, objects in targets.items():
                _require_alike(name, contents[name], objects)
            if (contents["scaler"] is None) != (scaler is None):
                raise CheckpointError(
                    f"it was saved {'without' if contents['scaler'] is None else 'with'} a scaler, "
                    "and load() was called the other way: give the same as to save()"
                )
            present = module.state_dict()
            _require_same_tensors(
                local_parts(present) if between.divided else present, contents["model"]
            )
            between.check(contents["sync"])
        except CheckpointError as error:
            refused = f"{here[number]}: {error}"
        _require_all("load", between.gather(refused, "offbeat.load()"))
        if between.divided:
            contents["model"] = model_state(module, contents["model"])
            pairs = zip(targets["optimizer"], contents["optimizer"], strict=True)
            contents["optimizer"] = [(kind, optimizer_state(o, one)) for o, (kind, one) in pairs]
        module.load_state_dict(contents["model"])
        for name, objects in targets.items():
            for one, (_, values) in zip(objects, contents[name], strict=True):
                one.load_state_dict(values)
        if scaler is not None:
            scaler.load_state_dict(contents["scaler"])
        sync.load_state_dict(contents["sync"])
        _set_random_states(contents["random"], between.device)
        for later, path in files_of(folder, between.rank).items():
            if later > number:  # not whole on all workers: in the way of the next one
                path.rename(path.with_name(f"{path.name}.damaged"))
        if between.rank == 0:
            logger.info("training goes on from step %d, saved in %s", number[0], folder)
        return Loaded(number[0], here[number], contents["extra"])


def _require_all(what: str, refusals: Sequence[str | None]) -> None:
    """Raise CheckpointError if one of the workers, in rank order, could not."""
    for rank, refused in enumerate(refusals):
        if refused is not None:
            raise CheckpointError(f"rank {rank} cannot {what}, so no worker does: {refused}")


def _common_step(folder: Path, answers: Sequence[Any], common: set[Number]) -> int:
    """At which all save; of a consensus that of whoever is ahead.

    Raises:
        CheckpointError: they are not at one step, or ``common``, what all have, goes beyond it.
    """
    first = answers[0][1:3]
    for rank, (_, of, step, *_) in enumerate(answers):
        if [of, step] != first and (of, first[0]) != ("consensus", "consensus"):
            raise CheckpointError(
                f"rank {rank} saves the state of a {of} at step {step}, rank 0 that of a "
                f"{first[0]} at step {first[1]}: all workers save at the same step"
            )
    reached = max(int(one[2]) for one in answers)
    later = [number for number in common if number[0] > reached]
    if later:
        raise CheckpointError(
            f"{folder} holds a checkpoint of step {max(later)[0]}, this is step {reached}: go on "
            "from it with offbeat.load(), or save to another directory"
        )
    return reached


def _meet_on(folder: Path, here: dict[Number, Path], between: BetweenSteps) -> list[list[Number]]:
    """What each worker has.

    What has its name on one worker is on the disks of all: who crashed before it gave its own the
    name does so now, and adds it to ``here``.
    """
    unnamed = unnamed_of(folder, between.rank)
    told = between.gather([sorted(here), sorted(unnamed)], "offbeat.load()")
    pairs = [[[(step, again) for step, again in one] for one in both] for both in told]
    named = {number for some, _ in pairs for number in some}
    for number in named & (unnamed.keys() - files_of(folder, between.rank).keys()):
        give_name(unnamed[number])
        here[number] = unnamed[number]
    return [sorted({*some, *named.intersection(others)}) for some, others in pairs]


def _newest_whole(
    folder: Path,
    here: dict[Number, Path],
    common: set[Number],
    lists: Sequence[Sequence[Sequence[int]]],
    between: BetweenSteps,
) -> tuple[Number, dict[str, Any]]:
    """The newest that all can read, and what is in this worker's file."""
    reasons = [
        f"rank {rank} has {', '.join(f'step {step}' for step, _ in one) or 'none'}"
        for rank, one in enumerate(lists)
    ]
    for number in sorted(common, reverse=True):
        refused, contents = None, {}
        try:
            contents = read(here[number])
            _require_own(
                contents["sync"], here[number], files_of(folder, between.rank), between.rank
            )
        except CheckpointError as error:
            refused = str(error)
        answers = between.gather([refused, contents.get("id")], "offbeat.load()")
        refusals = [f"rank {rank}: {one[0]}" for rank, one in enumerate(answers) if one[0]]
        if not refusals and any(one[1] != answers[0][1] for one in answers):
            refusals = ["the workers' files were not saved together"]
        if not refusals:
            return number, contents
        reasons = [f"step {number[0]}: {refusals[0]}", *(reasons if len(common) == 1 else ())]
        if between.rank == 0:
            logger.warning("the checkpoint of step %d is passed over: %s", number[0], refusals[0])
    raise CheckpointError(
        f"no checkpoint in {folder} is whole on all workers: {'; '.join(reasons)}. Restore the "
        "files, or begin anew in another directory"
    )


def _require_own(state: dict[str, Any], path: Path, own: dict[Number, Path], rank: int) -> None:
    """A worker takes rank 0's file in place of its own only if that is of a consensus."""
    if path not in own.values() and state["of"] == "worker" and rank < state["size"]:
        raise CheckpointError(f"there is no file of rank {rank} beside {path}")


# -- what is in them -------------------------------------------------------------------------------


def _module(model: nn.Module | None, between: BetweenSteps) -> nn.Module:
    return between.model if model is None else model


def _listed(objects: Any) -> list[Any]:
    if objects is None:
        return []
    return list(objects) if isinstance(objects, Sequence) else [objects]


def _states(objects: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(type(one).__name__, one.state_dict()) for one in _listed(objects)]


def _require_alike(name: str, saved: Sequence[tuple[str, Any]], objects: Sequence[Any]) -> None:
    """The same kinds, and of optimizers groups of as many parameters."""
    theirs, ours = [kind for kind, _ in saved], [type(one).__name__ for one in objects]
    if theirs != ours:
        raise CheckpointError(
            f"it was saved with {name} {', '.join(theirs) or 'none'}, here is "
            f"{', '.join(ours) or 'none'}: give the same as to save()"
        )
    for (kind, values), one in zip(saved, objects, strict=True):
        if name == "optimizer":
            groups = [len(group["params"]) for group in values["param_groups"]]
            present = [len(group["params"]) for group in one.param_groups]
            if groups != present:
                raise CheckpointError(
                    f"the {kind} was saved with groups of {groups} parameters, here they are "
                    f"{present}: build it as in the saved run"
                )


def _require_same_tensors(here: dict[str, Any], saved: dict[str, Any]) -> None:
    present = {name: getattr(one, "shape", None) for name, one in here.items()}
    theirs = {name: getattr(one, "shape", None) for name, one in saved.items()}
    for name in [*present, *theirs]:
        if name not in theirs or name not in present or present[name] != theirs[name]:
            shown = [tuple(one[name] or ()) if name in one else "none" for one in (theirs, present)]
            raise CheckpointError(
                f"it was saved for another model: of {name!r} that one has {shown[0]}, this one "
                f"{shown[1]}; build the model of the saved run"
            )


def _random_states(device: torch.device) -> dict[str, Any]:
    """Of this process; the accelerator's is that of the model's device."""
    numpy = np.random.get_state(legacy=False)
    key = numpy["state"]["key"].tolist()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {
        "torch": torch.get_rng_state(),
        "cuda": own,
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
        "python": random.getstate(),
    }


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    inner = states["numpy"]["state"]
    key = np.array(inner["key"], dtype=np.uint32)
    np.random.set_state({**states["numpy"], "state": {**inner, "key": key}})
    random.setstate(states["python"])
