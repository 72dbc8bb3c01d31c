"""The comparisons that the pages quote: workloads, links and methods.

A *cell* is one workload on one network. Its results are in ``results/race-CELL.jsonl``. The *ideal*
is the reference ``ideal``, BSP on an infinitely fast network. The studies are:

- ``headline``: every method tuned with the same number of trials, five seeds, in virtual time. A
  method runs with its settings that are first to 90 % of the ideal's gain, and with those that are
  first to 98 %.
- ``fresh``: the ideal, the default settings and four others of ``headline``, with five further
  seeds, on which nothing was developed.
- ``elsewhere``: the same methods with the settings that ``headline`` chose, and the default
  settings, in virtual time: with 16 workers, at the chosen rates and at twice these; and on uneven
  links, where one of the workers has a fifth of the bandwidth, also with the settings that were
  chosen for links that are all as slow as this one.
- ``real``: the main methods with the settings that ``headline`` chose, and the default settings,
  on real processes behind shaped links.
- ``sweep``: streaming averaging with default settings on links from fast to slow, with 4 and with
  16 workers, in virtual time. The ideal, which is the same on all links, runs on the first.
- ``parts``: streaming averaging with other settings, at the rate that ``headline`` chose.
- ``rates``: streaming averaging and the ideal at several learning rates and numbers of workers. All
  take equally many steps, so more workers see more samples.
- ``many``: streaming averaging with 16, 64 and 256 workers, on a slow and a very fast link. The
  workers of a node share its link.
- ``adam``: strategies with ``--adam-correction`` on and off.
- ``features``: streaming averaging and the ideal with clipping, weight decay, LoRA and others. The
  settings are the defaults.
- ``stored``: streaming averaging with the global model in float32 and in bfloat16, not tuned.
- ``skewed``: strategies with three of ten labels on each worker, not tuned, in virtual time.
- ``uneven``: strategies for workers of unequal speed, tuned with the same number of trials, in
  virtual time. All methods lease the data, so that faster workers take more of it.
- ``elastic``: one of the workers dies and another one joins, in virtual time. All methods lease the
  data.
- ``elastic_real``: the same on real processes, of which one is killed.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.race.slowdown import fastest
from offbeat.simulate import Compute, Network
from offbeat.units import to_bandwidth
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.runners import Runner, ShapedLinks, VirtualCluster
from offbeat_lab.recipes import find_recipe
from offbeat_lab.results import read_results
from offbeat_lab.scenario import Scenario, ScenarioEvent
from offbeat_lab.timing.padding import parse_slow

WORKERS, TRIALS, EVALUATIONS, JITTER = 4, 32, 20, 0.05
FAST, GOOD = 0.9, 0.98
"""Shares of the ideal's improvement to which slowdowns are shown. Tuning chooses by both."""
REAL_STEP_SECONDS = 0.1
"""Time up to which real workers sleep in each step. It is longer than their computing."""
MAX_SECONDS = 120.0
"""Time limit of a run of ``real``, more than three times what the ideal takes."""
NEAR, FAR = "100us", "30ms"
"""Latencies of the links."""
LINKS = ("1Gbit/s", "200Mbit/s", "50Mbit/s", "10Mbit/s")
SLOW = "10Mbit/s"
"""The slow one of uneven links."""
SWEEP = ("1Gbit/s", "200Mbit/s", "50Mbit/s", "30Mbit/s", "20Mbit/s", "10Mbit/s", "5Mbit/s")
"""Links of ``sweep``."""
SWEEP_RATES = {("cnn", 4): 1, ("transformer", 4): 1, ("cnn", 16): 1, ("transformer", 16): 2}
"""Workload and number of workers → factor on the learning rate at which the ideal ends best."""


@dataclass(frozen=True)
class Workload:
    """A training task.

    Attributes:
        file: File of the recipe in ``models/``.
        data: Subdirectory of the data directory; None if the recipe needs no files.
        step_seconds: Virtual time of a step.
        partition: Partition of the data among the workers, as in ``Job``.
    """

    file: str
    data: str | None
    step_seconds: float
    partition: str | None = None

    def job(self, data: Path, workers: int) -> Job:
        """Return the settings that all runs of this workload share.

        The number of steps is the same with any number of workers.
        """
        file = str(Path("benchmarks", "models", self.file))
        more = workers / WORKERS
        return Job(
            file,
            workers=workers,
            epochs=None if more == 1 else find_recipe(file).epochs * more,
            data=None if self.data is None else str(data / self.data),
            evaluations=EVALUATIONS,
            partition=self.partition,
        )


WORKLOADS = {
    "cnn": Workload("cifar_cnn.py", "cifar10", 0.05),
    "transformer": Workload("byte_transformer.py", None, 0.025),
    "mlp": Workload("digits_mlp.py", None, 0.02),
    "mnist": Workload("mnist_mlp.py", "mnist", 0.02),
}
FEATURES = {
    name: Workload(f"features.py:{name}", None, 0.025)
    for name in (
        *("weight_decay", "tied_weights", "clipping", "accumulation", "lora"),
        *("short_memory", "long_memory", "large_batch"),
    )
} | {"batchnorm": Workload("features.py:batchnorm", "cifar10", 0.05)}
"""Workloads of ``features``."""
DILOCO, DEFAULT = "diloco", "streaming"
HEADLINE = (
    *("ideal", "streaming", "async", "selsync", DILOCO, "local", "powersgd", "sparseloco", "bsp"),
    "bsp --wire float32",
)
"""Methods of ``headline``. ``bsp --wire float32`` is DDP with all gradients in one bucket."""
REAL = ("ideal", "streaming", "async", "selsync", DILOCO, "local", "bsp", "bsp --wire float32")
"""Methods of ``real``. Torch's own DDP runs in the place of the last one."""
PARTS = (
    *("streaming", "streaming:outer_gain=1", "streaming:outer_gain=2"),
    *("streaming --wire int4", "streaming --wire int8", "streaming --wire float32"),
    *("streaming:parts=1", "streaming:parts=4"),
)


RATES = {
    ("cnn", 4): (0.25, 0.5, 1, 2),
    ("cnn", 16): (0.5, 1, 2),
    ("transformer", 4): (0.5, 1, 2, 4),
    ("transformer", 16): (1, 2, 4),
}
"""Workload and number of workers → factors on the recipe's learning rate."""
UNCORRECTED = " --adam-correction off"
VARIANTS = {key: ("ideal", "streaming", "streaming:outer_gain=1") for key in RATES} | {
    ("transformer", 16): ("ideal", "streaming", "streaming:outer_gain=0.5")
}
"""Workload and number of workers → methods of ``rates``: the ideal, the default, and the default
with another outer gain. With 16 workers and AdamW the default is 1."""
MANY = {
    ("mnist", "50Mbit/s", 16, 1): (4,),
    ("mnist", "50Mbit/s", 64, 1): (4, 8),
    ("mnist", "50Mbit/s", 64, 8): (8,),
    ("mnist", "50Mbit/s", 256, 8): (8,),
    ("mnist", "100Gbit/s", 16, 1): (4,),
    ("mnist", "100Gbit/s", 64, 1): (8,),
}
"""Workload, link, number of workers and workers per node of each cell of ``many`` → factors on the
learning rate of streaming averaging."""
MANY_IDEAL = {
    ("mnist", 16): (2, 4, 8),
    ("mnist", 64): (4, 8, 16, 32),
    ("mnist", 256): (8, 16, 32),
}
"""Workload and number of workers → factors on the learning rate of the ideal in ``many``."""
CORRECTED = (
    *("streaming", "async:staleness=4", "local:period=4", "local:period=16"),
    f"{DILOCO}:period=16,outer_lr=0.5,outer_momentum=0.6,fragments=4,overlap=4 --lr-scale 0.5",
)
"""Methods of ``adam``, each with and without longer steps. DiLoCo has the settings that were chosen
without them."""
SPEEDS = {"half": "3=2", "graded": "1=1.25,2=2,3=4", "sixth": "3=6"}
"""Name → slow workers of ``uneven`` and the factors on their step times."""
EAGER = "async:schedule=eager"
"""Asynchronous averaging whose workers step at their own speed."""
UNEVEN = ("ideal", "streaming", EAGER, "local", DILOCO)
"""Methods of ``uneven``."""
UNEVEN_RATE = 4
"""Factor on the learning rate of the first trials of ``uneven``."""
ELASTIC = (
    *("ideal", "streaming", f"{EAGER} --wire int2", "local:period=4 --wire int2"),
    *("diloco:period=4,outer_lr=0.5,outer_momentum=0.5 --wire int2", "bsp --wire int4"),
)
"""Methods of ``elastic`` and ``elastic_real``."""
ELASTIC_RATE = 8
"""Factor on their learning rate, with which the ideal ends best in ``uneven``."""
SKEWED = (
    *("ideal", "streaming", "streaming:outer_gain=1", "streaming:outer_gain=1 --wire int4"),
    *("local:period=2 --wire int4", "bsp --wire int4"),
)
"""Methods of ``skewed``."""
FRESH = ("ideal", "async", DILOCO, "local", "bsp")
"""Methods of ``fresh``, besides the default."""
STORED = (
    *("ideal", "streaming", "streaming:outer_gain=1,stored=bfloat16"),
    *("streaming --wire int4", "streaming:outer_gain=1,stored=bfloat16 --wire int4"),
    *("ideal --lr-scale 0.0625", "streaming --lr-scale 0.0625"),
    "streaming:outer_gain=1,stored=bfloat16 --lr-scale 0.0625",
)
"""Methods of ``stored``. At low rates an update is small beside what bfloat16 rounds."""
DIES_AT, JOINS_AT = 20, 80
"""Steps after which the last worker dies and another one joins, at the usual time of a step. The
ideal takes about 200."""


@dataclass(frozen=True)
class Cell:
    """One workload on one network, in one study.

    ``speeds`` is a key of ``SPEEDS``. The workers of a node share its link. With ``uneven_links``,
    the link of the last worker has a fifth of the bandwidth.
    """

    study: str
    workload: str
    bandwidth: str
    latency: str = NEAR
    workers: int = WORKERS
    speeds: str | None = None
    workers_per_node: int = 1
    uneven_links: bool = False

    @property
    def name(self) -> str:
        """Name such as ``headline-cnn-50Mbit``."""
        late = "" if self.latency == NEAR else f"-{self.latency}"
        many = "" if self.workers == WORKERS else f"-{self.workers}workers"
        uneven = "" if self.speeds is None else f"-{self.speeds}"
        nodes = "" if self.workers_per_node == 1 else f"-{self.workers_per_node}pernode"
        link = self.bandwidth.removesuffix("/s") + ("-unevenlinks" if self.uneven_links else "")
        return f"{self.study}-{self.workload}-{link}{late}{many}{nodes}{uneven}"

    @property
    def link(self) -> str:
        """The link as text, with a latency other than the usual."""
        return self.bandwidth if self.latency == NEAR else f"{self.bandwidth}, {self.latency}"

    @property
    def task(self) -> Workload:
        """The workload."""
        task = (FEATURES if self.study == "features" else WORKLOADS)[self.workload]
        return replace(task, partition="label:3") if self.study == "skewed" else task

    def path(self, folder: Path = RESULTS) -> Path:
        """Return the path of the cell's results."""
        return folder / f"race-{self.name}.jsonl"

    @property
    def slow(self) -> str | None:
        """Slow workers, as in ``Job``."""
        return None if self.speeds is None else SPEEDS[self.speeds]

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        if self.workers >= 64:  # a run takes many minutes
            return 1
        return 5 if self.study in ("headline", "fresh") else 3

    @property
    def trials(self) -> int | None:
        """Number of trials of each method; None if the methods are not tuned."""
        return TRIALS if self.study in ("headline", "uneven") else None

    def methods(self, folder: Path = RESULTS) -> list[str]:
        """Return the methods; some studies have the fast settings of ``headline``.

        Raises:
            FileNotFoundError: ``headline`` has no results for the workload and the link, or for one
                of the methods.
        """
        if self.study == "headline":
            return [*HEADLINE]
        if self.study == "features":
            return ["ideal", "streaming"]
        if self.study == "sweep":
            kinds = ("ideal", "streaming") if self.bandwidth == SWEEP[0] else ("streaming",)
            return [at_rate(kind, SWEEP_RATES[self.workload, self.workers]) for kind in kinds]
        if self.study == "uneven":
            return [*UNEVEN]
        if self.study == "skewed":
            return [*SKEWED]
        if self.study == "stored":
            return [*STORED]
        if self.study.startswith("elastic"):
            return [at_rate(method, ELASTIC_RATE) for method in ELASTIC]
        if self.study == "adam":
            return ["ideal", *(one + end for one in CORRECTED for end in ("", UNCORRECTED))]
        if self.study == "rates":
            key = self.workload, self.workers
            grid = RATES[key]
            return [at_rate(method, rate) for method in VARIANTS[key] for rate in grid]
        if self.study == "many":
            few = self.workers == 16 or self.bandwidth == "100Gbit/s"
            forms = ["streaming{}", "streaming{} --wire float32"] if few else ["streaming{}"]
            forms += ["streaming:outer_gain=0.5{}"] if self.workers == 16 else []
            rates = MANY[self.workload, self.bandwidth, self.workers, self.workers_per_node]
            return [
                *(at_rate("ideal", rate) for rate in MANY_IDEAL[self.workload, self.workers]),
                *(form.format(at_rate("", rate)) for rate in rates for form in forms),
            ]
        chosen = self._chosen(folder)
        default = Job("").under(DEFAULT + _rate(chosen["ideal"]))
        if self.study == "elsewhere":
            jobs = [*(chosen[method] for method in HEADLINE), default]
            if self.workers != WORKERS:
                jobs += [replace(job, lr_scale=2 * job.lr_scale) for job in jobs]
            else:
                slow = replace(self, bandwidth=SLOW)._chosen(folder)
                jobs += [*(slow[method] for method in HEADLINE), default]
            return [job.label for job in jobs]
        if self.study == "fresh":
            return [default.label, *(chosen[method].label for method in FRESH)]
        if self.study == "parts":
            rate = _rate(chosen["streaming"])
            return ["ideal" + _rate(chosen["ideal"]), *(one + rate for one in PARTS)]
        *real, ddp = [chosen[method] for method in REAL]
        labels = [*(job.label for job in real), "torch:ddp" + _rate(ddp), default.label]
        return list(dict.fromkeys(labels))

    def _chosen(self, folder: Path) -> dict[str, Job]:
        """Return the fast settings of each method of ``headline`` on this link."""
        headline = replace(self, study="headline", workers=WORKERS, uneven_links=False)
        best = fastest(read_results(headline.path(folder), trials=True), FAST, headline.seeds)
        if missing := [method for method in HEADLINE if method not in best]:
            raise FileNotFoundError(f"{headline.name} has no runs of {missing[0]!r}")
        return {method: next(iter(runs.values())).job for method, runs in best.items()}

    def job(self, data: Path) -> Job:
        """Return the settings that all runs share."""
        job = replace(self.task.job(data, self.workers), workers_per_node=self.workers_per_node)
        if self.study == "fresh":
            return replace(job, seed=self.seeds)
        if self.study == "uneven":
            return replace(
                job, partition=LEASED, slow=self.slow, jitter=JITTER, lr_scale=UNEVEN_RATE
            )
        if self.study == "elastic":
            return replace(job, **self._elastic(self.task.step_seconds), jitter=JITTER)
        if self.study == "elastic_real":
            seconds = REAL_STEP_SECONDS
            return replace(job, **self._elastic(seconds), step_seconds=seconds, jitter=JITTER)
        if self.study != "real":
            return job
        return replace(job, step_seconds=REAL_STEP_SECONDS, max_seconds=MAX_SECONDS)

    def _elastic(self, step_seconds: float) -> dict[str, Any]:
        """Return the settings of a job whose last worker dies. Another one joins later."""
        dies = ScenarioEvent(DIES_AT * step_seconds, worker=self.workers - 1, alive=False)
        joins = ScenarioEvent(JOINS_AT * step_seconds, worker=self.workers, alive=True)
        scenario = str(Scenario((dies, joins)))
        return {"partition": LEASED, "scenario": scenario}

    def _bandwidth_of(self, node: int, now: float) -> float:
        """Return the bandwidth of a node's link if the links are uneven."""
        return to_bandwidth(self.bandwidth) / (5 if node == self.workers - 1 else 1)

    @contextlib.contextmanager
    def runner(self) -> Iterator[Runner]:
        """Yield the network of the cell; that of real processes exists until the end."""
        if self.study in ("real", "elastic_real"):
            nodes = self.workers + (self.study == "elastic_real")  # one for the worker that joins
            with ShapedLinks(nodes, to_bandwidth(self.bandwidth)) as links:
                yield links
        else:
            slow = parse_slow(self.slow, self.workers)
            compute = Compute(self.task.step_seconds, jitter=JITTER, slowdown=slow)
            network = Network(
                self._bandwidth_of if self.uneven_links else self.bandwidth,
                latency=self.latency,
                workers_per_node=self.workers_per_node,
            )
            yield VirtualCluster(network, compute)


def at_rate(method: str, rate: float) -> str:
    """Return a method with a factor on the learning rate."""
    return method if rate == 1 else f"{method} --lr-scale {rate:g}"


def _rate(job: Job) -> str:
    """Return the learning-rate factor of a job as an option."""
    return "" if job.lr_scale == 1 else f" --lr-scale {job.lr_scale:g}"


CELLS = (
    *(Cell("headline", name, link) for name in ("cnn", "transformer") for link in LINKS),
    Cell("headline", "transformer", "200Mbit/s", FAR),
    *(Cell("elsewhere", name, "50Mbit/s", workers=16) for name in ("cnn", "transformer")),
    *(Cell("elsewhere", name, "50Mbit/s", uneven_links=True) for name in ("cnn", "transformer")),
    *(Cell("fresh", name, link) for link in LINKS for name in ("cnn", "transformer")),
    *(Cell("real", name, link) for name in ("cnn", "transformer") for link in LINKS),
    *(Cell("sweep", name, link, workers=many) for name, many in SWEEP_RATES for link in SWEEP),
    *(Cell("parts", name, "50Mbit/s") for name in ("cnn", "transformer")),
    Cell("adam", "transformer", "50Mbit/s"),
    *(Cell("features", name, "50Mbit/s") for name in FEATURES),
    Cell("skewed", "cnn", "50Mbit/s"),
    Cell("stored", "transformer", "50Mbit/s"),
    *(Cell("rates", name, "50Mbit/s", workers=many) for name, many in RATES),
    *(Cell("many", name, link, workers=n, workers_per_node=k) for name, link, n, k in MANY),
    *(Cell("uneven", "mlp", "50Mbit/s", speeds=speeds) for speeds in SPEEDS),
    *(Cell(study, "mlp", "50Mbit/s") for study in ("elastic", "elastic_real")),
)


def select(words: Sequence[str]) -> list[Cell]:
    """Return the cells whose names contain all words, between dashes; without words all cells.

    Raises:
        ValueError: There is no such cell.
    """
    found = [one for one in CELLS if all(f"-{word}-" in f"-{one.name}-" for word in words)]
    if not found:
        raise ValueError(f"no cell has all of {' '.join(words)!r}; --list shows the cells")
    return found
