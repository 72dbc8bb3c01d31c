"""Arguments that attach() refuses before anything is sent."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from loops import sgd
from offbeat.errors import AttachError
from offbeat.training.checks.compatibility import require_usable
from problems import make_model


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_attach_needs_a_process_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a launcher has started several processes, the error says how to get one."""
    monkeypatch.setenv(name, "2")
    model = make_model()
    with pytest.raises(AttachError, match=rf"init_process_group\(\).*torchrun .*{name}=2"):
        offbeat.attach(model, sgd(model), offbeat.BSP())


ARGUMENTS: list[tuple[Callable[[nn.Module], dict[str, Any]], type[Exception], str]] = [
    (
        lambda model: {"optimizer": sgd(make_model())},
        AttachError,
        "SGD holds no parameter of this.*ModuleList",
    ),
    (lambda model: {"optimizer": []}, AttachError, "at least one optimizer"),
    (
        lambda model: {"optimizer": [sgd(model[0]), sgd(make_model())]},
        AttachError,
        "SGD holds no parameter",
    ),
    (
        lambda model: {"optimizer": sgd(nn.ModuleList([model, nn.Linear(2, 2)]))},
        AttachError,
        r"also moves 2 tensor\(s\) that are not",
    ),
    (
        lambda model: {"optimizer": [sgd(model), sgd(model[0])]},
        AttachError,
        r"two optimizers both move parameter '\d\.",
    ),
    (
        lambda model: {"optimizer": torch.optim.LBFGS(model.parameters())},
        AttachError,
        r"LBFGS.*SGD or AdamW",
    ),
    (lambda model: {"optimizer": [object()]}, TypeError, "must be a torch"),
    (lambda model: {"strategy": "bsp"}, TypeError, r"got 'bsp'.*parse_strategy"),
    (lambda model: {"time_out": 3}, TypeError, "time_out"),
    (lambda model: {"scaler": object()}, TypeError, "torch.amp.GradScaler, got a object.* inside"),
    (lambda model: {"model": [model]}, TypeError, r"got a list.*nn\.ModuleList\("),
]


@pytest.mark.parametrize(("changes", "error", "why"), ARGUMENTS)
def test_wrong_arguments_are_refused(
    changes: Callable[[Any], dict[str, Any]], error: type[Exception], why: str
) -> None:
    """Pitfall 18: a typo is a TypeError. ``elastic/test_leaving`` tests time-outs."""
    model = make_model()
    given = {"model": model, "optimizer": sgd(model), "strategy": offbeat.BSP(), **changes(model)}
    with pytest.raises(error, match=why):
        offbeat.attach(**given)


class Holds(nn.Module):
    """A linear layer with an additional parameter or buffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if isinstance(tensor, nn.Parameter):
            self.odd = tensor
        else:
            self.register_buffer("odd", tensor)


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their API is a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (nn.Parameter(torch.ones(3, device="meta")), r"parameter 'odd' .* meta device.*to_empty"),
        (torch.ones(3, device="meta"), r"buffer 'odd' .* meta device"),
        (nn.UninitializedParameter(), "parameter 'odd' .* lazy module.*forward pass"),
        (nn.UninitializedBuffer(), "buffer 'odd' .* lazy module"),
        (nn.Parameter(of_inference(), False), "parameter 'odd' .*inference_mode.*clone"),
        (of_inference(), "buffer 'odd' .*inference_mode"),
        (nn.Parameter(torch.ones(3, 1).expand(3, 2)), "parameter 'odd' .* expanded.*clone"),
        (torch.ones(1).expand(3), "buffer 'odd' .* expanded"),
        (nn.Parameter(torch.ones(5).as_strided((3, 3), (1, 1))), "overlapping view"),
        (nn.Parameter(torch.ones(9).as_strided((2, 3, 2), (2, 2, 1))), "overlapping view"),
        (torch.ones(9).as_strided((3, 2), (2, 3)), "may be the same memory"),  # interleaved
        (torch.ones(3).to_sparse(), "buffer 'odd' .*sparse.*to_dense"),
        (nested(), "buffer 'odd' .* nested.*to_padded_tensor"),
        (torch.ones(3).to(torch.float8_e5m2), "buffer 'odd' .*8 bits.*bfloat16"),
        (nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn)), "parameter 'odd' .*8 bits"),
        (torch.ones(3).to(torch.uint16), "buffer 'odd' .*cannot send torch.uint16.*int64"),
        (quantized(), "buffer 'odd' .*cannot send torch.qint8.*float32"),
    ],
)
def test_tensors_that_cannot_be_written_are_refused(tensor: torch.Tensor, why: str) -> None:
    """The error has the name, the reason and the remedy.

    Frozen tensors count: they are copied at first.
    """
    model = Holds(tensor)
    with pytest.raises(AttachError, match=why):
        offbeat.attach(model, sgd(model.layer), offbeat.BSP())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, 3).t(),
        torch.ones(4, 6)[:, ::2],
        torch.ones(1, 3).expand(1, 3),
        torch.ones(3, 1).expand(3, 1),
        torch.ones(0, 3),
        torch.ones(0, 1).expand(0, 5),
        torch.ones(()),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(20).as_strided((3, 4), (2, 5)),
    ],
)
def test_other_strides_are_accepted(tensor: torch.Tensor) -> None:
    """Transposed, strided, channels-last and empty tensors can be written in place."""
    require_usable(Holds(tensor))
    require_usable(Holds(nn.Parameter(tensor)))


@pytest.mark.parametrize("name", ["0.weight", "queeu"])
def test_ddp_may_ignore_buffers_only(name: str) -> None:
    """A trained parameter would be averaged, and so would a buffer whose name is misspelt."""
    model = make_model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
    with pytest.raises(AttachError, match=rf"ignore '{name}', which is not a buffer.*outside"):
        offbeat.attach(model, sgd(model), offbeat.BSP())


def test_attach_inside_inference_mode_is_refused() -> None:
    """Tensors made there can never be written again."""
    model = make_model()
    inside = pytest.raises(AttachError, match=r"inside torch\.inference_mode")
    with inside, torch.inference_mode():
        offbeat.attach(model, sgd(model), offbeat.BSP())


ABILITIES: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("bsp", {"wire": "auto"}, ValueError, "wire must be .*, got 'auto'"),
    ("bsp", {"wire": "float16"}, ValueError, 'wire must be "float32", "int8", "int4"'),
    ("bsp", {"non_finite": "exclude"}, ValueError, 'non_finite must be "raise" or "warn"'),
    ("bsp", {"min_workers": 0}, ValueError, "min_workers must be at least 1, got 0"),
    ("bsp", {"min_workers": 1.5}, TypeError, "min_workers must be an integer"),
    ("bsp", {"min_workers": 1, "node_group": "auto"}, AttachError, "min_workers with node_group"),
]


@pytest.mark.parametrize(("text", "options", "error", "why"), ABILITIES)
def test_excluded_combinations_are_refused(
    text: str, options: dict[str, Any], error: type[Exception], why: str
) -> None:
    """They are refused before anything is sent: this test has no process group."""
    model = make_model()
    with pytest.raises(error, match=why):
        offbeat.attach(model, sgd(model), offbeat.parse_strategy(text), **options)


def test_several_optimizers_exclude_elastic_means_of_gradients() -> None:
    """The gradients are averaged one optimizer after the other."""
    model = make_model()
    optimizers = [sgd(model[0]), sgd(model[2:])]
    with pytest.raises(AttachError, match="min_workers with bsp and several optimizers"):
        offbeat.attach(model, optimizers, offbeat.BSP(), min_workers=1)


@pytest.mark.parametrize(
    ("text", "refused"), [("streaming", True), ("async", True), ("bsp", False)]
)
def test_parameters_that_share_memory_are_refused(text: str, refused: bool) -> None:
    """Parameters tied by ``.data`` would receive an update twice."""

    def work() -> None:
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight.data = model["a"].weight.data
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offbeat.attach(model, optimizer, offbeat.parse_strategy(text)).detach()

    if refused:
        with pytest.raises(AttachError, match=r"'a\.weight' and 'b\.weight' share memory"):
            offbeat.simulate(work, workers=2)
    else:
        offbeat.simulate(work, workers=2)
