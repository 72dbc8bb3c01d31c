"""Launchers on one or two "machines" of loopback, the logs of their workers, and their signals."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.launched.store_faults import Intruders, StoreLink
from offbeat.launcher.store import listen, serve

MARK = "OFFBEAT_SOAK"
"""Environment variable by which the processes of a training are found."""
Event = dict[str, Any]


@dataclass
class Process:
    """A worker's process and its log.

    Attributes:
        pid: Process id.
        slot: Machine and number of the worker, as ``0:1``.
        events: Lines of the log, except those of batches.
        steps: Lines of batches.
    """

    pid: int
    slot: str
    events: list[Event] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
    _read: int = 0

    def has(self, event: str) -> bool:
        """Return True if the log has such an event."""
        return any(one["event"] == event for one in self.events)

    def lives(self) -> bool:
        """Return True while the process runs."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.lives():
            os.kill(self.pid, number)


class Training:
    """Launchers and their workers.

    Args:
        folder: Directory of the files.
        settings: Settings of the script.
        here: Number of workers on each machine.
        store: ``launcher``: the only launcher keeps it. ``process``: this process does. ``file``.
        options: Further options of ``offbeat run``.

    Attributes:
        address: Address of the store. None: the launcher knows it.
        link: The proxy in front of a store that this process keeps; None if it does not.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        here: Sequence[int],
        store: str = "launcher",
        options: Sequence[str] = (),
    ) -> None:
        self.folder, self.here, self._options = folder, here, options
        (folder / "logs").mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(settings))
        self._mark, self._logs = uuid.uuid4().hex, dict[Path, Process]()
        self._kept: Any = None
        self.address: str | None = None
        self.link: StoreLink | None = None
        self._intruders: list[Intruders] = []
        if store == "file":
            self.address = f"file://{folder}/store"
        elif store == "process":
            self._kept = serve(listen("127.0.0.1", 0))
            self.link = StoreLink(self._kept.port)
            self.address = f"127.0.0.1:{self.link.port}"
        self.launchers = [self.launch(machine) for machine in range(len(here))]

    def launch(self, machine: int) -> subprocess.Popen[bytes]:
        """Start the launcher of a machine."""
        argv = [sys.executable, "-m", "offbeat.cli", "run", "--workers", str(sum(self.here))]
        if self.address is not None:
            argv += ["--store", self.address, "--here", str(self.here[machine])]
        argv += self._options
        path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        environment = {**os.environ, MARK: self._mark, "MACHINE": str(machine), "PYTHONPATH": path}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OFFBEAT_KERNELS": "0"}
        with (self.folder / f"output{machine}").open("ab") as output:
            return subprocess.Popen(
                [*argv, str(Path(__file__).with_name("script.py")), str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def intrude(self, count: int, data: bytes) -> None:
        """Open connections to the store that this process keeps; see ``Intruders``."""
        self._intruders.append(Intruders(self._kept.port, count, data))

    def output(self) -> str:
        """Return what the launchers and workers have written."""
        return "\n".join(p.read_text(errors="replace") for p in self.folder.glob("output*"))

    def processes(self) -> list[Process]:
        """Return all processes of workers so far, with their logs up to now."""
        for path in sorted((self.folder / "logs").iterdir()):
            process = self._logs.get(path)
            with path.open("rb") as file:
                file.seek(process._read if process else 0)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            events = [json.loads(line) for line in data.splitlines()]
            if process is None and events:
                process = Process(events[0]["pid"], events[0]["slot"])
                self._logs[path] = process
            if process is not None:
                process.events += [one for one in events if one["event"] != "step"]
                process.steps += [one for one in events if one["event"] == "step"]
                process._read += len(data)
        return list(self._logs.values())

    def trains(self, since: float = 0.0) -> list[Process]:
        """Return the live processes that have taken a step after ``since``, by ``monotonic``."""
        found = [p for p in self.processes() if len(p.steps) > 1 and p.steps[-2]["at"] > since]
        return [p for p in found if not p.has("last") and p.lives()]

    def is_whole(self, since: float = 0.0) -> bool:
        """Return True if as many workers train as there should be."""
        return len({p.slot for p in self.trains(since)}) == sum(self.here)

    def has_ended(self) -> bool:
        """Return True if a worker has ended its training, or is about to."""
        return any(process.has("last") for process in self.processes())

    def left(self) -> list[str]:
        """Return the processes that are left, except the launchers."""
        found, mark = [], f"{MARK}={self._mark}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append(f"{path.name}: {command[:150]}")
            except OSError:
                continue
        return found

    def close(self) -> None:
        """End all processes."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for one in self.left():
            Process(int(one.partition(":")[0]), "").send(signal.SIGKILL)
        for intruders in self._intruders:
            intruders.close()
        if self.link is not None:
            self.link.close()
        self._kept = None


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; return False if it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
