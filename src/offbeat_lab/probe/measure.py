"""Measures the network, each pair of workers in turn."""

import dataclasses
import json
import random
import socket
import time

import torch
import torch.distributed as dist

from offbeat.arguments import POSITIVE, require_integer, require_number
from offbeat.errors import OffbeatError
from offbeat.transport.communicator import Communicator
from offbeat.transport.torch_backend.network_interface import interface_in_use
from offbeat.transport.torch_backend.process_groups import backends_of
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from offbeat_lab.probe.diagnosis import find_warnings
from offbeat_lab.probe.pairwise import Link, serve
from offbeat_lab.probe.result import Pair, Probe, Rank

_ALL_PAIRS_UP_TO = 8  # number of workers up to which all pairs are measured


def probe(
    *,
    size_bytes: int = 4 * 2**20,
    seconds: float = 20.0,
    seed: int = 0,
    timeout_seconds: float = 60.0,
) -> Probe:
    """Measure the network between the workers of the default process group. A collective.

    The group's backend must be gloo. All workers pass the same arguments and return the same
    result. One pair is measured at a time, while the other workers wait.

    Args:
        size_bytes: Maximum message size (≥ 1024). On slow links the messages are smaller.
        seconds: Target duration. A fast network needs less time, a very slow one more.
        seed: Seed of the payload and, with more than 8 workers, of the choice of pairs.
        timeout_seconds: Time-out of each operation between workers.

    Raises:
        TypeError, ValueError: an argument has another type or is out of its range.
        OffbeatError: there is no gloo process group of at least 2 workers.
        CommunicationError: a worker ended or did not answer in time. The message names its rank.
    """
    require_integer("size_bytes", size_bytes, least=1024)
    require_number("seconds", seconds, POSITIVE)
    require_number("timeout_seconds", timeout_seconds, POSITIVE)
    if not dist.is_available() or not dist.is_initialized():
        raise OffbeatError("probe needs an initialised process group: start it with torchrun")
    if (backends := {*backends_of(None).values()}) != {"gloo"}:
        names = ", ".join(sorted(backends))
        raise OffbeatError(f"probe measures with gloo, and the process group is {names}")
    if dist.get_world_size() < 2:
        raise OffbeatError("probe needs at least 2 workers: there is no network with 1")
    communicator = TorchCommunicator(None, timeout_seconds=timeout_seconds)
    _barrier(communicator)
    started = time.perf_counter()
    # The payload is noise, because some network tunnels compress data.
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(256, (size_bytes,), dtype=torch.uint8, generator=generator)
    scratch = torch.empty_like(noise)
    order = choose_pairs(communicator.size, seed)
    measured: list[Pair] = []
    for number, (source, destination) in enumerate(order):
        left = max(0.0, started + seconds - time.perf_counter())
        # The other workers wait in the barrier below and must not reach its time-out.
        share = min(left / (len(order) - number), timeout_seconds / 4)
        if communicator.rank == source:
            link = Link(communicator, destination, noise)
            measured.append(link.measure(share))
        elif communicator.rank == destination:
            serve(communicator, source, scratch)
        _barrier(communicator)
    local = {
        "rank": dataclasses.asdict(
            Rank(communicator.rank, socket.gethostname(), interface_in_use("gloo"))
        ),
        "pairs": [dataclasses.asdict(pair) for pair in measured],
        "seconds": time.perf_counter() - started,
    }
    payloads = communicator.gather_bytes(json.dumps(local).encode(), what="results of the probe")
    results = [json.loads(payload) for payload in payloads]
    ranks = tuple(Rank(**result["rank"]) for result in results)
    pairs = sorted((Pair(**p) for result in results for p in result["pairs"]), key=lambda p: p.ends)
    return Probe(
        ranks=ranks,
        pairs=tuple(pairs),
        possible_pairs=communicator.size * (communicator.size - 1),
        warnings=tuple(find_warnings(ranks, pairs)),
        seed=seed,
        seconds=results[0]["seconds"],
    )


def choose_pairs(size: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return the pairs (source, destination) to measure among ``size`` workers.

    With up to 8 workers, these are all pairs. With more, each worker r sends to r + 1, to r − 1 and
    to one other worker that is drawn with ``seed``.
    """
    if size <= _ALL_PAIRS_UP_TO:
        return [(a, b) for a in range(size) for b in range(size) if a != b]
    draw = random.Random(seed)
    pairs = [(a, (a + step) % size) for step in (1, -1) for a in range(size)]
    return pairs + [(a, (a + draw.randrange(2, size - 1)) % size) for a in range(size)]


def _barrier(communicator: Communicator) -> None:
    communicator.sum(torch.zeros(1), what="barrier between two measurements").wait()
