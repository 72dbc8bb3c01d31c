"""Settings of plans for the tests: small models on small clusters, and real ones like them."""

from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from offbeat import Compute, Network, Strategy
from offbeat.plan.placeholder_model import Shapes
from offbeat.plan.run import Setting

STEP, LATENCY = 0.05, 0.001
SLOW, FAST = 8e6, 80e6  # bits a second: a mean of the model takes a few steps, or less than one
INSIDE = 400e6  # of the links in a node
TENSORS, ELEMENTS = 8, 4096  # of the model, and of each tensor: 131 kB
SMALLER = 64  # numbers that one number of the placeholder stands for


class Model(nn.Module):
    """Tensors alike, whose gradients are 1."""

    def __init__(self, elements: int = ELEMENTS) -> None:
        super().__init__()
        self.p = nn.ParameterList(torch.zeros(elements) for _ in range(TENSORS))

    def forward(self) -> Tensor:
        return sum(p.sum() for p in self.p)  # type: ignore[return-value]


def shapes(elements: int = ELEMENTS, smaller: float = SMALLER) -> Shapes:
    """Those of ``Model(elements)``, by a placeholder of fewer numbers."""
    each = round(elements / smaller)
    named = tuple((f"p.{i}", each) for i in range(TENSORS))
    return Shapes(named, (), 0, elements / each, TENSORS * elements)


def network(bandwidth: float, *, nodes: bool = False, latency: float = LATENCY) -> Network:
    """Links of a cluster, in nodes of two workers or without."""
    inside: dict[str, Any] = {"workers_per_node": 2, "inside": INSIDE}
    inside["inside_latency"] = LATENCY / 10
    return Network(bandwidth, latency, **(inside if nodes else {}))


def setting(
    workers: int = 4,
    bandwidth: float = SLOW,
    *,
    jitter: float = 0.0,
    nodes: bool = False,
    of: Shapes | None = None,
    lssr: float = 0.9,
) -> Setting:
    """A placeholder like ``Model`` on a cluster."""
    links = network(bandwidth, nodes=nodes)
    return Setting(of or shapes(), workers, links, STEP, jitter, lssr)


def train(
    strategy: Strategy,
    wire: Any,
    *,
    workers: int,
    bandwidth: float,
    settle: int,
    steps: int,
    elements: int = ELEMENTS,
    nodes: bool = False,
) -> tuple[float, float, float]:
    """Seconds, idle share and bytes of a step of a real training in ``offbeat.simulate``."""

    def worker() -> tuple[float, float, float]:
        model = Model(elements)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        group: Any = "auto" if nodes else None
        sync = offbeat.attach(model, optimizer, strategy, wire=wire, node_group=group)
        totals = []
        for step in range(settle + steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if step + 1 in (settle, settle + steps):
                stats = sync.stats
                elapsed = stats.compute_seconds + stats.wait_seconds
                totals.append((elapsed, stats.wait_seconds, stats.payload_bytes))
        sync.finish()
        elapsed, waited, sent = (after - before for before, after in zip(*totals, strict=True))
        return elapsed / steps, waited / elapsed, sent / steps

    links, compute = network(bandwidth, nodes=nodes), Compute(STEP)
    return max(offbeat.simulate(worker, workers=workers, network=links, compute=compute).results)
