"""``attach(..., wire=…)``: training over a lossy wire, under every strategy that averages."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import Compute, Network, simulate
from offbeat.errors import MismatchError
from offbeat.lab.cluster import Cluster
from offbeat.means.gradient_mean import gradient_buckets
from offbeat.strategies import parse_strategy, worker
from offbeat.strategies.base import Strategy, Worker
from problems import make_batch
from workers import run

TEXTS = [
    "bsp",
    "local:period=3",
    "selsync:delta=0.05,max_interval=4",
    "selsync:delta=0.05,flags=deferred",
    "selsync:delta=0.05,aggregate=gradients",
    "async:staleness=4",
    "async:staleness=4,outer_lr=0.7,outer_momentum=0.5",
    "fedavg:period=4",
    "fedavg:period=4,fraction=0.6",
    "diloco:period=4,outer_momentum=0.3",
    "diloco:period=4,outer_momentum=0.3,fragments=2,overlap=1",
]
LOSSY = ["bfloat16", "int8"]


def make(seed: int, *, norm: bool = False) -> nn.Sequential:
    """8,705 parameters, enough for quantising to pay with 3 workers, in small buckets too."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Linear(4, 64), nn.Tanh()]
        layers += [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        if norm:
            layers.append(nn.BatchNorm1d(64))
        return nn.Sequential(*layers, nn.Linear(64, 1))


def loss_on(model: nn.Module, rank: int, step: int, samples: int = 8) -> Tensor:
    x, y = make_batch(rank, step, samples, torch.float32)
    return (model(x) - y).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def attach(model: nn.Module, optimizer: Any, text: str, wire: Any, **options: Any) -> Any:
    strategy = parse_strategy(text)
    return offbeat.attach(
        model, optimizer, strategy, wire=wire, **{"timeout_seconds": 30, **options}
    )


def train(
    rank: int, size: int, text: str, wire: str, steps: list[int], look: int = 0
) -> dict[str, Any]:
    model = make(rank)
    optimizer = adamw(model)
    sync = attach(model, optimizer, text, wire)
    losses, seen = [], []
    for step in range(steps[rank]):
        optimizer.zero_grad()
        loss = loss_on(model, rank, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if look and step % look == look - 1:
            with sync.consensus():
                seen.append(flat(model))
    own = flat(model)
    bytes_sent, syncs = sync.stats.payload_bytes, sync.stats.syncs
    sync.finish()
    return {
        "own": own,
        "end": flat(model),
        "losses": losses,
        "seen": seen,
        "bytes": bytes_sent,
        "syncs": syncs,
    }


def in_simulator(function: Callable[..., Any], *args: Any, workers: int = 3) -> list[Any]:
    def worker() -> Any:
        # What oneDNN has prepared here for two threads would hang in processes forked later.
        torch.set_num_threads(1)
        return function(dist.get_rank(), dist.get_world_size(), *args)

    return simulate(
        worker,
        workers=workers,
        network=Network("10Mbit/s", latency="1ms"),
        compute=Compute("10ms", jitter=0.3),
    ).results


# -- the same everywhere --------------------------------------------------------------------------


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("text", TEXTS)
def test_gloo_and_the_simulator_agree(text: str, wire: str) -> None:
    """Models, looks at the consensus and bytes; all workers end with the same bits."""
    args = (text, wire, [11, 13, 12], 6)
    real, simulated = run(train, *args, workers=3), in_simulator(train, *args)
    for a, b in zip(real, simulated, strict=True):
        for name in ("own", "end", "seen"):
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-6, msg=name)
        assert (a["bytes"], a["syncs"]) == (b["bytes"], b["syncs"])
        assert torch.equal(a["end"], real[0]["end"])
        assert torch.equal(b["end"], simulated[0]["end"])


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("text", ["bsp", "local:period=1", "selsync:delta=0"])
def test_blocking_strategies_keep_all_workers_equal(text: str, wire: str) -> None:
    """After a mean over a lossy wire all workers hold the same bits, in every step."""

    def steps(rank: int, size: int) -> list[Tensor]:
        model = make(rank)
        optimizer = adamw(model)
        trace = []
        with attach(model, optimizer, text, wire):
            for step in range(8):
                optimizer.zero_grad()
                loss_on(model, rank, step).backward()
                optimizer.step()
                trace.append(flat(model))
        return trace

    traces = run(steps, workers=3)
    for trace in traces:
        assert torch.equal(torch.stack(trace), torch.stack(traces[0]))
        assert not torch.equal(trace[0], trace[1])


@pytest.mark.parametrize(
    "text", ["bsp", "local:period=3", "async:staleness=4", "async:staleness=6"]
)
def test_looking_does_not_change_training(text: str) -> None:
    """consensus() leaves errors and references as they are."""
    looked = in_simulator(train, text, "int8", [12] * 3, 1)
    plain = in_simulator(train, text, "int8", [12] * 3)
    for a, b in zip(looked, plain, strict=True):
        assert a["losses"] == b["losses"]
        assert torch.equal(a["end"], b["end"])


def test_eager_merges_over_a_lossy_wire() -> None:
    """No cadence, unequal numbers of steps: everyone comes home with the same bits."""
    for results in (
        run(train, "async:staleness=5,schedule=eager", "int8", [9, 31, 16], 5, workers=3),
        in_simulator(train, "async:staleness=5,schedule=eager", "int8", [9, 31, 16]),
    ):
        for result in results:
            assert torch.equal(result["end"], results[0]["end"])


@pytest.mark.parametrize("text", TEXTS)
def test_a_lone_worker_trains_as_without_a_wire(text: str) -> None:
    (lossy,) = in_simulator(train, text, "int8", [9], 4, workers=1)
    (exact,) = in_simulator(train, text, "float32", [9], 4, workers=1)
    assert torch.equal(lossy["end"], exact["end"])


# -- as good as exact -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*TEXTS, "async:staleness=4,schedule=eager"])
def test_training_reaches_nearly_the_same_loss(text: str) -> None:
    """The consensus after 150 steps is as good as that over an exact wire, and much cheaper."""

    def final_loss(result: dict[str, Any]) -> float:
        model = make(0)
        with torch.no_grad():
            nn.utils.vector_to_parameters(result["end"], model.parameters())
            return sum(float(loss_on(model, rank, 10_000, 256)) for rank in range(3))

    results = {w: in_simulator(train, text, w, [150] * 3)[0] for w in ("float32", "int8")}
    start = {"end": flat(make(0))}
    losses = {w: final_loss(result) for w, result in results.items()}
    assert losses["float32"] < 0.6 * final_loss(start)
    assert losses["int8"] < 1.1 * losses["float32"]
    if "eager" not in text:  # a faster merge makes more of them
        assert results["int8"]["bytes"] < 0.55 * results["float32"]["bytes"]


def test_without_error_feedback_small_gradients_would_be_lost() -> None:
    """A gradient far below its block's scale still arrives, in time."""

    def steps(rank: int, size: int) -> Tensor:
        model = nn.Module()
        model.x = nn.Parameter(torch.zeros(4096))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with attach(model, optimizer, "bsp", "int8"):
            for _ in range(100):
                model.x.grad = torch.full((4096,), 1e-3)
                model.x.grad[::512] = 1.0  # a block's scale is 1/127, and 1e-3 rounds to 0
                optimizer.step()
        return model.x.detach()

    for x in in_simulator(steps):
        small = torch.ones(4096, dtype=torch.bool)
        small[::512] = False
        # what has not arrived: half a scale on each worker, and half of that of the sum
        assert ((x[small] + 0.1).abs() <= 0.5 / 127 * 2 + 1e-6).all()
        assert x[small].any()


# -- gradients ------------------------------------------------------------------------------------


def small_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    made = gradient_buckets(parameters, bucket_bytes=4096)
    assert len(made) >= 3
    return made


def accumulate(rank: int, size: int, passes: list[int], how: str) -> list[Tensor]:
    """The gradients each step uses, with ``passes`` backward passes a step."""
    model = make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[Tensor] = []
    sync = attach(model, optimizer, "bsp", "int8")
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone())
    )
    for step, count in enumerate(passes):
        optimizer.zero_grad()
        for micro in range(count):
            loss_on(model, rank, 10 * step + micro).backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if how == "meet" and step % 2:
            with sync.consensus():
                pass
        optimizer.step()
    sync.finish()
    return seen


@pytest.mark.parametrize(
    ("passes", "how"),
    [([1, 1, 1, 1], ""), ([1, 3, 2, 1, 2, 1], ""), ([1] * 6, "clip"), ([1] * 5, "meet")],
)
def test_buckets_sent_twice_feed_their_errors_once(
    passes: list[int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets that leave too early and are sent again: the same bits as without overlap."""
    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    early = run(accumulate, passes, how, workers=3)
    monkeypatch.setattr(offbeat.BSP, "bucket_ready", Strategy.bucket_ready)  # nobody watches
    late = run(accumulate, passes, how, workers=3)
    for a, b in zip(early, late, strict=True):
        assert torch.equal(torch.stack(a), torch.stack(b))
        assert torch.equal(torch.stack(a), torch.stack(early[0]))


def test_all_gradients_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ over steps of the means is the exact Σ but for one rounding, accumulated or not."""
    passes = [1, 2, 1, 3, 1, 1, 2, 1]

    def steps(rank: int, size: int) -> tuple[Tensor, Tensor]:
        model = make(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)  # the model stays where it is
        got = torch.zeros(8705)
        own = torch.zeros(8705)
        with attach(model, optimizer, "bsp", "int8"):

            def add(*_: Any) -> None:
                got.add_(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))

            optimizer.register_step_pre_hook(add)
            for step, count in enumerate(passes):
                optimizer.zero_grad()
                for micro in range(count):
                    loss_on(model, rank, 10 * step + micro).backward()
                own += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                optimizer.step()
        return got, own

    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    results = run(steps, workers=3)
    exact = sum(own for _, own in results) / 3
    largest = 3 * float(exact.abs().max())
    for got, _ in results:
        # what is kept back: less than a scale for each worker's and for the sum's rounding
        assert (got - exact).abs().max() < 2 * largest / 127
        assert not torch.equal(got, exact)


def overflow(rank: int, size: int) -> list[tuple[bool, float]]:
    model = make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    seen = []
    with attach(model, optimizer, "bsp", "int8", scaler=scaler):
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_on(model, rank, step)).backward()
            if (rank, step) == (1, 2):
                model[2].weight.grad[3, 3] = float("inf")
            before = flat(model)
            scaler.step(optimizer)
            scaler.update()
            seen.append((torch.equal(before, flat(model)), scaler.get_scale()))
        assert flat(model).isfinite().all()
    return seen


def test_an_overflow_is_seen_by_all_workers() -> None:
    """One infinite gradient: every worker skips that step, and no other."""
    for seen in run(overflow, workers=3):
        assert [skipped for skipped, _ in seen] == [False, False, True, False, False, False]
        assert [scale for _, scale in seen] == [256.0] * 2 + [128.0] * 4


# -- what stays exact -----------------------------------------------------------------------------


def normalised(rank: int, size: int, text: str) -> dict[str, Any]:
    model = make(rank, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, text, "int8")
    smallest = torch.tensor(1.0)
    for step in range(25 + rank):
        optimizer.zero_grad()
        x, _ = make_batch(rank, step, 16, torch.float32)
        scale = 20.0 if (step // 3 + rank) % 2 else 0.01  # variances change wildly
        model(scale * x).square().mean().backward()
        optimizer.step()
        smallest = torch.minimum(smallest, model[6].running_var.min())
    own = {name: value.clone() for name, value in model.state_dict().items()}
    sync.finish()
    return {"smallest": smallest, "own": own, "end": model.state_dict()}


@pytest.mark.parametrize("text", TEXTS)
def test_batch_statistics_travel_exactly(text: str) -> None:
    """Variances stay positive and the workers' statistics are equal at the end."""
    results = in_simulator(normalised, text)
    for result in results:
        assert result["smallest"] >= 0
        for name, value in result["end"].items():
            assert torch.equal(value, results[0]["end"][name]), name


@pytest.mark.parametrize("text", ["selsync:delta=inf", "async:staleness=40", "local:period=50"])
def test_the_final_mean_is_exact(text: str) -> None:
    """Training without a merge, then finish(): the mean of the models to float32 rounding."""
    results = in_simulator(train, text, "int8", [9] * 3)
    mean = sum(r["own"].double() for r in results) / 3
    for result in results:
        torch.testing.assert_close(result["end"].double(), mean, rtol=1e-6, atol=1e-7)


# -- checkpoints ----------------------------------------------------------------------------------


def resumed(rank: int, size: int, text: str, wire: str, stop: int | None) -> dict[str, Any]:
    model = make(rank)
    optimizer = adamw(model)
    sync = attach(model, optimizer, text, wire)
    trace = []
    for step in range(16):
        if step == stop:
            file = io.BytesIO()
            torch.save([sync.state_dict(), model.state_dict(), optimizer.state_dict()], file)
            sync.detach()
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model = make(rank + 10)
            optimizer = adamw(model)
            sync = attach(model, optimizer, text, wire)
            model.load_state_dict(saved[1])
            optimizer.load_state_dict(saved[2])
            sync.load_state_dict(saved[0])
        optimizer.zero_grad()
        loss_on(model, rank, step).backward()
        optimizer.step()
        trace.append(flat(model))
    sync.finish()
    return {"trace": torch.stack(trace), "end": flat(model), "bytes": sync.stats.payload_bytes}


@pytest.mark.parametrize("wire", LOSSY)
@pytest.mark.parametrize("text", TEXTS)
def test_a_resumed_run_goes_on_bit_for_bit(text: str, wire: str) -> None:
    """Errors, references and the merge in flight are in the checkpoint."""
    for stop in (7, 8):
        whole = in_simulator(resumed, text, wire, None)
        parts = in_simulator(resumed, text, wire, stop)
        for a, b in zip(whole, parts, strict=True):
            assert torch.equal(a["trace"], b["trace"])
            assert torch.equal(a["end"], b["end"])
            assert a["bytes"] == b["bytes"]


def load_other(rank: int, size: int) -> str:
    model = make(0)
    optimizer = adamw(model)
    with attach(model, optimizer, "local:period=2", "int8") as sync:
        state = sync.state_dict()
    with attach(model, optimizer, "local:period=2", "float32") as sync:
        try:
            sync.load_state_dict(state)
        except ValueError as error:
            return str(error)
    return ""


def test_state_of_another_wire_is_refused() -> None:
    text = "the state was saved with wire='int8', this is wire='float32'"
    assert in_simulator(load_other) == [text] * 3


# -- mistakes -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class Pushes(Strategy):
    """A strategy that averages nothing."""

    name = "pushes"
    averages = "nothing"

    def due(self, worker: Worker) -> bool:
        return False


def test_bad_wires_are_refused() -> None:
    """An unknown precision; any but float32 with a strategy that pushes to a server."""
    model = make(0)
    with pytest.raises(ValueError, match='wire must be "float32", "bfloat16" or "int8"'):
        offbeat.attach(model, adamw(model), offbeat.BSP(), wire="float16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Pushes pushes to a parameter server; wire applies to"):
        offbeat.attach(model, adamw(model), Pushes(), wire="int8")


def disagree(rank: int, size: int) -> str:
    model = make(0)
    try:
        attach(model, adamw(model), "bsp", "int8" if rank == 1 else "float32")
    except MismatchError as error:
        return str(error)
    return ""


def test_workers_must_agree_on_the_wire() -> None:
    """No collective of the lossy wire before that: nobody hangs."""
    for text in run(disagree, workers=3):
        assert (
            text == "rank 1 differs from rank 0: rank 1 has wire 'int8'; rank 0 has wire 'float32'"
        )


# -- bytes ----------------------------------------------------------------------------------------


def test_payload_bytes_of_local_sgd() -> None:
    """Per mean: five float64 of the roll, 1 + 1/N payloads of 516 bytes for each 512 numbers."""
    results = in_simulator(train, "local:period=1", "int8", [6] * 3)
    blocks = 6  # of each of 3 chunks: 8,705 / (3 · 512), rounded up
    assert [r["bytes"] for r in results] == [6 * (7 * 8 + (3 + 1) * blocks * 516)] * 3


ON_THE_LINK = """
import json, sys, torch, torch.distributed as dist, offbeat
rank, size, folder = json.loads(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=size)
def sent():
    line = next(l for l in open("/proc/net/dev") if l.strip().startswith("link0:"))
    return int(line.partition(":")[2].split()[8])
found = {}
for wire in ("float32", "int8"):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offbeat.attach(model, optimizer, offbeat.BSP(), wire=wire):
        dist.barrier()
        before = sent()
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(2, 1000)).square().mean().backward()
            optimizer.step()
        dist.barrier()
        found[wire] = sent() - before
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")
def test_the_link_carries_a_quarter(tmp_path: Path) -> None:
    """Interface counters over 4 steps of BSP: 1 M gradients each, 3 nodes."""
    with Cluster(3, 1e9) as cluster:
        processes = [
            subprocess.Popen(
                cluster.command(
                    rank,
                    [sys.executable, "-c", ON_THE_LINK, json.dumps([rank, 3, str(tmp_path)])],
                ),
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": cluster.interface},
            )
            for rank in range(3)
        ]
        found = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    ring = 4 * 2 * (2 / 3) * 4 * 1_001_000
    for sent in found:
        assert 1.0 < sent["float32"] / ring < 1.15  # and headers
        assert 3.6 < sent["float32"] / sent["int8"] < 4.1


# -- failures -------------------------------------------------------------------------------------


def die(rank: int, size: int, text: str) -> str:
    model = make(0)
    optimizer = adamw(model)
    sync = attach(model, optimizer, text, "int8", timeout_seconds=10)
    try:
        for step in range(30):
            if (rank, step) == (1, 9):
                os._exit(1)
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()
        sync.finish()
    except offbeat.CommunicationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("text", ["bsp", "local:period=2", "async:staleness=4"])
def test_a_dead_worker_is_noticed(text: str) -> None:
    """Both stages of a sum fail as any other operation does."""
    first, _, last = run(die, text, workers=3, may_die=(1,))
    for message in (first, last):
        assert "failed after" in message
        assert "lost the connection to rank" in message  # 1, and the other if it gave up first
