"""PowerSGD: values, error feedback and unusual gradients."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loops import attach, close, sgd
from offbeat_lab import PowerSGD
from problems import flat, make_model
from strategies.low_rank_reference import LowRank, first_q
from worlds import simulated


class Several(nn.Module):
    """A convolution and a matrix, which are compressed with rank 2, and others that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(6, 3, 2, 2, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        self.matrix = nn.Parameter(torch.zeros(9, 8, dtype=torch.float64).t())
        self.small = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))


COMPRESSED = {0: (6, 12), 2: (8, 9)}
STEPS = 5


def gradient(rank: int, step: int, position: int, shape: Any) -> Tensor:
    """A random gradient."""
    random = np.random.default_rng([rank, step, position])
    return torch.from_numpy(random.standard_normal(shape))


def observe(rank: int, size: int) -> list[list[Tensor]]:
    """Return the means of each step."""
    model = Several()
    optimizer = sgd(model)
    means = []
    with attach(model, optimizer, PowerSGD(rank=2)):
        for step in range(STEPS):
            for i, p in enumerate(model.parameters()):
                p.grad = gradient(rank, step, i, p.shape)
            optimizer.step()
            means.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return means


def test_values_are_those_of_numpy() -> None:
    """Compares the means of every step with Algorithm 1 in numpy, which has the same Q and e."""
    size = 3
    results = simulated(observe, workers=size)
    references = {i: LowRank(first_q(i, m, 2), n, size) for i, (n, m) in COMPRESSED.items()}
    for step in range(STEPS):
        for i, p in enumerate(Several().parameters()):
            each = [gradient(rank, step, i, p.shape) for rank in range(size)]
            expected = sum(each) / size
            if i in references:
                arrays = [g.reshape(COMPRESSED[i]).numpy() for g in each]
                expected = torch.from_numpy(references[i].mean(arrays)).view(p.shape)
            for means in results:
                close(means[step][i], expected, 1e-10)


# -- unusual gradients and steps -------------------------------------------------------------------


class Unusual(nn.Module):
    """Matrices of several dtypes, and one whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype))

        self.coarse = zeros(8, 9, dtype=torch.bfloat16)
        self.fine = zeros(7, 6, dtype=torch.float64)
        self.pairs = zeros(6, 5, dtype=torch.complex64)
        self.rows = zeros(9, 8)
        self.missing = zeros(6, 7)
        self.partly = zeros(7, 7)
        self.vector = zeros(5, dtype=torch.float64)
        self.empty = zeros(0, 4)


def unusual(rank: int, size: int, autocast: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return means and e after one step with gradients of rank 1."""
    model = Unusual()
    optimizer = sgd(model)
    sync = attach(model, optimizer, PowerSGD(rank=1))
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    model.missing.grad = None
    model.rows.grad = model.rows.grad.to_sparse(1)
    if rank == 0:
        model.partly.grad = None
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        optimizer.step()
    errors = sync.state_dict()["state"]["errors"]
    means = {name: p.grad for name, p in model.named_parameters()}
    sync.finish()
    return means, {tuple(e.shape): e for e in errors}


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_every_kind_are_averaged(autocast: bool) -> None:
    """A missing gradient counts as zeros, and stays missing if no worker has one."""
    for rank, (means, errors) in enumerate(simulated(unusual, autocast, workers=3)):
        assert means["missing"] is None
        assert not errors[6, 7].any()
        assert means["rows"].is_sparse
        for name, p in Unusual().named_parameters():
            if name != "missing":
                assert means[name].dtype == p.dtype
                mean = (2 + 3) / 3 if name == "partly" else 2.0
                got = means[name].to_dense()
                torch.testing.assert_close(got, torch.full_like(p.detach(), mean))
        own = 0.0 if rank == 0 else rank + 1.0
        torch.testing.assert_close(errors[7, 7], torch.full((7, 7), own - 5 / 3))
        torch.testing.assert_close(errors[9, 8], torch.full((9, 8), rank + 1.0 - 2))


def pause(rank: int, size: int) -> dict[str, list[Tensor]]:
    """Return Q and e of rank 0 and 1 before and after rank 1 trains alone, or neither has M."""
    model = Several()
    optimizer = sgd(model)
    sync = attach(model, optimizer, PowerSGD(rank=2))
    seen: dict[str, list[Tensor]] = {}

    def step(number: int, *, missing: bool = False) -> None:
        for i, p in enumerate(model.parameters()):
            p.grad = None if missing and i == 2 else gradient(rank, number, i, p.shape)
        optimizer.step()

    def look(name: str) -> None:
        state = copy.deepcopy(sync.state_dict()["state"])
        seen[name] = [*state["q"], *state["errors"]]

    step(0)
    look("first")
    step(1, missing=True)  # the first matrix in the order of backward
    look("missing")
    if rank == 1:
        step(2)
        step(3)
    with sync.consensus():
        pass
    look("paused")
    sync.finish()
    return seen


def test_errors_stay_while_a_worker_or_a_gradient_is_missing() -> None:
    """Q changes on all workers with every mean of the matrix."""
    results = simulated(pause, workers=2)
    for rank, seen in enumerate(results):
        q, other_q, error, other_error = range(4)
        for kept in (q, error):
            assert torch.equal(seen["first"][kept], seen["missing"][kept])
        for changed in (other_q, other_error):
            assert not torch.equal(seen["first"][changed], seen["missing"][changed])
        for i in (error, other_error):
            assert torch.equal(seen["missing"][i], seen["paused"][i]) == (rank == 0)
        for i in (q, other_q):
            assert torch.equal(seen["paused"][i], results[0]["paused"][i])
            assert not torch.equal(seen["missing"][i], seen["paused"][i])


def overflow(rank: int, size: int) -> tuple[list[float], list[Tensor]]:
    """Return the model's norm after three steps, the second with an overflow on rank 1, and e."""
    model = make_model(0, torch.float32)
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", growth_interval=1000)
    sync = attach(model, optimizer, PowerSGD(rank=1), scaler=scaler)
    norms, errors = [], []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.ones(4, 4) * (rank + 1)
        loss = model(x).square().mean()
        scaler.scale(loss * (float("inf") if step == rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        norms.append(float(flat(model).norm()))
        errors.append(torch.cat([e.reshape(-1) for e in sync.state_dict()["state"]["errors"]]))
    sync.finish()
    return norms, errors


def test_a_step_that_a_scaler_skips_changes_neither_q_nor_e() -> None:
    for norms, errors in simulated(overflow, workers=3):
        assert norms[0] == norms[1] != norms[2]
        assert torch.equal(errors[0], errors[1])
        assert errors[2].isfinite().all()
        assert not torch.equal(errors[1], errors[2])
