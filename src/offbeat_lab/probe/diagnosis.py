"""Warnings about anomalies of a measured network."""

import math
import re
import statistics
from collections.abc import Sequence

from offbeat_lab.probe.result import DIRECTIONS, Pair, Rank, rate_of
from offbeat_lab.probe.tables import show_rate, show_time


def find_warnings(ranks: Sequence[Rank], pairs: Sequence[Pair]) -> list[str]:
    """Return one line for each anomaly.

    Anomalies are:

    - a rank that uses another network interface than rank 0;
    - a rank that uses the loopback interface, although there are several hosts;
    - a rank that sends or receives, or both, at less than half of the median rate. ``rate_of``
      computes the two rates of each rank from its measured links. One median is taken over the
      sending and receiving rates of all ranks together. A rate from a single link is ignored,
      because it does not show which end is slow;
    - a pair whose latency is over 5 times the median over all pairs. If both directions were
      measured, the lower latency counts.

    If links between hosts were measured, rates and latencies of other links are ignored.
    """
    warnings = []
    first = ranks[0].interface.partition(" (")[0]
    for worker in ranks:
        name = worker.interface.partition(" (")[0]
        if name != first:
            warnings.append(
                f"rank {worker.rank} ({worker.host}) uses another interface than rank 0: "
                f"{name} instead of {first}; GLOO_SOCKET_IFNAME chooses it"
            )
    hosts = {worker.rank: worker.host for worker in ranks}
    if len(set(hosts.values())) > 1:
        warnings += [
            f"rank {worker.rank} ({worker.host}) uses the loopback interface, which reaches no "
            "other host: name the right one in GLOO_SOCKET_IFNAME"
            for worker in ranks
            if re.match(r"lo\b", worker.interface) or re.search(r"\(127\.", worker.interface)
        ]
    between = [pair for pair in pairs if hosts[pair.source] != hosts[pair.destination]]
    return warnings + _slow_ranks(ranks, between or pairs) + _late_pairs(between or pairs)


def _slow_ranks(ranks: Sequence[Rank], pairs: Sequence[Pair]) -> list[str]:
    rates = {
        (worker.rank, way): rate_of(worker.rank, way, pairs, least=2)
        for worker in ranks
        for way in DIRECTIONS
    }
    known = [rate for rate in rates.values() if rate is not None]
    median = statistics.median(known) if known else 0.0
    warnings = []
    for worker in ranks:
        slow = [
            f"{way} at {show_rate(rate)}"
            for way in DIRECTIONS
            if (rate := rates[worker.rank, way]) is not None and rate < median / 2
        ]
        if slow:
            warnings.append(
                f"rank {worker.rank} ({worker.host}) {' and '.join(slow)}, less than half of the "
                f"median rate of {show_rate(median)}"
            )
    return warnings


def _late_pairs(pairs: Sequence[Pair]) -> list[str]:
    best: dict[tuple[int, int], float] = {}
    for pair in pairs:
        ends = min(pair.ends), max(pair.ends)
        best[ends] = min(pair.latency_seconds, best.get(ends, math.inf))
    median = statistics.median(best.values()) if best else 0.0
    return [
        f"ranks {a} and {b}: latency {show_time(latency)}, over 5 times the median of "
        f"{show_time(median)}"
        for (a, b), latency in sorted(best.items())
        if latency > 5 * median
    ]
