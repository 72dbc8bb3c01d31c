"""Which tensors of a model can be synchronized: what cannot be written in place is refused."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offbeat.errors import AttachError
from offbeat.strategies.base import Strategy
from offbeat.training.shards import is_sharded

_DIVIDED = (
    "every worker must hold the whole model, or its node with node_group and fully_shard; attach "
    "it without FSDP and without tensor parallelism"
)


def require_usable(model: nn.Module) -> None:
    """Raise unless every parameter and buffer of ``model`` can be read, and written in place.

    Raises:
        AttachError: naming the first that cannot, why, and what to do.
    """
    if torch.is_inference_mode_enabled():
        raise AttachError("attach() inside torch.inference_mode(): leave it, nothing trains there")
    for module in model.modules():
        if type(module).__module__.startswith("torch.distributed.fsdp"):
            raise AttachError(f"the model is inside {type(module).__name__}: {_DIVIDED}")
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            why = _unusable(tensor)
            if why is not None:
                raise AttachError(f"{kind} {name!r} cannot be synchronized: {why}")


def require_apart(tensors: Mapping[str, Tensor], strategy: Strategy) -> None:
    """Raise if two of the parameters are the same memory, and ``strategy`` would move it twice.

    A mean of models or gradients that is written twice is written once; an update is not.

    Raises:
        AttachError: naming both.
    """
    if strategy.averages != "updates":
        return
    seen: dict[tuple[int, torch.device], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.device)
        if tensor.numel() and seen.setdefault(place, name) != name:
            raise AttachError(
                f"parameters {seen[place]!r} and {name!r} share memory, which "
                f"{strategy.name} would move twice: make them one Parameter to tie them, not by "
                ".data"
            )


def _unusable(tensor: Tensor) -> str | None:
    """Why ``tensor`` cannot be synchronized, and what to do; None if it can."""
    if is_sharded(tensor):
        return f"it is a DTensor, divided among workers: {_DIVIDED}"
    if is_lazy(tensor):
        return (
            "it has no shape yet (a lazy module); run one forward pass, then build the optimizer "
            "and attach"
        )
    if tensor.is_meta:
        return (
            "it is on the meta device and has no values; model.to_empty(device=…) and initialise "
            "or load it before attach()"
        )
    if tensor.is_inference():
        return (
            "it was made inside torch.inference_mode(); build or load the model outside, or "
            "replace it by a clone() made outside"
        )
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; replace it by its to_dense()"
    if _shares_memory_with_itself(tensor):
        return (
            "some of its elements are the same memory (it was expanded, or is an overlapping "
            "view); replace it by its clone().contiguous()"
        )
    return None


def _shares_memory_with_itself(tensor: Tensor) -> bool:
    """Whether two elements of ``tensor`` lie at the same place."""
    dims = [(tensor.stride(d), n) for d, n in enumerate(tensor.shape) if n > 1]
    reach = 0  # of the dimensions so far: offsets from 0 up to this
    for stride, size in sorted(dims):
        if tensor.numel() and stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    places = torch.zeros(1, dtype=torch.int64)  # rarely needed: interleaved views, too
    for stride, size in dims:
        places = (places[:, None] + stride * torch.arange(size)).reshape(-1)
    return len(places.unique()) < tensor.numel()
