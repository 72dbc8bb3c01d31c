"""Streaming averaging: what must hold of parts in flight, whatever rounds and whatever is late."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat import Compute, Network, StreamingAveraging, simulate
from offbeat.averaging import InFlight
from offbeat.averaging.cuts import cut_evenly
from offbeat.strategies.base import Roll
from offbeat.strategies.rate_control import PRECISIONS, Pace
from offbeat.strategies.roll import Ballot
from problems import OPTIMIZERS, flat, make_batch, make_model, make_wide, train_step, wide_loss
from worlds import run

WIRES = ["float32", "bfloat16", "int8", "int4", "int2"]


def observe(rank: int, size: int, text: str, wire: Any, steps: int) -> list[dict[str, Any]]:
    """What happens at each landing: x and P before and after, and u."""
    model = make_wide(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(text), wire=wire)
    worker = sync._worker
    seen: list[dict[str, Any]] = []
    for number, part in enumerate(worker.state.parts):
        land = part.land

        def landing(
            step: int, part: InFlight = part, number: int = number, land: Any = land
        ) -> bool:
            part.wait()
            part._find_tensors()
            bucket = part.buckets[0]
            before = torch.cat([t.reshape(-1) for t in bucket.tensors]).clone()
            update, base = part._updates[0], part.base[0].clone()
            u, mean = update.sent.whole(), update.wait().whole() / part.weight
            landed = bool(land(step))
            after = torch.cat([t.reshape(-1) for t in bucket.tensors]).clone()
            seen.append(
                {
                    **{"part": number, "x": before, "P": base, "u": u, "D": mean},
                    **{"x after": after, "P after": part.base[0].clone(), "w": part.weight},
                    **{"v": part.velocity[0].clone() if part.velocity else None},
                    **{"fade": part.fade, "ahead": part.ahead, "gain": worker.state.gain},
                }
            )
            return landed

        part.land = landing  # type: ignore[method-assign]
    for step in range(steps):
        optimizer.zero_grad()
        wide_loss(model, rank, step).backward()
        optimizer.step()
    sync.finish()
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "text",
    [
        "streaming:parts=3,schedule=cyclic,staleness=4,outer_gain=1",
        "streaming:parts=3,outer_gain=1",
    ],
)
def test_a_landing_keeps_the_mean_and_the_residual(text: str, wire: str) -> None:
    """P ← P + D is the same everywhere; Σ x stays, but for the second stage; x − P shrinks by u."""
    workers = run(observe, text, wire, 9, workers=3)
    assert len(workers[0]) > 6
    largest = max(float(landing["u"].abs().max()) for seen in workers for landing in seen)
    for number, one in enumerate(zip(*workers, strict=True)):
        landings: list[dict[str, Any]] = list(one)
        assert len({landing["part"] for landing in landings}) == 1, "in one order"
        first = landings[0]
        for landing in landings:
            assert torch.equal(landing["P after"], first["P after"]), number
            torch.testing.assert_close(landing["P after"], landing["P"] + landing["D"])
            torch.testing.assert_close(
                landing["x after"] - landing["P after"],
                landing["x"] - landing["P"] - landing["u"],
                rtol=1e-5,
                atol=1e-6,
            )
        # What rounding has taken from the sums is with their owners until the next time.
        # Who has finished, and has nothing to send any more, weighs nothing.
        exact = sum(landing["u"].double() for landing in landings) / first["w"]
        share = {"float32": 1e-6, "bfloat16": 2**-8, "int8": 1 / 127, "int4": 1 / 7, "int2": 1 / 7}
        assert float((first["D"] - exact).abs().max()) <= 1.2 * share[wire] * largest + 1e-7


def train(rank: int, size: int, text: str, steps: int) -> list[Tensor]:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    trace = []
    with offbeat.attach(model, optimizer, offbeat.parse_strategy(text), timeout_seconds=20):
        for step in range(steps):
            train_step(model, optimizer, make_batch(rank, step))
            trace.append(flat(model))
    return [*trace, flat(model)]


@pytest.mark.parametrize("staleness", [2, 6])
def test_one_part_is_asynchronous_averaging(staleness: int) -> None:
    """The cyclic schedule, over an exact wire: the same models after every step."""
    text = f"streaming:parts=1,schedule=cyclic,staleness={staleness},outer_gain=1"
    ours = run(train, text, 13, workers=3)
    theirs = run(train, f"async:staleness={staleness}", 13, workers=3)
    for a, b in zip(ours, theirs, strict=True):
        for one, other in zip(a, b, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def idle_of(bandwidth: str, parts: int, wire: Any, staleness: int = 64) -> Any:
    """The end of 40 steps of 10 ms on 4 workers with steps of unequal length."""

    def worker() -> Any:
        rank = dist.get_rank()
        model = make_wide(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = StreamingAveraging(parts=parts, staleness=staleness, outer_gain=1)
        sync = offbeat.attach(model, optimizer, strategy, wire=wire)
        for step in range(40):
            optimizer.zero_grad()
            wide_loss(model, rank, step).backward()
            optimizer.step()
        stats = sync.stats
        found = (stats.idle, dict(stats.details), stats.payload_bytes)
        sync.detach()
        return found

    network = Network(bandwidth, latency="100us")
    compute = Compute("10ms", jitter=0.1)
    return simulate(worker, workers=4, network=network, compute=compute).results


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["float32", "int4"])
@pytest.mark.parametrize("bandwidth", ["1Mbit/s", "10Mbit/s", "1Gbit/s"])
def test_nobody_waits(bandwidth: str, wire: str) -> None:
    """A model of 35 kB takes up to 0.4 s, which is 40 steps."""
    for idle, details, _ in idle_of(bandwidth, 4, wire):
        assert idle < 0.01
        assert details["landings"] > 2


def test_the_link_is_kept_busy() -> None:
    """With a fast link the whole model passes at every step or two; with a slow one a part."""
    fast = idle_of("1Gbit/s", 4, "float32")[0]
    slow = idle_of("3Mbit/s", 4, "float32")[0]
    assert fast[1]["landings"] > 40 * 4 / 1.6
    assert 4 <= slow[1]["landings"] < 40


@pytest.mark.parametrize("staleness", [3, 8])
def test_the_bound_is_kept(staleness: int) -> None:
    """Own steps past the last part that has landed; on a slow link workers wait there."""
    for idle, details, _ in idle_of("1Mbit/s", 2, "float32", staleness):
        assert details["staleness_max"] <= staleness
        assert idle > 0.3


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_parts_are_of_equal_bytes(parts: int) -> None:
    """They hold every number once, in order; a column of a transposed matrix stays whole."""
    model = make_wide(seed=0, norm=True)
    parameters = [torch.nn.Parameter(torch.arange(0.0)), *model.parameters()]
    cuts = [views() for views in cut_evenly(parameters, parts)]
    together = torch.cat([v.reshape(-1) for part in cuts for v in part])
    assert torch.equal(together, flat(model).to(together))
    sizes = [sum(v.numel() for v in part) for part in cuts]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    whole = torch.zeros(6, 4).t()
    (first,) = (views() for views in cut_evenly([whole], 2))
    assert first[0].shape == whole.shape


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("staleness=3,schedule=cyclic", "staleness must be even.*"),
        ("parts=0", "parts must be at least 1, got 0"),
        ("parts=many", "parts must be \"auto\", got 'many'"),
        ("outer_gain=0.5", "outer_gain must be finite and at least 1, got 0.5"),
    ],
)
def test_impossible_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        offbeat.parse_strategy(f"streaming:{text}")


# -- what it chooses by itself --------------------------------------------------------------------


def choices(
    bandwidth: str,
    strategy: Any = None,
    latency: str = "100us",
    steps: int = 60,
    wire: Any = "auto",
) -> list[dict[str, Any]]:
    """Details after 60 steps of 10 ms of a model of 280 kB, on 3 workers of unequal speed."""

    def worker() -> dict[str, Any]:
        rank = dist.get_rank()
        model = torch.nn.Linear(264, 264)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = offbeat.attach(model, optimizer, strategy, wire=wire)
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(4, 264, generator=torch.Generator().manual_seed(100 * rank + step))
            model(x).square().mean().backward()
            optimizer.step()
        found = dict(sync.stats.details)
        sync.finish()
        return found

    compute = Compute("10ms", jitter=0.1)
    network = Network(bandwidth, latency=latency)
    return simulate(worker, workers=3, network=network, compute=compute).results


def test_fewer_bits_over_a_slower_link() -> None:
    """With ``wire="auto"``; the same on all workers."""
    chosen = []
    for bandwidth in ("1Gbit/s", "20Mbit/s", "2Mbit/s"):
        wires = {one["wire"] for one in choices(bandwidth, steps=100)}
        assert len(wires) == 1
        chosen.append(PRECISIONS.index(wires.pop()))
    assert chosen[0] < PRECISIONS.index("int4") < chosen[2]
    assert chosen == sorted(chosen)


def test_how_often_the_model_passes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """No link is idle: each sends to two others, 2 bits a number and 4 bytes a block."""
    with caplog.at_level(logging.INFO, logger="offbeat"):
        found = choices("2Mbit/s", steps=150, wire=None)
    elements = 264 * 264 + 264
    seconds = 2 * elements * (2 + 32 / 512) / 2e6
    assert {"wire"}.isdisjoint(found[0])
    for one in found:
        assert one["pass_steps"] == pytest.approx(seconds / 0.01, rel=0.1)
    told = [one for one in caplog.messages if "passes every" in one]
    assert len(told) == 3, "once on each worker"
    assert all(one.startswith("the whole model (2 parts in int2) passes") for one in told)


def test_parts_are_as_many_as_pay() -> None:
    """At least 4 MiB each, 4 at most, but two of 64 KiB."""
    assert {one["parts"] for one in choices("1Gbit/s")} == {2}
    sizes = (2**16, 2**17 - 1, 2**17, 2**23, 3 * 2**22, 2**24, 2**30)
    assert [StreamingAveraging()._count(size) for size in sizes] == [1, 1, 2, 2, 3, 4, 4]
    assert StreamingAveraging(parts=9)._count(10e6) == 9


def test_precision_is_tried_and_taken_back() -> None:
    """More bits where the model passes at once; if that is too slow the next try comes later."""
    pace = Pace(precision="int8")
    assert not pace.choose(1.5, 5, 8, 2), "of twice the bits it would take three"
    assert pace.choose(1.2, 10, 8, 2)
    assert (pace.precision, pace.began, pace.landed) == ("bfloat16", 10, -2)
    assert pace.choose(3.0, 20, 8, 2), "in vain"
    assert pace.precision == "int8"
    waited = 0
    while not pace.choose(1.2, 30, 8, 2):
        waited += 1
    assert waited == 3, "four counts instead of one"
    assert not pace.choose(2.4, 40, 8, 2), "proved"
    assert not pace.choose(2.4, 50, 8, 2)
    assert pace.choose(20.0, 60, 8, 2)
    assert pace.precision == "int2", "no other is small enough"


def test_passes_are_counted_between_landings_of_one_precision() -> None:
    """A link that was full at any time was not free, though its window is open now."""
    pace = Pace(window=4, landed=-2, allowance=2.0)
    for step in (3, 5, 8, 10, 12, 14):
        assert pace.passes(step, 2, chooses=True) is None
        pace.resize([5] if step == 10 else [], 2, prompt=3)
        pace.land(step)
    assert (pace.began, pace.landed, pace.window) == (5, 4, 4)
    assert pace.passes(14, 2, chooses=True) == (14 - 5) * 2 / 4, "not 1: a part was late at step 10"
    pace.choose(4.5, 14, 4, 2)
    assert pace.landed == -2
    assert not pace.crowded


@pytest.mark.parametrize(
    ("window", "chooses", "passes"), [(4, True, 1.0), (3, True, 4.0), (4, False, 4.0)]
)
def test_a_link_is_free_where_the_window_is_open(window: int, chooses: bool, passes: float) -> None:
    """Then fewer bits would not help; who does not choose is told what was counted."""
    pace = Pace(window=window, landed=4, probing=False, allowance=2.0)
    assert pace.passes(8, 2, chooses=chooses) == passes


@pytest.mark.parametrize(("ages", "window"), [([], 9), ([0, 0], 9), ([1, 0], 6), ([2, 1, 1], 5)])
def test_the_window_opens_and_closes(ages: list[int], window: int) -> None:
    """By half of it while the link has never been full; by one if more than a fourth are late."""
    pace = Pace(window=6)
    pace.resize(ages, 8, prompt=1)
    assert pace.window == window
    pace.resize([], 8, prompt=1)
    assert pace.window == {9: 13, 6: 7, 5: 6}[window]


def test_no_more_is_sent_than_a_twentieth_of_the_time_allows() -> None:
    """A part that takes 4 ms to launch and land, in steps of 100 ms: 1.25; for nothing: all."""
    pace = Pace()
    for step in range(100):
        pace.step(0.1 * step, [0.002, 0.002] if step > 50 else [], 8)
        pace.allowance = 0.0
    pace.step(10.0, [0.002], 8)
    assert pace.allowance == pytest.approx(1.25)
    assert pace.step_seconds == pytest.approx(0.1)
    free = Pace()
    for step in range(3):
        free.step(0.1 * step, [], 8)
    assert free.allowance == 16, "no window is wider"


def test_launches_and_landings_cost_the_time_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ms and 8 ms: a part costs 12."""
    for name, seconds in (("launch", 0.004), ("land", 0.008)):
        real = getattr(InFlight, name)

        def slow(
            self: InFlight, *args: Any, real: Any = real, seconds: float = seconds, **given: Any
        ) -> Any:
            self._team.host.sleep(seconds, "rounding")
            return real(self, *args, **given)

        monkeypatch.setattr(InFlight, name, slow)

    def work() -> float:
        rank = dist.get_rank()
        model = make_wide(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with offbeat.attach(model, optimizer) as sync:
            for step in range(120):
                optimizer.zero_grad()
                wide_loss(model, rank, step).backward()
                optimizer.step()
            return float(sync._worker.state.pace.part_seconds)

    network = Network("1Gbit/s", latency="100us")
    for seconds in simulate(work, workers=2, network=network, compute=Compute("50ms")).results:
        assert seconds == pytest.approx(0.012, rel=0.12)


def test_time_is_not_lost_while_a_launch_is_agreed_on() -> None:
    """A part each 2.5 steps, asked for when there is time for one, launched two steps later."""
    pace, launched, asked = Pace(), 0, None
    for step in range(1, 1001):
        pace.step(0.1 * step, [0.00625], 2)
        if asked is not None and step == asked + 2:
            pace.allowance -= 1
            launched, asked = launched + 1, None
        if asked is None and pace.allowance >= 1:
            asked = step
    assert launched == pytest.approx(400, rel=0.02)


def test_a_part_that_was_kept_from_the_processor_counts_little() -> None:
    """Once 2.5 s instead of 2 ms: as four times what it costs, and so forgotten in some steps."""
    pace = Pace()
    for step in range(1, 41):
        pace.step(0.1 * step, [2.5 if step == 20 else 0.002], 8)
        if step == 20:
            assert pace.part_seconds == pytest.approx(0.004 * 1.3)
    assert pace.part_seconds == pytest.approx(0.004, rel=0.04)


# -- the outer gain -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["streaming:parts=2,schedule=cyclic,staleness=4,outer_gain=3", "streaming:parts=2"]
)
def test_the_outer_momentum_moves_all_alike(text: str) -> None:
    """v ← e^(−age/50)·v + D; P and x move by D + (G − 1)·(1 − e^(−age/50))·v."""
    workers = run(observe, text, "float32", 12, workers=4)
    velocity: dict[int, Tensor] = {}
    for one in zip(*workers, strict=True):
        landings: list[dict[str, Any]] = list(one)
        first = landings[0]
        kept = velocity.get(first["part"], torch.zeros_like(first["D"]))
        v = velocity[first["part"]] = first["fade"] * kept + first["D"]
        shift = first["D"] + first["ahead"] * v
        assert 0 <= first["ahead"] <= (4 - 1) * (1 - first["fade"]) + 1e-12
        for landing in landings:
            torch.testing.assert_close(landing["P after"], landing["P"] + shift)
            torch.testing.assert_close(
                landing["x after"], landing["x"] + shift - landing["u"], rtol=1e-5, atol=1e-6
            )
            assert torch.equal(landing["P after"], first["P after"])
    if "outer_gain" in text:
        assert all(landing["ahead"] > 0 for landing in workers[0])


def test_the_outer_momentum_never_grows_by_itself() -> None:
    """When a worker that was ahead has finished, the mean step of the others is an older one."""
    strategy = StreamingAveraging(outer_gain=3.0)
    worker = SimpleNamespace(size=3, state=SimpleNamespace(launched=[0.0], gain=1.0))
    ballot = Ballot(1.0, True, False, False, 0.0, 0, 0)
    found = [
        strategy._momentum(worker, 0, Roll(3, stepping, 0, 0, 0.0, ballot, (0.0, steps, 0.0, 0.0)))  # type: ignore[arg-type]
        for stepping, steps in ((3, 240.0), (2, 100.0), (2, 110.0))
    ]
    for (fade, ahead), age in zip(found, (80, 0, 5), strict=True):
        assert fade == pytest.approx(math.exp(-age / 50))
        assert ahead == pytest.approx(2 * (1 - fade))


def test_the_gain_is_that_of_coherence() -> None:
    """G = √(mean‖u‖²/‖D‖²): √N where what the workers do is noise, 1 where it is all the same."""

    def worker(noise: float) -> float:
        rank = dist.get_rank()
        model = torch.nn.Linear(1, 4096, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sync = offbeat.attach(model, optimizer, StreamingAveraging(parts=2), wire="float32")
        for step in range(40):
            random = torch.Generator().manual_seed(1000 * rank + step)
            own = torch.randn(4096, 1, generator=random)
            model.weight.grad = torch.ones(4096, 1) + noise * own
            optimizer.step()
        gain = float(sync.stats.details["outer_gain"])
        sync.finish()
        return gain

    def gains(noise: float) -> list[float]:
        place = {"network": Network("1Gbit/s"), "compute": Compute("10ms")}
        return simulate(lambda: worker(noise), workers=6, **place).results

    for noise in (0.1, 1.0, 30.0):
        found = gains(noise)
        # Of k steps together: mean‖u‖² = n·(k² + k·noise²), ‖D‖² = n·(k² + k·noise²/6), k from 1
        # to 3, and 4,096 numbers.
        ideal = [math.sqrt((k + noise**2) / (k + noise**2 / 6)) for k in (1, 3)]
        assert min(ideal) * 0.99 < found[0] < max(ideal) * 1.01
        assert found[0] <= math.sqrt(6)
        assert len(set(found)) == 1


# -- the end --------------------------------------------------------------------------------------


def ending(rank: int, size: int, wire: Any) -> tuple[Tensor, Tensor, list[Tensor], int]:
    """The model before ``finish``, P, the model afterwards, and bytes handed over by ``finish``.

    The last part lands in the last step, so that all that ``finish`` does is to end.
    """
    model = make_wide(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    strategy = StreamingAveraging(parts=2, schedule="cyclic", staleness=4, outer_gain=1.0)
    sync = offbeat.attach(model, optimizer, strategy, wire=wire)
    for step in range(10):
        optimizer.zero_grad()
        wide_loss(model, rank, step).backward()
        optimizer.step()
    state = sync.state_dict()  # lets what is under way arrive
    sync.load_state_dict(state)
    with sync.consensus():
        mean = flat(model)
    before = sync.stats.payload_bytes
    sync.finish()
    base = torch.cat([one for part in state["state"]["parts"] for one in part["base"]])
    return mean, base, [flat(model)], sync.stats.payload_bytes - before


@pytest.mark.parametrize("wire", ["float32", "int8", "int2"])
def test_the_end_is_the_mean_of_all_models(wire: str) -> None:
    """The same bits on all; over few bits off by what int8 takes of x − P, for fewer bytes."""
    results = run(ending, wire, workers=4)
    mean, base, _, sent = results[0]
    (end,) = results[0][2]
    for _, _, (other,), _ in results[1:]:
        assert torch.equal(end, other)
    if wire == "float32":
        torch.testing.assert_close(end, mean, rtol=1e-6, atol=1e-7)
        return
    residual = float((mean - base).abs().max())
    assert residual > 0
    assert float((end - mean).abs().max()) < 0.1 * max(residual, 1e-3)
    assert sent < 0.7 * 4 * mean.numel()
