"""SelSync's Table I and Figure 1a, and the step times that follow from them by arithmetic.

Table I has iterations to convergence, the share of local steps (LSSR), and the overall speed-up in
*time to convergence*. They are related by:

    overall = (speed-up per step) · (BSP's iterations / own iterations)

A step takes t to compute, a mean of models m, and a tally r. Without overlap BSP takes t + m for a
step, and SelSync t + r + (1 − ℓ)·m, where ℓ is its LSSR. So the speed-up per step is below
1/(1 − ℓ) on any machine and network.

Times are in seconds. The paper's figures are of 16 workers at 5 Gbit/s.
"""

from dataclasses import dataclass

VOCABULARY, WIDTH = 267_735, 200
# q, k, v and output; the two layers of hidden size 200; two norms: all with biases
_LAYER = 4 * (WIDTH**2 + WIDTH) + 2 * (WIDTH**2 + WIDTH) + 4 * WIDTH
TRANSFORMER = 2 * VOCABULARY * WIDTH + VOCABULARY + 2 * _LAYER


@dataclass(frozen=True)
class Row:
    """One method on one model, as in the paper.

    Attributes:
        method: SelSync's δ, or FedAvg's (C, E).
        iterations: Iterations to convergence, relative to BSP's.
        overall: Speed-up in time to convergence.
        lssr: Share of local steps; None where it is not known.
    """

    method: str
    iterations: float
    overall: float
    lssr: float | None = None

    @property
    def per_step(self) -> float:
        """Speed-up of a step that the overall speed-up requires."""
        return self.overall * self.iterations

    @property
    def limit(self) -> float | None:
        """Upper bound of the speed-up of a step, 1/(1 − LSSR)."""
        return None if self.lssr is None else 1 / (1 - self.lssr)

    @property
    def impossible(self) -> bool:
        """True if the required speed-up of a step is above its bound."""
        return self.limit is not None and self.per_step >= self.limit


@dataclass(frozen=True)
class Model:
    """The paper's figures of one model.

    Attributes:
        name: Name of the model.
        parameters: Number of parameters, as the published code builds it.
        throughput: BSP's throughput on 16 workers relative to one, read off Figure 1a.
        selsync: Rows of δ = 0.3 and 0.5.
        fedavg: Rows of (1, 0.25) and (1, 0.125); the second has twice as many means.
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
    """Return the speed-up of a step: (t + m) / (t + r + (1 − ℓ)·m)."""
    return (step + mean) / (step + flags + (1 - lssr) * mean)


def step_of(speedup: float, mean: float, lssr: float, flags: float = 0.0) -> float | None:
    """Return the t at which ``per_step`` is ``speedup``; None if there is none above 0."""
    step = (mean - speedup * (flags + (1 - lssr) * mean)) / (speedup - 1)
    return step if step > 0 else None


def lssr_of(speedup: float, step: float, mean: float, flags: float = 0.0) -> float:
    """Return the ℓ at which a step gains ``speedup``; above 1 means that no LSSR suffices."""
    return 1 - ((step + mean) / speedup - step - flags) / mean


def step_of_pair(seldom: float, often: float, mean: float) -> tuple[float, float]:
    """Return the t and the H at which a mean every 2·H steps gains ``seldom``, every H ``often``.

    They solve two equations, without a tally: t + m = S₁·(t + m/2H) = S₂·(t + m/H). H is infinite
    if both gain the same.
    """
    share = 2 / seldom - 1 / often  # t/(t + m)
    step = mean * share / (1 - share)
    left = (step + mean) / often - step
    return step, mean / left if left > 1e-12 * mean else float("inf")


def step_of_throughput(throughput: float, workers: int, mean: float) -> float:
    """Return the t at which N workers under BSP have this throughput: T = N·t/(t + m)."""
    return mean * throughput / (workers - throughput)
