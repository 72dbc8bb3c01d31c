"""A double of a GPU: tensors that are in the memory of the CPU, and say that they are on a GPU.

It counts the kernels that Offbeat launches, and the calls in which its host would wait for the GPU.
The host finds NaN in page-locked memory to which the GPU copies, until it waits for the GPU.
It finds races between streams (``streams.py``). It cannot show what kernels compute on a GPU, or
what they cost.
"""

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offbeat
from offbeat.quantization import message
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.kernels import land
from streams import Stream, Streams

CUDA = torch.device("cuda", 0)
PACKAGE = Path(offbeat.__file__).parent
ELSEWHERE = {"simulate", "transport"}  # the simulator computes sums with torch
READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__"}
WAITING_OPERATIONS = {"nonzero", "masked_select", "equal", "is_nonzero", "_local_scalar_dense"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "resize_"}


class GpuTensor(Tensor):
    """A tensor that says that it is on a GPU."""

    device = CUDA
    is_cuda, is_cpu = True, False

    def record_stream(self, stream: Any) -> None:
        gpu.streams.record(self, stream)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # a file has plain tensors

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), function.__name__
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        with torch._C.DisableTorchFunctionSubclass():
            if name in READS or name == "cpu" or _device_in(name, args, kwargs) == "cpu":
                gpu.note("wait", name)
                gpu.touch([args[0]], [])
                gpu.streams.host_waits()
                host = args[0].as_subclass(Tensor)
                return getattr(host, name)(*args[1:], **kwargs)
            tensors = [a for a in args if isinstance(a, Tensor) and a.dim() and a.numel()]
            mixed = len({t.is_cuda for t in tensors}) == 2
            if mixed and name in ("copy_", "__setitem__"):
                if kwargs.get("non_blocking") and is_pinned(args[0]):
                    gpu.download(args[0], args[1])
                    return args[0]
                if not (kwargs.get("non_blocking") and is_pinned(tensors[-1])):
                    gpu.note("wait", f"{name} between host and GPU")
        with _Kernels():
            return super().__torch_function__(function, types, args, kwargs)


class _Kernels(TorchDispatchMode):
    """Counts what would be kernels."""

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name, (first, *_) = operation._schema.name.removeprefix("aten::"), operation._schema.returns
        view = first.alias_info is not None and not first.alias_info.is_write
        masked = name.startswith("index") and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if masked or name in WAITING_OPERATIONS:
            gpu.note("wait", name)
        if not view and name not in ALLOCATIONS:
            gpu.note("kernel", name)
        result = operation(*args, **(kwargs or {}))
        if name in ALLOCATIONS:
            gpu.streams.allocate(result)  # also for the network, on the stream of the caller
        elif not view:
            writes = [*_written(operation, args, kwargs), *tree_leaves(result)]
            gpu.touch(tree_leaves((args, kwargs)), writes)
        return result


def _written(operation: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Any]:
    """Return the arguments that an operation writes."""
    named = dict(zip((a.name for a in operation._schema.arguments), args, strict=False))
    named |= kwargs or {}
    info = {a.name: a.alias_info for a in operation._schema.arguments}
    return tree_leaves([v for n, v in named.items() if info[n] is not None and info[n].is_write])


def _device_in(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """Return the type of the device in the arguments of ``Tensor.to``."""
    for value in (*args, kwargs.get("device")) if name == "to" else ():
        if isinstance(value, str | torch.device):
            return torch.device(value).type
    return None


class Gpu:
    """What Offbeat does with the GPU.

    Attributes:
        training: Threads in which the training runs. The others are background threads.
        counts: Number of events, by kind ("kernel", "wait"), name and place.
        on: True while events are counted.
        downloads: Copies to page-locked memory that may not have ended, and their values.
        streams: Its streams.
    """

    def __init__(self) -> None:
        self.training: set[int] = set()
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.on = False
        self.downloads: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.streams = Streams()

    def download(self, target: Tensor, values: Tensor) -> None:
        """Begin a copy to page-locked memory."""
        self.touch([values], [target])
        place = target.data_ptr(), target.numel()
        self.downloads.pop(place, None)
        self.downloads[place] = target, values.as_subclass(Tensor).detach().clone()
        target.fill_(math.nan)

    def synchronize(self) -> None:
        """Complete all copies."""
        self.streams.host_waits(everything=True)
        for target, values in self.downloads.values():
            target.copy_(values)
        self.downloads.clear()

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """The GPU finds what it has copied. The host does not."""
        downloads = dict(self.downloads)
        self.synchronize()
        yield
        for target, values in downloads.values():
            self.download(target, values)

    def note(self, kind: str, name: str) -> None:
        """Count an event, if Offbeat caused it. In the background it may wait."""
        if not self.on or (kind == "wait" and threading.get_ident() not in self.training):
            return
        folder, place = _place()
        if folder not in ELSEWHERE and place:
            self.counts[kind, name, place] += 1

    def touch(self, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """Note an operation on the current stream, unless the network does it for any worker."""
        folder, place = _place()
        if folder not in ELSEWHERE:
            self.streams.operation(_tensors(reads), _tensors(writes), place or "the training")

    def total(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return sum(number for (found, _, _), number in self.counts.items() if found == kind)


gpu = Gpu()


def _place() -> tuple[str, str]:
    """Return the folder and the line of Offbeat that is being executed; "" outside of Offbeat."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            folder, *_ = path.relative_to(PACKAGE).parts
            return folder, f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "", ""


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors on the GPU and those in page-locked memory, but no numbers."""
    return [
        each
        for each in values
        if isinstance(each, Tensor) and each.numel() and (each.is_cuda or is_pinned(each))
    ]


def on_gpu(tensor: Tensor) -> GpuTensor:
    """Return the tensor itself, as one on the GPU."""
    return tensor.as_subclass(GpuTensor)


def move_to_gpu(model: nn.Module) -> None:
    """Replace the parameters and the buffers of ``model``."""
    for module in model.modules():
        for name, value in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(on_gpu(value.detach())))
        for name, value in [*module.named_buffers(recurse=False)]:
            module.register_buffer(name, on_gpu(value))


def install(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Let torch make and copy tensors on this GPU. Returns a new ``Gpu``."""
    global gpu
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.streams.current)
    monkeypatch.setattr(torch.cuda, "stream", gpu.streams.use)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(gpu.streams, device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.synchronize())
    monkeypatch.setattr(message, "triton_kernels", lambda device, precision: None)
    for name in ("empty", "zeros", "ones", "full", "tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, _factory(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "pin_memory", _pinned)
    monkeypatch.setattr(Tensor, "to", _to(Tensor.to))
    return gpu


def _factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def on_any_device(*args: Any, **kwargs: Any) -> Tensor:
        pinned = kwargs.pop("pin_memory", False)
        if torch.device(kwargs.get("device") or "cpu").type != "cuda":
            tensor = make(*args, **kwargs)
            return _pinned(tensor) if pinned else tensor
        if make.__name__ in ("tensor", "as_tensor"):
            gpu.note("wait", f"{make.__name__} from the host")
        elif make.__name__ != "empty":
            gpu.note("kernel", make.__name__)
        return on_gpu(make(*args, **{**kwargs, "device": "cpu"}))

    return on_any_device


def _pinned(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    pinned.pinned = True  # type: ignore[attr-defined]
    return pinned


def is_pinned(tensor: Tensor) -> bool:
    """Return True if the tensor is in page-locked memory, or a view of one that is."""
    return hasattr(tensor if tensor._base is None else tensor._base, "pinned")


def _to(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _device_in("to", args, kwargs) != "cuda":
            return plain(tensor, *args, **kwargs)
        if not (tensor.is_cuda or (is_pinned(tensor) and kwargs.get("non_blocking"))):
            gpu.note("wait", "to the GPU")
        host = tensor.as_subclass(Tensor)
        args = tuple("cpu" if isinstance(a, str | torch.device) else a for a in args)
        kwargs = {**kwargs, "copy": kwargs.get("copy") or not tensor.is_cuda}
        with gpu.in_order():
            moved = plain(host, *args, **kwargs)
        if moved is not host:
            gpu.touch([tensor], [on_gpu(moved)])
        return tensor if moved is host else on_gpu(moved)

    to.__name__ = "to"
    return to


# -- the Triton kernels ---------------------------------------------------------------------------


def install_kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replace the Triton kernels by doubles with their results. Returns the number of launches."""
    launches: Counter[str] = Counter()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> Any:
            gpu.note("kernel", function.__name__)
            launches[function.__name__] += 1
            changed = [args[index] for index in WRITTEN[function.__name__]]
            gpu.touch(tree_leaves(args), tree_leaves(changed))
            on, gpu.on = gpu.on, False
            try:
                return function(*args)
            finally:
                gpu.on = on

        return launch

    doubles = {f.__name__: counted(f) for f in (encode, add_up, move, add)}
    kernels = SimpleNamespace(make_table=list, **doubles)
    monkeypatch.setattr(message, "triton_kernels", lambda device, precision: kernels)
    return launches


WRITTEN = {"encode": (3, 4), "add_up": (1, 2), "move": (2, 4, 5), "add": (0,)}
"""Positions of the arguments that each kernel writes."""


def _codec(bits: int) -> Any:
    return next(kind() for kind in CODECS.values() if kind.bits == bits)


def _host(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


def encode(
    table: list[Tensor],
    error: Tensor | None,
    shared: Tensor,
    rows: Tensor,
    finite: Tensor,
    bits: int,
) -> None:
    values = torch.zeros(len(rows) * BLOCK)
    values[: len(shared)] = torch.cat([_host(t) for t in table]).float()
    if error is not None:
        values[: len(shared)] -= _host(error)
    values[: len(shared)] -= _host(shared)
    _host(finite).logical_and_(values.isfinite().all())
    _codec(bits).encode(values, _host(rows))


def add_up(updates: Tensor, errors: Tensor, rows: Tensor, bits: int) -> None:
    total = _host(errors)[: len(rows) * BLOCK]
    for update in _host(updates):
        _codec(bits).decode(update.contiguous(), total, add=True)
    encoded = torch.empty(rows.shape, dtype=torch.uint8)
    _codec(bits).encode(total, encoded)
    _host(rows).copy_(encoded)


def move(
    summands: Sequence[Tensor],
    sent: Tensor,
    shift: Tensor,
    weight: float,
    shared: Tensor,
    velocity: Tensor,
    factors: tuple[float, float, float],
    bits: int,
) -> Tensor:
    for index, rows in enumerate(summands):
        _codec(bits).decode(_host(rows).contiguous(), _host(shift), add=index > 0)
    own, squares = torch.empty(len(shift)), torch.zeros(len(sent), 2, dtype=torch.float64)
    _codec(bits).decode(_host(sent).contiguous(), own)
    for block in range(len(sent)):
        some = slice(block * BLOCK, (block + 1) * BLOCK)
        vectors = [_host(t)[some].numpy() for t in (shift, own, shared, velocity)]
        land(*vectors[:2], weight, *vectors[2:], *factors, squares[block].numpy())
    return on_gpu(squares)


def add(table: list[Tensor], error: Tensor | None, values: Tensor) -> None:
    assert error is None, "this double cannot round"
    for target, change in zip(table, values.split([len(t) for t in table]), strict=True):
        _host(target).add_(_host(change))
