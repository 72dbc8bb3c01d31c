"""The command line in the test's process, which has imported torch already."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.commands import TORCHRUN, Call, Ended, plain
from offbeat import cli
from offbeat.cli import view
from offbeat.launcher import launch, store
from offbeat_lab.cli import runs


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Call ``main`` in this process, on a wide screen."""

    def main(*argv: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["offbeat", *argv])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), plain(out), plain(err)

    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of workers
    monkeypatch.setattr(view.console, "width", 200)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", os.getcwd())])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models, beside other tests
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield main
    for number, handler in handlers.items():  # which ``main`` replaces
        signal.signal(number, handler)
    torch.set_num_threads(threads)


@pytest.fixture
def idle_call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Call ``main`` in an empty folder; fail if anything runs, is measured or is written."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("something was started")

    def main(*argv: str) -> Ended:
        answer = call(*argv)
        assert not list(tmp_path.iterdir())
        return answer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs.comparison, "run_and_record", refuse)
    monkeypatch.setattr(runs, "measure_recipe", refuse)
    monkeypatch.setattr(launch, "_context", refuse)
    monkeypatch.setattr(store, "listen", refuse)
    return main
