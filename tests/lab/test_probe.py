"""The probe measures the rates of the links and warns of anomalies."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lab.test_cluster import needs_namespaces, on_nodes
from offbeat.display.table import Table
from offbeat.errors import CommunicationError, OffbeatError
from offbeat_lab.launch.cluster import Cluster
from offbeat_lab.probe import (
    Pair,
    Probe,
    Rank,
    choose_pairs,
    find_warnings,
    measure,
    probe,
)
from offbeat_lab.probe.tables import by_rank, caption
from workers import run

WORKER = """
import json, sys
import torch
import torch.distributed as dist
from offbeat_lab.probe import probe
rank, size, folder, seconds = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=rank, world_size=size)
result = probe(size_bytes=2**20, seconds=seconds, timeout_seconds=30)
if rank == 0:
    json.dump(result.to_dict(), sys.stdout)
dist.destroy_process_group()
"""


def probed(cluster: Cluster, folder: Path, seconds: float) -> dict[str, Any]:
    """Run the probe on the nodes of ``cluster`` and return rank 0's result."""
    return dict(json.loads(on_nodes(cluster, WORKER, str(folder), seconds)[0]))


def bits(found: dict[str, Any]) -> dict[tuple[int, int], float]:
    return {(p["source"], p["destination"]): 8 * p["bytes_per_second"] for p in found["pairs"]}


def probe_and_return(rank: int, size: int) -> tuple[dict[str, Any], Table]:
    result = probe(size_bytes=2**20, seconds=1)
    return result.to_dict(), by_rank(result)


def test_three_workers_on_loopback() -> None:
    """All workers return the same result, with all six ordered pairs."""
    results = run(probe_and_return, workers=3)
    found, table = results[0]
    assert all(result[0] == found for result in results)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2]
    assert all("lo (127.0.0.1" in one["interface"] for one in found["ranks"])
    assert list(bits(found)) == choose_pairs(3)
    for pair in found["pairs"]:
        assert 1e-6 < pair["latency_seconds"] < 1
        assert 1e5 < pair["bytes_per_second"] < 1e12
        assert 16384 <= pair["message_bytes"] <= 2**20
        assert pair["repetitions"] >= 1
    assert not [line for line in found["warnings"] if "interface" in line]
    assert table.headings == ("rank", "host", "interface", "latency", "sends", "receives")
    assert [len(row) for row in table.rows] == [len(table.headings)] * 3


def probe_and_time(rank: int, size: int) -> float:
    start = time.monotonic()
    probe(size_bytes=2**20, seconds=2)
    return time.monotonic() - start


@pytest.mark.quiet
def test_the_target_duration_is_kept() -> None:
    """A fast link needs less: its messages are repeated at most 20 times."""
    assert max(run(probe_and_time, workers=3)) < 4


@pytest.mark.nightly
@needs_namespaces
@pytest.mark.quiet
def test_bandwidths_are_those_of_the_links(tmp_path: Path) -> None:
    """Of 100 Mbit/s, headers take about 5 %."""
    with Cluster(2, 100e6) as cluster:
        found = probed(cluster, tmp_path, seconds=3)
    assert bits(found) == pytest.approx({(0, 1): 100e6, (1, 0): 100e6}, rel=0.25)
    assert "link0 (10.111.0.1" in found["ranks"][0]["interface"]
    assert found["warnings"] == []


@pytest.mark.nightly
@needs_namespaces
@pytest.mark.quiet
def test_a_slow_uplink_is_named(tmp_path: Path) -> None:
    """One node of three sends at a tenth: its rank is named, and no other."""
    slow = ["tc", "qdisc", "replace", "dev", Cluster.interface, "root", "tbf"]
    with Cluster(3, 200e6) as cluster:
        subprocess.run(
            cluster.command(2, [*slow, *["rate", "20mbit", "burst", "131072", "latency", "100ms"]]),
            check=True,
            timeout=30,
        )
        found = probed(cluster, tmp_path, seconds=4)
    rates = bits(found)
    assert {ends: rate for ends, rate in rates.items() if ends[0] != 2} == pytest.approx(
        {ends: 200e6 for ends in rates if ends[0] != 2}, rel=0.25
    )
    assert rates[2, 0] == pytest.approx(20e6, rel=0.25)
    assert rates[2, 1] == pytest.approx(20e6, rel=0.25)
    named = [line for line in found["warnings"] if "sends" in line or "receives" in line]
    assert len(named) == 1
    assert named[0].startswith("rank 2 (")
    assert " sends at " in named[0]
    assert " receives at " not in named[0]


def probe_beside_one_that_dies(rank: int, size: int) -> str:
    if rank == 1:  # when it is first measured
        measure.serve = lambda *_: os._exit(1)  # type: ignore[assignment]
        probe()
    start = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        probe(seconds=20, timeout_seconds=5)
    assert time.monotonic() - start < 25
    return str(caught.value)


def test_a_dead_worker_is_an_error_everywhere() -> None:
    """No worker waits longer than the time-out; the error names the missing rank."""
    said = run(probe_beside_one_that_dies, workers=3, may_die=(1,))
    # Or "lost the connection to ranks 0, 1", where rank 0 has given up by then.
    for message in (said[0], said[2]):
        assert re.search(r"\branks? ([02], )*1\b", message), message


def refusals(rank: int, size: int) -> str:
    for wrong, word in (
        ({"size_bytes": 1000}, "size_bytes must be at least 1024, got 1000"),
        ({"seconds": 0}, "seconds must be positive and finite, got 0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds must be positive and finite, got inf"),
    ):
        with pytest.raises(ValueError, match=word):
            probe(**wrong)  # type: ignore[arg-type]
    with pytest.raises(OffbeatError) as caught:
        probe()
    return str(caught.value)


def test_a_probe_without_a_gloo_group_is_an_error() -> None:
    """Arguments out of range, no process group, one worker alone."""
    with pytest.raises(OffbeatError, match="start it with torchrun"):
        probe()
    assert run(refusals, workers=1) == [
        "probe needs at least 2 workers: there is no network with 1"
    ]


@pytest.mark.parametrize("size", [2, 3, 8, 9, 10, 33])
def test_every_worker_sends_and_receives(size: int) -> None:
    """All pairs up to 8 workers; beyond, both neighbours and one more, by the seed alone."""
    pairs = choose_pairs(size, seed=3)
    assert pairs == choose_pairs(size, seed=3)
    assert len(set(pairs)) == len(pairs) == (size * (size - 1) if size <= 8 else 3 * size)
    assert all(a != b and 0 <= b < size for a, b in pairs)
    for rank in range(size):
        assert (rank, (rank + 1) % size) in pairs
        assert ((rank + 1) % size, rank) in pairs
    assert size <= 9 or pairs != choose_pairs(size, seed=4)


def ranks(*hosts_and_interfaces: tuple[str, str]) -> list[Rank]:
    return [Rank(i, host, name) for i, (host, name) in enumerate(hosts_and_interfaces)]


def all_pairs(
    size: int, rate: dict[tuple[int, int], float], latency: dict[tuple[int, int], float]
) -> list[Pair]:
    """Return pairs of 100 Mbit/s and 100 us, unless given otherwise."""
    return [
        Pair(a, b, latency.get((a, b), 1e-4), rate.get((a, b), 12.5e6), 2**20, 5)
        for a, b in choose_pairs(size)
    ]


EVEN = [(f"host{i}", f"eth0 (10.0.0.{i}; from GLOO_SOCKET_IFNAME)") for i in range(4)]


def test_a_normal_network_has_no_warnings() -> None:
    """Noise within a factor of two and different addresses are normal."""
    assert find_warnings(ranks(*EVEN), all_pairs(4, {(0, 1): 7e6}, {(1, 2): 4e-4})) == []
    assert find_warnings(ranks(*EVEN[:2]), all_pairs(2, {}, {})) == []
    assert find_warnings(ranks(*EVEN[:2]), []) == []


def test_another_interface_and_loopback_are_warnings() -> None:
    """The name counts, not the address; a host's name may lead to 127.0.1.1 on no interface."""
    odd = [EVEN[0], ("host1", "wlan0 (10.0.0.9; from GLOO_SOCKET_IFNAME)"), EVEN[2]]
    assert find_warnings(ranks(*odd), all_pairs(3, {}, {})) == [
        "rank 1 (host1) uses another interface than rank 0: wlan0 instead of eth0; "
        "GLOO_SOCKET_IFNAME chooses it"
    ]
    nowhere = "? (127.0.1.1; from the host's name, GLOO_SOCKET_IFNAME is not set)"
    found = find_warnings(ranks(("a", nowhere), ("b", nowhere)), all_pairs(2, {}, {}))
    assert [line.partition(",")[0] for line in found] == [
        "rank 0 (a) uses the loopback interface",
        "rank 1 (b) uses the loopback interface",
    ]
    one_host = ranks(("a", "lo (127.0.0.1; from X)"), ("a", "lo (127.0.0.1; from X)"))
    assert find_warnings(one_host, all_pairs(2, {}, {})) == []


@pytest.mark.parametrize("size", [3, 4])
def test_a_slow_rank_is_named_with_its_direction(size: int) -> None:
    """A tenth of the rate in one direction or in both; its partners are not blamed."""
    people = ranks(*EVEN[:size])
    others = range(1, size)
    up, down = {(0, b): 1.25e6 for b in others}, {(b, 0): 1.25e6 for b in others}
    end = ", less than half of the median rate of 100 Mbit/s"
    assert find_warnings(people, all_pairs(size, up, {})) == [
        f"rank 0 (host0) sends at 10 Mbit/s{end}"
    ]
    assert find_warnings(people, all_pairs(size, {**up, **down}, {})) == [
        f"rank 0 (host0) sends at 10 Mbit/s and receives at 10 Mbit/s{end}"
    ]


def test_a_late_pair_is_named_once() -> None:
    """Over five times the median in both directions; one direction alone was a hiccup."""
    late = {(1, 3): 7e-4, (3, 1): 6e-4, (0, 2): 9e-4}
    assert find_warnings(ranks(*EVEN), all_pairs(4, {}, late)) == [
        "ranks 1 and 3: latency 600 us, over 5 times the median of 100 us"
    ]


def test_pairs_within_a_host_are_not_the_network() -> None:
    """Fast pairs of ranks on one host do not make the other pairs slow."""
    people = ranks(*(EVEN[i // 2] for i in range(4)))
    near = [(0, 1), (1, 0), (2, 3), (3, 2)]
    pairs = all_pairs(4, dict.fromkeys(near, 1e10), dict.fromkeys(near, 1e-6))
    assert find_warnings(people, pairs) == []


def test_tables() -> None:
    """Figures with units, and which pairs were measured."""
    people = ranks(*EVEN[:3])
    pairs = all_pairs(3, {(0, 1): 6.17e6}, {(0, 1): 2.5e-3})
    result = Probe(tuple(people), tuple(pairs), 6, ("odd",), 7, 3.21)
    assert by_rank(result).rows[1] == (
        "1",
        "host1",
        EVEN[1][1],
        "100 us",
        "100 Mbit/s",
        "100 Mbit/s",
    )
    assert by_rank(result).caption == caption(result)
    assert caption(result) == "3 workers on 3 hosts, gloo, all 6 ordered pairs, 3.2 s"
    some = Probe(tuple(people), tuple(pairs[:4]), 6, (), 7, 3.21)
    assert "4 of 6 ordered pairs (the ring of neighbours and a sample, seed 7)" in caption(some)
    told = result.to_dict()
    assert json.loads(json.dumps(told)) == told
    assert told["warnings"] == ["odd"]
