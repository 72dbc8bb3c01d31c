"""What a plan is asked for: the arguments of ``offbeat.plan``, checked before anything is run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from offbeat.arguments import require_integer, require_number
from offbeat.plan.phantom import shapes_of
from offbeat.plan.play import Setting
from offbeat.quantization.wire import Precision, require_precision
from offbeat.registry import parse_strategy
from offbeat.simulate import Network
from offbeat.strategies import Strategy
from offbeat.strategies.base import CustomFlow
from offbeat.training.compatibility import require_abilities
from offbeat.units import to_seconds


@dataclass(frozen=True, kw_only=True)
class Question:
    """The arguments of ``offbeat.plan``, and what they say.

    Attributes:
        network: The links.
        setting: Model and cluster, without the cost of nodes.
        given: The strategies, with the text that the user has given; None without any.

    Raises:
        AttachError: a strategy that cannot train in nodes.
        TypeError: an argument of the wrong type.
        ValueError: an impossible value, a baseline, or a strategy that cannot use the wire.
    """

    parameters: float | str | nn.Module
    step_time: float | str
    workers: int
    bandwidth: float | str
    latency: float | str
    jitter: float = 0.0
    wire: Precision | None = None
    lssr: float = 0.9
    strategies: Sequence[str | Strategy] | None = None
    workers_per_node: int = 1
    inside: float | str | None = None
    inside_latency: float | str | None = None
    network: Network = field(init=False)
    setting: Setting = field(init=False)
    given: list[tuple[str, Strategy]] | None = field(init=False)

    def __post_init__(self) -> None:
        require_integer("workers", self.workers, least=1)
        if self.wire is not None:
            require_precision(self.wire)
        require_number("jitter", self.jitter)
        require_number("lssr", self.lssr)
        if not 0 <= self.jitter <= 1:
            raise ValueError(
                f"jitter must be in [0, 1], like 0.1 for 10 % of a step, got {self.jitter}"
            )
        if not 0 < self.lssr < 1:
            raise ValueError(f"lssr must be between 0 and 1, like 0.9, got {self.lssr}")
        network = Network(
            self.bandwidth,
            self.latency,
            workers_per_node=self.workers_per_node,
            inside=self.inside,
            inside_latency=self.inside_latency,
        )
        if self.workers % self.workers_per_node:
            raise ValueError(
                f"workers={self.workers} do not fill nodes of "
                f"workers_per_node={self.workers_per_node}"
            )
        seconds = to_seconds(self.step_time)
        setting = Setting(
            shapes_of(self.parameters), self.workers, network, seconds, self.jitter, self.lssr
        )
        given = None if self.strategies is None else self._read(self.strategies)
        for name, value in (("network", network), ("setting", setting), ("given", given)):
            object.__setattr__(self, name, value)

    def _read(self, strategies: Sequence[str | Strategy]) -> list[tuple[str, Strategy]]:
        if isinstance(strategies, str) or not strategies:
            raise ValueError(
                f'strategies must be a list like ["bsp", "local:period=8"]: {strategies}'
            )
        found = []
        for chosen in strategies:
            if not isinstance(chosen, str | Strategy):
                raise TypeError(
                    f"a strategy is text like local:period=8, or a Strategy; got {chosen!r}"
                )
            strategy = parse_strategy(chosen) if isinstance(chosen, str) else chosen
            if isinstance(strategy.averages(), CustomFlow):
                raise ValueError(
                    f"plan has no row for {strategy}: it is a baseline to compare with, or has a "
                    "flow of its own; run it with offbeat compare or offbeat simulate"
                )
            wire = self.wire or strategy.default_wire
            require_abilities(strategy, wire=wire, nodes=self.workers_per_node > 1)
            found.append((str(chosen).strip(), strategy))
        return found
