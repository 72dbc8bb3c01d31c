"""A parameter server's push and pull against bare messages of as many bytes.

Two processes: rank 1 pushes its values to the shard of rank 0 and pulls the sum, against one bare
send of as many bytes and one bare receive. Then all workers of four at once, each with a shard on
every rank, against one all-reduce of as many bytes (which moves as many over each link).
"""

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Result, compare, interleave, slowest
from benchmarks.processes import run
from offbeat.baselines.parameter_server import ParameterServer
from offbeat.transport.team import Team
from offbeat.transport.torch_distributed import TorchCommunicator


def _bare(flat: torch.Tensor) -> None:
    """Rank 1 sends to rank 0, which sends as much back."""
    if dist.get_rank() == 1:
        dist.send(flat, 0)
        dist.recv(flat, 0)
    else:
        dist.recv(flat, 1)
        dist.send(flat, 1)


def measure(kilobytes: int, together: bool, repetitions: int) -> dict[str, list[float]]:
    """Runs on every worker: seconds of the push-pull and of what is bare."""
    elements = 250 * kilobytes
    team = Team(TorchCommunicator(None, timeout_seconds=60))
    values = torch.zeros(elements)
    server = ParameterServer(team, values, servers=None if together else (0,))
    flat = torch.zeros(elements)
    asks = together or team.rank == 1
    rounds = 0

    def push_pull() -> None:
        nonlocal rounds
        rounds += 1
        if asks:
            values.fill_(1.0)
            server.start("push_pull", clock=rounds, min_clock=rounds if together else 0)
            server.take(wait=True)

    bare = (lambda: dist.all_reduce(flat)) if together else (lambda: _bare(flat))
    seconds = interleave({"server": push_pull, "bare": bare}, repetitions, between=dist.barrier)
    pushes = rounds * (team.size if together else 1)
    assert not asks or torch.equal(values, torch.full_like(values, pushes))
    if not together:
        seconds = {name: times if asks else [0.0] * len(times) for name, times in seconds.items()}
    dist.barrier()
    server.leave()
    return seconds


def result(kilobytes: int, workers: int, bandwidth: str | None, repetitions: int) -> Result:
    """One row."""
    together = workers > 2
    config: dict[str, Any] = {
        "kilobytes": kilobytes,
        "together": together,
        "repetitions": repetitions,
    }
    each = run(measure, workers=workers, bandwidth=bandwidth, **config)
    seconds = slowest(each)
    ratio, details = compare(seconds["server"], seconds["bare"])
    link = bandwidth or "loopback"
    what = "all-reduce" if together else "send + receive"
    return Result(
        "server",
        f"push-pull of {kilobytes / 1000:g} MB / bare {what}, {workers} workers, {link}",
        ratio,
        None if together else 1.25,
        config={**config, "workers": workers, "link": link},
        details=details,
    )


def results(*, quick: bool = False) -> list[Result]:
    """All figures of this benchmark. At most 1.25 times the time is 80 % of the throughput."""
    return [
        result(kilobytes, workers, bandwidth, repetitions // 4 if quick else repetitions)
        for bandwidth, repetitions in ((None, 60), ("1Gbit/s", 20))
        for workers in (2, 4)
        for kilobytes in (1_000, 40_000)
    ]
