"""Conversion of a checkpoint for ``torch.distributed.checkpoint`` (DCP)."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from offbeat.checkpoint.files import Files, read
from offbeat.checkpoint.worker_state import Values
from offbeat.errors import CheckpointError


def to_dcp(checkpoints: Path, output: Path, step: int | None = None) -> int:
    """Write a checkpoint with the names and shapes that ``get_state_dict`` of torch returns.

    Floating-point tensors of the model become their mean over the nodes, as in a consensus. Other
    tensors of the model, and the optimizers, are those of rank 0's node.

    Args:
        checkpoints: Directory with the files that ``save`` has written on all workers.
        output: New directory. Its entries are "model" and "optimizer".
        step: Step of the checkpoint. None: the newest.

    Returns:
        The step.

    Raises:
        CheckpointError: there is no such checkpoint, a file is missing or damaged, or ``output``
            exists.
    """
    files = Files(checkpoints, 0)
    keys = [key for key in files.checkpoints() if step in (None, key[0])]
    if not keys:
        raise CheckpointError(
            f"{checkpoints} has no file step-{step or '…'}.rank0.pt of offbeat.save"
        )
    if output.exists():
        raise CheckpointError(f"{output} exists: name a new directory")
    first = read(files.path(max(keys)), mmap=True)
    workers = [read(files.path(max(keys), rank), mmap=True) for rank in range(first["size"])]
    if any(each["id"] != first["id"] for each in workers):
        raise CheckpointError(f"the files of step {max(keys)[0]} were not saved together")
    nodes: dict[int, list[Values]] = {}
    for each in sorted(workers, key=lambda each: each["layout"]["place"]):
        nodes.setdefault(each["layout"]["place"][0], []).append(each)
    model = {}
    for name, value in first["model"].items():
        of_nodes = [
            _joined(name, node, [each["model"][name] for each in node]) for node in nodes.values()
        ]
        averaged = isinstance(value, Tensor) and value.is_floating_point()
        local = name in first["layout"]["local"]
        model[_plain(name)] = _mean(of_nodes) if averaged and not local else of_nodes[0]
    state, groups = {}, []
    for index, names in enumerate(first["layout"]["parameters"]):
        saved = [each["optimizer"][index] for each in nodes[0]]
        for number, values in saved[0]["state"].items():
            state[_plain(names[number])] = {
                key: _joined(names[number], nodes[0], [one["state"][number][key] for one in saved])
                for key in values
            }
        groups += [
            {**group, "params": [_plain(names[number]) for number in group["params"]]}
            for group in saved[0]["param_groups"]
        ]
    optimizer = {"state": state, "param_groups": groups}
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        save({"model": model, "optimizer": optimizer}, checkpoint_id=output, no_dist=True)
    return max(keys)[0]


def _plain(name: str) -> str:
    """Return a parameter's name without the prefix of ``torch.compile``, as DCP does."""
    return name.replace("_orig_mod.", "")


def _joined(name: str, node: Sequence[Values], parts: Sequence[Any]) -> Any:
    """Return a value of parameter ``name``, joined from the shards ``parts`` of a node's workers.

    A value without the shape of the parameter, such as a step counter, is equal on all of them.
    """
    shards = node[0]["layout"]["shards"]
    if name not in shards or parts[0].shape != node[0]["model"][name].shape:
        return parts[0]
    return torch.cat(list(parts), shards[name])


def _mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.double() for each in values]).mean(0).to(values[0].dtype)
