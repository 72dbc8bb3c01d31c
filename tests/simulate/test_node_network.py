"""Nodes of several workers in virtual time: seconds and bytes, worked out by hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import Compute, Network, simulate

# Numbers so far apart that a second on the wrong link shows.
STEP = 0.05
OUT, OUT_LATENCY = 1e6, 2e-3  # bytes a second, seconds
IN, IN_LATENCY = 40e6, 1e-4
M = 4 * 10_000  # bytes of the model, one tensor
NODES = {
    "bandwidth": 8 * OUT,
    "latency": OUT_LATENCY,
    "inside": 8 * IN,
    "inside_latency": IN_LATENCY,
}


def network(workers_per_node: int = 2, **changes: Any) -> Network:
    return Network(**{**NODES, "workers_per_node": workers_per_node, **changes})


class Model(nn.Module):
    """One tensor, whose gradient is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(M // 4))

    def forward(self) -> Tensor:
        return self.p.sum()


def measured(text: str, *, workers: int, per_node: int, cycle: int, flat: bool = False) -> Any:
    """Seconds of a step, and of it those waited between nodes; all are alike on all workers."""

    def worker() -> Any:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = offbeat.attach(
            model,
            optimizer,
            offbeat.parse_strategy(text),
            node_group=None if flat else "auto",
        )
        found = []
        for step in range(5 * cycle):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if step + 1 in (2 * cycle, 5 * cycle):
                stats = sync.stats
                found.append((stats.compute_seconds + stats.wait_seconds, stats.wait_seconds))
        sync.finish()
        return [(b - a) / (3 * cycle) for a, b in zip(*found, strict=True)]

    results = simulate(
        worker, workers=workers, network=network(per_node), compute=Compute(STEP)
    ).results
    for one in results:
        assert one == pytest.approx(results[0], rel=1e-9)
    return results[0]


def inside_mean(workers: int) -> float:
    """Three numbers of each worker of the node, then a ring over the gradients.

    The numbers say whether it steps and contributes, and the layout of the only gradient.
    """
    return gathered(8 * 3, workers) + 2 * (workers - 1) * (IN_LATENCY + M / workers / IN)


def between(size: float, nodes: int, workers: int) -> float:
    """A ring in which each worker has 1/L of the bytes and of the link."""
    part = size / workers
    return 2 * (nodes - 1) * (OUT_LATENCY + part / nodes / (OUT / workers))


def gathered(part: float, workers: int) -> float:
    """Every worker of a node sends its part to all others at once."""
    return IN_LATENCY + (workers - 1) * part / IN


def votes(size: float, nodes: int, workers: int) -> float:
    """Each worker sends its vote to its counterparts at once, with 1/L of the link."""
    return OUT_LATENCY + (nodes - 1) * size / (OUT / workers)


VOTE = 8 * 8
SELSYNC_VOTE = 8 * 10


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 2), (2, 4)])
def test_local_sgd_waits_for_a_vote_and_a_mean_between_nodes(nodes: int, per_node: int) -> None:
    """step = t + inside + (vote + mean + shares)/H.

    The workers of a node give each other their shares of the mean at the landing.
    """
    period = 4
    seconds, waited = measured(
        f"local:period={period}", workers=nodes * per_node, per_node=per_node, cycle=period
    )
    mean = votes(VOTE, nodes, per_node) + between(M, nodes, per_node)
    assert waited == pytest.approx(mean / period, rel=1e-6)
    more = (mean + gathered(M / per_node, per_node)) / period
    assert seconds == pytest.approx(STEP + inside_mean(per_node) + more, rel=1e-6)


def test_the_flags_of_nodes_cost_as_much_as_those_of_workers() -> None:
    seconds, _ = measured("selsync:delta=inf", workers=4, per_node=2, cycle=1)
    flags = votes(SELSYNC_VOTE, 2, 2)
    assert seconds == pytest.approx(STEP + inside_mean(2) + flags, rel=1e-6)


def test_traffic_between_nodes_does_not_delay_traffic_inside() -> None:
    """A mean of 2·(2 ms + 20 kB at 1 MB/s) = 46 ms and more is hidden behind four steps."""
    seconds, waited = measured("async:staleness=8", workers=4, per_node=2, cycle=4)
    assert waited == 0
    landing = gathered(M / 2, 2) / 4
    assert seconds == pytest.approx(STEP + inside_mean(2) + landing, rel=1e-9)


@pytest.mark.parametrize("flat", [True, False])
def test_under_bsp_a_ring_goes_round_all_workers(flat: bool) -> None:
    """At the speed of a node's link, because the ring enters and leaves each node once.

    The workers of a node share the link for the agreement: the vote and two numbers of each worker.
    """
    seconds, _ = measured("bsp", workers=4, per_node=2, cycle=1, flat=flat)
    agreement = OUT_LATENCY + 3 * (VOTE + 8 * 2) / (OUT / 2)
    ring = 2 * 3 * (OUT_LATENCY + M / 4 / OUT)
    assert seconds == pytest.approx(STEP + agreement + ring, rel=1e-6)


def test_rates_by_hand() -> None:
    """800 Mbit/s is 100 MB/s; a node has one flow of a ring, and L of an all-gather."""
    links = Network("800Mbit/s", "1ms", workers_per_node=4, inside="80Gbit/s")
    slow = Network("800Mbit/s", "1ms", workers_per_node=2, inside="8Mbit/s")
    for network, kind, size, ranks, sharing, seconds in (
        (links, "gather", 1e6, range(8), 1, 1e-3 + 7 * 1e6 / 25e6),
        (links, "exchange", 8e6, range(8), 1, 1e-3 + 7 * 1e6 / 25e6),
        (links, "broadcast", 1e6, range(8), 1, 3 * (1e-3 + 1e6 / 25e6)),
        (links, "broadcast", 1e6, [0, 4], 1, 1e-3 + 1e6 / 100e6),
        (links, "reduce", 1e6, range(4), 1, 6 * (1e-5 + 25e4 / 1e10)),
        (links, "reduce", 1e6, [0, 4], 4, 2 * (1e-3 + 5e5 / 25e6)),
        (slow, "reduce", 1e6, range(4), 1, 6 * (1e-3 + 25e4 / 1e6)),  # a ring passes inside, too
        (slow, "reduce", 1e6, [0, 2], 1, 2 * (1e-3 + 5e5 / 100e6)),
    ):
        found, _ = network.collective_cost(kind, size, ranks, sharing, 0.0)
        assert found == pytest.approx(seconds), (kind, ranks, sharing)


def test_a_function_gets_the_number_of_the_node() -> None:
    links = Network(lambda node, now: 8e6 * (1 + node), workers_per_node=2)
    assert [links.bits_per_second(rank, 0.0) for rank in range(4)] == [8e6, 8e6, 16e6, 16e6]


def test_messages_of_a_node_queue_at_its_link() -> None:
    """Two concurrent messages to another node queue; a message inside the node does not."""
    size = 10_000

    def worker() -> float:
        rank = dist.get_rank()
        communicator: Any = dist.group.WORLD.make_communicator(60.0)  # type: ignore[union-attr]
        x = torch.zeros(size // 4)
        if rank in (0, 1):
            futures = [communicator.send(x, destination=rank + 2, what="across")]
            if rank == 0:
                futures.append(communicator.send(x, destination=1, tag=1, what="inside"))
            else:
                futures.append(communicator.receive(x, source=0, tag=1, what="inside"))
                futures[-1].wait()
                return float(communicator.host.now())
        else:
            futures = [communicator.receive(x, source=rank - 2, what="across")]
        for one in futures:
            one.wait()
        return float(communicator.host.now())

    result = simulate(worker, workers=4, network=network())
    assert result.results[1] == pytest.approx(IN_LATENCY + size / IN)
    first, second = result.results[2:]
    assert first == pytest.approx(OUT_LATENCY + size / OUT)
    assert second == pytest.approx(OUT_LATENCY + 2 * size / OUT)
    assert result.sent_bytes == [size, size, 0, 0], "bytes inside a node do not count"


def test_workers_fill_the_nodes() -> None:
    with pytest.raises(ValueError, match="workers=3 do not fill nodes of workers_per_node=2"):
        simulate(lambda: None, workers=3, network=network())
