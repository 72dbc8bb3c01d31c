"""Measure a network: one pair of workers at a time, while the others wait, then all together."""

import dataclasses
import json
import random
import socket
import time

import torch
import torch.distributed as dist

from offbeat.arguments import POSITIVE, require_integer, require_number
from offbeat.errors import OffbeatError
from offbeat.lab.probe.all_reduce import measure_all_reduce
from offbeat.lab.probe.link import Link, serve
from offbeat.lab.probe.result import AllReduce, Pair, Probe, Rank
from offbeat.lab.probe.verdict import find_warnings
from offbeat.transport.communicator import Communicator
from offbeat.transport.network_interface import interface_in_use
from offbeat.transport.torch_distributed import TorchCommunicator

_ALL_PAIRS_UP_TO = 8  # workers; beyond, a ring of neighbours and a sample
_PAIR_SHARE = 0.7  # of all the time; the rest is for all-reduces


def probe(
    *,
    size_bytes: int = 4 * 2**20,
    seconds: float = 20.0,
    seed: int = 0,
    timeout_seconds: float = 60.0,
) -> Probe:
    """Measure the network between the workers of the default process group, which must be gloo.

    A collective: all workers call it alike. All of them return the same result.

    Args:
        size_bytes: Largest message (at least 1024). Slow links get smaller ones, to end in time.
        seconds: Time to aim for. A fast network needs less; a very slow one takes longer, as each
            pair gets at least two messages of 16 KiB.
        seed: Of the choice of pairs among more than 8 workers, and of the bytes sent.
        timeout_seconds: How long a single wait may take before the probe fails everywhere.

    Raises:
        TypeError, ValueError: an argument of another type, or out of its range.
        OffbeatError: no gloo process group of at least 2 workers.
        CommunicationError: a worker died or did not answer in time; the message names it.
    """
    require_integer("size_bytes", size_bytes, least=1024)
    require_number("seconds", seconds, POSITIVE)
    require_number("timeout_seconds", timeout_seconds, POSITIVE)
    if not dist.is_available() or not dist.is_initialized():
        raise OffbeatError("probe needs an initialised process group: start it with torchrun")
    if (backend := str(dist.get_backend())) != "gloo":
        raise OffbeatError(f"probe measures with gloo, and the process group is {backend}")
    if dist.get_world_size() < 2:
        raise OffbeatError("probe needs at least 2 workers: there is no network with 1")
    communicator = TorchCommunicator(None, timeout_seconds=timeout_seconds)
    _meet(communicator)
    started = time.perf_counter()
    # Noise, as some tunnels compress. Floats, as random bits would hold slow denormal numbers.
    noise = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(seed))
    scratch = torch.empty_like(noise)
    order = choose_pairs(communicator.size, seed)
    measured: list[Pair] = []
    for number, (source, destination) in enumerate(order):
        left = max(0.0, started + _PAIR_SHARE * seconds - time.perf_counter())
        # The others wait as long as one pair takes, and must not run into the time-out.
        share = min(left / (len(order) - number), timeout_seconds / 4)
        if communicator.rank == source:
            link = Link(communicator, destination, noise.view(torch.uint8))
            measured.append(link.measure(share))
        elif communicator.rank == destination:
            serve(communicator, source, scratch.view(torch.uint8))
        _meet(communicator)
    left = started + seconds - time.perf_counter()
    reduced = measure_all_reduce(communicator, noise, scratch, max(0.0, left))
    mine = {
        "rank": dataclasses.asdict(
            Rank(communicator.rank, socket.gethostname(), interface_in_use(backend))
        ),
        "pairs": [dataclasses.asdict(pair) for pair in measured],
        "all_reduce": dataclasses.asdict(reduced) if reduced else None,
        "seconds": time.perf_counter() - started,
    }
    payloads = communicator.gather_bytes(json.dumps(mine).encode(), what="results of the probe")
    told = [json.loads(payload) for payload in payloads]
    ranks = tuple(Rank(**one["rank"]) for one in told)
    pairs = sorted((Pair(**p) for one in told for p in one["pairs"]), key=lambda p: p.ends)
    return Probe(
        ranks=ranks,
        pairs=tuple(pairs),
        possible_pairs=communicator.size * (communicator.size - 1),
        all_reduce=AllReduce(**told[0]["all_reduce"]),
        warnings=tuple(find_warnings(ranks, pairs)),
        seed=seed,
        seconds=told[0]["seconds"],
    )


def choose_pairs(size: int, seed: int = 0) -> list[tuple[int, int]]:
    """The ordered pairs to measure among ``size`` workers.

    All of them up to 8 workers; beyond that neighbours in the ring, both ways, and for each worker
    one more destination, drawn with ``seed``.
    """
    if size <= _ALL_PAIRS_UP_TO:
        return [(a, b) for a in range(size) for b in range(size) if a != b]
    draw = random.Random(seed)
    pairs = [(a, (a + step) % size) for step in (1, -1) for a in range(size)]
    return pairs + [(a, (a + draw.randrange(2, size - 1)) % size) for a in range(size)]


def _meet(communicator: Communicator) -> None:
    """Wait until all workers are here, so that only one pair has the network."""
    communicator.sum(torch.zeros(1), what="meeting between two measurements").wait()
