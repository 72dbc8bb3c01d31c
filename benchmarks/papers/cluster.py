"""Dummy models in the simulator, and the same by formula.

Models are dummies, smaller than the real ones by a factor of 1000 (SelSync's) or 100 (GoogLeNet),
on links slower by the same factor; latencies stay. So means take as long as the real ones in one
bucket, and the 56 bytes of a roll a little longer; formulas with the real sizes say by how little.
A dummy is one tensor, so BSP does not overlap with backward, as in SelSync's
published code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import BSP, AsyncAveraging, Compute, Network, SelSync, Strategy, simulate
from offbeat.averaging.votes import Vote
from offbeat.transport.costs import all_reduce_seconds

LATENCY = 1e-4
ROLL_BYTES = 8 * Vote.SLOTS
TAIL_BYTES = 4 * (Vote.SLOTS + 2)  # what the workers agree on with their gradients
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
        """Seconds and idle share of a step of the slowest after the settling ones, and the LSSR."""

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
        slowest: dict[str, float] = max(result.results, key=lambda one: one["step_seconds"])
        return slowest

    def step_seconds(
        self, strategy: Strategy, parameters: int, step: float, lssr: float = 0.5
    ) -> float:
        """By formula, with the real sizes in one bucket, for steps of so many seconds alone.

            BSP               t + A(gradients, and what the workers agree on)
            SelSync           t + r + (1 − LSSR)·m
            cyclic averaging  max(β·t, r + m)/β

        A is a ring all-reduce, m that of the model, r that of a roll, β half of the staleness.
        """
        size = 4.0 * parameters
        mean, roll = self.mean_seconds(size), self.roll_seconds
        match strategy:
            case BSP():
                return step + self.mean_seconds(size + TAIL_BYTES)
            case SelSync():
                return step + roll + (1 - lssr) * mean
            case AsyncAveraging(staleness=staleness, schedule="cyclic"):
                cycle = staleness // 2
                return max(cycle * step, roll + mean) / cycle
        raise ValueError(f"no formula for {strategy}")

    def mean_seconds(self, size_bytes: float) -> float:
        return all_reduce_seconds(size_bytes, self.workers, self.bandwidth / 8, LATENCY)

    @property
    def roll_seconds(self) -> float:
        return self.mean_seconds(ROLL_BYTES)


CLUSTER = Setting(16, 5e9, 1000)
FOUR = Setting(4, 1e9, 100)


def off_formula(found: Iterable[Mapping[str, float]], expected: Iterable[float]) -> float:
    """The largest relative difference of a step's seconds from the formulas."""
    return max(
        abs(one["step_seconds"] / seconds - 1) for one, seconds in zip(found, expected, strict=True)
    )
