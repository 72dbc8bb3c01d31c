"""SelSync's Table I and Figure 1a, and what follows from them by arithmetic alone.

Table I tells iterations to convergence, the share of local steps (LSSR) and the overall speed-up,
which is one in *time to convergence*. Between the two stand the iterations:

    overall = (speed-up per step) · (BSP's iterations / own iterations)

With a step computed in t, a mean of models that takes m and an exchange of flags that takes r,
BSP without overlap takes t + m for a step and SelSync t + r + (1 − ℓ)·m, ℓ its LSSR. So the
speed-up per step is below 1/(1 − ℓ), whatever computes and whatever the network.

Units: seconds. Figures of the paper are 16 workers' at 5 Gbit/s.
"""

from dataclasses import dataclass

VOCABULARY, WIDTH = 267_735, 200
# q, k, v and output; the two layers of hidden size 200; two norms: all with biases
_LAYER = 4 * (WIDTH**2 + WIDTH) + 2 * (WIDTH**2 + WIDTH) + 4 * WIDTH
TRANSFORMER = 2 * VOCABULARY * WIDTH + VOCABULARY + 2 * _LAYER


@dataclass(frozen=True)
class Row:
    """One method on one model, as the paper gives it.

    Attributes:
        method: SelSync's δ, or FedAvg's (C, E).
        iterations: Until convergence, relative to BSP's.
        overall: Speed-up in time to convergence.
        lssr: Share of local steps; None where we do not have it.
    """

    method: str
    iterations: float
    overall: float
    lssr: float | None = None

    @property
    def per_step(self) -> float:
        """The speed-up of a step that the overall one needs."""
        return self.overall * self.iterations

    @property
    def limit(self) -> float | None:
        """1/(1 − LSSR), the most that a step can gain."""
        return None if self.lssr is None else 1 / (1 - self.lssr)

    @property
    def impossible(self) -> bool:
        """Whether a step would have to gain more than it can."""
        return self.limit is not None and self.per_step >= self.limit


@dataclass(frozen=True)
class Model:
    """What the paper says of one model.

    Attributes:
        name: Its name.
        parameters: Of it, as its published code builds it.
        throughput: Of BSP on 16 workers relative to one, read off Figure 1a.
        selsync: Rows of δ = 0.3 and 0.5.
        fedavg: Rows of (1, 0.25) and (1, 0.125), the second with twice as many means.
    """

    name: str
    parameters: int
    throughput: float
    selsync: tuple[Row, Row]
    fedavg: tuple[Row, Row] | None = None


WORKERS = 16
MODELS = (
    Model(
        "ResNet-101",
        44_549_160,
        3.1,
        (Row("δ = 0.3", 1.85, 2.03, 0.829), Row("δ = 0.5", 2.33, 1.67)),
        (Row("FedAvg (1, 0.25)", 2.78, 2.59), Row("FedAvg (1, 0.125)", 2.50, 2.55)),
    ),
    Model(
        "VGG11",
        132_863_336,
        2.35,
        (Row("δ = 0.3", 6.70, 6.16, 0.912), Row("δ = 0.5", 7.52, 13.75, 0.937)),
    ),
    Model(
        "AlexNet",
        61_100_840,
        2.8,
        (Row("δ = 0.3", 0.90, 4.62, 0.954), Row("δ = 0.5", 1.00, 4.63)),
    ),
    Model(
        "Transformer",
        TRANSFORMER,
        2.75,
        (Row("δ = 0.3", 1.38, 2.42, 0.725), Row("δ = 0.5", 1.65, 2.06)),
        (Row("FedAvg (1, 0.25)", 4.00, 1.99), Row("FedAvg (1, 0.125)", 3.72, 2.14)),
    ),
)


def per_step(step: float, mean: float, lssr: float, flags: float = 0.0) -> float:
    """The speed-up of a step: (t + m) / (t + r + (1 − ℓ)·m)."""
    return (step + mean) / (step + flags + (1 - lssr) * mean)


def step_of(speedup: float, mean: float, lssr: float, flags: float = 0.0) -> float | None:
    """The t at which a step gains ``speedup``, solved from ``per_step``; None if no t > 0 does."""
    step = (mean - speedup * (flags + (1 - lssr) * mean)) / (speedup - 1)
    return step if step > 0 else None


def lssr_of(speedup: float, step: float, mean: float, flags: float = 0.0) -> float:
    """The ℓ at which a step of t gains ``speedup``; above 1 it gains less even without a mean."""
    return 1 - ((step + mean) / speedup - step - flags) / mean


def step_of_pair(seldom: float, often: float, mean: float) -> tuple[float, float]:
    """The t and the H at which a mean every 2·H steps gains ``seldom``, and every H ``often``.

    Two equations in two unknowns, with no flags: t + m = S₁·(t + m/2H) = S₂·(t + m/H). H is
    infinite if both gain as much.
    """
    share = 2 / seldom - 1 / often  # of t in t + m
    step = mean * share / (1 - share)
    left = (step + mean) / often - step
    return step, mean / left if left > 1e-12 * mean else float("inf")


def step_of_throughput(throughput: float, workers: int, mean: float) -> float:
    """The t at which ``workers`` under BSP without overlap do so much: T = N·t/(t + m)."""
    return mean * throughput / (workers - throughput)
