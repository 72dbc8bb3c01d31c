"""A model that ``fully_shard`` has divided among the workers of a node, as one of them holds it.

Each worker trains its own shard of every parameter together with its counterparts in the other
nodes, which hold the same shard. Gathering parameters and reducing gradients inside the node stays
with torch.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from offbeat.errors import AttachError
from offbeat.nodes.detection import NodeGroup, node_ranks
from offbeat.transport.communicator import Transport


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # whoever has one has imported it
    return module is not None and isinstance(tensor, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Shard(nn.Parameter):
    """This worker's part of a parameter: the same memory, and the same part of its gradient.

    Attributes:
        whole: The parameter that module and optimizer hold.
    """

    whole: Any

    @staticmethod
    def of(whole: nn.Parameter) -> "Shard":
        """The part of ``whole``, a DTensor, that is here."""
        made = Shard(_local(whole), requires_grad=whole.requires_grad)
        made.whole = whole
        return made

    @property
    def grad(self) -> Tensor | None:
        """That of the parameter, as far as it is here."""
        gradient = self.whole.grad
        return None if gradient is None else _local(gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.whole.grad = None if value is None else _divided_as(value, self.whole)


def _divided_as(value: Tensor, whole: Any) -> Tensor:
    """The DTensor whose part here is ``value``, divided as ``whole`` is."""
    made: Tensor = type(whole.data).from_local(
        value,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():  # else it would be a new tensor each time, with a history
        local: Tensor = tensor.to_local()
        return local


def local_parts(values: Any) -> Any:
    """The same with the part that is here in place of each DTensor, for a file of this worker."""
    if isinstance(values, Tensor):
        return _local(values) if is_sharded(values) else values
    if isinstance(values, dict):
        return {key: local_parts(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(map(local_parts, values))
    return values


def model_state(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """What ``model`` can load, from what ``local_parts`` made of its state."""
    present = model.state_dict()
    return {name: _put_together(value, present[name]) for name, value in saved.items()}


def optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Likewise: what belongs to a parameter and has the shape of its part is divided as it is."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {key: _put_together(value, parameters[index]) for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _put_together(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not is_sharded(like):
        return value
    return _divided_as(value, like) if value.shape == _local(like).shape else value


class Shards(nn.Module):
    """What one worker holds of a model: its shards, under the names of the parameters.

    Buffers are those of the model. All of its parameters must be DTensors.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of = [model]  # in a list, for it is no part of this module
        self.reshard()
        self._shards = {id(p): Shard.of(p) for p in model.parameters()}

    def shard(self, whole: nn.Parameter) -> Shard:
        """That of a parameter of the model."""
        return self._shards[id(whole)]

    def reshard(self) -> None:
        """Reshard the modules, if an evaluation has left them with gathered parameters.

        Gathered parameters would not follow when the shards are moved.
        """
        for module in self._of[0].modules():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, whole in self._of[0].named_parameters(prefix, recurse, remove_duplicate):
            if id(whole) in self._shards:  # else it was replaced
                yield name, self._shards[id(whole)]

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self._of[0].named_buffers(prefix, recurse, remove_duplicate)


def shards_of(
    model: nn.Module, group: dist.ProcessGroup | Transport | None, node_group: NodeGroup | None
) -> Shards | None:
    """The shards of a model that ``fully_shard`` has divided among the workers of this node.

    None if it is whole. Nothing is sent.

    Args:
        model: The model.
        group: As given to ``attach``.
        node_group: As given to ``attach``. None: there are no nodes, and no shards.

    Raises:
        AttachError: the model is divided in another way.
    """
    if node_group is None or not any(map(is_sharded, model.parameters())):
        return None
    if not any(map(is_fully_sharded, model.modules())):
        raise AttachError(
            "the model has DTensors and was not given to fully_shard (tensor parallelism): with "
            "node_group a model is whole, or divided by fully_shard inside each node"
        )
    _require_placement(model, node_ranks(group, node_group))
    return Shards(model)


def _require_placement(model: nn.Module, node: list[int] | str) -> None:
    """Raise unless each parameter is cut along one dimension, over the workers of this node.

    Args:
        model: The model.
        node: Their ranks; text if they are not known, of which another one complains.
    """
    for name, p in model.named_parameters():
        if not is_sharded(p):
            why = "it is no DTensor, and others are: give fully_shard all of the model"
        elif p.device_mesh.ndim != 1:  # type: ignore[attr-defined]
            why = f"its mesh has {p.device_mesh.ndim} dimensions: give fully_shard a mesh of one"  # type: ignore[attr-defined]
        elif not p.placements[0].is_shard():  # type: ignore[attr-defined]
            why = f"its placement is {p.placements[0]}, no shard"  # type: ignore[attr-defined]
        elif isinstance(node, list) and (mesh := p.device_mesh.mesh.tolist()) != node:  # type: ignore[attr-defined]
            why = (
                f"its mesh has the ranks {mesh}, and the node of node_group {node}: give "
                "fully_shard a mesh of the node's workers, in their order"
            )
        else:
            continue
        raise AttachError(f"parameter {name!r} cannot be trained between nodes: {why}")
