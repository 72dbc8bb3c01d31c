"""Longer steps of Adam: the factor against two real optimizers, the steps, options, checkpoints."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from loops import Sink, attach, close, error_of, restart, start
from offbeat.strategies.base import Strategy
from offbeat.training.learning_rate.adam_correction import factor_of
from offbeat_lab.baselines import STRATEGIES
from problems import flat, make_batch, make_model, train_step
from worlds import run, simulated

ADAMS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1),
}
# Nothing is averaged, so that a test sees local steps.
LOCAL = "local:period=1000"
LOOKAHEAD = "streaming:parts=1,schedule=cyclic,staleness=2000"


# -- the factor -----------------------------------------------------------------------------------


def moments(steps: int, workers: int, signal: float, betas: tuple[float, float]) -> Any:
    """Train a worker's Adam on noise, and one on the mean noise of all workers."""
    torch.manual_seed(steps)
    number, results = 20_000, []
    noise = torch.randn(steps, workers, number)
    mean = signal * torch.randn(number)
    for gradients in (noise[:, 0] + mean, noise.mean(1) + mean):
        parameter = nn.Parameter(torch.zeros(number))
        optimizer = torch.optim.Adam([parameter], betas=betas)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        results.append(optimizer.state[parameter])
    return results


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [1, 4, 16])
@pytest.mark.parametrize("signal", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    ("steps", "betas"), [(10, (0.9, 0.999)), (60, (0.9, 0.95)), (30, (0.5, 0.99))]
)
def test_the_factor_is_the_ratio_of_two_real_optimizers(
    workers: int, signal: float, steps: int, betas: tuple[float, float]
) -> None:
    own, mean = moments(steps, workers, signal, betas)
    v, v_mean = own["exp_avg_sq"].sum().item(), mean["exp_avg_sq"].sum().item()
    found = factor_of(v, own["exp_avg"].square().sum().item(), betas, steps, workers)
    assert found == pytest.approx(math.sqrt(v / v_mean), rel=0.06)
    assert 1 <= found <= math.sqrt(workers)


@pytest.mark.parametrize(
    ("v", "m_squared", "beta", "steps"),
    [
        *((v, m, 0.9, 50) for v, m in ((0.0, 0.0), (math.inf, 1.0), (math.nan, 1.0))),
        *((v, m, 0.9, 50) for v, m in ((1.0, math.nan), (1e-3, 1e3), (math.inf, math.inf))),
        (1.0, 0.5, 0.0, 50),  # without first moments
        (0.0, 0.0, 0.9, 0),  # a fused Adam that has skipped all steps
    ],
)
def test_the_factor_of_useless_moments_is_one(
    v: float, m_squared: float, beta: float, steps: int
) -> None:
    assert factor_of(v, m_squared, (beta, 0.999), steps, 4) == 1


# -- steps ----------------------------------------------------------------------------------------


def step_with(rank: int, size: int, kind: str, factor: float, strategy: str, longer: float) -> None:
    model = make_model(seed=rank)
    optimizer = ADAMS[kind](model.parameters())
    sync = attach(model, optimizer, strategy, adam_correction=True)
    duplicate = copy.deepcopy(model)
    reference = ADAMS[kind](duplicate.parameters())
    group = reference.param_groups[0]
    group["lr"] = group["lr"] * factor * longer
    if group["decoupled_weight_decay"]:
        group["weight_decay"] /= factor
    before = copy.deepcopy(optimizer.param_groups[0]["lr"])
    for step in range(3):
        sync.stats.details["lr_factor"] = [factor]
        for one, its in ((model, optimizer), (duplicate, reference)):
            train_step(one, its, make_batch(rank, step))
        close(flat(model), flat(duplicate), 1e-13)
        assert optimizer.param_groups[0]["lr"] == before
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    sync.detach()


@pytest.mark.parametrize("kind", ADAMS)
def test_a_step_has_the_longer_learning_rate_and_the_same_decoupled_decay(kind: str) -> None:
    run(step_with, kind, 1.75, LOCAL, 1.0, workers=2)


def test_streaming_averaging_doubles_the_steps_with_their_decay() -> None:
    """Its outer gain is ½, so the global model moves as far. A worker alone takes usual steps."""
    run(step_with, "adamw", 1.75, LOOKAHEAD, 2.0, workers=2)
    run(step_with, "adamw", 1.0, LOOKAHEAD, 1.0, workers=1)


def measured(rank: int, size: int) -> Any:
    """Train two groups and compute their factors by hand."""
    model, sink = make_model(seed=rank), Sink()
    parameters = [*model.parameters()]
    groups = [{"params": parameters[:2], "betas": (0.8, 0.9)}, {"params": parameters[2:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    sync = attach(model, optimizer, LOCAL, log=sink, adam_correction=True)
    factors = [1.0, 1.0]
    for step in range(30):
        train_step(model, optimizer, make_batch(rank, step))
        assert sink.records[-1]["lr_factor"] == pytest.approx(factors, rel=1e-9)
        if (step + 1) % 10:
            continue
        for i, group in enumerate(optimizer.param_groups):
            states = [optimizer.state[p] for p in group["params"]]
            v = sum(state["exp_avg_sq"].sum().item() for state in states)
            m = sum(state["exp_avg"].square().sum().item() for state in states)
            target = factor_of(v, m, group["betas"], step + 1, size)
            factors[i] = 0.9 * factors[i] + 0.1 * target
        assert sync.stats.details["lr_factor"] == pytest.approx(factors, rel=1e-9)
    assert all(1 < factor < math.sqrt(size) for factor in factors)
    sync.detach()
    return factors


def test_each_group_has_a_smoothed_factor_of_its_own() -> None:
    one, other = run(measured, workers=2)
    assert one[0] != one[1]
    assert one != other  # each worker measures its own gradients


def test_a_failed_step_does_not_lengthen_the_next_one() -> None:
    def worker(rank: int, size: int) -> None:
        model, optimizer, sync = start(rank, LOCAL, "adamw", adam_correction=True)
        train_step(model, optimizer, make_batch(rank, 0))
        sync.stats.details["lr_factor"] = [2.0]
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)  # after the hook with the factor
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            assert optimizer.param_groups[0]["lr"] == 0.02
        sync.detach()
        assert optimizer.param_groups[0]["lr"] == 0.01

    run(worker, workers=2)


@pytest.mark.parametrize("in_hook", [False, True])
def test_schedulers_and_sinks_see_the_scheduled_learning_rate(in_hook: bool) -> None:
    """Also in hooks that were registered before ``attach``."""

    def worker(rank: int, size: int) -> tuple[list[float], list[float]]:
        model, sink = make_model(seed=rank), Sink()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        rates, written = [], []
        if in_hook:
            optimizer.register_step_post_hook(lambda *_: schedule.step())
        sink.write = lambda record: written.append(optimizer.param_groups[0]["lr"])
        sync = attach(model, optimizer, "streaming", log=sink)
        for step in range(25):
            rates.append(optimizer.param_groups[0]["lr"])
            train_step(model, optimizer, make_batch(rank, step))
            if not in_hook:
                schedule.step()
        assert sync.stats.details["lr_factor"][0] > 1
        sync.finish()
        return rates, written

    for rates, written in run(worker, workers=2):
        assert rates == pytest.approx([0.01 * 0.9**i for i in range(25)])
        assert written == pytest.approx([0.01 * 0.9 ** (i + in_hook) for i in range(25)])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_groups_may_share_the_tensor_of_their_learning_rate(kind: Any) -> None:
    """Torch gives all groups the same tensor. Each has its factor, and the tensor stays as it is.

    With SGD the factors are those of the outer gain.
    """

    def worker(rank: int, size: int) -> list[Tensor]:
        ends = []
        for lr in (torch.tensor(0.01, dtype=torch.float64), 0.01):
            model = make_model(seed=0)
            groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
            optimizer = kind(groups, lr=lr)
            sync = attach(model, optimizer, "streaming:schedule=cyclic,staleness=2")
            for step in range(25):
                train_step(model, optimizer, make_batch(rank, step))
            assert all(group["lr"] is lr for group in optimizer.param_groups)
            assert lr == 0.01
            ends.append(flat(model))
            sync.detach()
        return ends

    for shared, own in simulated(worker, workers=2):
        close(shared, own)


def test_the_factor_does_not_follow_a_rarely_used_parameter() -> None:
    def worker(rank: int, size: int) -> float:
        rare, usual = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.AdamW([rare, usual])
        sync = attach(nn.ParameterList([rare, usual]), optimizer, LOCAL, adam_correction=True)
        torch.manual_seed(rank)
        for step in range(100):
            rare.grad = torch.zeros(1) if step >= 95 else None
            usual.grad = torch.ones(1000) + 0.3 * torch.randn(1000)
            optimizer.step()
        (found,) = sync.stats.details["lr_factor"]
        sync.detach()
        return found

    for found in simulated(worker, workers=4):
        # v = 1 + 0.09, and of the mean gradient of 4 workers 1 + 0.09 / 4
        want = math.sqrt(1.09 / 1.0225)
        assert 1 + 0.8 * (want - 1) * (1 - 0.9**10) < found < want


def test_two_optimizers_have_factors_of_their_own() -> None:
    def worker(rank: int, size: int) -> dict[str, Any]:
        model = make_model(seed=rank)
        parameters = [*model.parameters()]
        optimizers = [torch.optim.AdamW(parameters[:2]), torch.optim.NAdam(parameters[2:])]
        sync = attach(model, optimizers, "streaming")
        for step in range(11):
            model(make_batch(rank, step)[0]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        sync.finish()
        return sync.stats.details

    for details in run(worker, workers=2):
        assert details["lr_factor"][0] > 1
        assert details["lr_factor_1"][0] > 1


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "option", "active"),
    [
        ("streaming", "adamw", None, True),
        ("streaming", "adamw", False, False),
        ("streaming", "sgd", None, False),
        ("local:period=4", "adamw", None, True),
        ("local:period=4", "adamw", False, False),
        ("diloco:period=4", "adamw", True, True),
        ("async:staleness=4", "adamw", None, True),
        ("bsp", "adamw", None, False),
    ],
)
def test_it_is_on_if_adam_trains_and_models_are_averaged(
    text: str, kind: str, option: bool | None, active: bool
) -> None:
    def worker(rank: int, size: int) -> tuple[bool, str]:
        model, optimizer, sync = start(rank, text, kind, adam_correction=option)
        for step in range(10):
            train_step(model, optimizer, make_batch(rank, step))
        sync.finish()
        return "lr_factor" in sync.stats.details, repr(sync._iteration.flow.strategy)

    for found, strategy in run(worker, workers=2):
        assert found == active
        assert ("outer_gain='lookahead'" in strategy) == (active and text == "streaming")


@pytest.mark.parametrize(
    ("strategy", "make", "message"),
    [
        (offbeat.StreamingAveraging(), torch.optim.RMSprop, "adam_correction with RMSprop: it is"),
        (offbeat.BSP(), torch.optim.AdamW, "adam_correction with bsp: the workers average grad"),
        (
            offbeat.parse_strategy("easgd", STRATEGIES),
            torch.optim.AdamW,
            "adam_correction with easgd",
        ),
    ],
)
def test_it_is_refused_where_it_has_no_effect(strategy: Strategy, make: Any, message: str) -> None:
    def worker(rank: int, size: int) -> Any:
        model = make_model()
        return error_of(
            lambda: attach(model, make(model.parameters()), strategy, adam_correction=True)
        )

    for kinds, text in run(worker, workers=2):
        assert "AttachError" in kinds
        assert text.startswith(message)


# -- checkpoints ----------------------------------------------------------------------------------


def resumed(rank: int, size: int, again: bool) -> Tensor:
    def begin() -> tuple[nn.Module, Any, Any]:
        return start(rank, "streaming:schedule=cyclic,staleness=4", "adamw")

    model, optimizer, sync = begin()
    for step in range(45):
        if step == 25:
            saved = sync.state_dict()["stats"]["details"]["lr_factor"]
            assert saved[0] > 1
            if again:
                model, optimizer, sync = restart(model, optimizer, sync, begin)
        train_step(model, optimizer, make_batch(rank, step))
    sync.detach()
    return flat(model)


def test_a_checkpoint_continues_with_the_same_factors() -> None:
    whole, parts = (simulated(resumed, again, workers=2) for again in (False, True))
    assert all(map(torch.equal, whole, parts))
