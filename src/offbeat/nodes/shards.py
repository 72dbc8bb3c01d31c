"""Models that ``fully_shard`` (FSDP2) has sharded over the workers of a node.

Each worker trains its local shard of every parameter together with its counterparts in the other
nodes, which hold the same shard. Torch gathers parameters and reduces gradients inside the node.
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
    """Return True for a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # imported if a DTensor exists
    return module is not None and isinstance(tensor, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to this module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Shard(nn.Parameter):
    """The local shard of a parameter. Shares the memory of the parameter and of its gradient.

    Attributes:
        parameter: The parameter (a DTensor) that the module and the optimizer hold.
    """

    parameter: Any

    @staticmethod
    def of(parameter: nn.Parameter) -> "Shard":
        """Return the local shard of a DTensor parameter."""
        shard = Shard(_local(parameter), requires_grad=parameter.requires_grad)
        shard.parameter = parameter
        return shard

    @property
    def grad(self) -> Tensor | None:
        """The local shard of the gradient."""
        gradient = self.parameter.grad
        return None if gradient is None else _local(gradient)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.parameter.grad = None if value is None else _sharded_like(value, self.parameter)


def _sharded_like(value: Tensor, like: Any) -> Tensor:
    """Return the DTensor with the local shard ``value`` and the sharding of ``like``."""
    result: Tensor = type(like.data).from_local(
        value,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return result


def _local(tensor: Any) -> Tensor:
    with torch.no_grad():  # with gradients it would return a new autograd tensor each time
        local: Tensor = tensor.to_local()
        return local


def local_parts(values: Any) -> Any:
    """Return nested ``values`` with each DTensor replaced by its local shard, for saving."""
    if isinstance(values, Tensor):
        return _local(values) if is_sharded(values) else values
    if isinstance(values, dict):
        return {key: local_parts(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(map(local_parts, values))
    return values


def model_state(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state that ``model`` can load, from its saved ``local_parts``."""
    present = model.state_dict()
    return {name: _restored(value, present[name]) for name, value in saved.items()}


def optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state that ``optimizer`` can load, from its saved ``local_parts``.

    A tensor with the shape of a parameter's local shard is sharded like that parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {key: _restored(value, parameters[index]) for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    return {**saved, "state": state}


def _restored(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not is_sharded(like):
        return value
    return _sharded_like(value, like) if value.shape == _local(like).shape else value


class Shards(nn.Module):
    """The local shards of a model, as a module whose parameters have the names of the model's.

    Its buffers are those of the model.

    Args:
        model: A model whose parameters are all DTensors.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # in a list, because it is not a submodule
        self.reshard()
        self._shards = {id(p): Shard.of(p) for p in model.parameters()}

    def shard(self, parameter: nn.Parameter) -> Shard:
        """Return the local shard of a parameter of the model."""
        return self._shards[id(parameter)]

    def reshard(self) -> None:
        """Reshard the modules that an evaluation has left with gathered parameters.

        Changes of the shards would not reach gathered parameters.
        """
        for module in self._model[0].modules():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        named = self._model[0].named_parameters(prefix, recurse, remove_duplicate)
        for name, parameter in named:
            if id(parameter) in self._shards:  # False if the user has replaced the parameter
                yield name, self._shards[id(parameter)]

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self._model[0].named_buffers(prefix, recurse, remove_duplicate)


def shards_of(
    model: nn.Module, group: dist.ProcessGroup | Transport | None, node_group: NodeGroup | None
) -> Shards | None:
    """Return the local shards of a model that ``fully_shard`` has sharded over this node.

    None if the model has no DTensors. Sends nothing.

    Args:
        model: The model.
        group: Argument ``group`` of ``attach``.
        node_group: Argument ``node_group`` of ``attach``. None: no nodes, so no shards.

    Raises:
        AttachError: the model is sharded in any other way.
    """
    if node_group is None or not any(map(is_sharded, model.parameters())):
        return None
    if not any(map(is_fully_sharded, model.modules())):
        raise AttachError(
            "the model has DTensors and was not given to fully_shard (tensor parallelism): with "
            "node_group, use a model without DTensors, or fully_shard it inside each node"
        )
    _require_placement(model, node_ranks(group, node_group))
    return Shards(model)


def _require_placement(model: nn.Module, node: list[int] | str) -> None:
    """Raise AttachError unless each parameter is sharded over the workers of this node alone.

    Args:
        model: The model.
        node: Ranks of the node. Not checked if a text: ``open_nodes`` raises it as an error.
    """
    for name, p in model.named_parameters():
        if not is_sharded(p):
            why = "it is no DTensor, and others are: apply fully_shard to the whole model"
        elif p.device_mesh.ndim != 1:  # type: ignore[attr-defined]
            why = f"its mesh has {p.device_mesh.ndim} dimensions: give fully_shard a mesh of one"  # type: ignore[attr-defined]
        elif not p.placements[0].is_shard():  # type: ignore[attr-defined]
            why = f"its placement is {p.placements[0]}, not Shard"  # type: ignore[attr-defined]
        elif isinstance(node, list) and (mesh := p.device_mesh.mesh.tolist()) != node:  # type: ignore[attr-defined]
            why = (
                f"its mesh has the ranks {mesh}, and the node of node_group {node}: give "
                "fully_shard a mesh of the node's workers, in their order"
            )
        else:
            continue
        raise AttachError(f"parameter {name!r} cannot be trained between nodes: {why}")
