"""Conversion of a checkpoint for ``torch.distributed.checkpoint`` (DCP)."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from offbeat.checkpoint.files import Files, read
from offbeat.checkpoint.worker_state import Values
from offbeat.errors import CheckpointError


def to_dcp(checkpoints: Path, output: Path, step: int | None = None) -> int:
    """Write a checkpoint with the keys and shapes that ``get_state_dict`` of torch returns.

    Floating-point tensors of the model become their mean over the nodes, as in a consensus. Other
    tensors of the model, and the optimizers, are those of rank 0's node.

    Args:
        checkpoints: Directory with the files that ``save`` has written on all workers.
        output: New directory. Its entries are "model" and "optimizer".
        step: Step of the checkpoint. None: the newest.

    Returns:
        The step.

    Raises:
        CheckpointError: a file is missing or damaged, ``output`` exists, or the optimizer's state
            cannot be joined.
    """
    files = Files(checkpoints, 0)
    key = max((key for key in files.checkpoints() if step in (None, key[0])), default=None)
    if key is None:
        name = f"step-{'…' if step is None else step}.rank0.pt"
        raise CheckpointError(f"{checkpoints} has no {name}: name the directory given to save()")
    if output.exists():
        raise CheckpointError(f"{output} exists: name a new directory")
    first = read(files.path(key), mmap=True)
    workers = [read(files.path(key, rank), mmap=True) for rank in range(first["size"])]
    if any(each["id"] != first["id"] for each in workers):
        raise CheckpointError(f"the files of step {key[0]} were not saved together")
    nodes: dict[int, list[Values]] = {}
    for each in sorted(workers, key=lambda each: each["layout"]["place"]):
        nodes.setdefault(each["layout"]["place"][0], []).append(each)
    layout, model, state, groups = first["layout"], {}, {}, []
    for name, value in first["model"].items():
        wholes = [_joined(name, node, [w["model"][name] for w in node]) for node in nodes.values()]
        averaged = isinstance(value, Tensor) and value.is_floating_point()
        if averaged and name not in layout["local"]:
            wholes[0] = torch.stack([each.double() for each in wholes]).mean(0).to(value.dtype)
        model[_plain(name)] = wholes[0]
    for i, names in enumerate(layout["parameters"]):
        saved = [each["optimizer"][i] for each in nodes[0]]
        for index, values in saved[0]["state"].items():
            state[_plain(names[index])] = {
                key: _joined(names[index], nodes[0], [each["state"][index][key] for each in saved])
                for key in values
            }
        for group in saved[0]["param_groups"]:
            groups += [{**group, "params": [_plain(names[index]) for index in group["params"]]}]
    optimizer = {"state": state, "param_groups": groups}
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed
    with warnings.catch_warnings(action="ignore"):  # DCP warns that there is no process group
        save({"model": model, "optimizer": optimizer}, checkpoint_id=partial, no_dist=True)
    partial.rename(output)
    return key[0]


def _plain(name: str) -> str:
    """Return a parameter's name without the prefix of ``torch.compile``, as DCP does."""
    return name.replace("_orig_mod.", "")


def _joined(name: str, node: list[Values], parts: list[Any]) -> Any:
    """Return a value of parameter ``name``, joined from the shards ``parts`` of a node's workers.

    A value without the shape of the parameter, such as a step counter, must be equal on all.
    """
    shards, like, first = node[0]["layout"]["shards"], node[0]["model"].get(name), parts[0]
    if name not in shards or not isinstance(first, Tensor):
        return first
    if first.shape == like.shape:
        return torch.cat(parts, shards[name])
    if not all(torch.equal(first, each) for each in parts):
        raise CheckpointError(
            f"the optimizer's state of {name!r} has neither the shape of the parameter nor equal "
            "values on all shards, as with Adafactor: it cannot be converted"
        )
    return first
