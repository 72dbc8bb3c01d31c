"""Nodes with shaped links: their sockets and bursts, and nothing of them is left behind.

``test_scenario.py`` tests their rates.
"""

import json
import multiprocessing
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from offbeat_lab.launch import cluster as lab
from offbeat_lab.launch.cluster import Cluster, _run, enter_namespace

needs_namespaces = pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")


def namespaces(process: int) -> set[str]:
    """Return the namespaces of ``process``; other tests may make some meanwhile."""
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in shown.stdout.splitlines() if line}
    return {name for name in names if name.startswith(f"offbeat-{process}-")}


def connect_from(node: str, port: int) -> None:
    """Enter a node, and connect from there to node 0."""
    enter_namespace(node)
    socket.create_connection(("10.111.0.1", port), 20).close()


@needs_namespaces
def test_a_process_enters_a_node() -> None:
    """Its sockets are those of the node."""
    with Cluster(2, 1e8) as cluster, ThreadPoolExecutor(1) as thread:
        listener = thread.submit(
            lambda: enter_namespace(cluster.node(0)) or socket.create_server(("10.111.0.1", 0))
        ).result()
        with listener:
            listener.settimeout(20)
            port = listener.getsockname()[1]
            spawn = multiprocessing.get_context("spawn")
            process = spawn.Process(target=connect_from, args=(cluster.node(1), port))
            process.start()
            connection, peer = listener.accept()
            connection.close()
            process.join(20)
    assert (process.exitcode, peer[0]) == (0, "10.111.0.2")


def test_an_unknown_node_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="offbeat-none"):
        enter_namespace("offbeat-none")


@needs_namespaces
@pytest.mark.parametrize(("bits_per_second", "most"), [(10e6, 6056), (200e6, 6056), (1e9, 17000)])
def test_an_idle_link_passes_at_most_3_percent_of_a_small_model_at_once(
    bits_per_second: float, most: int
) -> None:
    """The burst of the filter, for a message of 600 kB, as the kernel reports it."""
    with Cluster(1, bits_per_second) as cluster:
        shown = _run("tc", "-n", cluster.node(0), "-j", "qdisc", "show", "dev", cluster.interface)
    burst = json.loads(shown)[0]["options"]["burst"]
    assert 4 * 1500 <= burst <= most < 0.03 * 600_000


@needs_namespaces
def test_everything_is_removed() -> None:
    """No namespace remains after an exit, an exception or the death of a process."""
    here = os.getpid()
    assert namespaces(here) == set()
    with Cluster(2, 1e9) as cluster:
        assert len(namespaces(here)) == 3
        assert "1 Gbit/s" in str(cluster)
    assert namespaces(here) == set()
    with pytest.raises(ZeroDivisionError), Cluster(2, 1e9):
        _ = 1 / 0
    assert namespaces(here) == set()
    child = os.fork()
    if child == 0:
        Cluster(1, 1e9)._build()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(namespaces(child)) == 2
    lab.remove_leftovers()
    assert namespaces(child) == set()


def test_number_of_workers_is_checked() -> None:
    with pytest.raises(ValueError, match="workers must be between 1 and 200"):
        Cluster(0, 1e9)
