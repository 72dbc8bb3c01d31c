"""The decisions of each strategy: ``averages``, ``due``, ``vote``, ``decide``.

On plain views of workers, without torch. ``test_conformance`` tests the resulting models.
"""

import itertools
import logging
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import DiLoCo, SelSync, StreamingAveraging
from offbeat.strategies.base import GlobalModel, Strategy, WorkerView
from offbeat.strategies.trigger import RelativeChange, ThresholdController
from strategies.decisions import UNREAD, Workers, summed_votes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GlobalModel(parts=0), "parts must be at least 1, got 0"),
        (lambda: GlobalModel(lands=-1), 'lands must be at least 0, or "arrived"; got -1'),
    ],
)
def test_impossible_shared_models_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# -- fixed schedules ------------------------------------------------------------------------------


class Lazy(Workers):
    """Workers whose tallies must not be read by ``decide``."""

    def __init__(self, strategy: Strategy, **view: Any) -> None:
        super().__init__(strategy, size=3, **view)
        decide = strategy.decide
        for view in self.views:
            assert decide(view, UNREAD)


@given(st.integers(1, 40), st.data())
def test_diloco_launches_each_fragment_once_a_period(period: int, data: Any) -> None:
    """Fragment p is launched after the steps t ≡ ⌊p·H/P⌋ (mod H), one in a round."""
    parts = data.draw(st.integers(1, period))
    workers = Lazy(DiLoCo(period=period, fragments=parts), count=parts)
    due = {q * period + p * period // parts for q in range(4) for p in range(1, parts + 1)}
    assert workers.launch_steps(3 * period) == [t for t in sorted(due) if t <= 3 * period]
    assert workers.views[0].launches == 3 * parts


@given(st.integers(1, 20), st.integers(1, 30))
def test_cyclic_streaming_passes_the_model_in_a_cycle(cycle: int, parts: int) -> None:
    """Every part is launched again within β = τ/2 steps, at equal intervals if P ≤ β."""
    strategy = StreamingAveraging(parts=parts, schedule="cyclic", staleness=2 * cycle)
    workers, launched, next_part = Lazy(strategy, count=parts), [0] * parts, 0
    for step in range(1, 4 * cycle + 1):
        launch = workers.step()
        for _ in range(int(launch or 0)):
            assert step - launched[next_part] <= cycle
            launched[next_part], next_part = step, (next_part + 1) % parts
    assert all(4 * cycle - last < cycle for last in launched)


# -- SelSync --------------------------------------------------------------------------------------


def norm_of(rank: int, step: int) -> float:
    """Return ‖g‖² on ``rank`` at ``step``: a slowly falling value with 30 % noise."""
    noise = random.Random(10_007 * rank + step).gauss(0, 1)
    return (1 + 10 / (1 + step / 50)) * math.exp(0.3 * noise)


class Play:
    """A training under SelSync with gradients of given norms, on N workers.

    Attributes:
        synced: Of each step, whether something is launched.
        flags: Of each step, whether the trigger of any worker has fired.
        thresholds: δ of each step.
    """

    def __init__(
        self,
        strategy: SelSync,
        steps: int,
        size: int = 3,
        norm: Callable[[int, int], float] = norm_of,
    ) -> None:
        self.workers = Workers(strategy, size)
        self.synced: list[bool] = []
        self.flags: list[bool] = []
        self.thresholds: list[float] = []
        for step in range(steps):
            launch = self.workers.step([norm(rank, step) for rank in range(size)])
            assert launch is not None, "there is a round in every step"
            records = [view.record for view in self.workers.views]
            assert len({record["threshold"] for record in records}) == 1
            self.synced.append(launch > 0)
            self.flags.append(any(record["flag"] for record in records))
            self.thresholds.append(records[0]["threshold"])

    def intervals(self) -> list[int]:
        """Return the steps between two synchronizations, the start and the end included."""
        at = [0, *(i for i, sync in enumerate(self.synced, 1) if sync), len(self.synced)]
        return [b - a for a, b in itertools.pairwise(at)]


@pytest.mark.parametrize(("size", "smoothing"), [(1, 0.01), (16, 0.16), (250, 1.0)])
def test_the_smoothing_grows_with_the_number_of_workers(size: int, smoothing: float) -> None:
    """a = N/100, at most 1: 0.16 for the paper's 16 workers."""
    own, given_ = (Play(SelSync(delta=0.3, smoothing=a), 30, size) for a in (None, smoothing))
    assert own.synced == given_.synced


@pytest.mark.parametrize("target", [0.5, 0.7, 0.9])
def test_the_target_share_of_local_steps_is_reached(target: float) -> None:
    """LSSR is target_lssr ± 0.05 over 300 steps, with the recursion for δ."""
    play = Play(SelSync(target_lssr=target, smoothing=0.3), 300)
    assert 1 - sum(play.synced) / 300 == pytest.approx(target, abs=0.05)
    assert set(play.thresholds[:2]) == {0.3}, "until a finite Δ is known"
    for k in range(3, 300):
        gain = max(0.1, 2 / math.sqrt(k - 1))
        ratio = math.exp(gain * (play.synced[k - 1] - (1 - target)))
        assert play.thresholds[k] == pytest.approx(play.thresholds[k - 1] * ratio, rel=1e-9)


@pytest.mark.parametrize("size", [2, 16, 64])
def test_by_default_nine_of_ten_steps_are_local(size: int) -> None:
    """This holds for any number of workers. A fixed δ = 0.3 fires never or always."""
    assert SelSync() == SelSync(target_lssr=0.9)
    play, fixed = Play(SelSync(), 400, size), Play(SelSync(delta=0.3), 400, size)
    assert 1 - sum(play.synced[200:]) / 200 == pytest.approx(0.9, abs=0.03)
    assert set(fixed.thresholds) == {0.3}
    if size < 16:
        assert not any(fixed.synced[200:])
    elif size == 64:
        assert sum(fixed.synced[200:]) > 180


@pytest.mark.parametrize("warmup_steps", [20, 100])
def test_after_a_warm_up_the_trigger_fires_as_often_as_wanted(warmup_steps: int) -> None:
    """During the warm-up δ follows the triggers, not the forced decisions."""
    play = Play(SelSync(target_lssr=0.9, warmup_steps=warmup_steps), warmup_steps + 150)
    own = play.synced[warmup_steps:]
    assert play.synced[:warmup_steps] == [True] * warmup_steps
    assert sum(own) / len(own) == pytest.approx(0.1, abs=0.04)
    assert own.index(True) < 40
    assert not all(play.flags[:warmup_steps])


@pytest.mark.parametrize("max_interval", [3, 6])
def test_with_a_short_interval_the_trigger_still_fires(max_interval: int) -> None:
    """At 10 % ± 3 of the steps, though intervals are shorter than 1/(1 − target_lssr)."""
    play = Play(SelSync(target_lssr=0.9, max_interval=max_interval), 300)
    assert sum(play.flags[100:]) / 200 == pytest.approx(0.1, abs=0.03)
    assert max(play.intervals()) == max_interval
    assert all(sync for sync, flag in zip(play.synced, play.flags, strict=True) if flag)


def test_a_norm_that_is_not_finite_sets_no_flag(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, logged once, and leaves m unchanged, because a GradScaler skips such steps."""

    def norm(rank: int, step: int) -> float:
        return math.nan if rank == 1 and step in (4, 5) else 1.0

    with caplog.at_level(logging.WARNING, logger="offbeat"):
        play = Play(SelSync(delta=0.3), 8, norm=norm)
    assert play.synced == [True] + [False] * 7
    assert [view.details.get("norms_not_finite") for view in play.workers.views] == [None, 2, None]
    (message,) = caplog.messages
    assert message.startswith("rank 1: the gradient is not finite at step 5")


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40),
    st.dictionaries(
        st.integers(0, 40), st.lists(st.sampled_from([math.nan, math.inf]), max_size=2)
    ),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_an_overflow_now_and_then_changes_nothing(
    values: list[float], bad: dict[int, list[float]], window: int | None
) -> None:
    """At most two in a row give Δ = 0, and do not affect the other steps."""
    clean, disturbed = RelativeChange(window), RelativeChange(window)
    for i, value in enumerate(values):
        for wrong in bad.get(i, []):
            assert disturbed.update(wrong, 0.3) == 0.0
        assert disturbed.update(value, 0.3) == clean.update(value, 0.3)
    assert disturbed == clean


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("times", [3, 50])
def test_after_many_norms_that_are_not_finite_it_starts_again(
    window: int | None, times: int
) -> None:
    """The old mean does not apply to a restored model: Δ = ∞, then as in a new training."""
    trigger, fresh = RelativeChange(window), RelativeChange(window)
    for value in (1e9, 2e9, 3e9):
        trigger.update(value, 0.1)
    assert [trigger.update(math.nan, 0.1) for _ in range(times)] == [0.0] * times
    found = [trigger.update(value, 0.1) for value in (1.0, 1.5, 1.2, 2.0)]
    assert found == [fresh.update(value, 0.1) for value in (1.0, 1.5, 1.2, 2.0)]
    assert found[0] == math.inf


@pytest.mark.parametrize("window", [None, 1, 3])
def test_changes_of_zero_and_without_memory(window: int | None) -> None:
    """0/0 is 0; the first gradient after zeros is an infinite change. Smoothing 1 has no memory."""
    trigger = RelativeChange(window)
    assert [trigger.update(s, 1.0) for s in (4.0, 1.0, 2.0)] == [math.inf, 0.75, 1.0]
    trigger = RelativeChange(window)
    assert [trigger.update(s, 0.5) for s in (0.0, 0.0, 2.0)] == [math.inf, 0.0, math.inf]


def test_controller_stays_bounded() -> None:
    """A trigger that always or never fires moves δ to a bound, from which it returns."""
    for fired in (True, False):
        controller = ThresholdController(0.5, 0.3)
        for _ in range(5000):
            controller.update(fired, 0.3)
        assert 1e-12 <= controller.delta <= 1e12
        extreme = controller.delta
        controller.update(not fired, 0.3)
        assert (controller.delta < extreme) == fired


# -- streaming averaging --------------------------------------------------------------------------


def streaming(size: int = 4, parts: int = 4, **options: Any) -> tuple[Any, Any]:
    """Return a strategy and the view of a worker that it drives."""
    strategy = StreamingAveraging(parts=parts, **options)
    view = WorkerView(size=size, count=parts, step=1)
    view.state = strategy.state(view)
    return strategy, view


def test_the_outer_momentum_never_grows_by_itself() -> None:
    """The mean step of the workers decreases when the fastest worker has finished."""
    strategy, view = streaming(size=3, outer_gain=3.0)
    for (stepping, steps), age in zip(
        ((3, 240.0), (2, 100.0), (2, 110.0)), (80, 0, 5), strict=True
    ):
        fade, ahead = strategy.outer_step(view, 0, summed_votes(stepping, (steps, 0.0, 0.0)))
        assert fade == pytest.approx(math.exp(-age / 50))
        assert ahead == pytest.approx(2 * (1 - fade))


def test_a_message_of_a_barrier_does_not_shorten_the_memory_of_the_momentum() -> None:
    """No worker steps then, so the votes say nothing about the steps since the last launch."""
    strategy, view = streaming(size=3, outer_gain=3.0)
    strategy.outer_step(view, 0, summed_votes(3, (240.0, 0.0, 0.0)))
    assert strategy.outer_step(view, 0, summed_votes(0, (0.0, 0.0, 0.0))) == (1.0, 0.0)
    fade, _ = strategy.outer_step(view, 0, summed_votes(3, (246.0, 0.0, 0.0)))
    assert fade == pytest.approx(math.exp(-2 / 50))


@pytest.mark.parametrize(
    ("size", "gain"), [(1, 1.0), (2, 0.5), (4, 0.5), (9, 0.75), (16, 1.0), (64, 1.0)]
)
def test_the_outer_step_of_lookahead_grows_with_the_number_of_workers(
    size: int, gain: float
) -> None:
    """Local steps are longer by as much as the outer step is shorter."""
    strategy, view = streaming(size, outer_gain="lookahead")
    lr = strategy.averages().outer.lr
    assert callable(lr)
    assert lr(size) == gain
    assert view.lr_factor == 1 / gain
    strategy.after_step(view)
    assert view.details["outer_gain"] == gain


def test_parts_are_as_many_as_pay() -> None:
    """16, or parts of 32 MiB in larger models, at most 1,024 of them."""
    sizes = (2**14, 2**29, 2**30, 2**36)
    parts = StreamingAveraging().averages().parts
    assert callable(parts)
    assert [parts(size) for size in sizes] == [16, 16, 32, 1024]
    assert StreamingAveraging(parts=9).averages().parts == 9
