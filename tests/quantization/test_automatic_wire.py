"""The automatic wire: no error is lost when its precision changes, and all workers choose alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.quantization.automatic_wire import AdaptiveWire
from offbeat.quantization.precision import PrecisionControl
from offbeat.quantization.wire import Precision
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Completed
from offbeat.transport.team import Team
from transport import communicators

ELEMENTS, SIZE = 5_003, 3
CONTROL = PrecisionControl("bfloat16", 3, 64, -1, True, "int8", 0.25, True)
ORDER: list[Precision] = ["int8", "bfloat16", "int8", "int8", "float32", "bfloat16", "float32"]


def on_wire(function: Callable[[AdaptiveWire, Team], Any]) -> list[Any]:
    def on(communicator: Communicator) -> Any:
        team = Team(communicator)
        return function(AdaptiveWire(team), team)

    return communicators.simulated(on)


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(10 * rank + step))


def exactly(step: int) -> Tensor:
    return sum(
        (inputs(rank, step).double() for rank in range(SIZE)), torch.zeros(ELEMENTS).double()
    )


def add_up(wire: AdaptiveWire, team: Team) -> list[Tensor]:
    results = []
    for step, precision in enumerate(ORDER):
        wire.control.precision = precision
        results.append(wire.sum(inputs(team.rank, step), stream="a", what="test").wait())
    return results


def test_errors_outlive_a_change_of_precision() -> None:
    """The error of one sum is part of the next, whatever its precision. The total is exact."""
    for results in on_wire(add_up):
        wanted = got = torch.zeros(ELEMENTS, dtype=torch.float64)
        for step, (precision, result) in enumerate(zip(ORDER, results, strict=True)):
            wanted, got = wanted + exactly(step), got + result
            missing = float((wanted - got).abs().max())
            if precision == "float32":
                assert missing < 1e-4
            else:
                assert 0.005 < missing < 0.2  # of a sum of three standard normal numbers


def abstain(wire: AdaptiveWire, team: Team) -> tuple[Tensor, Tensor]:
    wire.control.precision = "int8"
    first = wire.sum(inputs(team.rank, 0), stream="a", what="test").wait().clone()
    wire.control.precision = "float32"
    x = inputs(team.rank, 1)
    second = wire.sum(x, stream="a", what="test", contribute=team.rank != 1).wait().clone()
    third = wire.sum(torch.zeros(ELEMENTS), stream="a", what="test").wait()
    return first + second, third


def test_a_worker_that_does_not_contribute_keeps_its_errors() -> None:
    """The errors are part of its next contribution."""
    for early, rest in on_wire(abstain):
        wanted = exactly(0) + inputs(0, 1) + inputs(2, 1)
        assert float((wanted - early).abs().max()) > 1e-2
        torch.testing.assert_close((early + rest).double(), wanted, rtol=0, atol=1e-4)


def undo(wire: AdaptiveWire, team: Team, kinds: list[Precision]) -> list[Tensor]:
    wire.control.precision = "int8"
    first = wire.sum(inputs(team.rank, 0), stream="a", what="test", tentative=True).wait().clone()
    results = [first]
    for precision in kinds:
        wire.control.precision = precision
        for step in (7, 1):  # the first one is undone
            handle = wire.sum(inputs(team.rank, step), stream="a", what="test", tentative=True)
            result = handle.wait().clone()
            if step == 7:
                wire.undo("a")
        results.append(result)
    return results


@pytest.mark.parametrize("kinds", [["float32"], ["float32", "float32"], ["bfloat16", "float32"]])
def test_an_undone_sum_leaves_no_trace(kinds: list[Precision]) -> None:
    """Errors that an exact sum has carried are restored, too."""
    for results in on_wire(lambda wire, team: undo(wire, team, kinds)):
        wanted = exactly(0) + len(kinds) * exactly(1)
        got = sum(results, torch.zeros(ELEMENTS))
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-4)


def choices(wire: AdaptiveWire, team: Team, save: bool) -> list[Any]:
    """Play rounds of steps of 1 s. The last worker to arrive waits 0.3 s for the link."""
    waits, trace = [0.5, 0.3, 0.9], []
    for round in range(60):
        if save and round == 25:
            state = wire.state_dict()
            wire = AdaptiveWire(team)
            wire.load_state_dict(state)
        assert wire.measurements(round, stepping=False)[:2] == (0.0, 0.0)
        wire.sum(torch.zeros(ELEMENTS), stream="a", what="test").wait()
        if round != 40:  # in round 40 rank 2 takes no step, so its wait does not count
            tally = (3.0, 3.0 * 1.0, *waits)
        else:
            tally = (2.0, 2.0 * 1.0, waits[0], waits[1], float("inf"))
        wire.apply_measurements(Completed(tally))
        trace.append((wire.control.precision, wire.reason))
    return trace


def test_all_workers_make_the_same_choice() -> None:
    """After 16 steps, one round late, without tallies from before the change. Also if resumed."""
    (first, *others) = on_wire(lambda wire, team: choices(wire, team, False))
    assert all(other == first for other in others)
    kinds = [precision for precision, _ in first]
    # 17 rounds are decided when the 16th tally is evaluated. The next tally is outdated. After 16
    # more, int8 is reversed, because a step still takes 1 s. The next try comes 4 choices later.
    assert kinds[:16] == ["float32"] * 16
    assert kinds[16:33] == ["int8"] * 17
    assert kinds[33:] == ["float32"] * 27
    assert first[20][1] == ("the link made workers wait 30 % of the time in float32")
    (again, *_) = on_wire(lambda wire, team: choices(wire, team, True))
    assert [precision for precision, _ in again] == kinds


def saved(wire: AdaptiveWire, team: Team) -> Any:
    wire.control = replace(CONTROL)
    wire.measurements(5, stepping=True)
    team.host.sleep(2.0, "test")
    for tally in ((3.0, 3.0, 0.1, 0.2, 0.3), (4.0, 4.0, 0.3, 0.2, 0.1)):
        wire.apply_measurements(Completed(tally))
    state = wire.state_dict()
    other = AdaptiveWire(team)
    other.load_state_dict(state)
    team.host.sleep(1.0, "test")
    states = (state, other.state_dict())
    return other.control, other.measurements(9, stepping=True), states


def test_a_state_holds_choice_measurements_and_clock() -> None:
    for control, measured, (state, again) in on_wire(saved):
        assert control == CONTROL
        assert measured == (4.0, pytest.approx(3.0), 0.0, 0.0, 0.0)
        ((name, one),), ((_, two),) = state.items(), again.items()
        assert name == "the choice of a precision"
        assert torch.equal(one["summed"], two["summed"])
        # The last two are seconds since the last vote, and one more second has passed.
        assert torch.equal(one["sent"][:-2], two["sent"][:-2])
