"""Workers behind ``links.Links`` that train, and ask for a fault before one operation.

``Server`` is a process that has imported Offbeat and forks the workers of each training. They exit
as a script does, so that an abort while Python shuts down shows as a signal.

Parameter j of worker k receives the gradient k + 1 in each step, with SGD and the learning rate 1.
So the mean over the workers is known after each step, and a model that contains a step twice, or
not at all, is found.
"""

import contextlib
import faulthandler
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from links import Fault, Links, inject

TIMEOUT_SECONDS = 3.0
WORKERS, BEFORE, STEPS = 3, 5, 14
LEAD_STEPS = 4  # a worker is at most so many steps ahead of another one
OPERATIONS = ("attach", "round", "save", "load", "join", "leave", "consensus", "finish")
STRATEGIES = (
    "bsp",
    "local:period=2",
    "async:staleness=2",
    "streaming:parts=3,staleness=4,outer_gain=1",
)


@dataclass(frozen=True)
class Cell:
    """One training with one fault.

    Attributes:
        operation: Operation before which the fault begins.
        kind: See ``Fault``, as well as ``target`` and ``after``.
        strategy: Strategy as text.
        elastic: True if the workers gather at the store, False for a process group.
        victim: Index of the worker whose links fail. In "join" and "leave" it is the last worker
            that joins or leaves.
    """

    operation: str
    kind: Any
    target: str
    strategy: str
    elastic: bool
    victim: int = 1
    after: int = 0

    def __str__(self) -> str:
        strategy = self.strategy.split(":")[0]
        text = f"{self.operation}-{self.kind}-{self.target}-{strategy}"
        text += "-elastic" if self.elastic else ""
        text += f"-after{self.after}" if self.after else ""
        return text + f"-{self.victim}"


# -- in a worker -----------------------------------------------------------------------------------


class _Log:
    """The events of a worker, one JSON line for each."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def __call__(self, event: str, **more: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n")


def work(cell: Cell, index: int, folder: Path, port: int, control: int) -> None:
    """Train as worker ``index``, and log what happens."""
    import torch

    import offbeat

    torch.set_num_threads(1)
    log = _Log(folder / f"log{index}")
    victim = index == cell.victim
    fault = Fault(cell.kind, cell.victim, cell.target, cell.after)
    model = torch.nn.Linear(4000, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def value() -> list[float]:
        numbers = model.weight.detach()
        return [float(numbers.min()), float(numbers.max())]

    def operate(operation: str, function: Any, *, may_fail: bool = False) -> Any:
        if operation == cell.operation and victim:
            inject(control, fault)
        try:
            result = function()
        except offbeat.CommunicationError as error:
            if not may_fail:
                raise
            log("failed", text=str(error))
            return None
        if operation == cell.operation:
            log("operated")
        return result

    def step() -> None:
        optimizer.zero_grad()
        (model.weight * float(index + 1)).sum().backward()
        optimizer.step()
        details = sync.stats.details
        membership = {key: details.get(key) for key in ("generation", "members")}
        log("step", step=sync.step, size=sync.size, value=value(), **membership)

    sync: Any = None
    try:
        _connect(cell, index, port)
        log("connected")
        for other in range(WORKERS):  # the fault must not hit the script's own process group
            _await(folder / f"log{other}", "connected")
        if cell.operation == "join" and victim:
            _await(folder / "log0", '"step": 3')
        strategy = offbeat.parse_strategy(cell.strategy)
        sync = operate(
            "join" if cell.operation == "join" else "attach",
            lambda: offbeat.attach(model, optimizer, strategy, timeout_seconds=TIMEOUT_SECONDS),
        )
        log("attached", rank=sync.rank, step=sync.step)
        checkpoints = str(folder / "checkpoints")
        deadline = time.monotonic() + 60
        operated = False
        while sync.step < STEPS or (cell.operation == "join" and not operated):
            if cell.operation == "join":
                operated = sync.step >= STEPS and not _pending(folder, cell.victim)
                time.sleep(0.02)
                assert time.monotonic() < deadline
            if sync.step == BEFORE and not operated and cell.operation != "join":
                operated = True
                if cell.operation == "load":
                    offbeat.save(checkpoints, sync)
                if cell.operation == "round" and victim:
                    inject(control, fault)
                if cell.operation in ("save", "load"):
                    call = functools.partial(getattr(offbeat, cell.operation), checkpoints, sync)
                    operate(cell.operation, call, may_fail=cell.elastic)
                if cell.operation == "consensus":
                    operate("consensus", lambda: _consensus(sync))
                if cell.operation == "leave" and victim:
                    operate("leave", sync.detach)
                    log("left")
                    return
            step()
        operate("finish", sync.finish)
        log("finished", value=value(), step=sync.step)
    except offbeat.OffbeatError as error:
        log("error", kind=type(error).__name__, text=str(error), value=value())
    except BaseException as error:
        import traceback

        log("raw", text=traceback.format_exc(), kind=type(error).__name__)


def _consensus(sync: Any) -> None:
    with sync.consensus():
        pass


def _connect(cell: Cell, index: int, port: int) -> None:
    import torch.distributed as dist

    from offbeat.elastic import membership, silence

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OFFBEAT_KERNELS": "0", "RES_OPTIONS": "attempts:0"}
    if cell.elastic:
        membership._STORE_SECONDS = 0.1
        silence.REFUSED_SECONDS = 0.5
        size = WORKERS - (cell.operation == "join")
        os.environ |= {"OFFBEAT_STORE": f"127.0.0.1:{port}", "OFFBEAT_WORKERS": str(size)}
        return
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    dist.init_process_group(
        "gloo", store=store, rank=index, world_size=WORKERS, timeout=timedelta(seconds=30)
    )


def _await(path: Path, text: str) -> None:
    deadline = time.monotonic() + 30
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)


def _pending(folder: Path, index: int) -> bool:
    """Return True while the newcomer neither trains nor has raised."""
    path = folder / f"log{index}"
    return not path.exists() or not any(
        f'"{event}"' in path.read_text() for event in ("step", "error", "raw")
    )


# -- the server ------------------------------------------------------------------------------------


def _serve() -> None:
    """Read trainings from the standard input, one JSON line each, and fork their workers."""
    import torch

    import offbeat
    from offbeat import attach  # noqa: F401 - with all modules of the package
    from offbeat.quantization.kernels import kernels

    for name in STRATEGIES:
        offbeat.parse_strategy(name)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    os.environ["OFFBEAT_KERNELS"] = "0"
    kernels()
    import gc

    gc.freeze()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while line := sys.stdin.readline():
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            break
    else:
        return
    null = os.open(os.devnull, os.O_RDWR)  # the pipes are the server's
    os.dup2(null, 0)
    os.dup2(null, 1)
    order = json.loads(line)
    folder, cell = Path(order["folder"]), Cell(**order["cell"])
    workers: dict[int, int] = {}
    for index, port in enumerate(order["ports"]):
        if (pid := os.fork()) == 0:
            output = os.open(folder / f"output{index}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.enable()
            work(cell, index, folder, port, order["control"])
            return  # the interpreter shuts down as that of a script does
        workers[pid] = index
    statuses: dict[int, dict[str, Any]] = {}
    while workers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in workers:
            code = os.waitstatus_to_exitcode(status)
            statuses[workers.pop(pid)] = {"code": code, "at": time.monotonic()}
        elif (folder / "stop").exists():
            for pid in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler shows where
            (folder / "stop").unlink()
        else:
            time.sleep(0.01)
    (folder / "partial").write_text(json.dumps(statuses))
    (folder / "partial").rename(folder / "statuses")
    os._exit(0)


class Server:
    """The process that forks workers. A context manager."""

    def __enter__(self) -> "Server":
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def train(self, cell: Cell, folder: Path, *, seconds: float = 40.0) -> "Result":
        """Run a training, and return what has happened."""
        assert self._process.stdin is not None
        with Links(WORKERS) as links:
            order = {"cell": asdict(cell), "folder": str(folder)}
            order |= {"ports": links.ports, "control": links.control}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            deadline, stopped = time.monotonic() + seconds, False
            while not (folder / "statuses").exists():
                time.sleep(0.01)
                if time.monotonic() > deadline and not stopped:
                    (folder / "stop").touch()
                    stopped = True
            statuses = json.loads((folder / "statuses").read_text())
            begun = links.begun
        logs = [
            [json.loads(line) for line in (folder / f"log{index}").read_text().splitlines()]
            for index in range(WORKERS)
        ]
        outputs = [(folder / f"output{index}").read_text() for index in range(WORKERS)]
        return Result(
            cell, begun, stopped, [statuses[str(i)] for i in range(WORKERS)], logs, outputs
        )


# -- judging ---------------------------------------------------------------------------------------


@dataclass
class Result:
    """What has happened in a training."""

    cell: Cell
    begun: float | None
    stopped: bool
    statuses: list[dict[str, Any]]
    logs: list[list[dict[str, Any]]]
    outputs: list[str]

    def last(self, index: int) -> dict[str, Any]:
        return self.logs[index][-1] if self.logs[index] else {"event": "nothing", "at": 0.0}

    def slowest(self) -> float:
        """Longest time in which a worker has neither advanced nor raised since the fault began.

        Without the time in which Python shuts down.
        """
        gaps = [0.0]
        for log in self.logs if self.begun is not None else []:
            times = [self.begun, *(e["at"] for e in log if e["at"] > self.begun)]
            gaps += [b - a for a, b in itertools.pairwise(times)]
        return max(gaps)

    def exit_seconds(self) -> float:
        """Longest time from the last event of a worker to the end of its process."""
        pairs = zip(self.statuses, range(WORKERS), strict=True)
        return max(status["at"] - self.last(index)["at"] for status, index in pairs)

    @property
    def limit_seconds(self) -> float:
        """Longest wait of a worker on a quiet machine."""
        return TIMEOUT_SECONDS * (2 if self.cell.elastic else 1) + 5

    def story(self) -> str:
        """Return the last events of each worker, and what it has printed."""
        begun = self.begun or 0.0
        lines = [f"{self.cell}: the slowest wait took {self.slowest():.1f} s"]
        for index, status in enumerate(self.statuses):
            lines.append(f"worker {index} ended with {status['code']} {status['at'] - begun:.1f} s")
            lines += [f"  {e['at'] - begun:.1f} s: {e}" for e in self.logs[index][-3:]]
            lines.append(self.outputs[index][-2000:])
        return "\n".join(lines)

    def faults(self) -> list[str]:
        """Return what docs/failures.md does not allow."""
        found = []
        if self.begun is None and not self.cell.after:
            found.append("the fault has not begun")
        if self.stopped:
            found.append("a worker hangs")
        if self.slowest() > self.limit_seconds and os.getloadavg()[0] < (os.cpu_count() or 1):
            found.append(f"a wait of {self.slowest():.1f} s")
        for index, status in enumerate(self.statuses):
            end = self.last(index)
            if status["code"]:
                found.append(f"worker {index} has ended with {status['code']}")
            elif end["event"] not in ("finished", "error", "left"):
                found.append(f"worker {index}: {end}")
            for event in self.logs[index]:
                found += self._error(index, event)
        return [*found, *self._values()]

    def _error(self, index: int, event: dict[str, Any]) -> Iterator[str]:
        if event["event"] not in ("error", "failed"):
            return
        text = event["text"]
        if "\n" in text:
            yield f"worker {index}: an error of several lines: {text}"
        if not text.startswith(("rank ", "gathering failed", "offbeat.")):
            yield f"worker {index}: no rank: {text}"
        if event.get("kind") == "CommunicationTimeout" and "timeout_seconds" not in text:
            yield f"worker {index}: no setting: {text}"

    def _values(self) -> Iterator[str]:
        finished = [i for i in range(WORKERS) if self.last(i)["event"] == "finished"]
        values = {tuple(self.last(i)["value"]) for i in finished}
        if len(values) > 1:
            yield f"different models: {values}"
        for index, log in enumerate(self.logs):
            known = 0
            for event in log:
                known = event.get("step", known)
                if "value" in event and (known or self.cell.operation != "join"):
                    low, high = event["value"]
                    most = known + (event["event"] == "error")  # a step that has failed
                    # A worker without the last mean receives the model of one that has it.
                    most += LEAD_STEPS * self.cell.elastic
                    if not -WORKERS * most - 1e-3 <= low <= high <= -known + 1e-3:
                        yield f"worker {index}: wrong value {event}"
        if len(finished) == WORKERS and self.cell.operation != "join":
            low, high = self.last(0)["value"]
            mean = -(1 + WORKERS) / 2 * self.last(0)["step"]
            # Workers without the last mean receive a model, and take their steps again with it.
            changed = any(event.get("generation") for log in self.logs for event in log)
            most = WORKERS * LEAD_STEPS * changed + 1e-3
            if not mean - most <= low <= high <= mean + most:
                yield f"wrong mean {low} {high}, expected {mean}"


if __name__ == "__main__":
    _serve()
