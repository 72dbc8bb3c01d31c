"""Checks of the arguments of ``attach``. They send nothing.

They reject options that do not work together, and tensors that cannot be synchronized. Each error
names a remedy. What a strategy supports depends on the result of its method ``averages()``:

- ``GlobalModel``: the workers average models, part by part. To *launch* a part is to start its
  averaging. The strategy is *blocking* if workers wait for each mean, and *eager* if a mean takes
  effect as soon as it arrives.
- ``Gradients``: the workers average gradients.
- ``CustomFlow``: the strategy has its own communication code, as the baselines have.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from offbeat.arguments import Range, require_choice, require_number
from offbeat.averaging import NonFinite
from offbeat.averaging.replica import local_tensors
from offbeat.errors import AttachError
from offbeat.nodes.shards import is_sharded
from offbeat.quantization.wire import Precision, require_precision
from offbeat.strategies.base import CustomFlow, GlobalModel, Gradients, Strategy

_TIMEOUT = Range(least=0.001, most=31_536_000, hint="seconds: from a millisecond to a year")
_DIVIDED = (
    "every worker must hold the whole model, or its node with node_group and fully_shard; attach "
    "it without FSDP and without tensor parallelism"
)
_RUN = "; where OFFBEAT_STORE sets it, as under offbeat run, start the script with torchrun"


# -- strategy and options --------------------------------------------------------------------------


def require_abilities(
    strategy: Strategy,
    *,
    wire: Precision = "float32",
    adam_correction: bool = False,
    non_finite: NonFinite = "raise",
    nodes: bool = False,
    sharded: bool = False,
    elastic: bool = False,
    optimizers: int = 1,
) -> None:
    """Raise unless ``strategy`` supports the given options of ``attach``.

    ``nodes`` is True if ``node_group`` is given, ``elastic`` if ``min_workers`` is given, and
    ``sharded`` if ``fully_shard`` has sharded the model. ``optimizers`` is their number.

    Raises:
        AttachError: the strategy does not support an option, or two options exclude each other.
        ValueError: the value of ``wire`` or ``non_finite`` is unknown.
    """
    require_precision(wire)
    require_choice("non_finite", non_finite, ("raise", "warn"))
    averages = strategy.averages()
    if isinstance(averages, CustomFlow):
        used = {
            f"wire={wire!r}": wire != "float32",
            "adam_correction": adam_correction and not averages.models,
            "node_group": nodes,
            "min_workers": elastic,
        }
        for option, given in used.items():
            if given:
                raise AttachError(
                    f"{option} with {strategy}: baselines to compare with, and strategies with a "
                    "flow of their own, train with exact messages, a fixed number of workers and "
                    "one worker per node; leave it out, or use a strategy to train with"
                    + (_RUN if option == "min_workers" else "")
                )
        return
    if adam_correction and isinstance(averages, Gradients):
        raise AttachError(
            f"adam_correction with {strategy}: the workers average gradients, so each Adam steps "
            "with the mean gradient already; leave it out"
        )
    if elastic and nodes:
        raise AttachError(
            "min_workers with node_group: a node cannot continue without one of its workers; leave "
            f"one of them out{_RUN}"
        )
    if isinstance(averages, Gradients) and elastic and optimizers > 1:
        raise AttachError(
            f"min_workers with {strategy} and several optimizers, whose gradients are averaged "
            f"one after the other: use one optimizer, or leave it out{_RUN}"
        )


def require_timeout(seconds: float, name: str = "timeout_seconds") -> None:
    """Raise unless ``seconds`` can be the time-out of an operation: some backends need a limit."""
    require_number(name, seconds, _TIMEOUT)


# -- the model -------------------------------------------------------------------------------------


def require_usable(model: nn.Module) -> None:
    """Raise AttachError unless every parameter and buffer can be read and written in place.

    Also raise if ``model`` contains modules of FSDP or an engine of DeepSpeed, if DDP is set to
    ignore other tensors than buffers, or if inference mode is enabled.
    """
    if torch.is_inference_mode_enabled():
        raise AttachError("attach() inside torch.inference_mode(): leave it, nothing trains there")
    for module in model.modules():
        if type(module).__module__.startswith("torch.distributed.fsdp"):
            raise AttachError(f"the model is inside {type(module).__name__}: {_DIVIDED}")
        if type(module).__module__.startswith("deepspeed.runtime"):
            raise AttachError(
                f"the model is inside a {type(module).__name__} of DeepSpeed, which averages "
                "gradients, or divides the model, by itself: train without DeepSpeed"
            )
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name in sorted(local_tensors(model) - buffers):
        raise AttachError(
            f"DistributedDataParallel is set to ignore {name!r}, which is not a buffer: keep "
            "parameters of one worker outside of the attached model"
        )
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            reason = unusable(tensor)
            if reason is not None:
                raise AttachError(f"{kind} {name!r} cannot be synchronized: {reason}")


def require_synchronous_layers(model: nn.Module, strategy: Strategy, *, nodes: bool) -> None:
    """Raise AttachError if ``model`` has a SyncBatchNorm whose workers do not step together.

    Its forward pass is a collective. The workers step together if ``strategy`` averages
    gradients. With ``nodes`` (``node_group``) those of a node do, too.
    """
    if isinstance(strategy.averages(), Gradients):
        return
    for name, module in model.named_modules():
        inside = nodes and getattr(module, "process_group", None) is not None
        if isinstance(module, nn.SyncBatchNorm) and not inside:
            raise AttachError(
                f"module {name!r} is a SyncBatchNorm, which waits for all workers in each forward "
                f"pass, and under {strategy} they do not step together: use BatchNorm, whose "
                "statistics are averaged, or BSP()"
            )


def require_distinct_memory(tensors: Mapping[str, Tensor], strategy: Strategy) -> None:
    """Raise AttachError if two parameters begin at the same address and ``strategy`` adds to both.

    A strategy that trains while a mean is computed adds an update to the parameters when the mean
    arrives. Shared memory would receive the update twice. A strategy that waits for the mean
    overwrites the parameters, which is harmless if done twice.
    """
    averages = strategy.averages()
    if not isinstance(averages, GlobalModel) or averages.blocking:
        return
    seen: dict[tuple[int, torch.device], str] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.device)
        if tensor.numel() and seen.setdefault(place, name) != name:
            raise AttachError(
                f"parameters {seen[place]!r} and {name!r} share memory, which {strategy} would "
                "move twice: tie them as one Parameter, not by .data"
            )


def unusable(tensor: Tensor) -> str | None:
    """Return why ``tensor`` cannot be synchronized, with a remedy. None if it can."""
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
    if tensor.is_nested:
        return "it is a nested tensor; replace it by its to_padded_tensor()"
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad  # only copied, as bytes
    if tensor.is_floating_point() and tensor.itemsize == 1 and not frozen:
        return (
            f"numbers of 8 bits ({tensor.dtype}) cannot be averaged; keep it in bfloat16, and cast "
            "it in forward"
        )
    if tensor.is_quantized or tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return f"workers cannot send {tensor.dtype}; convert it to int64 or float32"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}; replace it by its to_dense()"
    if _shares_memory_with_itself(tensor):
        return (
            "some of its elements may be the same memory (it was expanded, or is an overlapping "
            "view); replace it by its clone().contiguous()"
        )
    return None


def _shares_memory_with_itself(tensor: Tensor) -> bool:
    """Return True if two elements of ``tensor`` may have the same address.

    Also True for a view whose dimensions interleave without a common address, which is rare.
    """
    largest = 0  # largest offset that the dimensions so far can reach
    for stride, size in sorted((tensor.stride(d), n) for d, n in enumerate(tensor.shape) if n > 1):
        if tensor.numel() and stride <= largest:
            return True
        largest += stride * (size - 1)
    return False
