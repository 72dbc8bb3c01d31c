"""The command ``probe``."""

import contextlib
import os
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cli.commands import Call, plain
from offbeat import cli


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
