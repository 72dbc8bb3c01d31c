"""Models that ``fully_shard`` (FSDP2) has sharded over the workers of a node.

Inside a node torch gathers parameters and reduces gradients. Across nodes, each worker averages its
local shard of every parameter with its *counterparts*, the workers of other nodes that hold the
same shard.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from offbeat.averaging.replica import saved_buffers
from offbeat.errors import AttachError
from offbeat.nodes.detection import NodeGroup, node_ranks
from offbeat.transport.communicator import Transport


def is_sharded(tensor: Tensor) -> bool:
    """Return True if ``tensor`` is a DTensor, the type that torch uses for sharded tensors."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists before its import
    return module is not None and isinstance(tensor, module.DTensor)


def is_fully_sharded(module: nn.Module) -> bool:
    """Return True if ``fully_shard`` was applied to ``module`` itself, not only to submodules."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Shard(nn.Parameter):
    """The local shard of a parameter, as a plain parameter in the same memory.

    Its ``grad`` is the local shard of the parameter's gradient.

    Attributes:
        parameter: The sharded parameter (a DTensor), which the model and the optimizer hold.
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


def unsharded(parameter: Tensor) -> Tensor:
    """Return the parameter that autograd knows: the DTensor of a ``Shard``, or ``parameter``."""
    return parameter.parameter if isinstance(parameter, Shard) else parameter


def _sharded_like(value: Tensor, like: Any) -> Tensor:
    """Return a DTensor with the local shard ``value``, sharded like the DTensor ``like``."""
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
    with torch.no_grad():  # otherwise autograd would record to_local() as an operation
        local: Tensor = tensor.to_local()
        return local


def local_parts(values: Any) -> Any:
    """Return a state, such as a ``state_dict()``, with local shards in place of the DTensors."""
    if isinstance(values, Tensor):
        return _local(values) if is_sharded(values) else values
    if isinstance(values, dict):
        return {key: local_parts(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(map(local_parts, values))
    return values


def model_state(model: nn.Module, saved: dict[str, Any]) -> dict[str, Any]:
    """Turn local shards in ``saved``, a state of ``model``, into DTensors; see ``local_parts``."""
    present = model.state_dict()
    return {name: _restored(value, present[name]) for name, value in saved.items()}


def optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Turn local shards in ``saved``, a state of ``optimizer``, into DTensors; see ``local_parts``.

    Only tensors with the shape of the parameter's local shard are converted. Step counters, for
    example, are not.
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
    """The local shards of a model, as a module with the names and the saved buffers of the model.

    All parameters of the model must be DTensors.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = [model]  # a list, so that torch does not register it as a submodule
        self.reshard()
        self._shards = {id(p): Shard.of(p) for p in model.parameters()}

    def shard(self, parameter: nn.Parameter) -> Shard:
        """Return the local shard of a parameter of the model."""
        return self._shards[id(parameter)]

    def reshard(self) -> None:
        """Free the full parameters that torch has gathered for a forward pass.

        The next forward pass then gathers them again, so that it sees changes of the shards.
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
            if id(parameter) in self._shards:  # False if the user replaced the parameter later
                yield name, self._shards[id(parameter)]

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        places = saved_buffers(self._model[0]).values()
        saved = {id(module.get_buffer(key)) for module, key in places}
        for name, buffer in self._model[0].named_buffers(prefix, recurse, remove_duplicate):
            if id(buffer) in saved:
                yield name, buffer


def shards_of(
    model: nn.Module, group: dist.ProcessGroup | Transport | None, node_group: NodeGroup | None
) -> Shards | None:
    """Return the local shards of a model that ``fully_shard`` has sharded over this node.

    Returns None if the model has no DTensors or ``node_group`` is None. ``group`` and
    ``node_group`` are those of ``attach``. Sends nothing.

    Raises:
        AttachError: the model is sharded in another way.
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

    ``node`` has the ranks of these workers, or a text that says why they are unknown. With a text
    the ranks are not checked here, because ``open_nodes`` later raises this text as an error.
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
