"""``results/papers.md``: the tables, and where they agree with the papers."""

from textwrap import fill
from typing import Any

from benchmarks.papers.cyclic import STALENESS
from benchmarks.papers.selsync import SYSTEMS, WORKERS
from benchmarks.papers.table_one import per_step

PAGE = """\
# The papers' settings, simulated

Every figure here is simulated or arithmetic, by `python -m benchmarks papers`, except those of the
papers. Step times t on the papers' GPUs are not known, so they are a parameter. All numbers:
[papers.json](papers.json).

## (a) SelSync: 16 workers, 5 Gbit/s, latency 100 µs

The paper's Table I tells overall speed-ups, in *time to convergence*. With the iterations,

    overall = (speed-up of a step) × (BSP's iterations / own iterations)

and a step cannot gain more than 1/(1 − LSSR). "t" is the time to compute a step at which δ = 0.3
gains what it needs, from (t + m) / (t + r + (1 − LSSR)·m), with m a mean of the model and r the
flags; at that t the other rows need an LSSR of so much:

{table_1}

LSSRs in brackets are what follows; the others are the paper's. Simulated, the speed-up of a step at
δ = 0.3, and the overall one with the paper's iterations:

{speedups}

Throughput of BSP relative to one worker, simulated, at two step times: that of Table I, and that at
which 16 workers on a ring do what the paper's Figure 1a shows (read off it):

{throughput}

"Servers" is `SSP(staleness=0)` with a part of the model on each worker, "one server" with all of it
on one.

## (b) Asynchronous averaging, cyclic: 4 workers, 1 Gbit/s, latency 100 µs

Throughput relative to one worker (linear: 4×) and idle share, simulated:

{idle}

![Speed-ups, throughput and idle shares, simulated](papers.png)

## Where they agree, and where the paper's own figures cannot hold

{verdict}"""

VERDICT = """\
**Table I agrees with itself and with the cost model for three of four models.** ResNet-101's two
rows of SelSync ask for {resnet_needs} a step: at {resnet_t} both hold, the second with an LSSR a
little above the first's, as a larger δ must have. FedAvg's two rows there, one with twice as many
means as the other, give {resnet_fedavg} and means every {resnet_often} and {resnet_seldom} steps:
nearly the same step time, though that is half as many means as four and eight in an epoch of 98
steps. AlexNet's two rows hold at {alexnet_t}, the Transformer's at {transformer_t}. All three are
plausible for GPUs.

**VGG11's rows cannot hold, neither of them.** Taken with its iterations, 6.70 and 7.52 times BSP's,
a step has to gain {vgg_needs}; at its LSSRs it gains less than {vgg_limits} on any machine and any
network. They are no target.

**The Transformer's FedAvg does not fit its SelSync.** Both rows ask for
{transformer_fedavg_needs} a step, with twice as many means in one as in the other, so means cost
nothing there, and a step takes {transformer_fedavg}, not {transformer_t}.

**Figure 1a asks for other step times than Table I.** On a ring it needs {figure_steps}, Table I
{table_steps}; only AlexNet's two are alike. At those of Figure 1a, SelSync with δ = 0.3 would gain
{figure_gains} overall, in place of {paper_gains}. A slower or faster network does not help: both
depend on t/m alone. Overlap of BSP with backward would make Figure 1a's step times shorter, and
SelSync's gains smaller still.

**One parameter server does not give Figure 1a.** With all of the model on one machine behind
5 Gbit/s a step would have to compute for {server_steps} to give the figure, and throughput hardly
grows with the workers. Servers on all workers send what a ring sends, and give what a ring gives.

**Asynchronous averaging agrees.** The paper reports linear speed-up, and idle times near 0
from τ = 8. A merge takes {merge_small}, or {merge_large} with the auxiliary classifiers, and a
cycle of τ/2 steps that lasts as long hides it completely. So τ = 8 is the first of 2, 4, 8, 16, 32
without idle time for steps of {window_small}, or {window_large}: what one expects of 32 images,
some 290 GFLOP, on a GPU of 2018. Shorter steps need a larger τ (50 ms: 16, or 32), longer ones a
smaller. There is no jitter here and nobody else on the network, so these zeros are a best case.

**Not modelled.** Overlap of BSP with backward, input, the optimizer, copies between GPU and host,
means in several buckets (each pays 3 ms of latency with 16 workers). The iterations are the
paper's; that SelSync needs as many here was not tried. All simulated step times of ring and merges
are within {off_plan:.2f} % of formulas with the real sizes; what remains is the roll, whose 56
bytes travel on the slower link.
"""


def markdown(data: dict[str, Any]) -> str:
    """The page."""
    models: dict[str, Any] = data["a"]["models"]
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
    return PAGE.format(
        table_1=_table_1(models),
        speedups=_speedups(models),
        throughput=_throughput(models),
        idle=table(["model", "t", "BSP", *(f"τ = {s}" for s in STALENESS)], idle),
        verdict=verdict(data),
    )


def _table_1(models: dict[str, Any]) -> str:
    head = ["model, a mean", "row", "iterations", "overall", "a step has to gain", "at most"]
    rows = []
    for name, model in models.items():
        step, first = model["step_seconds_of_table_1"], True
        for row in [*model["table_1"], *model.get("fedavg", {"rows": []})["rows"]]:
            what = f"{name}, {milliseconds(model['mean_seconds'])}" if first else ""
            limit, lssr, needed = row["limit"], row["lssr"], row["lssr_at_that_step"]
            known = f"{lssr:.3f}" if lssr is not None else ""
            if lssr is None and needed is not None:
                known = f"({needed:.3f})"
            at = milliseconds(step) if step and row is model["table_1"][0] else ""
            rows.append(
                [
                    what,
                    row["method"],
                    f"{row['iterations']:.2f}×",
                    f"{row['overall']:.2f}×",
                    f"**{row['per_step']:.2f}×**",
                    f"{limit:.1f}×" if limit else "",
                    known,
                    "impossible" if row["impossible"] else at,
                ]
            )
            first = False
    return table([*head, "LSSR", "t"], rows)


def _speedups(models: dict[str, Any]) -> str:
    steps = [milliseconds(row["step_seconds"]) for row in next(iter(models.values()))["rows"]]
    head = ["model", "LSSR simulated", *(f"t = {one}" for one in steps), "t of Table I", "paper"]
    rows = []
    for name, model in models.items():
        exact, paper = model["at_table_1"], model["table_1"][0]
        shown = [f"{row['per_step']:.2f}×, {row['overall']:.2f}×" for row in model["rows"]]
        if exact:
            at = milliseconds(exact["step_seconds"])
            shown.append(f"{exact['per_step']:.2f}×, {exact['overall']:.2f}× ({at})")
        else:
            shown.append("none")
        lssr = f"{model['rows'][0]['selsync']['lssr']:.4f}"
        rows.append([name, lssr, *shown, f"{paper['per_step']:.2f}×, **{paper['overall']:.2f}×**"])
    return table(head, rows)


def _throughput(models: dict[str, Any]) -> str:
    rows = []
    for name, model in models.items():
        for source, found in model["throughput"].items():
            for system in SYSTEMS:
                first = system == "ring"
                at = f"{milliseconds(found['step_seconds'])} ({source})"
                rows.append([name if first else "", at if first else "", system])
                rows[-1] += [f"{one:.2f}×" for one in found[system]]
                rows[-1].append(f"{model['throughput_of_figure_1a']:.2f}×" if first else "")
    head = ["model", "t", "system", *(f"N = {n}" for n in WORKERS), "Figure 1a, N = 16"]
    return table(head, rows)


def verdict(data: dict[str, Any]) -> str:
    """``VERDICT``, judged on the full run, with the numbers of this one."""
    models = data["a"]["models"]
    resnet, vgg, alexnet, transformer = models.values()
    small, large = data["b"]["models"].values()
    period = resnet["fedavg"]["period"]
    text = VERDICT.format(
        resnet_needs=needs(resnet["table_1"]),
        resnet_t=milliseconds(resnet["step_seconds_of_table_1"]),
        resnet_fedavg=milliseconds(resnet["fedavg"]["step_seconds"]),
        resnet_often=f"{period:.0f}",
        resnet_seldom=f"{2 * period:.0f}",
        alexnet_t=milliseconds(alexnet["step_seconds_of_table_1"]),
        transformer_t=milliseconds(transformer["step_seconds_of_table_1"]),
        vgg_needs=needs(vgg["table_1"]),
        vgg_limits=" and ".join(f"{row['limit']:.1f}×" for row in vgg["table_1"]),
        transformer_fedavg_needs=needs(transformer["fedavg"]["rows"][:1]),
        transformer_fedavg=milliseconds(transformer["fedavg"]["step_seconds"]),
        figure_steps=", ".join(
            f"{milliseconds(one['step_seconds_of_figure_1a'])} ({name})"
            for name, one in models.items()
        ),
        table_steps=", ".join(
            milliseconds(one["step_seconds_of_table_1"]) if one["at_table_1"] else "none"
            for one in models.values()
        ),
        figure_gains=", ".join(f"{at_figure_1a(one):.2f}×" for one in models.values()),
        paper_gains=", ".join(f"{one['table_1'][0]['overall']:.2f}×" for one in models.values()),
        server_steps=" to ".join(
            f"{f(map(one_server, models.values())):.1f} s" for f in (min, max)
        ),
        merge_small=milliseconds(small["merge_seconds"]),
        merge_large=milliseconds(large["merge_seconds"]),
        window_small=between(small["steps_as_the_paper_seconds"]),
        window_large=between(large["steps_as_the_paper_seconds"]),
        off_plan=100 * data["off_plan"],
    )
    return "\n\n".join(fill(one, 100, break_on_hyphens=False) for one in text.split("\n\n")) + "\n"


def at_figure_1a(model: dict[str, Any]) -> float:
    """The overall speed-up at the step time of Figure 1a, with the paper's iterations."""
    row, step = model["table_1"][0], model["step_seconds_of_figure_1a"]
    gained = per_step(step, model["mean_seconds"], row["lssr"], model["flags_seconds"])
    return gained / float(row["iterations"])


def one_server(model: dict[str, Any]) -> float:
    """The step time at which BSP with one server does what Figure 1a shows."""
    found, target = model["throughput"]["Figure 1a"], model["throughput_of_figure_1a"]
    workers, step = WORKERS[-1], found["step_seconds"]
    communication = workers * step / found["one server"][-1] - step
    return float(communication * target / (workers - target))


def needs(rows: list[dict[str, Any]]) -> str:
    return " and ".join(f"{row['per_step']:.2f}×" for row in rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def between(seconds: tuple[float, ...] | list[float]) -> str:
    return "{:.0f}–{:.0f} ms".format(*(1000 * one for one in seconds))
