"""The result of ``offbeat.plan``: forecasts, a recommendation, and their display."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from offbeat.display.table import Table
from offbeat.plan.forecast import Forecast, percent
from offbeat.quantization.wire import Precision
from offbeat.units import show_bandwidth, show_bytes, show_seconds

HEADINGS = ("strategy", "step", "speed-up", "idle", "sent per step", "extra memory", "note")
SPEED_UP_MEANS = (
    "The speed-up counts steps, not the time to a metric: a strategy may need more steps than "
    "another to reach the same metric."
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Forecasts for one model, machine and network, and the strategy to try first.

    Attributes:
        parameters: Number of averaged elements of the model. An element whose sum takes 8 bytes, as
            in float64, counts as two.
        step_seconds: Compute time t of a step, seconds.
        workers: Number of workers.
        bandwidth: Bandwidth of each worker's or node's link in each direction, bits per second.
        latency_seconds: Latency of a message, seconds.
        workers_per_node: Number of workers per node (≥ 1).
        inside: Bandwidth of each worker's link inside its node, bits per second; None if a node has
            one worker.
        inside_latency_seconds: Latency inside a node, seconds; None if a node has one worker.
        node_step_seconds: Mean duration of a step of a single node, with the mean of its gradients,
            seconds. It is t if a node has one worker.
        jitter: Standard deviation of the compute time relative to t.
        wire: Precision given for means, as in ``attach``; "float32" if none was given.
        model_bytes: Size of the model in float32, bytes.
        rows: Forecasts, one per strategy.
        recommendation: Forecast of the strategy to try first.
        reason: Text that explains the recommendation.
    """

    parameters: float
    step_seconds: float
    workers: int
    bandwidth: float
    latency_seconds: float
    workers_per_node: int
    inside: float | None
    inside_latency_seconds: float | None
    node_step_seconds: float
    jitter: float
    wire: Precision
    model_bytes: float
    rows: tuple[Forecast, ...]
    recommendation: Forecast
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values. Infinity in a forecast becomes the string "inf"."""

        def row(forecast: Forecast) -> dict[str, Any]:
            return {k: "inf" if v == math.inf else v for k, v in asdict(forecast).items()}

        return {
            **asdict(self),
            "rows": [row(forecast) for forecast in self.rows],
            "recommendation": row(self.recommendation),
        }

    def caption(self) -> str:
        """Return model, machine and network in one line."""
        jitter = f" ± {100 * self.jitter:g} %" if self.jitter else ""
        wire = f" sent as {self.wire}" if self.wire != "float32" else ""
        nodes = ""
        if self.inside is not None and self.inside_latency_seconds is not None:
            nodes = (
                f" between nodes of {self.workers_per_node} with {show_bandwidth(self.inside)}, "
                f"latency {show_seconds(self.inside_latency_seconds)}, which step every "
                f"{show_seconds(self.node_step_seconds)} alone"
            )
        return (
            f"{self.parameters:,.0f} parameters ({show_bytes(self.model_bytes)}){wire}, "
            f"{show_seconds(self.step_seconds)}{jitter} a step, {self.workers} workers, "
            f"{show_bandwidth(self.bandwidth)}, latency {show_seconds(self.latency_seconds)}"
            f"{nodes}; predicted, not measured"
        )

    def table(self) -> Table:
        """Return a table with one row per strategy."""
        rows = tuple(
            (
                row.strategy,
                show_seconds(row.step_seconds),
                f"{row.throughput:.2f}x",
                percent(row.idle),
                show_bytes(row.payload_bytes),
                show_bytes(row.memory_bytes),
                row.note,
            )
            for row in self.rows
        )
        return Table(HEADINGS, rows, self.caption())

    def markdown(self) -> str:
        """Return caption, table and recommendation as Markdown."""
        advice = f"Try `{self.recommendation.strategy}` first: {self.reason}."
        return f"{self.table().markdown()}\n{SPEED_UP_MEANS}\n\n{advice}\n"
