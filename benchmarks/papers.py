"""The papers' settings in the simulator: do their speed-ups follow from their own figures?

(a) SelSync: 16 workers at 5 Gbit/s with models of the bytes of ResNet-101, VGG11, AlexNet and the
Transformer. BSP's throughput relative to one worker, and SelSync's speed-up over BSP at the LSSR of
the paper's Table I. (b) Asynchronous averaging: 4 workers at 1 Gbit/s with GoogLeNet's bytes,
τ = 2…32, cyclic: throughput relative to one worker, and the idle share.

Everything is simulated. Step times on the papers' GPUs are not known here, so they are a parameter;
for each row of Table I we also solve for the step time at which its speed-up follows from its LSSR,
and simulate that. Models are dummies, smaller than the real ones by a factor of 1000 (a) or 100
(b), on links slower by the same factor; latencies stay. So means take as long as the real ones in
one bucket, and the 56 bytes of a roll a little longer; the strategies' forecasts with the real
sizes say by how little. A dummy is one tensor, so BSP does not overlap with backward, as in
SelSync's published code.

The LSSR comes from SelSync's own trigger with the paper's δ = 0.3 and smoothing N/100: gradients
are constant, except that in evenly spread steps one worker, each time another, has twice the
gradient (Δ = 0.48). What was simulated is in ``lssr``.

Sizes are parameters × 4 bytes. VGG11, ResNet-101 and AlexNet are torchvision's with the ImageNet
classifier, as SelSync's published code builds them, for CIFAR too (531 MB for VGG11, the size that
is usually quoted; with 100 classes it is 517 MB). The Transformer has d = 200, hidden 200, 2 layers
and WikiText-103's vocabulary of 267,735, with an output layer of its own, as in that code: 107.8 M
parameters. Tied it has 54.3 M, and its means take half as long; that code's lower-case
vocabulary is smaller, too. GoogLeNet is torchvision's: 6.6 M parameters, or 13.0 M with the two
auxiliary classifiers, which take part in training.

What agrees and what cannot hold is told at the end of ``results/papers.md``. Writes
``results/papers.json``, ``papers.md`` and ``papers.png``, the same for every run. Longer than
400 lines because of the page that it writes.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.harness import HEADER, RESULTS, Result, report
from offbeat import BSP, AsyncAveraging, Compute, Network, SelSync, Strategy, simulate
from offbeat.costs import all_reduce_seconds
from offbeat.strategies.forecast import ROLL_BYTES, Costs, Forecast

LATENCY = 1e-4
STEP_SECONDS = (0.05, 0.1, 0.2, 0.4)
SHOWN = 0.1  # the step time of the summary
STALENESS = (2, 4, 8, 16, 32)
CYCLES, SETTLING_CYCLES = 6, 2

VOCABULARY, WIDTH = 267_735, 200
# q, k, v and output; the two layers of hidden size 200; two norms: all with biases
_LAYER = 4 * (WIDTH**2 + WIDTH) + 2 * (WIDTH**2 + WIDTH) + 4 * WIDTH
TRANSFORMER = 2 * VOCABULARY * WIDTH + VOCABULARY + 2 * _LAYER

# parameters; LSSR and speed-up of Table I; multiply-adds of one sample's forward, samples a step
SELSYNC = {
    "ResNet-101": (44_549_160, 0.829, 2.03, 7.8e9 / 49, 32),  # 32×32 images instead of 224×224
    "VGG11": (132_863_336, 0.912, 6.16, 7.5e9 / 49 + 123.6e6, 32),  # convolutions + classifier
    "AlexNet": (61_100_840, 0.954, 4.62, 0.71e9, 128),
    "Transformer": (TRANSFORMER, 0.725, 2.42, VOCABULARY * WIDTH + 2 * _LAYER, 35 * 20),
}
VGG_HALF = 13.75  # the other row of VGG11, δ = 0.5
GOOGLENET = {"GoogLeNet": 6_624_904, "GoogLeNet + auxiliary": 13_004_888}


NO_SPIKES: Mapping[int, int] = {}  # step → the worker whose gradient is twice as large


class Dummy(nn.Module):
    """So many parameters, each with the gradient ``factor``."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(parameters))

    def forward(self, factor: float) -> Tensor:
        return factor * self.p.sum()


@dataclass(frozen=True)
class Setting:
    """Workers and links of ``bandwidth`` bits a second; simulated at 1/``scale``."""

    workers: int
    bandwidth: float
    scale: int

    def run(
        self,
        strategy: Strategy,
        *,
        parameters: int,
        step_seconds: float,
        steps: int,
        settling: int = 0,
        spikes: Mapping[int, int] = NO_SPIKES,
        workers: int | None = None,
    ) -> dict[str, float]:
        """Seconds and idle share of a step of rank 0 after the settling ones, and the LSSR."""

        def worker() -> dict[str, float]:
            model = Dummy(round(parameters / self.scale))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            sync = offbeat.attach(model, optimizer, strategy)
            computed = waited = 0.0
            for step in range(steps):
                optimizer.zero_grad()
                model(2.0 if spikes.get(step) == dist.get_rank() else 1.0).backward()
                optimizer.step()
                if step + 1 == settling:
                    computed, waited = sync.stats.compute_seconds, sync.stats.wait_seconds
            computed = sync.stats.compute_seconds - computed
            waited = sync.stats.wait_seconds - waited
            lssr = sync.stats.lssr
            sync.finish()
            total = computed + waited
            return {
                "step_seconds": total / (steps - settling),
                "idle": waited / total,
                "lssr": lssr,
                "steps": steps,
            }

        result = simulate(
            worker,
            workers=self.workers if workers is None else workers,
            network=Network(self.bandwidth / self.scale, latency=LATENCY),
            compute=Compute(step_seconds),
        )
        return dict(result.results[0])

    def plan(
        self, parameters: int, step: float, strategies: list[Strategy], lssr: float
    ) -> list[Forecast]:
        """The formulas, with the real sizes in one bucket."""
        costs = Costs(
            workers=self.workers,
            step_seconds=step,
            bytes_per_second=self.bandwidth / 8,
            latency_seconds=LATENCY,
            model_bytes=4.0 * parameters,
            lssr=lssr,
            bucket_bytes=math.inf,
            first_bucket_bytes=math.inf,
        )
        return [strategy.forecast(costs) for strategy in strategies]

    def mean_seconds(self, size_bytes: float) -> float:
        return all_reduce_seconds(size_bytes, self.workers, self.bandwidth / 8, LATENCY)


CLUSTER = Setting(16, 5e9, 1000)
FOUR = Setting(4, 1e9, 100)


def off_plan(found: Iterable[dict[str, float]], planned: Iterable[Forecast]) -> float:
    """The largest relative difference of a step's seconds from the formulas."""
    return max(
        abs(one["step_seconds"] / forecast.step_seconds - 1)
        for one, forecast in zip(found, planned, strict=True)
    )


def implied_step(parameters: int, lssr: float, speedup: float) -> tuple[float, float]:
    """The step time t at which SelSync's speed-up S follows from its LSSR ℓ.

    (t + m) = S·(t + r + (1−ℓ)·m), and with all of BSP's communication hidden that can be,
    max(t, m) = S·(t + r + (1−ℓ)·m) with t < m. Means and rolls take m and r.
    """
    m, r = CLUSTER.mean_seconds(4 * parameters), CLUSTER.mean_seconds(ROLL_BYTES)
    spent = r + (1 - lssr) * m
    return (m - speedup * spent) / (speedup - 1), m / speedup - spent


def selsync_model(name: str, step_seconds: tuple[float, ...], most_steps: int) -> dict[str, Any]:
    """One model of (a): everything there is to say about it."""
    parameters, lssr, speedup, multiply_adds, samples = SELSYNC[name]
    share = Fraction(1 - lssr).limit_denominator(most_steps)  # of steps that synchronize
    syncs, steps = share.numerator, share.denominator
    spikes = {-(-i * steps // syncs): i % CLUSTER.workers for i in range(syncs)}
    strategy = SelSync(delta=0.3)
    implied, implied_overlapped = implied_step(parameters, lssr, speedup)
    never = 1 / (1 - lssr)
    operations = 6 * multiply_adds * samples  # 2 a multiply-add; backward is twice forward
    rows = []
    for step in (*step_seconds, implied):
        common = {"parameters": parameters, "step_seconds": step}
        alone = CLUSTER.run(BSP(), **common, steps=2, workers=1)["step_seconds"]
        bsp = CLUSTER.run(BSP(), **common, steps=2)
        ours = CLUSTER.run(strategy, **common, steps=steps, spikes=spikes)
        assert round(ours["lssr"] * steps) == steps - syncs, (ours, share)
        planned = CLUSTER.plan(parameters, step, [BSP(), strategy], ours["lssr"])
        rows.append(
            {
                "step_seconds": step,
                "bsp": bsp,
                "selsync": ours,
                "bsp_throughput": CLUSTER.workers * alone / bsp["step_seconds"],
                "selsync_throughput": CLUSTER.workers * alone / ours["step_seconds"],
                "speedup": bsp["step_seconds"] / ours["step_seconds"],
                "off_plan": off_plan((bsp, ours), planned),
            }
        )
    return {
        "parameters": parameters,
        "megabytes": 4 * parameters / 1e6,
        "mean_seconds": CLUSTER.mean_seconds(4 * parameters),
        "paper": {"lssr": lssr, "speedup": speedup},
        "limit": never,
        "implied_step_seconds": implied,
        "implied_step_seconds_overlapped": implied_overlapped,
        "gigaflop_per_step": operations / 1e9,
        "rows": rows[:-1],
        "at_implied": rows[-1],
    }


def without_communication() -> dict[str, float]:
    """What 6.16× at LSSR 0.912 leaves for VGG11 if it never synchronized at all."""
    parameters, lssr, speedup, *_ = SELSYNC["VGG11"]
    step, overlapped = implied_step(parameters, lssr, speedup)
    common = {"parameters": parameters, "step_seconds": step}
    bsp = CLUSTER.run(BSP(), **common, steps=2)["step_seconds"]
    never = CLUSTER.run(SelSync(delta=math.inf), **common, steps=10)
    m, r = CLUSTER.mean_seconds(4 * parameters), CLUSTER.mean_seconds(ROLL_BYTES)
    shortest = STEP_SECONDS[0]
    return {
        "paper": VGG_HALF,
        "lssr": never["lssr"],
        "with_flags": bsp / never["step_seconds"],
        "overlapped_with_flags": m / (overlapped + r),
        "needed_lssr": 1 - 1 / VGG_HALF,
        "lssr_at_50": 1 - ((shortest + m) / VGG_HALF - shortest - r) / m,
    }


def cyclic(parameters: int, step_seconds: tuple[float, ...]) -> dict[str, Any]:
    """One model size of (b)."""
    rows = []
    for step in step_seconds:
        common = {"parameters": parameters, "step_seconds": step}
        alone = FOUR.run(BSP(), **common, steps=2, workers=1)["step_seconds"]
        strategies = [AsyncAveraging(staleness=staleness) for staleness in STALENESS]
        planned = FOUR.plan(parameters, step, [BSP(), *strategies], 0.5)
        found = {"bsp": FOUR.run(BSP(), **common, steps=2)}
        for strategy in strategies:
            cycle = strategy.staleness // 2
            steps, settling = CYCLES * cycle, SETTLING_CYCLES * cycle
            run = FOUR.run(strategy, **common, steps=steps, settling=settling)
            found[str(strategy.staleness)] = run
        rows.append(
            {
                "step_seconds": step,
                "throughput": {
                    key: FOUR.workers * alone / one["step_seconds"] for key, one in found.items()
                },
                "idle": {key: one["idle"] for key, one in found.items()},
                "off_plan": off_plan(found.values(), planned),
            }
        )
    merge = FOUR.mean_seconds(4 * parameters) + FOUR.mean_seconds(ROLL_BYTES)
    return {
        "parameters": parameters,
        "megabytes": 4 * parameters / 1e6,
        "merge_seconds": merge,
        # idle at τ = 4 and none at τ = 8, as the paper reports: merge/4 ≤ t < merge/2
        "steps_as_the_paper_seconds": [merge / 4, merge / 2],
        "rows": rows,
    }


def measure(step_seconds: tuple[float, ...], most_steps: int) -> dict[str, Any]:
    """All of it."""
    data: dict[str, Any] = {"simulated": True, "offbeat": offbeat.__version__}
    data["a"] = {
        "setting": {**asdict(CLUSTER), "latency_seconds": LATENCY},
        "models": {name: selsync_model(name, step_seconds, most_steps) for name in SELSYNC},
        "vgg11_without_communication": without_communication(),
    }
    data["b"] = {
        "setting": {**asdict(FOUR), "latency_seconds": LATENCY},
        "models": {name: cyclic(count, step_seconds) for name, count in GOOGLENET.items()},
    }
    data["off_plan"] = max(
        row["off_plan"]
        for part in (data["a"], data["b"])
        for model in part["models"].values()
        for row in (*model["rows"], *([model["at_implied"]] if "at_implied" in model else []))
    )
    return data


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def between(seconds: tuple[float, ...] | list[float]) -> str:
    return "{:.0f}–{:.0f} ms".format(*(1000 * one for one in seconds))


PAGE = """\
# The papers' settings, simulated

Every figure here is simulated, by `python -m benchmarks.papers`, except those of the papers. Step
times t on the papers' GPUs are not known, so they are a parameter. All numbers:
[papers.json](papers.json).

## (a) SelSync: 16 workers, 5 Gbit/s, latency 100 µs

Throughput of BSP without overlap, relative to one worker (linear: 16×), simulated:

{scaling}

Speed-up of SelSync over BSP, simulated, next to the paper's Table I:

{speedups}

"t that gives it" is the step time at which the paper's speed-up follows from its LSSR: solved from
the formula, then simulated ({at_implied}). "t if BSP overlaps" is the
same if backward hid all of BSP's communication that it can (formula only). The last column is the
rate at which a GPU would compute to take so long, by our estimate of the arithmetic.

## (b) Asynchronous averaging, cyclic: 4 workers, 1 Gbit/s, latency 100 µs

Throughput relative to one worker (linear: 4×) and idle share, simulated:

{idle}

![The speed-ups and idle shares above, simulated](papers.png)

## Where they agree, and where the paper's own figures cannot hold

{verdict}"""


def markdown(data: dict[str, Any]) -> str:
    """The tables, and where they agree with the papers."""
    models: dict[str, Any] = data["a"]["models"]
    steps = [f"t = {milliseconds(row['step_seconds'])}" for row in models["VGG11"]["rows"]]
    scaling, speedups = [], []
    for name, model in models.items():
        scaling.append([name, f"{model['megabytes']:.0f} MB", milliseconds(model["mean_seconds"])])
        scaling[-1] += [f"{row['bsp_throughput']:.2f}×" for row in model["rows"]]
        implied = model["implied_step_seconds"], model["implied_step_seconds_overlapped"]
        rates = [f"{model['gigaflop_per_step'] / 1000 / t:.1f}" for t in implied]
        lssrs = model["paper"]["lssr"], model["rows"][0]["selsync"]["lssr"]
        speedups.append([name, "{:.3f} ({:.4f})".format(*lssrs)])
        speedups[-1] += [f"{row['speedup']:.2f}×" for row in model["rows"]]
        speedups[-1] += [f"{model['limit']:.1f}×", f"**{model['paper']['speedup']:.2f}×**"]
        speedups[-1] += [*map(milliseconds, implied), f"{' / '.join(rates)} TFLOP/s"]
    idle = [
        [
            f"{name}, {model['megabytes']:.1f} MB",
            milliseconds(row["step_seconds"]),
            *(
                f"{x:.2f}× ({abs(i):.0%})"
                for x, i in zip(row["throughput"].values(), row["idle"].values(), strict=True)
            ),
        ]
        for name, model in data["b"]["models"].items()
        for row in model["rows"]
    ]
    after = ["limit 1/(1−LSSR)", "paper", "t that gives it", "t if BSP overlaps", "rate at these t"]
    return PAGE.format(
        scaling=table(["model", "size", "a mean takes", *steps], scaling),
        speedups=table(["model", "LSSR: paper (simulated)", *steps, *after], speedups),
        idle=table(["model", "t", "BSP", *(f"τ = {s}" for s in STALENESS)], idle),
        at_implied=", ".join(f"{m['at_implied']['speedup']:.2f}×" for m in models.values()),
        verdict=verdict(data),
    )


VERDICT = """\
**SelSync, what agrees.** The four main rows of Table I stay below 1/(1−LSSR), which is reached only
if communication is everything: {limits}. Each
follows from its LSSR at some step time, and at equal step times of 200 ms or more the simulation
gives the paper's order: VGG11, AlexNet, Transformer, ResNet-101. That BSP does not scale here is
plain, too: at 100 ms, 16 workers with VGG11 do {vgg_bsp:.2f} of the work of one. (We have no figure
of the paper to put beside BSP's throughput.)

**What is doubtful.** Whether these are step times of the paper's GPUs. AlexNet needs {alexnet_t}
(from full overlap of BSP with backward to none) for 128 ImageNet images: plausible. VGG11 needs
{vgg_t} and the Transformer {transformer_t}: long for the arithmetic in them, though optimizer,
input and copies to the host come on top. ResNet-101 needs {resnet_t} for 32 CIFAR images, some
{resnet_flop:.0f} GFLOP. We would expect tens of milliseconds, and at 50 ms its LSSR gives
{resnet_50:.1f}×: the paper gained half of what its LSSR and network allow, so something else than
the model's bytes must have taken its time.

**What cannot hold.** The other row of VGG11, 13.75× with δ = 0.5. For equal numbers of
steps it needs an LSSR of at least {needed_lssr:.3f} on any machine.
At the step time that follows from 6.16× in the first row, no LSSR
suffices: without any synchronization the simulation gives {with_flags:.1f}×, and if BSP overlapped
perfectly, the formula {overlapped_with_flags:.1f}×. These two depend on the ratio of a step to a
mean, which 6.16× and 0.912 fix, and hardly on bandwidth or size. A shorter step could give 13.75×
(50 ms with an LSSR of {lssr_at_50:.2f}), but would have given {vgg_50:.1f}× in the first row.
So for equal numbers of steps the two rows exclude each other, and unequal numbers do not help:
from the paper's own step counts (not simulated here) at most 2.1× follow. It is no target.

**Asynchronous averaging agrees.** The paper reports linear speed-up, and idle times near 0
from τ = 8. A merge takes {merge_small}, or {merge_large} with the auxiliary classifiers, and a
cycle of τ/2 steps that lasts as long hides it completely. So τ = 8 is the first of 2, 4, 8, 16, 32
without idle time for steps of {window_small}, or {window_large}: what one expects of 32 images,
some 290 GFLOP, on a GPU of 2018. Shorter steps need a larger τ (50 ms: 16, or 32), longer ones a
smaller. There is no jitter here and nobody else on the network, so these zeros are a best case.

**Not modelled.** Overlap of BSP with backward, input, the optimizer, copies between GPU and host,
means in several buckets (each pays 3 ms of latency with 16 workers), and how many steps a metric
takes, by which a speed-up to equal accuracy would also differ. All simulated step times are within
{off_plan:.2f} % of the strategies' own forecasts with the real sizes; what remains is the roll,
whose 56 bytes travel on the slower link.
"""


def verdict(data: dict[str, Any]) -> str:
    """``VERDICT``, judged on the full run, with the numbers of this one."""
    models, never = data["a"]["models"], data["a"]["vgg11_without_communication"]
    keys = "implied_step_seconds_overlapped", "implied_step_seconds"
    resnet, vgg, alexnet, transformer = (models[name] for name in SELSYNC)
    small, large = data["b"]["models"].values()
    text = VERDICT.format(
        limits=", ".join(
            f"{m['paper']['speedup']:.2f} of {m['limit']:.1f}" for m in models.values()
        ),
        resnet_t=between([resnet[key] for key in keys]),
        vgg_t=between([vgg[key] for key in keys]),
        alexnet_t=between([alexnet[key] for key in keys]),
        transformer_t=between([transformer[key] for key in keys]),
        resnet_flop=resnet["gigaflop_per_step"],
        resnet_50=resnet["rows"][0]["speedup"],
        vgg_bsp=vgg["rows"][1]["bsp_throughput"],
        merge_small=milliseconds(small["merge_seconds"]),
        merge_large=milliseconds(large["merge_seconds"]),
        window_small=between(small["steps_as_the_paper_seconds"]),
        window_large=between(large["steps_as_the_paper_seconds"]),
        off_plan=100 * data["off_plan"],
        vgg_50=vgg["rows"][0]["speedup"],
        **never,
    )
    return "\n\n".join(fill(one, 100, break_on_hyphens=False) for one in text.split("\n\n")) + "\n"


def draw(data: dict[str, Any]) -> None:
    """Speed-up against step time; idle share against staleness."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for name, model in data["a"]["models"].items():
        rows = sorted([*model["rows"], model["at_implied"]], key=lambda row: row["step_seconds"])
        xs = [1000 * row["step_seconds"] for row in rows]
        (line,) = left.plot(
            xs,
            [row["speedup"] for row in rows],
            "o-",
            label=f"{name}, LSSR {model['rows'][0]['selsync']['lssr']:.3f}",
        )
        paper = model["paper"]["speedup"]
        left.plot(1000 * model["implied_step_seconds"], paper, "*", ms=15, color=line.get_color())
    left.plot([], [], "k*", ms=12, label="the paper's speed-up")
    left.set(xlabel="step time [ms]", ylabel="speed-up over BSP")
    left.set_title("simulated: SelSync, 16 workers, 5 Gbit/s", fontsize="medium")
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    ticks = [1000 * step for step in STEP_SECONDS]
    left.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    left.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    for (name, model), style in zip(data["b"]["models"].items(), ("o-", "s--"), strict=True):
        for number, row in enumerate(model["rows"]):
            right.plot(
                STALENESS,
                [100 * row["idle"][str(staleness)] for staleness in STALENESS],
                style,
                color=f"C{number}",
                label=f"{name}, {milliseconds(row['step_seconds'])}",
            )
    right.set(xlabel="staleness τ", ylabel="idle [%]", ylim=(-3, 100))
    right.set_title("simulated: cyclic averaging, 4 workers, 1 Gbit/s", fontsize="medium")
    right.set_xscale("log", base=2)
    right.set_xticks(STALENESS, [str(staleness) for staleness in STALENESS])
    speed = right.secondary_yaxis(
        "right", functions=(lambda idle: 4 - idle / 25, lambda speed: 100 - 25 * speed)
    )
    speed.set_ylabel("throughput relative to one worker")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(RESULTS / "papers.png", dpi=120)
    plt.close(figure)


@contextmanager
def one_thread() -> Iterator[None]:
    """Many workers take turns on small tensors: more threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def results(*, quick: bool = False) -> list[Result]:
    """Summary rows; without ``quick`` also the files."""
    step_seconds, most_steps = ((SHOWN,), 25) if quick else (STEP_SECONDS, 100)
    with one_thread():
        data = measure(step_seconds, most_steps)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "papers.json").write_text(json.dumps(data, indent=1) + "\n")
        (RESULTS / "papers.md").write_text(markdown(data))
        draw(data)
    config = {"simulated": True, "step_seconds": list(step_seconds)}
    found = []
    for name, model in data["a"]["models"].items():
        row = next(row for row in model["rows"] if row["step_seconds"] == SHOWN)
        what = f"simulated: SelSync/BSP, {name}, 100 ms (paper {model['paper']['speedup']})"
        details = {
            "bsp_throughput": row["bsp_throughput"],
            "lssr": row["selsync"]["lssr"],
            "implied_step_seconds": model["implied_step_seconds"],
        }
        found.append(Result("papers", what, row["speedup"], None, "x", config, details))
    never = data["a"]["vgg11_without_communication"]
    what = f"simulated: VGG11 without any synchronization (paper {VGG_HALF})"
    found.append(Result("papers", what, never["with_flags"], None, "x", config, never))
    for name, model in data["b"]["models"].items():
        row = next(row for row in model["rows"] if row["step_seconds"] == SHOWN)
        what = f"simulated: idle share, τ = 8, {name}, 100 ms"
        details = {"idle": row["idle"], "throughput": row["throughput"]}
        found.append(Result("papers", what, 100 * row["idle"]["8"], None, "%", config, details))
    what = "simulated: largest deviation from the formulas"
    return [*found, Result("papers", what, 100 * data["off_plan"], None, "%", config)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one step time, nothing saved")
    quick = parser.parse_args().quick
    print(HEADER)
    report(results(quick=quick), save=False)  # a simulation is the same every time: no log
