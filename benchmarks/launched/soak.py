"""Random faults under ``offbeat run``: ``python -m benchmarks.launched.soak --minutes 20``."""

import argparse
import json
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine
from benchmarks.launched.training import Process, Training, wait_until
from benchmarks.soak.runner import working_folder
from benchmarks.soak.soak import table

IN_STEP = (
    *("bsp", "local:period=4", "selsync:delta=0.3"),
    *("async:staleness=4", "diloco:period=3,outer_lr=1,outer_momentum=0"),
)
STRATEGIES = (
    *IN_STEP,
    *("async:staleness=4,schedule=eager", "streaming:parts=3,staleness=4,outer_gain=1"),
)
KINDS = {"kill": 4, "kill two": 3, "kill all": 2, "stop": 2, "terminate": 2, "exception": 2}
KINDS["kill in attach"] = 4
FAULTS = 12
_WHOLE_SECONDS, _END_SECONDS = 150.0, 200.0
_ORDER_SECONDS = 60.0  # longer than a pause before a restart


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
    kinds["kill fork server"] = 2
    faults = draw.choices(list(kinds), weights=list(kinds.values()), k=FAULTS)
    if draw.random() < 0.7:
        faults[-1] = "kill at end"
    return Case(
        index,
        strategy := draw.choice(STRATEGIES),
        here,
        store,
        draw.random() < 0.7 and strategy in IN_STEP,
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
        first = kind.partition(" ")[0]
        methods: dict[str, Callable[[], None]] = {
            "kill two": lambda: self._send(signal.SIGKILL, 2),
            "kill all": self._kill_all,
            "kill in attach": self._kill_in_attach,
            "kill at end": lambda: self._order(
                "die-at-end", self._draw.uniform(0, 0.4), _END_SECONDS
            ),
            "kill launcher": self._kill_launcher,
            "kill fork server": self._kill_fork_server,
            "stop": lambda: self._stop(self._draw.uniform(0.3, 3)),
            "stop for too long": lambda: self._stop(self._draw.uniform(9, 14)),
            "exception": lambda: self._order("raise", 0, _ORDER_SECONDS),
        }
        number = signal.SIGTERM if first == "terminate" else signal.SIGKILL
        methods.get(kind, lambda: self._send(number, 1))()

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
        if order == "die-at-end":
            (self._folder / "hurry").touch()
        path = partial.rename(self._folder / order)
        if wait_until(lambda: not path.exists(), seconds):
            time.sleep(value)
        elif not self._training.has_ended():
            self.violations.append(f"no worker has taken the order to {order}")

    def _kill_in_attach(self) -> None:
        wait_until(lambda: bool(self._training.trains()), _WHOLE_SECONDS)
        order = self._folder / "die-in-attach"
        (self._folder / "order").write_text(str(seconds := self._draw.uniform(0, 0.7)))
        (self._folder / "order").rename(order)
        self._send(signal.SIGKILL, 1)
        if wait_until(lambda: not order.exists(), 60):
            time.sleep(seconds)
        elif not self._training.has_ended():
            self.violations.append("no worker was started again")

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
        if not all(one.lives() for one in alive):
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
        deadline = time.monotonic() + _END_SECONDS
        ended = wait_until(
            lambda: all(launcher.poll() is not None for launcher in training.launchers),
            deadline - time.monotonic(),
        )
        hangs = [] if ended else ["the training does not end"]
        add("training", no_start + hangs + judge(one, training), hangs=hangs)
        rows[-1]["counts"] = counts(training)
    finally:
        training.close()
    return rows


def judge(one: Case, training: Training) -> list[str]:
    """Return the violations that are visible after the end of the training."""
    found = []
    codes = [launcher.poll() for launcher in training.launchers]
    ended = [process.slot for process in training.processes() if process.has("ended")]
    for place, code in enumerate(codes):
        # "kill at end" may come when the worker has ended, and its process has not.
        if code == 137 and any(slot.startswith(f"{place}:") for slot in ended):
            codes[place] = 0
    if any(codes):
        found.append(f"the launchers ended with {codes}")
    if None not in codes and not wait_until(lambda: not training.left(), 10):
        found.append(f"left behind: {training.left()}")
    processes = training.processes()
    ends = [event for p in processes for event in p.events if event["event"] == "ended"]
    if not ends:
        found.append("no worker has finished")
    if len({end["sum"] for end in ends}) > 1:
        found.append(f"the models differ: {[end['sum'] for end in ends]}")
    output = training.output()
    failures = Counter(re.findall(r"worker \d+ ended with exit code (\d+)", output))
    failures["1"] -= one.faults.count("exception")
    expected = {"stop for too long"} & {*one.faults}
    found += [
        f"{count} workers ended with exit code {code}"
        for code, count in failures.items()
        if count > 0 and not (code == "75" and expected)
    ]
    return found + judge_uses(processes)


def judge_uses(processes: list[Process]) -> list[str]:
    """Compare which samples were used, and how often, with what the samplers count."""
    found = []
    for name, members in _trainings(processes).items():
        uses = _uses(members)
        finishers = [process for process in members if process.has("ended")]
        missing = _left(members) - uses.keys() if finishers else ()
        if missing:
            found.append(f"training {name}: {len(missing)} samples were not used")
        twice = sum(len(queues) - len({*queues}) for queues in uses.values())
        if twice:
            found.append(f"training {name}: {twice} samples were used twice from one queue")
        again = sum(len(queues) - 1 for queues in uses.values())
        counted = sum(_repeated(process) for process in members)
        if again > counted:
            text = f"training {name}: {again} repeated uses, but the samplers count {counted}"
            found.append(text)
        newest = {key: max(queues) for key, queues in uses.items()}
        taken = sum(
            step["queue"] < newest[step["epoch"], sample]
            for process in finishers
            for step in process.steps
            for sample in step["batch"]
        )
        if taken:
            found.append(f"training {name}: {taken} samples of survivors were used again")
    return found


def _trainings(processes: list[Process]) -> dict[str, list[Process]]:
    found: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        for event in process.events:
            if event["event"] == "attached":
                found[event["training"]].append(process)
    return found


def _left(processes: list[Process]) -> set[tuple[int, int]]:
    """Return the samples with which the training began, each with its epoch."""
    left = [e["left"] for p in processes for e in p.events if e["event"] == "data"]
    return {(epoch, sample) for epoch, samples in left[0] for sample in samples}


def _uses(processes: list[Process]) -> dict[tuple[int, int], list[int]]:
    """Return for each epoch and sample the queues from which it was used."""
    uses: dict[tuple[int, int], list[int]] = defaultdict(list)
    for process in processes:
        for step in process.steps:
            for sample in step["batch"]:
                uses[step["epoch"], sample].append(step["queue"])
    return uses


def _repeated(process: Process) -> int:
    return int(max((step["repeated"] for step in process.steps), default=0))


def counts(training: Training) -> dict[str, int]:
    """Return how many processes and trainings there were, and how many samples were repeated."""
    processes = training.processes()
    trainings = _trainings(processes).values()
    return {
        "processes": len(processes),
        "trainings": len(trainings),
        "loads": sum(process.has("loaded") for process in processes),
        "used": sum(len(queues) for one in trainings for queues in _uses(one).values()),
        "used_again": sum(len(q) - 1 for one in trainings for q in _uses(one).values()),
        "counted_again": sum(_repeated(process) for one in trainings for process in one),
    }


def main() -> int:
    """Run the command; return exit status 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launched.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all faults (default 0)")
    parser.add_argument("--minutes", type=float, default=20.0, help="time to run (default 20)")
    parser.add_argument("--first", type=int, default=0, help="number of the first training")
    parser.add_argument("--every", type=int, default=1, help="step from one training to the next")
    parser.add_argument("--most", type=int, default=10**9, help="largest number of trainings")
    parser.add_argument("--output", type=Path, help="append a JSON line for each fault")
    parser.add_argument("--table", type=Path, help="print the table of an --output file, and exit")
    parser.add_argument("--keep", type=Path, help="directory for the files of violations")
    options = parser.parse_args()
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    deadline, index, rows = time.monotonic() + 60 * options.minutes, options.first, []
    while time.monotonic() < deadline and index < options.first + options.most * options.every:
        one, began = case(options.seed, index), time.monotonic()
        with working_folder() as folder:
            new = survive(one, folder / "training")
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
        index += options.every
    print(table(rows))
    return int(any(row["violations"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
