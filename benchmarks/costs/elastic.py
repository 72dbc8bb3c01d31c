"""Cost of elastic training: one of four workers is killed, and later a new one joins.

Each strategy trains a small classifier for 300 steps of at least 5 ms over loopback, with workers
that gather at a store in a file, twice: once undisturbed; once with process 1 killed after 100
steps and a fifth one that joins when process 0 has taken 200. A worker's samples depend only on its
process and on the step. Figures, each the largest of all workers:

- seconds from the death to the end of the first step in a view without the dead worker;
- seconds from the request to join to the first step, and the longest step of the others meanwhile;
- final loss over that of the undisturbed run, on samples that no worker trains on.
"""

import json
import multiprocessing as mp
import os
import signal
import tempfile
import time
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from benchmarks.harness import Result
from offbeat.quantization.kernels import kernels

STRATEGIES = (
    "bsp",
    "local:period=8",
    "selsync:target_lssr=0.5",
    "async:staleness=8",
    "async:schedule=eager,staleness=8",
    "streaming",
    "diloco:period=8",
)
WORKERS, VICTIM, STEPS, BATCH = 4, 1, 300, 32
STEP_SECONDS = 0.005
_LIMIT_SECONDS = 120.0


def _samples(teacher: nn.Module, seed: int, count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return x, teacher(x).argmax(1)


def _network(seed: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 10))


def _train(rank: int, strategy: str, folder: Path, disturbed: bool) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["OFFBEAT_STORE"], os.environ["OFFBEAT_WORKERS"] = (
        f"file://{folder}/store",
        str(WORKERS),
    )
    died, joins = folder / "died", folder / "joins"
    if rank == WORKERS:
        kernels()  # takes a second, in which the training would end
        while not joins.exists():
            time.sleep(0.01)
    asked = time.time()
    teacher, model = _network(99, 64), _network(0, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(strategy), timeout_seconds=20)
    ends: list[tuple[float, int]] = []
    while sync.step < STEPS:
        began = time.perf_counter()
        if disturbed and rank == VICTIM and sync.step == STEPS // 3:
            died.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = _samples(teacher, 10_000 * rank + sync.step, BATCH)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - began)))
        ends.append((time.time(), sync.stats.details["view"]))
        if disturbed and rank == 0 and sync.step == 2 * STEPS // 3:
            joins.touch()
    details = sync.stats.details
    sync.finish()
    x, y = _samples(teacher, -1, 4096)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(x), y))
    report = {"ends": ends, "loss": loss, "asked": asked, "members": details["members"]}
    (folder / f"partial{rank}").write_text(json.dumps(report))
    (folder / f"partial{rank}").rename(folder / f"report{rank}")


def run(strategy: str, *, disturbed: bool) -> dict[int, Any]:
    """Train once; return the report of each worker that finished, by rank.

    Raises:
        RuntimeError: A worker that should have finished did not.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        folder = Path(name)
        processes: list[ForkProcess] = [
            context.Process(target=_train, args=(rank, strategy, folder, disturbed), daemon=True)
            for rank in range(WORKERS + disturbed)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + _LIMIT_SECONDS
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()
        reports = {
            rank: json.loads((folder / f"report{rank}").read_text())
            for rank in range(len(processes))
            if (folder / f"report{rank}").exists()
        }
        if disturbed:
            died = float((folder / "died").read_text())
            for one in reports.values():
                one["died"] = died
    expected = {*range(len(processes))} - ({VICTIM} if disturbed else set())
    if reports.keys() != expected:
        raise RuntimeError(f"{strategy}: only ranks {sorted(reports)} have finished")
    return reports


def _figures(strategy: str) -> list[Result]:
    usual, reports = run(strategy, disturbed=False), run(strategy, disturbed=True)
    old = [one for rank, one in reports.items() if rank < WORKERS]
    died, asked = old[0]["died"], reports[WORKERS]["asked"]
    lost = max(next(t for t, view in one["ends"] if view > 0) - died for one in old)
    joined = reports[WORKERS]["ends"][0][0]
    stood = max(
        after - before
        for one in old
        for (before, _), (after, _) in zip(one["ends"], one["ends"][1:], strict=False)
        if before <= joined and after >= asked
    )
    ratio = reports[0]["loss"] / usual[0]["loss"]
    config = {"workers": WORKERS, "steps": STEPS, "strategy": strategy}
    return [
        Result("elastic", f"{strategy}: from a death to the next step", lost, None, "s", config),
        Result("elastic", f"{strategy}: a newcomer's wait", joined - asked, None, "s", config),
        Result("elastic", f"{strategy}: the others' longest step then", stood, None, "s", config),
        Result("elastic", f"{strategy}: loss / undisturbed", ratio, None, "", config),
    ]


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what optimizers need, once
    chosen = STRATEGIES[:1] if quick else STRATEGIES
    return [figure for strategy in chosen for figure in _figures(strategy)]
