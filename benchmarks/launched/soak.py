"""Random faults under ``offbeat run``: ``python -m benchmarks.launched.soak --minutes 20``.

A seed plans trainings and their faults (``case``). The soak starts launchers (``training.py``),
whose workers log every step (``script.py``), injects the faults, and compares the logs with what
docs/failures.md promises (``judge.py``).
"""

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.launched.judge import PERIODS, judge
from benchmarks.launched.store_faults import SLOW_BYTES_PER_SECOND
from benchmarks.launched.training import Process, Training, wait_until

IN_STEP = (*PERIODS, "async:staleness=4")
STRATEGIES = (
    *IN_STEP,
    *("async:staleness=4,schedule=eager", "streaming:parts=3,staleness=4,outer_gain=1"),
)
KINDS = {"kill": 4, "kill two": 3, "kill all": 2, "stop": 2, "terminate": 2, "exception": 2}
KINDS |= {"kill in attach": 4, "detach": 1}
STORE_KINDS = {"stalled client": 2, "idle clients": 1, "swallow": 2, "slow store": 1}
"""Faults of a store that the soak keeps."""
FAULTS = 12
_WHOLE_SECONDS, _END_SECONDS = 150.0, 200.0
_ORDER_SECONDS = 60.0  # longer than a pause before a restart
ORDERS = {
    "kill in attach": ("die-in-attach", 0.7, _ORDER_SECONDS),
    "kill in save": ("die-in-save", 0.05, _ORDER_SECONDS),
    "kill at end": ("die-at-end", 0.4, _END_SECONDS),
    "exception": ("raise", 0.0, _ORDER_SECONDS),
    "detach": ("detach", 0.0, _ORDER_SECONDS),
}
"""Faults that a worker injects into itself → its order, the longest delay, and the time limit."""


@dataclass(frozen=True)
class Case:
    """One training and its faults.

    Attributes:
        index: Number of the training.
        strategy: Strategy as text.
        here: Number of workers on each machine.
        store: See ``Training``.
        saves: True if the workers save checkpoints.
        timeout_seconds: Argument of ``attach``.
        faults: Kinds of the faults.
        seed: Seed of victims and times.
    """

    index: int
    strategy: str
    here: tuple[int, ...]
    store: str
    saves: bool
    timeout_seconds: float
    faults: tuple[str, ...]
    seed: int


def case(seed: int, index: int) -> Case:
    """Return training number ``index`` of ``seed``, the same each time."""
    draw = random.Random(f"launched {seed} {index}")
    here = draw.choice(((3,), (4,), (2, 1), (2, 2)))
    store = draw.choice(("launcher", "process", "file")[len(here) - 1 :])
    kinds = dict(KINDS)
    if silent := len(here) == 1 and draw.random() < 0.3:  # workers stop for more than the time-out
        kinds = {"stop for too long": 4, "kill": 3, "terminate": 1, "exception": 1}
    if len(here) == 2:
        kinds["kill launcher"] = 3
    if store == "process":
        kinds |= STORE_KINDS
    kinds["kill fork server"] = 2
    strategy = draw.choice(STRATEGIES)
    saves = draw.random() < 0.7 and strategy in IN_STEP
    if saves:
        kinds["kill in save"] = 2
    faults = draw.choices(list(kinds), weights=list(kinds.values()), k=FAULTS)
    if draw.random() < 0.7:
        faults[-1] = "kill at end"
    return Case(
        index,
        strategy,
        here,
        store,
        saves,
        8.0 if silent else 60.0,
        tuple(faults),
        draw.randrange(2**31),
    )


class Faults:
    """Injects faults into a training. Each method waits until the fault has happened, or cannot."""

    def __init__(self, training: Training, seed: int) -> None:
        self._training, self._folder = training, training.folder
        self._draw = random.Random(seed)
        self.violations: list[str] = []

    def inject(self, kind: str) -> None:
        """Inject a fault of this kind."""
        if kind in ORDERS:
            order, most, limit = ORDERS[kind]
            self._order(order, self._draw.uniform(0, most), limit)
            return
        methods: dict[str, Callable[[], object]] = {
            "kill": lambda: self._send(signal.SIGKILL, 1),
            "kill two": lambda: self._send(signal.SIGKILL, 2),
            "terminate": lambda: self._send(signal.SIGTERM, 1),
            "kill all": self._kill_all,
            "kill launcher": self._kill_launcher,
            "kill fork server": self._kill_fork_server,
            "stop": lambda: self._stop(self._draw.uniform(0.3, 3)),
            "stop for too long": lambda: self._stop(self._draw.uniform(9, 14)),
            "stalled client": lambda: self._training.intrude(1, b"\0"),
            "idle clients": lambda: self._training.intrude(1000, b""),
            "swallow": self._swallow,
            "slow store": self._slow,
        }
        methods[kind]()

    def _swallow(self) -> None:
        assert self._training.link is not None
        self._training.link.swallow(self._draw.uniform(1, 5))

    def _slow(self) -> None:
        assert self._training.link is not None
        self._training.link.bytes_per_second = SLOW_BYTES_PER_SECOND

    def _send(self, number: int, count: int) -> list[Process]:
        alive = self._training.trains()
        victims = self._draw.sample(alive, min(count, len(alive)))
        for victim in victims:
            victim.send(number)
        return victims

    def _kill_all(self) -> None:
        for process in self._training.processes():
            process.send(signal.SIGKILL)

    def _stop(self, seconds: float) -> None:
        victims = self._send(signal.SIGSTOP, 1)
        time.sleep(seconds)
        for victim in victims:
            victim.send(signal.SIGCONT)

    def _order(self, order: str, value: float, seconds: float) -> None:
        """Give an order, and wait until a worker has obeyed."""
        partial = self._folder / "order"
        partial.write_text(str(value))
        if order == "die-in-attach":
            wait_until(lambda: bool(self._training.trains()), _WHOLE_SECONDS)
        elif order == "die-at-end":
            (self._folder / "hurry").touch()
        path = partial.rename(self._folder / order)
        if order == "die-in-attach":
            self._send(signal.SIGKILL, 1)
        if wait_until(lambda: not path.exists(), seconds):
            time.sleep(value)
        elif not self._training.has_ended():
            self.violations.append(f"no worker has taken the order to {order}")

    def _kill_launcher(self) -> None:
        training, number = self._training, self._draw.randrange(2)
        own = [p for p in training.processes() if p.lives() and p.slot[0] == str(number)]
        training.launchers[number].kill()
        training.launchers[number].wait()
        if not wait_until(lambda: not any(p.lives() for p in own), 10):
            self.violations.append("workers outlive their launcher")
        time.sleep(self._draw.uniform(0, 2))
        training.launchers[number] = training.launch(number)

    def _kill_fork_server(self) -> None:
        """Kill the process that has forked a worker. The workers must continue."""
        alive = self._training.trains()
        if not alive:
            return
        launchers = {launcher.pid for launcher in self._training.launchers}
        server = parent(self._draw.choice(alive).pid)
        if server in launchers | {None}:  # it was killed before, and the launcher has its workers
            return
        Process(server, "").send(signal.SIGKILL)
        time.sleep(1.0)
        if not (all(one.lives() for one in alive) or self._training.has_ended()):
            self.violations.append("workers do not survive their fork server")


def parent(pid: int) -> int | None:
    """Return the parent of a process. None if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def survive(one: Case, folder: Path) -> list[dict[str, Any]]:
    """Train with all faults of a case. Return a row for each fault, and one for the training."""
    rows: list[dict[str, Any]] = []

    def add(kind: str, violations: list[str], seconds: float = 0.0, **more: Any) -> None:
        fault = {**asdict(one), "kind": kind}
        row = {"policy": "launcher", "case": fault, "missed": False, "hangs": []}
        rows.append({**row, "violations": violations, "notice_seconds": round(seconds, 2), **more})

    settings = {"epochs": 32, "samples": 500, "batch": 4, "step_seconds": 0.05}
    settings |= {"strategy": one.strategy, "timeout_seconds": one.timeout_seconds}
    settings["saves"] = one.saves
    options = ["--max-restarts", "100"]
    training = Training(folder, settings, one.here, one.store, options)
    draw, faults = random.Random(one.seed + 1), Faults(training, one.seed)
    try:
        whole = wait_until(training.is_whole, _WHOLE_SECONDS)
        no_start = [] if whole else ["the training has not begun"]
        for number, kind in enumerate(one.faults):
            if no_start or training.has_ended():
                add(kind, [], missed=True)
                continue
            faults.inject(kind)
            at, found = time.monotonic(), faults.violations
            faults.violations = []
            last = number == len(one.faults) - 1
            if not last and draw.random() < 0.3:
                time.sleep(draw.uniform(0, 1.5))
                add(kind, found)
                continue
            whole = wait_until(
                lambda at=at: training.has_ended() or training.is_whole(at), _WHOLE_SECONDS
            )
            hangs = [] if whole else ["not all workers train again"]
            add(kind, found + hangs, time.monotonic() - at, hangs=hangs)
            if hangs:
                break
            time.sleep(draw.uniform(0, 1))
        (folder / "hurry").touch()
        ended = wait_until(
            lambda: all(launcher.poll() is not None for launcher in training.launchers),
            _END_SECONDS,
        )
        hangs = [] if ended else ["the training does not end"]
        add("training", no_start + hangs + judge(one.strategy, one.faults, training), hangs=hangs)
    finally:
        training.close()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results by policy and kind as Markdown."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[f"{row['policy']}: {row['case']['kind']}"].append(row)
    lines = ["| fault | happened | survived | violations | hangs | noticed, or gone on, within |"]
    lines.append("|---|---|---|---|---|---|")
    shown = [*sorted(kinds.items()), *([("all", rows)] if len(kinds) > 1 else [])]
    for kind, some in shown:
        happened = [row for row in some if not row["missed"]]
        bad = [row for row in some if row["violations"]]
        hangs = [row for row in some if row["hangs"]]
        longest = max((row["notice_seconds"] for row in happened), default=0.0)
        good = sum(not row["violations"] for row in happened)
        within = f"{longest:.1f} s" if longest and kind != "all" else ""
        lines.append(
            f"| {kind} | {len(happened)} | {good} | {len(bad)} | {len(hangs)} | {within} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the command; return exit status 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launched.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all faults (default 0)")
    parser.add_argument("--minutes", type=float, default=20.0, help="time to run (default 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first training")
    parser.add_argument("--most", type=int, default=10**9, help="largest number of trainings")
    parser.add_argument("--output", type=Path, help="append a JSON line for each fault")
    parser.add_argument("--table", type=Path, help="print the table of an --output file, and exit")
    parser.add_argument("--keep", type=Path, help="directory for the files of violations")
    options = parser.parse_args()
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    deadline, index, rows = time.monotonic() + 60 * options.minutes, options.first, []
    while time.monotonic() < deadline and index < options.first + options.most:
        one, began = case(options.seed, index), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            new = survive(one, Path(folder, "training"))
            if options.keep and any(row["violations"] for row in new):
                shutil.copytree(folder, options.keep / f"{options.seed}-{index}")
        bad = [violation for row in new for violation in row["violations"]]
        took = time.monotonic() - began
        print(f"{index:4} {'VIOLATION' if bad else 'survived'} {took:.0f} s {one}", flush=True)
        for violation in bad:
            print(f"     {violation}", flush=True)
        rows += new
        if options.output is not None:
            with options.output.open("a") as file:
                for row in new:
                    line = {"seed": options.seed, **row, "machine": machine()}
                    file.write(json.dumps(line) + "\n")
        index += 1
    print(table(rows))
    return int(any(row["violations"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
