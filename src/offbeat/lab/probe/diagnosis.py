"""Warnings about a measured network."""

import math
import re
import statistics
from collections.abc import Sequence

from offbeat.lab.probe.result import DIRECTIONS, Pair, Rank, rate_of
from offbeat.lab.probe.tables import show_rate, show_time


def find_warnings(ranks: Sequence[Rank], pairs: Sequence[Pair]) -> list[str]:
    """Return one line for each anomaly.

    Anomalies are:

    - a rank on another interface than rank 0;
    - a rank on the loopback interface, although there are several hosts;
    - a rank that sends or receives (median over its partners) at less than half of the rate of the
      median rank. It needs at least two partners: one pair does not tell which end is slow;
    - a pair whose latency (the better of both directions) is over 5 times the median.

    With several hosts, only pairs between hosts are compared.
    """
    found = []
    first = ranks[0].interface.partition(" (")[0]
    for one in ranks:
        name = one.interface.partition(" (")[0]
        if name != first:
            found.append(
                f"rank {one.rank} ({one.host}) uses another interface than rank 0: {name} instead "
                f"of {first}; GLOO_SOCKET_IFNAME chooses it"
            )
    hosts = {one.rank: one.host for one in ranks}
    if len(set(hosts.values())) > 1:
        found += [
            f"rank {one.rank} ({one.host}) uses the loopback interface, which reaches no other "
            "host: name the right one in GLOO_SOCKET_IFNAME"
            for one in ranks
            if re.match(r"lo\b", one.interface) or re.search(r"\(127\.", one.interface)
        ]
    between = [pair for pair in pairs if hosts[pair.source] != hosts[pair.destination]]
    return found + _slow_ranks(ranks, between or pairs) + _late_pairs(between or pairs)


def _slow_ranks(ranks: Sequence[Rank], pairs: Sequence[Pair]) -> list[str]:
    rates = {
        (one.rank, way): rate_of(one.rank, way, pairs, least=2)
        for one in ranks
        for way in DIRECTIONS
    }
    known = [rate for rate in rates.values() if rate is not None]
    median = statistics.median(known) if known else 0.0
    found = []
    for one in ranks:
        slow = [
            f"{way} at {show_rate(rate)}"
            for way in DIRECTIONS
            if (rate := rates[one.rank, way]) is not None and rate < median / 2
        ]
        if slow:
            found.append(
                f"rank {one.rank} ({one.host}) {' and '.join(slow)}, less than half of the "
                f"{show_rate(median)} of the median rank"
            )
    return found


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
