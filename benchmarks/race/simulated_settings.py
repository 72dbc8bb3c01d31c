"""Settings of the race in virtual time: workloads, links, methods, and what tuning tries.

Virtual time covers what the links here cannot be shaped to: latencies and many workers. Training is
real, and steps take 80 virtual ms and vary by 5 %.

- ``mlp``: 149,110 parameters on scikit-learn's digits (``models/digits_mlp.py``). Its links are
  scaled: the one called 50 Mbit/s has 50 Mbit/s times the model's bytes over the CNN's. So a mean
  of all gradients takes as many steps as with the CNN on the link of that name. Latencies are not
  scaled, because the step time is not.
- ``cnn``: that CNN of 2.1 million parameters on CIFAR-10, at the recipe's rate, on links as they
  are called. A run takes minutes, so only four methods run.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.race.methods import DILOCO, DILOCO_OF_PERIOD
from offbeat.simulate import Network
from offbeat.units import to_bandwidth

STEP_SECONDS, EVALUATIONS = 0.08, 24
CNN_BYTES = 8_279_592
SEEDS, TUNING_SEED = (0, 1, 2), 100
FINALISTS = 2
"""Number of tuned rivals in a cell that run under the shown seeds: the first under the tuning seed.
"""
SHARE = 0.95
"""Share of the ideal network's final metric that is the target.

On real links it is 98 %, which most methods never reach here.
"""
FACTORS = (0.3, 1.0, 3.0, 10.0)
"""Factors on the recipe's learning rate that tuning tries."""
METHODS = (
    "ideal",
    "streaming",
    DILOCO,
    "bsp",
    "bsp --wire bfloat16",
    "local:period=16",
    "async",
    "selsync",
)
GRIDS = {
    "streaming": ("streaming", "streaming:outer_gain=1", "streaming:outer_gain=2"),
    "diloco": (DILOCO_OF_PERIOD.format(8), DILOCO, DILOCO_OF_PERIOD.format(32)),
    "bsp": ("bsp", "bsp --wire bfloat16", "bsp --wire int8"),
    "local": ("local:period=4", "local:period=16", "local:period=64"),
    "async": ("async:staleness=4", "async", "async:staleness=64"),
    "selsync": ("selsync:target_lssr=0.7", "selsync", "selsync:target_lssr=0.97"),
}
"""Family → settings that tuning tries; each of six families has twelve pairs with ``FACTORS``."""
MODELS = Path(__file__).parents[1] / "models"


@dataclass(frozen=True)
class Workload:
    """A training task.

    Attributes:
        file: File of the recipe in ``models/``.
        data: Subdirectory of the data directory; None if the recipe needs no files.
        epochs: Passes over the data.
        model_bytes: Bytes of the parameters.
        factors: Factors on the recipe's rate to tune over; one factor means no tuning.
        methods: Methods of the track ``defaults``.
    """

    file: str
    data: str | None
    epochs: float
    model_bytes: int
    factors: tuple[float, ...] = FACTORS
    methods: tuple[str, ...] = METHODS


WORKLOADS = {
    "mlp": Workload("digits_mlp.py", None, 16.0, 596_440),
    "cnn": Workload(
        "cifar_wide.py",
        "cifar10",
        2.0,
        CNN_BYTES,
        factors=(1.0,),
        methods=("ideal", "streaming", DILOCO, "local:period=16"),
    ),
}


@dataclass(frozen=True)
class Cell:
    """Links and workers.

    With more workers there are more samples, so that each worker takes the same number of steps.

    Attributes:
        bandwidth: Name of the link, such as ``50Mbit/s``.
        latency: One-way latency in milliseconds.
        workers: Number of workers.
        jitter: Relative variation of the step time.
        slow: Factor by which rank 0 is slower.
        halved: Seconds after which all bandwidths are halved; None if never.
    """

    bandwidth: str
    latency: float
    workers: int = 4
    jitter: float = 0.05
    slow: float = 1.0
    halved: float | None = None

    @property
    def name(self) -> str:
        """Name such as ``50Mbit/s 0.1ms``, followed by all settings that are not the default."""
        text = f"{self.bandwidth} {self.latency:g}ms"
        text += f" {self.workers} workers" if self.workers != 4 else ""
        text += f" jitter {100 * self.jitter:g} %" if self.jitter != 0.05 else ""
        text += f" one worker {self.slow:g} times slower" if self.slow != 1 else ""
        return text + (f" halved after {self.halved:g} s" if self.halved is not None else "")

    def network(self, workload: Workload) -> Network:
        """Return the links, scaled to the workload's model."""
        scale = workload.model_bytes / CNN_BYTES
        changes: dict[str | float, float] = {} if self.halved is None else {self.halved: 0.5}
        bandwidth = to_bandwidth(self.bandwidth) * scale
        return Network(bandwidth, self.latency / 1000, changes=changes)

    @property
    def merge_over_step(self) -> float:
        """Time of a mean of all gradients over the time of a step, the same for all workloads."""
        network = self.network(WORKLOADS["cnn"])
        return network.collective_seconds("reduce", CNN_BYTES, range(self.workers)) / STEP_SECONDS


BANDWIDTHS, LATENCIES = ("1Gbit/s", "200Mbit/s", "50Mbit/s", "10Mbit/s"), (0.1, 10.0, 30.0)
MAP = tuple(Cell(bandwidth, latency) for latency in (0.1, 30.0, 10.0) for bandwidth in BANDWIDTHS)
"""All bandwidths with all latencies, in the order in which they run."""
TUNED_AT = Cell("50Mbit/s", 0.1)
"""Cell at which learning rates are tuned."""
OTHERS = (
    replace(TUNED_AT, jitter=0.2),
    replace(TUNED_AT, slow=2.0),
    replace(TUNED_AT, halved=2.0),
    replace(TUNED_AT, workers=8),
    replace(TUNED_AT, workers=16),
)
CORNERS = tuple(one for one in MAP if one.bandwidth in BANDWIDTHS[::3] and one.latency != 10.0)
