"""What can go wrong between attach and finish ends in one clear error on every worker."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from offbeat.strategies.base import Strategy
from problems import PARAMETERS, flat, loss_of, make_batch, make_model, train_step
from workers import run

EVERY = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=1),
    offbeat.SelSync(delta=0.0),
    offbeat.SelSync(delta=0.0, aggregate="gradients"),
    offbeat.AsyncAveraging(staleness=2),
    offbeat.AsyncAveraging(staleness=2, schedule="eager"),
]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def error_of(function: Callable[[], object]) -> tuple[list[str], str]:
    """Class names and text of the error that ``function`` raises."""
    try:
        function()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return [], "nothing was raised"


# -- workers that were not started alike ----------------------------------------------------------


def odd_one_out(rank: int, size: int) -> dict[str, tuple[list[str], str]]:
    """Rank 1 differs from the others in one thing at a time; at the end all are alike."""
    odd = rank == 1
    seen = {}

    def attempt(name: str, model: nn.Module, optimizer: Any, strategy: Strategy) -> None:
        seen[name] = error_of(
            lambda: offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
        )

    model = make_model()
    if odd:
        model[3] = nn.Linear(2, 3).double()
    attempt("shape", model, sgd(model), offbeat.BSP())
    model = make_model()
    attempt("setting", model, sgd(model), offbeat.LocalSGD(period=3 if odd else 2))
    attempt("strategy", model, sgd(model), offbeat.BSP() if odd else offbeat.LocalSGD(period=2))
    kind = torch.optim.AdamW if odd else torch.optim.SGD
    attempt("optimizer", model, kind(model.parameters(), lr=0.1), offbeat.BSP())
    model = make_model()
    model[0].bias.requires_grad_(not odd)
    attempt("frozen", model, sgd(model[1:]), offbeat.BSP())
    model = nn.Sequential(make_model(), *[nn.BatchNorm1d(1).double()] * odd)
    attempt("extra layer", model, sgd(model[0]), offbeat.BSP())
    model = make_model(dtype=torch.float32 if odd else torch.float64)
    optimizer = sgd(model)
    attempt("dtype", model, optimizer, offbeat.BSP())
    model.double()  # the same model and optimizer, repaired
    offbeat.attach(model, optimizer, offbeat.BSP(), timeout_seconds=20).finish()
    return seen


def test_unequal_workers_are_refused_everywhere_with_the_first_difference() -> None:
    """MismatchError on every rank names the rank and the first difference, and leaves no trace."""
    expected = {
        "shape": (r"parameter '3.weight': shape \(3, 2\)", r"parameter '3.weight': shape \(1, 2\)"),
        "setting": (r"strategy LocalSGD\(period=3\)", r"strategy LocalSGD\(period=2\)"),
        "strategy": (r"strategy BSP\(\)", r"strategy LocalSGD\(period=2\)"),
        "optimizer": ("optimizer 0: AdamW with 6 parameters", "optimizer 0: SGD with 6 parameters"),
        "frozen": ("parameter '0.bias': .*frozen", "parameter '0.bias': .*averaged"),
        "extra layer": ("parameter '1.weight': .*", "nothing more"),
        "dtype": ("parameter '0.weight': .*float32.*", "parameter '0.weight': .*float64.*"),
    }
    for seen in run(odd_one_out, workers=3):
        assert seen.keys() == expected.keys()
        for name, (theirs, ours) in expected.items():
            kinds, text = seen[name]
            assert kinds[:2] == ["MismatchError", "AttachError"], (name, text)
            pattern = f"rank 1 differs from rank 0: rank 1 has {theirs}.*; rank 0 has {ours}"
            assert re.match(pattern, text), (name, text)


# -- workers that die or get stuck ----------------------------------------------------------------


def meet(folder: str, rank: int, ranks: list[int]) -> None:
    """Wait until all of ``ranks`` are here; not through Offbeat and not through the group."""
    store = dist.FileStore(f"{folder}/meeting", -1)
    store.set(str(rank), "here")
    store.wait([str(other) for other in ranks], timedelta(seconds=40))


def die(rank: int, size: int, strategy: Strategy, folder: str) -> Any:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=15)
    started = time.perf_counter()

    def train() -> None:
        for step in range(40):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(model, optimizer, make_batch(rank, step))

    kinds, text = error_of(train)
    seconds = time.perf_counter() - started
    steps = sync.step
    after = flat(model)
    sync.detach()
    meet(folder, rank, [0, 2])
    return kinds, text, seconds, steps, bool(after.isfinite().all())


@pytest.mark.parametrize("strategy", EVERY, ids=str)
def test_a_dead_worker_is_named_by_every_survivor_within_seconds(
    strategy: Strategy, tmp_path: Path
) -> None:
    """Pitfalls 15 and 19: CommunicationError that names the dead rank and the operation."""
    results = run(die, strategy, str(tmp_path), workers=3, may_die=(1,))
    assert results[1] is None
    for rank in (0, 2):
        kinds, text, seconds, steps, finite = results[rank]
        assert kinds[0] == "CommunicationError", text
        assert re.match(rf"rank {rank}: .+ failed after \d+\.\d s: ", text), text
        assert re.search(r"flag exchange at step|mean of the|merge \d+ of the models", text), text
        assert "lost the connection to rank 1, which" in text
        assert seconds < 10, "far below timeout_seconds=15"
        assert 2 <= steps <= 6
        assert finite


def give_up(rank: int, size: int, folder: str) -> Any:
    """Rank 1 dies; who has noticed stays alive until all have, as one that saves its work does."""
    model = make_model(seed=rank)
    optimizer = sgd(model)
    sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=1), timeout_seconds=12)
    train_step(model, optimizer, make_batch(rank, 0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.perf_counter()
    kinds, text = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    seconds = time.perf_counter() - started
    sync.detach()
    meet(folder, rank, [0, 2, 3, 4])
    return kinds, text, seconds


def test_survivors_that_are_no_neighbours_of_the_dead_learn_soon_too(tmp_path: Path) -> None:
    """Pitfall 19: a worker that gives up and detaches does not leave others to their time-out."""
    results = run(give_up, str(tmp_path), workers=5, may_die=(1,))
    for rank in (0, 2, 3, 4):
        kinds, text, seconds = results[rank]
        assert kinds[0] == "CommunicationError", text
        assert "lost the connection to rank 1, which" in text, "and nobody else"
        assert seconds < 9, text


def go_on(rank: int, size: int, folder: str) -> dict[str, list[list[str]]]:
    """Rank 0 goes on stepping although rank 1 has left without finish()."""
    trainings = []
    for strategy in EVERY:
        model = make_model(seed=rank)
        optimizer = sgd(model)
        offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
        trainings.append((strategy, model, optimizer))
    meet(folder, rank, [0, 1])
    if rank == 1:
        return {}
    return {
        str(strategy): [
            error_of(lambda m=model, o=optimizer, s=step: train_step(m, o, make_batch(0, s)))[0]
            for step in range(6)
        ]
        for strategy, model, optimizer in trainings
    }


def test_no_step_succeeds_after_a_failure(tmp_path: Path) -> None:
    """Pitfall 15: who catches the error and goes on gets it again, in every later step."""
    seen = run(go_on, str(tmp_path), workers=2)[0]
    for strategy, steps in seen.items():
        failed = ["CommunicationError" in kinds for kinds in steps]
        first = failed.index(True)
        # the asynchronous merge in flight is noticed when it is needed; from then on all fail
        assert first <= 2, (strategy, failed)
        assert all(failed[first:]), (strategy, failed)


def get_stuck(rank: int, size: int, strategy: Strategy, folder: str) -> Any:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    offbeat.attach(model, optimizer, strategy, timeout_seconds=3)

    def train() -> None:
        for step in range(40):
            if rank == 1 and step == 3:
                meet(folder, rank, [0, 2])  # until the others have given up
            train_step(model, optimizer, make_batch(rank, step))

    result = error_of(train)
    if rank != 1:
        meet(folder, rank, [0, 2])
    return result


@pytest.mark.parametrize(
    "strategy",
    [offbeat.BSP(), offbeat.AsyncAveraging(staleness=2)],
    ids=str,
)
def test_a_stuck_worker_is_named_after_the_time_out(strategy: Strategy, tmp_path: Path) -> None:
    """Pitfall 19: CommunicationTimeout with operation, rank, seconds and the knob to turn."""
    results = run(get_stuck, strategy, str(tmp_path), workers=3)
    for rank in (0, 2):
        kinds, text = results[rank]
        assert kinds[:2] == ["CommunicationTimeout", "CommunicationError"], text
        assert "TimeoutError" in kinds
        found = re.match(
            rf"rank {rank}: (.+) failed after (\d+\.\d) s: no answer from rank 1,", text
        )
        assert found, text
        assert re.match(r"flag exchange at step|mean of the|merge \d+ of", found[1]), text
        assert 2.8 <= float(found[2]) <= 8, text
        assert "timeout_seconds=3: raise it in attach(..., timeout_seconds=...)" in text
    kinds, text = results[1]
    assert "CommunicationError" in kinds, "the one that was stuck must not go on alone"


# -- what attach refuses --------------------------------------------------------------------------


def test_attach_needs_a_process_group() -> None:
    """Without init_process_group the error says how to get one."""
    model = make_model()
    with pytest.raises(offbeat.AttachError, match=r"init_process_group\(\).*torchrun"):
        offbeat.attach(model, sgd(model), offbeat.BSP())


def test_attach_needs_an_optimizer_with_this_models_parameters() -> None:
    """An optimizer of another model, or none at all, is refused."""
    model = make_model()
    with pytest.raises(offbeat.AttachError, match="SGD holds no parameter of this model"):
        offbeat.attach(model, sgd(make_model()), offbeat.BSP())
    with pytest.raises(offbeat.AttachError, match="at least one optimizer"):
        offbeat.attach(model, [], offbeat.BSP())
    with pytest.raises(offbeat.AttachError, match="SGD holds no parameter"):
        offbeat.attach(model, [sgd(model[0]), sgd(make_model())], offbeat.BSP())


def test_attach_refuses_foreign_parameters() -> None:
    """An optimizer that moves other tensors as well would leave those unsynchronized."""
    model = make_model()
    both = [*model.parameters(), *nn.Linear(2, 2).parameters()]
    with pytest.raises(offbeat.AttachError, match=r"also moves 2 tensor\(s\) that are not"):
        offbeat.attach(model, torch.optim.SGD(both, lr=0.1), offbeat.BSP())


def test_attach_refuses_two_optimizers_on_one_parameter() -> None:
    """Each parameter belongs to one optimizer."""
    model = make_model()
    with pytest.raises(offbeat.AttachError, match=r"two optimizers both move parameter '\d\."):
        offbeat.attach(model, [sgd(model), sgd(model[0])], offbeat.BSP())


def test_attach_refuses_lbfgs() -> None:
    """LBFGS takes many steps in one step()."""
    model = make_model()
    with pytest.raises(offbeat.AttachError, match=r"LBFGS.*SGD or AdamW"):
        offbeat.attach(model, torch.optim.LBFGS(model.parameters()), offbeat.BSP())


def test_attach_refuses_a_strategy_given_as_text() -> None:
    """The text form is for parse_strategy, and the error says so."""
    model = make_model()
    with pytest.raises(TypeError, match=r"got 'bsp'.*parse_strategy"):
        offbeat.attach(model, sgd(model), "bsp")  # type: ignore[arg-type]


def test_attach_refuses_what_is_no_optimizer() -> None:
    """A scheduler, say, is a TypeError that shows what was given."""
    model = make_model()
    with pytest.raises(TypeError, match="must be a torch"):
        offbeat.attach(model, [object()], offbeat.BSP())  # type: ignore[list-item]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_attach_refuses_no_time_out(seconds: float) -> None:
    """Pitfall 19: the time-out is positive."""
    model = make_model()
    with pytest.raises(ValueError, match="timeout_seconds must be positive"):
        offbeat.attach(model, sgd(model), offbeat.BSP(), timeout_seconds=seconds)


def test_attach_refuses_an_unknown_argument() -> None:
    """Pitfall 18: a typo is a TypeError."""
    model = make_model()
    with pytest.raises(TypeError, match="time_out"):
        offbeat.attach(model, sgd(model), offbeat.BSP(), time_out=3)  # type: ignore[call-arg]


# -- what a synchronizer refuses ------------------------------------------------------------------


class TwiceSGD(torch.optim.SGD):
    """Evaluates its closure twice a step, as line searches do."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def misuse(rank: int, size: int) -> dict[str, tuple[list[str], str]]:
    """Every misuse of a synchronizer, on both workers; the training then goes on."""
    seen = {}
    model = make_model(seed=rank)
    optimizer = sgd(model)
    sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=2), timeout_seconds=20)

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        offbeat.attach(model, optimizer, offbeat.BSP(), timeout_seconds=20)

    other = make_model()
    seen["model twice"] = error_of(lambda: attach(model, sgd(model)))
    seen["optimizer twice"] = error_of(lambda: attach(nn.ModuleList([model, other]), optimizer))
    train_step(model, optimizer, make_batch(rank, 0))

    def nest() -> None:
        with sync.consensus():
            pass

    own = flat(model)
    with sync.consensus():
        seen["nested consensus"] = error_of(nest)
        mean = flat(model)
        loss_of(model, make_batch(rank, 1)).backward()
        seen["step inside consensus"] = error_of(optimizer.step)
        seen["clip inside consensus"] = error_of(lambda: sync.clip_grad_norm_(1.0))
        seen["finish inside consensus"] = error_of(sync.finish)
        assert torch.equal(flat(model), mean)
    assert torch.equal(flat(model), own)
    stranger = error_of(lambda: sync.clip_grad_norm_(1.0, sgd(other)))
    seen["clip a stranger"] = stranger
    train_step(model, optimizer, make_batch(rank, 1))
    assert sync.step == 2
    sync.finish()
    seen["consensus after finish"] = error_of(nest)

    model = make_model(seed=rank)
    optimizer = sgd(model[0])
    sync = offbeat.attach(model, optimizer, offbeat.BSP(), timeout_seconds=20)
    train_step(model, optimizer, make_batch(rank, 0))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    seen["group added"] = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    sync.detach()
    seen["consensus after detach"] = error_of(
        lambda: contextlib.ExitStack().enter_context(sync.consensus())
    )

    model = make_model(seed=rank)
    optimizer = TwiceSGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=1), timeout_seconds=20)
    seen["closure twice"] = error_of(
        lambda: optimizer.step(lambda: loss_of(model, make_batch(rank, 0)).backward())
    )
    sync.detach()
    assert flat(model).numel() == PARAMETERS
    return seen


def test_misuse_is_an_attach_error_that_says_what_to_do() -> None:
    """Attaching twice, looking or stepping at the wrong moment, a changed optimizer: refused."""
    expected = {
        "model twice": r"this Sequential is attached already: finish\(\) or detach\(\)",
        "optimizer twice": r"this SGD is attached already: finish\(\) or detach\(\)",
        "nested consensus": r"consensus\(\) inside consensus\(\)",
        "step inside consensus": r"a training step inside consensus\(\)",
        "clip inside consensus": r"inside consensus\(\)",
        "finish inside consensus": r"finish\(\) inside consensus\(\)",
        "clip a stranger": "not attached",
        "consensus after finish": r"consensus\(\) after finish\(\) or detach\(\)",
        "consensus after detach": r"consensus\(\) after finish\(\) or detach\(\)",
        "group added": r"parameter group was added.*attach again",
        "closure twice": "TwiceSGD calls its closure more than once",
    }
    for seen in run(misuse, workers=2):
        assert seen.keys() == expected.keys()
        for name, pattern in expected.items():
            kinds, text = seen[name]
            assert kinds[:1] == ["AttachError"], (name, text)
            assert re.search(pattern, text), (name, text)
