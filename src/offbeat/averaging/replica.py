"""Replica: the tensors of one worker's model, and how each kind is combined over the workers.

A *consensus* replaces the local model by the mean over all workers, as follows:

- Trainable parameters, floating-point buffers and complex buffers become their mean.
- Signed integer buffers, such as BatchNorm's batch counter, become their maximum.
- All other buffers, such as flags, become those of rank 0. So do ``local_tensors``, such as the
  singular vectors of a spectral norm.
- Frozen parameters do not change, unless the script has changed them and they differ between the
  workers (``included``).
- Buffers that ``state_dict`` does not save (``persistent=False``) do not change: they are
  constants, such as causal masks and tables of positions.

Strategies that average models apply only the first rule during training.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

_version_of = attrgetter("_version")  # torch has no public name for it
_COUNTERS = (torch.int8, torch.int16, torch.int32, torch.int64)


def saved_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the buffers that ``state_dict`` saves, sorted by name. A shared one appears once.

    Each name comes with the module that holds the buffer, and the buffer's name in this module.
    """
    modules = dict(model.named_modules())
    done = {
        id(buffer)
        for module in modules.values()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if name in module._non_persistent_buffers_set  # state_dict() could run code of the user
    }
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) not in done:
                done.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = (module, name)
    return dict(sorted(found.items()))


def local_tensors(model: nn.Module) -> set[str]:
    """Return the names of tensors whose mean would be meaningless.

    DistributedDataParallel is set to ignore them, or they are the singular vectors of a spectral
    norm. If workers have different weights, the mean of their unit vectors is shorter than 1.
    """
    found: set[str] = set()
    for prefix, module in model.named_modules():
        own = {name for name, _ in module.named_buffers(recurse=False)}
        names = {n for n in own if n[-2:] in ("_u", "_v") and {n[:-1] + "u", n[:-1] + "v"} <= own}
        # DDP reads this attribute, too, and has no public one.
        names.update(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        found.update(f"{prefix}.{name}" if prefix else name for name in names)
    return found


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class Replica:
    """One worker's copy of a model.

    Args:
        model: The model.
        trainable: The parameters to average, even if they have no gradient.
        buffers_of: Module that holds the model's buffers. None: ``model``.

    Attributes:
        parameters: Name and tensor of each averaged parameter, sorted by name. Tied parameters
            appear once.
        included: Names of further parameters and buffers, which a consensus combines like buffers.
            Empty outside of a consensus.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Iterable[nn.Parameter],
        buffers_of: nn.Module | None = None,
    ) -> None:
        self._model = model
        self._buffers_of = model if buffers_of is None else buffers_of
        self.included: Sequence[str] = ()
        chosen = {id(p) for p in trainable}
        self.parameters = sorted(
            ((name, p) for name, p in model.named_parameters() if id(p) in chosen),
            key=lambda item: item[0],
        )
        self._tensors = [p for _, p in self.parameters]
        self._dtypes = [p.dtype for p in self._tensors]
        # Found only once, because a search takes longer than the average of a small part.
        self._local = local_tensors(self._buffers_of)
        self._saved_buffers = [
            (*place, name in self._local) for name, place in saved_buffers(self._buffers_of).items()
        ]

    def describe(self) -> list[str]:
        """Return a line of text for each tensor of the model, for comparison between workers."""
        averaged = {id(p) for _, p in self.parameters}
        lines = [
            f"parameter {name!r}: shape {tuple(p.shape)}, {p.dtype}, "
            f"{'averaged' if id(p) in averaged else 'frozen'}"
            for name, p in self._model.named_parameters()
        ]
        lines += [
            f"buffer {name!r}: shape {tuple(b.shape)}, {b.dtype}"
            + (", local" if name in self._local else "")
            for name, b in self._model.named_buffers()
        ]
        return lines

    def replaced(self) -> list[str]:
        """Return the names of averaged parameters that the model lacks or has in another dtype."""
        current = {id(p) for p in self._model.parameters()}
        return [
            name
            for (name, p), dtype in zip(self.parameters, self._dtypes, strict=True)
            if id(p) not in current or p.dtype != dtype
        ]

    def versions(self) -> list[int]:
        """Return torch's version counter of each averaged parameter, which counts its writes."""
        return [*map(_version_of, self._tensors)]

    # -- tensors ---------------------------------------------------------------------------------

    def everything(self) -> list[Tensor]:
        """Return all parameters and buffers, including frozen parameters."""
        return [*self._model.parameters(), *self._model.buffers()]

    def saved(self) -> dict[str, Tensor]:
        """Return the present parameters and the buffers that ``state_dict`` saves, by name."""
        buffers = saved_buffers(self._buffers_of).items()
        return {
            **dict(self._model.named_parameters()),
            **{name: getattr(*place) for name, place in buffers},
        }

    def float_buffers(self, *, included: bool = False) -> list[Tensor]:
        """Return the averaged floating-point and complex buffers, if wanted those ``included``."""
        found = self._present_buffers(included=included)
        return [b for b, local in found if _is_float(b) and not local]

    def integer_buffers(self) -> list[Tensor]:
        """Return the signed integer buffers that become their maximum."""
        return [b for b, local in self._present_buffers() if b.dtype in _COUNTERS and not local]

    def other_buffers(self) -> list[Tensor]:
        """Return all other buffers."""
        return [
            b
            for b, local in self._present_buffers()
            if local or not (_is_float(b) or b.dtype in _COUNTERS)
        ]

    def _present_buffers(self, *, included: bool = True) -> list[tuple[Tensor, bool]]:
        """Return the buffers that are tensors now, and whether each is in ``local_tensors``."""
        found = [(getattr(m, name, None), local) for m, name, local in self._saved_buffers]
        if included and self.included:
            saved, local = self.saved(), local_tensors(self._buffers_of)
            found += [(saved[name], name in local) for name in self.included]
        return [(buffer, local) for buffer, local in found if isinstance(buffer, Tensor)]

    def averaged(self) -> list[Tensor]:
        """Return the averaged parameters and buffers."""
        return [*self._tensors, *self.float_buffers(included=True)]

    def synchronized(self) -> list[Tensor]:
        """Return all tensors that a consensus may change, the averaged parameters first."""
        return [*self.averaged(), *self.integer_buffers(), *self.other_buffers()]

    # -- snapshots -------------------------------------------------------------------------------

    def snapshot(self, device: torch.device | str | None = None) -> list[Tensor]:
        """Return copies of the ``synchronized`` tensors.

        ``device`` is the device of the copies. None: that of each tensor.
        """
        return [t.detach().to(device or t.device, copy=True) for t in self.synchronized()]

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Copy the values of a ``snapshot`` back, in place."""
        with torch.no_grad():
            for target, value in zip(self.synchronized(), snapshot, strict=True):
                target.detach().copy_(value)
