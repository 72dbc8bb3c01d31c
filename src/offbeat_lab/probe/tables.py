"""The table that shows the result of a probe, a measurement of the network."""

import statistics

from offbeat.display.table import Table
from offbeat.units import show_bandwidth, show_seconds
from offbeat_lab.probe.result import DIRECTIONS, Probe, rate_of


def by_rank(result: Probe) -> Table:
    """Return a table with one row per rank.

    It shows the median latency of the rank's links, and the bandwidths at which the rank sends and
    receives (``rate_of``).
    """
    rows = []
    for worker in result.ranks:
        latencies = [pair.latency_seconds for pair in result.pairs if worker.rank in pair.ends]
        rates = [rate_of(worker.rank, way, result.pairs) or 0.0 for way in DIRECTIONS]
        latency = show_time(statistics.median(latencies))
        rows.append(
            (str(worker.rank), worker.host, worker.interface, latency, *map(show_rate, rates))
        )
    headings = ("rank", "host", "interface", "latency", *DIRECTIONS)
    return Table(headings, tuple(rows), caption(result))


def caption(result: Probe) -> str:
    """Return a line with the number of workers, hosts and measured pairs, and the duration."""
    hosts, measured = len({worker.host for worker in result.ranks}), len(result.pairs)
    pairs = f"all {measured} ordered pairs"
    if measured < result.possible_pairs:
        pairs = (
            f"{measured} of {result.possible_pairs} ordered pairs (the ring of neighbours and a "
            f"sample, seed {result.seed})"
        )
    return (
        f"{len(result.ranks)} workers on {hosts} host{'s' if hosts > 1 else ''}, gloo, {pairs}, "
        f"{result.seconds:.1f} s"
    )


def show_rate(bytes_per_second: float) -> str:
    """Return a rate as text, such as ``"49.4 Mbit/s"``."""
    return show_bandwidth(float(f"{8 * bytes_per_second:.3g}"))


def show_time(seconds: float) -> str:
    """Return a duration as text, such as ``"2.5 ms"``."""
    return show_seconds(seconds, digits=3)
