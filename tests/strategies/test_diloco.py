"""DiLoCo against its definition, written out over lists of tensors, and against torch's SGD."""

import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import DiLoCo, LocalSGD, simulate
from offbeat.strategies.base import Strategy
from problems import OPTIMIZERS, PARAMETERS, Simulated, flat, make_batch, make_model
from problems import train_step as take_step
from worlds import run

ROLL_BYTES = 7 * 8

# The parameters of make_model() by name have 5, 20, 2, 10, 1 and 2 elements. Cut by hand into
# parts of about equal size; the names are in the order of the model's own list but for 0 and 1.
FRAGMENTS = {
    1: [["0.bias", "0.weight", "2.bias", "2.weight", "3.bias", "3.weight"]],
    2: [["0.bias", "0.weight"], ["2.bias", "2.weight", "3.bias", "3.weight"]],
    3: [["0.bias"], ["0.weight", "2.bias"], ["2.weight", "3.bias", "3.weight"]],
    6: [["0.bias"], ["0.weight"], ["2.bias"], ["2.weight"], ["3.bias"], ["3.weight"]],
}


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class Sink:
    """Keeps the records of all steps."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None: ...


def train(
    rank: int,
    size: int,
    strategy: Strategy,
    counts: Sequence[int],
    looks: Sequence[Sequence[int]] = (),
    kind: str = "momentum",
) -> dict[str, Any]:
    """Own seed, own data, ``counts[rank]`` steps, a consensus after the steps in ``looks``."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sink = Sink()
    sync = offbeat.attach(model, optimizer, strategy, log=sink, timeout_seconds=20)
    trace, seen = [], []
    for step in range(1, counts[rank] + 1):
        take_step(model, optimizer, make_batch(rank, step - 1))
        trace.append(flat(model))
        if looks and step in looks[rank]:
            with sync.consensus():
                seen.append(flat(model))
    payload = sync.stats.payload_bytes
    sync.finish()
    return {
        "trace": trace,
        "seen": seen,
        "end": flat(model),
        "payload": payload,
        "stats": sync.stats,
        "records": sink.records,
    }


def reference(
    strategy: DiLoCo, counts: Sequence[int], kind: str = "momentum"
) -> tuple[list[list[Tensor]], Tensor]:
    """Every worker's model after each step, and at the end, parameter by parameter."""
    h, k, parts = strategy.period, strategy.overlap, FRAGMENTS[strategy.fragments]
    eta, mu, size = strategy.outer_lr, strategy.outer_momentum, len(counts)
    sim = Simulated.start(size, kind)
    x = [dict(model.named_parameters()) for model in sim.models]
    theta = {name: p.detach().clone() for name, p in x[0].items()}
    v = {name: torch.zeros_like(p) for name, p in theta.items()}
    news = [[False] * size for _ in parts]
    flights: list[Any] = []  # (step at which it lands, Δ by name, snapshot by name and worker)
    trace = []

    def land(due: int) -> None:
        for flight in [f for f in flights if f[0] <= due]:
            flights.remove(flight)
            _, delta, snapshot = flight
            for name, d in delta.items():
                v[name] = mu * v[name] + d
                theta[name] = theta[name] - eta * (d + mu * v[name])
                for own, before in zip(x, snapshot, strict=True):
                    with torch.no_grad():
                        own[name].copy_(theta[name] + (own[name] - before[name]))

    for t in range(1, max(counts) + 1):
        for rank in range(size):
            if t <= counts[rank]:
                take_step(sim.models[rank], sim.optimizers[rank], make_batch(rank, t - 1))
                for one in news:
                    one[rank] = True
        land(t)
        for p, names in enumerate(parts, 1):
            if t % h == (p * h // len(parts)) % h:
                taking = [n for n in range(size) if news[p - 1][n]]
                news[p - 1] = [False] * size
                delta = {
                    name: sum(theta[name] - x[n][name].detach() for n in taking) / len(taking)
                    for name in names
                }
                snapshot = [{name: own[name].detach().clone() for name in names} for own in x]
                flights.append((t + k, delta, snapshot))
        land(t)
        trace.append(sim.flat())
    land(t + k)
    moved = [float(any(one[n] for one in news)) for n in range(size)]
    if any(moved):
        sim.average(moved)
    return trace, sim.flat()[0]


def compare(strategy: DiLoCo, counts: Sequence[int], kind: str = "momentum") -> list[Any]:
    trace, end = reference(strategy, counts, kind)
    results = run(train, strategy, counts, (), kind, workers=len(counts))
    for rank, result in enumerate(results):
        assert len(result["trace"]) == counts[rank]
        for step, got in enumerate(result["trace"]):
            close(got, trace[step][rank])
        close(result["end"], end)
        assert torch.equal(result["end"], results[0]["end"]), "finish leaves all the same bits"
    return results


@pytest.mark.parametrize("kind", ["momentum", "adamw"])
@pytest.mark.parametrize(("outer_lr", "outer_momentum"), [(0.7, 0.9), (0.4, 0.0)])
def test_outer_steps_follow_the_definition(
    kind: str, outer_lr: float, outer_momentum: float
) -> None:
    """Δ = mean(θ − x); v ← μv + Δ; θ ← θ − η_o(Δ + μv); x ← θ, over three rounds and a rest."""
    strategy = DiLoCo(period=5, outer_lr=outer_lr, outer_momentum=outer_momentum)
    for result in compare(strategy, [17] * 3, kind):
        assert [r["decision"] == "sync" for r in result["records"]] == [
            t % 5 == 0 for t in range(1, 18)
        ]
        means = 8 * PARAMETERS + ROLL_BYTES
        assert result["payload"] == 3 * means, "nothing is sent within a period"
        assert result["stats"].payload_bytes == 4 * means, "the rest is averaged by finish"
        assert result["stats"].details == {"launched": 3, "applied": 3}


def test_it_is_torch_sgd_with_nesterov_momentum() -> None:
    """torch.optim.SGD(nesterov=True) on θ with the gradient mean(θ − x) gives the same θ."""
    results = run(train, DiLoCo(period=4), [16] * 3, workers=3)
    sim = Simulated.start(3, "momentum")
    theta = nn.Parameter(sim.flat()[0])
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(16):
        sim.step(step)
        if step % 4 == 3:
            theta.grad = sum(theta.detach() - x for x in sim.flat()) / 3
            outer.step()
            for model in sim.models:
                nn.utils.vector_to_parameters(theta.detach().clone(), model.parameters())
        for rank, result in enumerate(results):
            close(result["trace"][step], sim.flat()[rank])


@pytest.mark.parametrize("counts", [[12, 12, 12], [10, 10, 10], [4, 11, 6], [9, 2, 1]])
def test_outer_one_zero_is_local_sgd(counts: list[int]) -> None:
    """outer_lr=1, outer_momentum=0 is LocalSGD of the same period, to rounding."""
    expected = run(train, LocalSGD(period=4), counts, workers=3)
    strategy = DiLoCo(period=4, outer_lr=1.0, outer_momentum=0.0)
    for got, want in zip(run(train, strategy, counts, workers=3), expected, strict=True):
        close(torch.stack(got["trace"]), torch.stack(want["trace"]))
        close(got["end"], want["end"])


def test_whole_periods_end_with_theta() -> None:
    """After a multiple of H steps every worker holds θ already: finish sends nothing but a roll."""
    for result in run(train, DiLoCo(period=4), [12] * 3, workers=3):
        assert torch.equal(result["end"], result["trace"][-1])
        assert result["stats"].payload_bytes == result["payload"] + ROLL_BYTES


@pytest.mark.sampled
@pytest.mark.parametrize("counts", [[3, 17, 9], [13, 2, 4], [0, 8, 5]])
@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (3, 0), (1, 2), (3, 2)])
def test_uneven_counts(counts: list[int], fragments: int, overlap: int) -> None:
    """A finished worker's last window counts once in each fragment; then its weight is 0."""
    compare(DiLoCo(period=5, fragments=fragments, overlap=overlap), counts)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("period", "fragments", "overlap"),
    [(4, 2, 0), (5, 2, 0), (7, 3, 0), (6, 6, 0), (5, 1, 3), (7, 3, 1), (7, 3, 6), (6, 6, 5)],
)
def test_fragments_take_turns(period: int, fragments: int, overlap: int) -> None:
    """Fragment p after steps ⌊pH/P⌋ (mod H), each every H steps; applied k steps later."""
    strategy = DiLoCo(period=period, fragments=fragments, overlap=overlap)
    total = 3 * period + 1
    results = compare(strategy, [total] * 3)
    names = [name for name, _ in make_model().named_parameters()]
    sizes = dict(zip(names, (p.numel() for p in make_model().parameters()), strict=True))
    steps: dict[int, list[int]] = {p: [] for p in range(1, fragments + 1)}
    for record in results[0]["records"]:
        sent = 0
        if "fragment" in record:
            steps[record["fragment"]].append(record["step"])
            part = FRAGMENTS[fragments][record["fragment"] - 1]
            sent = 8 * sum(sizes[name] for name in part) + ROLL_BYTES
        assert record["payload_bytes"] == sent
        assert (record["decision"] == "sync") == ("applied" in record)
    for p, when in steps.items():
        due = [q * period + p * period // fragments for q in range(4)]
        assert when == [t for t in due if t <= total]
        landed = [r["step"] for r in results[0]["records"] if r.get("applied") == p]
        assert landed == [t + overlap for t in when if t + overlap <= total]
    if overlap:
        return
    for t in range(1, total + 1):  # a fragment is alike on all workers after its step alone
        models = [result["trace"][t - 1] for result in results]
        offset = 0
        for name in names:
            values = [model[offset : offset + sizes[name]] for model in models]
            offset += sizes[name]
            (p,) = (p for p, part in enumerate(FRAGMENTS[fragments], 1) if name in part)
            same = all(torch.equal(value, values[0]) for value in values)
            assert same == (t in steps[p]), f"{name} after step {t}"


@pytest.mark.parametrize(("overlap", "wire"), [(0, "float32"), (3, "float32"), (3, "int8")])
def test_nobody_waits_for_what_overlaps(overlap: int, wire: Any) -> None:
    """The sum travels for k steps unnoticed; without overlap every worker waits for it."""

    def worker() -> float:
        model = nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = offbeat.attach(model, optimizer, DiLoCo(period=5, overlap=overlap), wire=wire)
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
        waited = sync.stats.wait_seconds
        sync.finish()
        return waited

    network = offbeat.Network("8Mbit/s", latency="1ms")  # 40 kB on 2 workers: about 43 ms
    compute = offbeat.Compute("20ms")
    for waited in simulate(worker, workers=2, network=network, compute=compute).results:
        if overlap:
            assert waited == 0
        else:
            assert 4 * 0.04 < waited < 4 * 0.06


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (3, 0), (3, 2), (1, 4)])
def test_consensus_is_the_mean_and_looking_changes_nothing(fragments: int, overlap: int) -> None:
    """Inside, the mean of the models as they are, whatever is in flight; training goes on alike."""
    strategy = DiLoCo(period=5, fragments=fragments, overlap=overlap)
    plain = run(train, strategy, [18] * 3, workers=3)
    looked = run(train, strategy, [18] * 3, [range(1, 19)] * 3, workers=3)
    for a, b in zip(looked, plain, strict=True):
        assert torch.equal(torch.stack(a["trace"]), torch.stack(b["trace"]))
        assert torch.equal(a["end"], b["end"])
        assert a["stats"].payload_bytes == b["stats"].payload_bytes
    for step in range(18):
        mean = sum(result["trace"][step] for result in plain) / 3
        for result in looked:
            close(result["seen"][step], mean)
            assert torch.equal(result["seen"][step], looked[0]["seen"][step])
    if not overlap:
        close(looked[0]["seen"][-1], plain[0]["end"])  # what was evaluated is what finish gives


@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 0), (1, 3), (3, 4)])
def test_consensus_after_different_numbers_of_steps(fragments: int, overlap: int) -> None:
    """A worker that is early answers the others' rounds, without an end to its own schedule."""
    strategy = DiLoCo(period=5, fragments=fragments, overlap=overlap)
    looks = [[2, 9], [14, 15], [7, 18]]
    results = run(train, strategy, [16, 21, 33], looks, workers=3)
    for result in results:
        assert torch.equal(result["end"], results[0]["end"])
        for one, other in zip(result["seen"], results[0]["seen"], strict=True):
            assert torch.equal(one, other)
        assert result["stats"].details == results[0]["stats"].details


def resume(rank: int, size: int, strategy: DiLoCo, at: int) -> list[Any]:
    """Uninterrupted, saved on the way, and continued in new objects from what was saved."""
    runs: list[Any] = []
    saved = io.BytesIO()
    for how in ("straight", "saving", "resumed"):
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
        if how == "resumed":
            saved.seek(0)
            state = torch.load(saved, weights_only=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            sync.load_state_dict(state["sync"])
            assert sync.step == at
        trace = []
        for step in range(sync.step, 17):
            if how == "saving" and step == at:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "sync": sync.state_dict(),
                }
                torch.save(state, saved)
            take_step(model, optimizer, make_batch(rank, step))
            trace.append(flat(model))
        sync.finish()
        runs.append((torch.stack(trace)[at - 17 :], flat(model), sync.stats.details))
    return runs


@pytest.mark.sampled
@pytest.mark.parametrize("at", [6, 7, 10])  # fragments of two leave after steps 3, 6, 9, 12, 15
@pytest.mark.parametrize(("fragments", "overlap"), [(1, 0), (2, 2), (2, 5)])
def test_a_checkpoint_continues_bit_for_bit(at: int, fragments: int, overlap: int) -> None:
    """θ, v, what is in flight and the counters are in it, in the middle of a window too."""
    strategy = DiLoCo(period=6, fragments=fragments, overlap=overlap)
    for straight, saving, resumed in run(resume, strategy, at, workers=2):
        for other in (saving, resumed):
            assert torch.equal(other[0], straight[0])
            assert torch.equal(other[1], straight[1])
            assert other[2] == straight[2]


def rounded(rank: int, size: int, strategy: DiLoCo, wire: str, stop: int | None) -> list[Tensor]:
    """A model large enough to be quantised; saved and continued at step ``stop``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, strategy, wire=wire, timeout_seconds=20)
    trace = []
    for step in range(24 - rank):
        if step == stop:
            own, state = model.state_dict(), sync.state_dict()
            sync.detach()
            model = nn.Sequential(nn.Linear(60, 50), nn.Tanh(), nn.Linear(50, 30))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = offbeat.attach(model, optimizer, strategy, wire=wire, timeout_seconds=20)
            model.load_state_dict(own)
            sync.load_state_dict(state)
        x = torch.randn(8, 60, generator=torch.Generator().manual_seed(100 * rank + step))
        optimizer.zero_grad()
        (model(x) - x[:, :30].sin() - rank).square().mean().backward()
        optimizer.step()
        trace.append(flat(model))
    sync.finish()
    return [*trace, flat(model)]


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
@pytest.mark.parametrize("overlap", [0, 3])
def test_a_lossy_wire_carries_the_changes(wire: str, overlap: int) -> None:
    """θ stays alike on all workers and near the exact one; a checkpoint keeps what was rounded."""
    strategy = DiLoCo(period=4, fragments=2, overlap=overlap, outer_lr=0.5, outer_momentum=0.5)
    exact = run(rounded, strategy, "float32", None, workers=3)
    lossy = run(rounded, strategy, wire, None, workers=3)
    for a, b in zip(exact, lossy, strict=True):
        assert not torch.equal(a[-1], b[-1])
        assert torch.equal(b[-1], lossy[0][-1])
        torch.testing.assert_close(a[-1], b[-1], rtol=0, atol=0.01)
    for a, b in zip(lossy, run(rounded, strategy, wire, 11, workers=3), strict=True):
        assert torch.equal(torch.stack(a), torch.stack(b))


class Normalised(nn.Module):
    """Statistics, a mask of infinities, and a buffer that is bound anew in each pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("average", torch.full((2,), float(seed), dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + x.mean().to(torch.bfloat16)
        self.seen += 1
        return self.norm(self.linear(x))


def normalise(rank: int, size: int, overlap: int) -> dict[str, Any]:
    """The buffers before and after the boundary of each step."""
    model = Normalised(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before: list[dict[str, Tensor]] = []
    optimizer.register_step_post_hook(
        lambda *_: before.append({name: b.clone() for name, b in model.named_buffers()})
    )
    strategy = DiLoCo(period=3, fragments=2, overlap=overlap)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    after = []
    for step in range(10):
        scale = 20.0 if (step // 2 + rank) % 2 else 0.01
        for _ in range(1 + rank):  # another number of forward passes on each worker
            loss = model(scale * make_batch(rank, step, dtype=torch.float32)[0]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after.append({name: b.clone() for name, b in model.named_buffers()})
    sync.finish()
    end = {name: b.clone() for name, b in model.state_dict().items()}
    return {"before": before, "after": after, "end": end}


@pytest.mark.parametrize("overlap", [0, 2])
def test_buffers_go_with_the_last_fragment(overlap: int) -> None:
    """Every H steps the mean of statistics, the maximum of counts; k steps later with overlap."""
    results = run(normalise, overlap, workers=3)
    names = ["norm.running_mean", "norm.running_var", "average"]
    counts = ["norm.num_batches_tracked", "seen"]
    for step in range(10):
        before = [result["before"][step] for result in results]
        after = [result["after"][step] for result in results]
        launch = step - overlap
        if launch % 3 != 2 or launch < 0:
            for own, same in zip(before, after, strict=True):
                assert all(torch.equal(own[name], same[name]) for name in own), "a local step"
            continue
        snapshot = [result["after" if overlap else "before"][launch] for result in results]
        for name in names:
            parts = [own[name].float() for own in snapshot]
            assert not torch.equal(parts[0], parts[1])
            mean = sum(parts) / 3
            for own, now, got in zip(parts, before, after, strict=True):
                value = now[name].float()
                want = mean + (value - own)
                want = want.clamp(torch.minimum(value, mean), torch.maximum(value, mean))
                want = want.to(got[name].dtype)
                torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-6)
        for name in counts:
            largest = torch.stack([own[name] for own in snapshot]).amax(0)
            for now, got in zip(before, after, strict=True):
                assert torch.equal(got[name], torch.maximum(now[name], largest))
                assert got[name].dtype == now[name].dtype
        for got in after:
            assert torch.equal(got["mask"], torch.full((2, 2), -math.inf).triu(1))
            assert got["norm.running_var"].min() > 0
            if not overlap:
                assert all(torch.equal(got[name], after[0][name]) for name in got)
    for result in results:
        for name, value in result["end"].items():
            assert torch.equal(value, results[0]["end"][name]), name


def half(
    rank: int, size: int, outer_dtype: Any, overlap: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """The parameter before and after the boundary of each step."""
    model = nn.Module()
    model.x = nn.Parameter(torch.linspace(0.5, 2, 9).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-9)
    before: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: before.append(model.x.detach().clone()))
    strategy = DiLoCo(period=3, outer_lr=0.75, outer_dtype=outer_dtype, overlap=overlap)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    trace = []
    for step in range(12):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model.x.grad = torch.randn(9, generator=generator).to(dtype)
        optimizer.step()
        trace.append((before[-1], model.x.detach().clone()))
    sync.finish()
    return [*trace, (trace[-1][1], model.x.detach().clone())]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "outer_dtype", "kept"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, "float64", torch.float64),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "float64", torch.float64),
        (torch.float64, "float32", torch.float32),
    ],
)
def test_theta_is_kept_in_its_own_precision(
    dtype: torch.dtype, outer_dtype: Any, kept: torch.dtype, overlap: int
) -> None:
    """θ does not lose what x cannot hold: half types have a float32 θ, others what was asked."""
    results = run(half, outer_dtype, overlap, dtype, workers=2)
    sent = torch.float64 if dtype == torch.float64 else torch.float32
    work = torch.promote_types(kept, sent)
    theta = torch.linspace(0.5, 2, 9).to(dtype).to(kept)
    v, flight = torch.zeros_like(theta), None
    for step in range(12):
        before = [result[step][0] for result in results]
        after = [result[step][1] for result in results]
        if (step % 3 == 2 and not overlap) or flight is not None:
            snapshot = before if flight is None else flight
            flight = None
            delta = sum((theta - x.to(sent)).to(sent) for x in snapshot) / 2
            new = 0.9 * v.to(work) + delta
            theta = (theta.to(work) - 0.75 * (delta + 0.9 * new)).to(kept)
            v = new.to(kept)
            for x, old, got in zip(before, snapshot, after, strict=True):
                want = (theta.to(work) + (x.to(sent) - old.to(sent))).to(dtype)
                eps = torch.finfo(dtype).eps
                torch.testing.assert_close(got, want, rtol=2 * max(eps, 1e-7), atol=1e-7)
        if step % 3 == 2 and overlap:
            flight = after
    assert torch.equal(results[0][-1][1], results[1][-1][1])
    if not overlap:
        assert torch.equal(results[0][-1][1], results[0][-2][1])
        torch.testing.assert_close(results[0][-1][1], theta.to(dtype), rtol=1e-2, atol=1e-2)


def stuck(rank: int, size: int, outer_dtype: Any) -> Tensor:
    model = nn.Module()
    model.x = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = DiLoCo(period=1, outer_lr=0.125, outer_momentum=0.0, outer_dtype=outer_dtype)
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    for _ in range(6):
        model.x.grad = torch.full_like(model.x, 2.0**-8)  # a unit in the last place below 1
        optimizer.step()
    sync.finish()
    return model.x.detach().double()


def test_small_outer_steps_add_up_in_theta() -> None:
    """An eighth of a unit in the last place of bfloat16 is lost in bfloat16, not in float32."""
    # θ = 1 − d·2⁻⁸, x starts at θ rounded to 1: Δ = θ − (1 − 2⁻⁸), so d ← d + (1 − d)/8.
    d = [1 - (7 / 8) ** n for n in (5, 6)]
    assert d[0] < 0.5 < d[1], "x is rounded to 1 until the last step"
    assert run(stuck, None, workers=1)[0].tolist() == [1 - 2.0**-8] * 3
    assert run(stuck, "bfloat16", workers=1)[0].tolist() == [1.0] * 3


def test_a_single_worker_takes_outer_steps_too() -> None:
    """N = 1: the same formulas, on its own progress."""
    compare(DiLoCo(period=4, fragments=2, overlap=1), [14])


def too_many(rank: int, size: int) -> str:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(ValueError) as caught:
        offbeat.attach(model, optimizer, DiLoCo(fragments=7), timeout_seconds=20)
    assert dist.get_world_size() == size
    offbeat.attach(model, optimizer, DiLoCo(fragments=6), timeout_seconds=20).finish()
    return str(caught.value)


def test_more_fragments_than_tensors_are_refused() -> None:
    """By attach, on every worker, saying what is possible."""
    for text in run(too_many, workers=2):
        assert text.startswith("fragments must be at most 6, the number of parameter tensors")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"period": 0}, ValueError, "period must be at least 1, got 0"),
        ({"period": 2.0}, TypeError, "period must be an integer"),
        ({"outer_lr": 0}, ValueError, "outer_lr must be positive and finite, got 0"),
        ({"outer_lr": math.nan}, ValueError, "outer_lr must be positive"),
        ({"outer_lr": "1"}, TypeError, "outer_lr must be a number"),
        ({"outer_momentum": 1.0}, ValueError, r"outer_momentum must be in \[0, 1\), got 1.0"),
        ({"outer_momentum": -0.1}, ValueError, "outer_momentum must be in"),
        ({"fragments": 0}, ValueError, "fragments must be at least 1"),
        ({"period": 3, "fragments": 4}, ValueError, "fragments=4 and period=3; lower the one"),
        ({"overlap": -1}, ValueError, "overlap must be at least 0"),
        ({"period": 3, "overlap": 3}, ValueError, "overlap must be less than period"),
        ({"outer_dtype": "int8"}, ValueError, "outer_dtype must be None, .* got 'int8'"),
        ({"momentum": 0.9}, TypeError, "momentum"),
    ],
)
def test_bad_arguments_name_what_is_allowed(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    """An impossible setting is refused at once, and the message says what is possible."""
    with pytest.raises(error, match=words):
        DiLoCo(**options)
