"""Step times of the papers' settings: dummy models in the simulator, and formulas.

A dummy model is smaller than the real one by a factor of 1000 (SelSync) or 100 (GoogLeNet), and its
links are slower by the same factor; latencies are the same. So a mean takes as long as that of the
real model in one bucket. The 56 bytes of a tally are not scaled and take a little longer; formulas
with the real sizes show that the difference is small. A dummy is one tensor, so BSP does not
overlap with backward, as in SelSync's published code.
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
TALLY_BYTES = 8 * Vote.SLOTS
TAIL_BYTES = 4 * (Vote.SLOTS + 2)  # votes that travel with the gradients
NO_SPIKES: Mapping[int, int] = {}
"""Step → worker whose gradient is twice as large."""


class Dummy(nn.Module):
    """A model of one tensor whose gradients are all ``factor``."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(parameters))

    def forward(self, factor: float) -> Tensor:
        return factor * self.p.sum()


@dataclass(frozen=True)
class Setting:
    """A cluster with links of ``bandwidth`` bits a second, simulated at 1/``scale`` of its size."""

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
        """Simulate; return step time, idle share and LSSR of the slowest worker.

        Args:
            strategy: Strategy of the workers.
            parameters: Parameters of the real model.
            step_seconds: Computing time of a step.
            steps: Number of steps.
            settling: Steps at the start that do not count.
            spikes: See ``NO_SPIKES``.
            workers: Number of workers; None for that of the cluster.
        """

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
        """Return the step time by formula, with the real sizes in one bucket.

            BSP               t + A(gradients and votes)
            SelSync           t + r + (1 − ℓ)·m
            cyclic averaging  max(β·t, r + m)/β

        t is the computing time of a step, A the time of a ring all-reduce, m that of the model,
        r that of a tally, ℓ the LSSR, and β half of the staleness.
        """
        size = 4.0 * parameters
        mean, tally = self.mean_seconds(size), self.tally_seconds
        match strategy:
            case BSP():
                return step + self.mean_seconds(size + TAIL_BYTES)
            case SelSync():
                return step + tally + (1 - lssr) * mean
            case AsyncAveraging(staleness=staleness, schedule="cyclic"):
                cycle = staleness // 2
                return max(cycle * step, tally + mean) / cycle
        raise ValueError(f"no formula for {strategy}")

    def mean_seconds(self, size_bytes: float) -> float:
        return all_reduce_seconds(size_bytes, self.workers, self.bandwidth / 8, LATENCY)

    @property
    def tally_seconds(self) -> float:
        return self.mean_seconds(TALLY_BYTES)


CLUSTER = Setting(16, 5e9, 1000)
FOUR = Setting(4, 1e9, 100)


def off_formula(found: Iterable[Mapping[str, float]], expected: Iterable[float]) -> float:
    """Return the largest relative difference of the step times from the formulas."""
    return max(
        abs(one["step_seconds"] / seconds - 1) for one, seconds in zip(found, expected, strict=True)
    )
