"""What attach() refuses, before anything is sent."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import offbeat
from loops import sgd
from offbeat.strategies.base import Strategy, Worker
from problems import make_model


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


@dataclass(frozen=True, kw_only=True, repr=False)
class Pushes(Strategy):
    """A strategy that exchanges in a way of its own."""

    name = "pushes"
    averages = "nothing"

    def due(self, worker: Worker) -> bool:
        return False


def test_bad_wires_are_refused() -> None:
    """An unknown precision; any but float32 with a strategy that averages nothing."""
    model = make_model()
    with pytest.raises(
        ValueError, match='wire must be "float32", "bfloat16", "int8", "int4", "int2" or "auto"'
    ):
        offbeat.attach(model, sgd(model), offbeat.BSP(), wire="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='Pushes declares averages = "nothing"'):
        offbeat.attach(model, sgd(model), Pushes(), wire="int8")
