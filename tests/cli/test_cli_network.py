"""The commands about networks: ``plan`` and ``probe``."""

import contextlib
import json
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cli.commands import LIMIT, Call, one_line, plain, started
from offbeat import BSP, AsyncAveraging, LocalSGD, SelSync, StreamingAveraging, cli
from offbeat.cli import network
from offbeat.strategies.registry import parse_strategy
from offbeat_lab import probe as probing
from offbeat_lab.launch.cluster import Cluster
from offbeat_lab.probe import Pair
from offbeat_lab.timing.step_time import StepTime

NETWORKED = shlex.split("plan --parameters 25M --step-time 120ms --workers 16 --bandwidth 5gbit")
SUGGESTED = {
    BSP,
    LocalSGD,
    SelSync,
    StreamingAveraging,
    AsyncAveraging,
}  # by plan, if none is given

# plan


def test_plan(call: Call) -> None:
    """Every suggestion has a row and a note; one of them is recommended, with its reason."""
    code, out, err = call(*NETWORKED)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("25,000,000 parameters (100.0 MB), 120 ms a step, 16 workers")
    assert "predicted, not measured" in lines[0]
    assert "speed-up counts steps, not the time to a metric" in out
    assert "counts steps, not the time to a metric" in one_line(call("plan", "--help")[1])
    (advice,) = (line for line in lines if line.startswith("Try "))
    chosen, reason = re.fullmatch(r"Try (\S+) first: (.+)\.", advice).groups()  # type: ignore[union-attr]
    rows = [line.split()[0] for line in lines if re.match(r"[\w:=,.]+ {2,}\d", line)]
    assert {type(parse_strategy(row)) for row in rows} == SUGGESTED
    assert chosen in rows
    assert re.search(r"wait.* \d+ %", reason)
    for row in rows:
        assert any(line.startswith(f"{row}: ") for line in lines)


def test_plan_as_json(call: Call) -> None:
    """--json is JSON and nothing else, with the same strategies and recommendation."""
    code, out, err = call(*NETWORKED, "--json", "-s", "bsp", "-s", "local:period=8")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["workers"] == 16
    assert values["model_bytes"] == 1e8
    assert [row["strategy"] for row in values["rows"]] == ["bsp", "local:period=8"]
    assert values["recommendation"] in values["rows"]
    assert values["reason"]


def test_plan_of_strategies_over_a_wire(call: Call) -> None:
    """-s chooses the strategies, --wire the precision."""
    argv = (*NETWORKED, "--json", "-s", "diloco:period=8", "-s", "local:period=8")
    exact, lossy = (json.loads(call(*argv, *wire)[1]) for wire in ((), ("--wire", "int8")))
    assert [row["strategy"] for row in exact["rows"]] == ["diloco:period=8", "local:period=8"]
    assert 0.25 < lossy["rows"][0]["payload_bytes"] / exact["rows"][0]["payload_bytes"] < 0.28
    assert lossy["recommendation"]["strategy"] == "local:period=8"
    code, out, err = call(*NETWORKED, "--wire", "int3", "-s", "easgd")
    assert (code, out) == (2, "")
    assert "int3" in err


def test_plan_of_a_recipe(call: Call) -> None:
    """--model measures parameters and step time, unless a step time is given."""
    argv = ("plan", "--model", "digits", "--bandwidth", "100Mbit/s")
    code, out, _ = call(*argv, "-s", "bsp")
    assert code == 0
    first, second, *_ = out.splitlines()
    assert re.match(r"a step of digits takes \S+ \w+ here, ", first)
    assert re.match(
        r"[\d,]+ parameters \(606\.8 kB\), \S+ \w+ a step, 4 workers, 100 Mbit/s", second
    )
    assert re.search(r"^Try \S+ first: ", out, re.MULTILINE)
    code, out, err = call(*argv, "-s", "bsp", "--step-time", "7ms", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["step_seconds"] == 0.007


# Under torchrun


def as_torchrun_does(rank: int, port: int, folder: Path, argv: tuple[str, ...]) -> None:
    """Run the command as one of two processes, with its output in files."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with (
        (folder / f"out{rank}").open("w", encoding="utf-8") as out,
        (folder / f"err{rank}").open("w", encoding="utf-8") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        sys.argv = ["offbeat", *argv]
        torch.set_num_threads(1)  # a forked process must not wait for threads it has not
        cli.main()


@pytest.fixture
def under_torchrun(call: Call, tmp_path: Path) -> Call:
    """Run ``main`` in two processes and return their codes and their output."""

    def main(*argv: str) -> tuple[int, str, str]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("fork")  # torch is imported once
        processes = [
            context.Process(
                target=as_torchrun_does, args=(rank, store.port, tmp_path, argv), daemon=True
            )
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
            process.kill()
            process.join()
        codes = [process.exitcode or 0 for process in processes]
        out, err = (
            "".join((tmp_path / f"{name}{rank}").read_text(encoding="utf-8") for rank in range(2))
            for name in ("out", "err")
        )
        return max(map(abs, codes)), plain(out), plain(err)

    return main


def test_probe_prints_once(under_torchrun: Call) -> None:
    """Rank 0 alone prints, one table with a row for each rank."""
    code, out, err = under_torchrun("probe", "--seconds", "1")
    assert code == 0, err
    assert "Traceback" not in err
    lines = out.splitlines()
    assert re.fullmatch(r"2 workers on 1 host, gloo, all 2 ordered pairs, \S+ s", lines[0])
    assert sum(line.startswith("rank ") for line in lines) == 1
    ranks = [line for line in lines if re.match(r"\d {2,}", line)]
    assert [line.split()[0] for line in ranks] == ["0", "1"]
    assert all(re.search(r"\d (us|ms) +[\d.]+ \wbit/s +[\d.]+ \wbit/s *$", row) for row in ranks)


def test_a_port_in_use_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        code, out, err = call("probe")
    assert (code, out) == (1, "")
    where = rf"127\.0\.0\.1:{port} .* within 120 s"
    assert re.fullmatch(rf"error: rank 0 of 2 could not connect .* {where}: .*EADDRINUSE.*\n", err)


@pytest.mark.parametrize(("size", "words"), [("2", "at least two nodes, got 2"), ("5", "do not f")])
def test_nodes_are_checked_before_anything_is_measured(
    size: str, words: str, idle_call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    argv = ("--model", "digits", "--probe", "--workers-per-node", "2")
    code, out, err = idle_call("plan", *argv)
    assert (code, out) == (2, "")
    assert words in err


def test_a_node_is_on_one_machine(idle_call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the slow link would count as one inside a node."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    argv = ("--model", "digits", "--probe", "--workers-per-node", "2")
    code, out, err = idle_call("plan", *argv)
    assert (code, out) == (2, "")
    assert re.fullmatch("error: .* needs whole nodes on a machine, which has 1 workers here\n", err)


def test_links_inside_a_node_are_its_own() -> None:
    """With nodes of two, pairs 0-1 and 2-3 are inside; the slowest of each kind counts."""
    pairs = [
        Pair(a, b, latency_seconds=1e-3 * (a + b), bytes_per_second=1e6 * (10 * a + b + 1),
             message_bytes=1024, repetitions=3)
        for a, b in probing.choose_pairs(4)
    ]  # fmt: skip
    inside = {"inside": 8 * 2e6, "inside_latency": 5e-3}  # of 1, 1, 5 and 5 ms the upper median
    between = {"bandwidth": 8 * 3e6, "latency": 3e-3}  # 2, 2, 3, 3, 3, 3, 4 and 4 ms
    assert network.links(pairs, 2) == {**between, **inside}
    assert network.links(pairs) == {"bandwidth": 8 * 2e6, "latency": 3e-3}


@pytest.mark.nightly  # six processes import torch, and the probe takes its 20 s
@pytest.mark.skipif(Cluster.why_not() is not None, reason=f"{Cluster.why_not()}")
def test_nodes_behind_a_slow_link_are_measured_as_they_are() -> None:
    """2 × 2 workers, 100 Mbit/s between two namespaces and loopback inside each."""
    options = ("--parameters", "2.1M", "--step-time", "65ms", "--workers-per-node", "2")
    with Cluster(2, 100e6) as cluster, contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                started(
                    *cluster.command(node, (sys.executable, "-m", "torch.distributed.run")),
                    *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"),
                    *("--master-addr", "10.111.0.1", "--master-port", "29500"),
                    *("-m", "offbeat.cli", "plan", "--probe", "--json", *options),
                    GLOO_SOCKET_IFNAME=Cluster.interface,
                )
            )
            for node in range(2)
        ]
        (out, err), (silent, _) = (node.communicate(timeout=LIMIT) for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], err
    assert silent == "", "rank 0 alone prints"
    found = json.loads(out)
    assert (found["workers"], found["workers_per_node"]) == (4, 2)
    # Of an Ethernet frame of 1514 bytes 1448 are payload: 95.6 of 100 Mbit/s.
    assert 90e6 < found["bandwidth"] < 100e6
    assert found["inside"] > 10 * found["bandwidth"]
    assert 0 < found["inside_latency_seconds"] < 0.02
    assert 0 < found["latency_seconds"] < 0.02
    # A mean of the gradients between the nodes takes 8.4 MB / 12 MB/s = 0.7 s.
    steps = {row["strategy"]: row["step_seconds"] for row in found["rows"]}
    assert 0.7 < steps["bsp"] < 0.9
    assert not found["recommendation"]["strategy"].startswith(("bsp", "local:period=8"))


def test_plan_with_a_probe_prints_once(
    under_torchrun: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan uses the measured network, and rank 0 alone prints it."""
    # Forked processes must not train: what torch has prepared for threads here would hang there.
    monkeypatch.setattr(
        network, "measure_recipe", lambda name, data: (151_690, StepTime(0.005, 0.005, 0.006))
    )
    code, out, err = under_torchrun("plan", "--model", "digits", "--probe", "-s", "bsp")
    assert code == 0, err
    assert "Traceback" not in err
    assert out.count("predicted, not measured") == 1
    assert one_line(out).count(" 2 workers, ") == 1
    assert sum(line.startswith("Try ") for line in out.splitlines()) == 1
