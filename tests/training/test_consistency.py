"""Comparison of the workers at ``attach``, and the copy of rank 0's model."""

import re
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from loops import attach, error_of, everything, sgd
from offbeat.strategies.base import Strategy
from offbeat.training.checks import same_setup
from offbeat.training.checks.same_setup import require_same_setup
from offbeat.transport.connect import open_communicator
from problems import make_batch, make_model, train_step
from worlds import real, run


class Mixed(nn.Module):
    """Trainable, frozen and batch-norm tensors, all drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 3).double()
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("count", torch.tensor(100 + seed))
        self.register_buffer("empty", torch.empty(0))
        with torch.no_grad():
            self.norm.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(self.first(x))).sum(1, keepdim=True)


def start(rank: int, size: int) -> Any:
    model = Mixed(seed=rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    begin = everything(model)
    frozen = [p.detach().clone() for p in model.frozen.parameters()]
    train_step(model, optimizer, make_batch(rank, 0))
    sync.finish()
    same = [torch.equal(p, f) for p, f in zip(model.frozen.parameters(), frozen, strict=True)]
    return begin, same, sync.stats.payload_bytes


def test_everyone_starts_from_rank_0_and_frozen_parameters_stay() -> None:
    """All parameters and buffers are copied from rank 0; frozen ones never change."""
    want = everything(Mixed(seed=0))
    for rank, (begin, same, payload) in enumerate(run(start, workers=3)):
        for got, expected in zip(begin, want, strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        assert same == [True, True]
        # one mean of first (15), norm (6), running mean and variance (6); 2 votes; at the end the
        # mean of the last two again (6), 2 integers, and rank 0's mask
        assert payload == 8 * (15 + 6 + 6 + 6) + 8 * 2 + 2 * 8 * 8 + 3 * (rank == 0)


def odd_one_out(rank: int, size: int) -> dict[str, tuple[list[str], str]]:
    """Let rank 1 differ from the others in one thing at a time; finally nothing differs."""
    odd = rank == 1
    seen = {}

    def attempt(
        name: str, model: nn.Module, optimizer: Any, strategy: Strategy, **options: Any
    ) -> None:
        seen[name] = error_of(lambda: attach(model, optimizer, strategy, **options))

    model = make_model()
    if odd:
        model[3] = nn.Linear(2, 3).double()
    attempt("shape", model, sgd(model), offbeat.BSP())
    model = make_model()
    attempt("setting", model, sgd(model), offbeat.LocalSGD(period=3 if odd else 2))
    attempt("strategy", model, sgd(model), offbeat.BSP() if odd else offbeat.LocalSGD(period=2))
    kind = torch.optim.AdamW if odd else torch.optim.SGD
    attempt("optimizer", model, kind(model.parameters(), lr=0.1), offbeat.BSP())
    model, wire = make_model(), "int8" if odd else "float32"
    attempt("wire", model, sgd(model), offbeat.BSP(), wire=wire)
    adam = torch.optim.AdamW(model.parameters())
    attempt("adam", model, adam, offbeat.LocalSGD(period=9), adam_correction=odd)
    model[0].bias.requires_grad_(not odd)
    attempt("frozen", model, sgd(model[1:]), offbeat.BSP())
    model = nn.Sequential(make_model(), *[nn.BatchNorm1d(1).double()] * odd)
    attempt("extra layer", model, sgd(model[0]), offbeat.BSP())
    model = make_model()
    if odd:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    attempt("layout", model, sgd(model), offbeat.LocalSGD(period=2))
    model = make_model(dtype=torch.float32 if odd else torch.float64)
    optimizer = sgd(model)
    attempt("dtype", model, optimizer, offbeat.BSP())
    model.double()  # the same model and optimizer, repaired
    attach(model, optimizer, offbeat.BSP()).finish()
    return seen


def test_unequal_workers_are_refused_everywhere_with_the_first_difference() -> None:
    """MismatchError on every rank names the rank and the first difference. No state remains."""
    expected = {
        "shape": (r"parameter '3.weight': shape \(3, 2\)", r"parameter '3.weight': shape \(1, 2\)"),
        "setting": (r"strategy LocalSGD\(period=3\)", r"strategy LocalSGD\(period=2\)"),
        "strategy": (r"strategy BSP\(\)", r"strategy LocalSGD\(period=2\)"),
        "optimizer": (r"optimizer 0: AdamW with groups of \[6\]", "optimizer 0: SGD with gr"),
        "wire": ("wire 'int8'", "wire 'float32'"),
        "adam": ("adam_correction True", "adam_correction False"),
        "frozen": ("parameter '0.bias': .*frozen", "parameter '0.bias': .*averaged"),
        "extra layer": ("parameter '1.weight': .*", "nothing more"),
        "layout": (r"parameter '0.weight' with the strides \(1, 5\) .*", "nothing more"),
        "dtype": ("parameter '0.weight': .*float32.*", "parameter '0.weight': .*float64.*"),
    }
    for seen in run(odd_one_out, workers=3):
        assert seen.keys() == expected.keys()
        for name, (theirs, ours) in expected.items():
            kinds, text = seen[name]
            assert kinds[:2] == ["MismatchError", "AttachError"], (name, text)
            pattern = f"rank 1 differs from rank 0: rank 1 has {theirs}.*; rank 0 has {ours}"
            assert re.match(pattern, text), (name, text)


def another_protocol(rank: int, size: int, protocols: list[int]) -> tuple[list[str], str]:
    communicator = open_communicator(None, 20, what="a test")
    old, same_setup.PROTOCOL = same_setup.PROTOCOL, protocols[rank]
    try:
        return error_of(lambda: require_same_setup(communicator, ["the same"]))
    finally:
        same_setup.PROTOCOL = old
        communicator.close()


def test_workers_of_other_protocols_are_refused() -> None:
    """Versions of Offbeat with different messages must not train together."""
    for kinds, text in real(another_protocol, [1, 2], workers=2):
        assert "AttachError" in kinds
        assert text == (
            "rank 1 differs from rank 0: rank 1 has protocol 2; rank 0 has protocol 1; install the "
            "same version of offbeat everywhere"
        )
