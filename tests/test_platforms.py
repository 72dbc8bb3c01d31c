"""Offbeat without the system calls that Windows and macOS lack. The real systems are not tested."""

import subprocess
import sys

import pytest

from offbeat_lab.job import Job
from offbeat_lab.launch import processes
from offbeat_lab.launch.worker import WorkerProcess

WITHOUT_UNIX = """
import importlib, os, pkgutil, select, signal, socket, sys, tempfile
# These choose their system calls when they are imported.
import multiprocessing.connection, numpy, rich.console, subprocess, torch._dynamo, typer

lacks = {
    os: "fork register_at_fork setpgid killpg pread pwrite sched_getaffinity geteuid O_CLOEXEC",
    signal: "SIGKILL SIGCHLD",
    select: "poll epoll",
    socket: "AF_UNIX send_fds recv_fds",
}
for module, names in lacks.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios")))
sys.platform = "win32"

import offbeat
"""

IMPORT = """
for module in pkgutil.walk_packages(offbeat.__path__, "offbeat."):
    # Frameworks and Triton may be missing.
    if "integrations." not in module.name and not module.name.endswith(("__main__", "_kernels")):
        importlib.import_module(module.name)
"""

TRAIN = """
import torch.distributed as dist

def train(**options):
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, **options)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sync.finish()
    return model.weight.tolist()

first, second = offbeat.simulate(train, workers=2).results
assert first == second
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert train()
dist.destroy_process_group()
with tempfile.TemporaryDirectory() as folder:
    os.environ.update(OFFBEAT_STORE=f"file://{folder}/store", OFFBEAT_WORKERS="1")
    model = torch.nn.Linear(4, 1)
    try:
        offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except offbeat.AttachError as error:
        assert "elastic training needs Linux or macOS" in str(error), error
    else:
        raise AssertionError("elastic training is not refused")
"""


def run_without_unix(program: str) -> None:
    """Run a program in a process whose modules lack what Windows lacks."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_UNIX + program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.nightly  # importing everything in another process takes 10 s
def test_offbeat_needs_no_system_call_that_windows_lacks() -> None:
    """All modules can be imported, a worker trains, and elastic training is refused."""
    run_without_unix(IMPORT + TRAIN)


def test_worker_processes_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(processes.OffbeatError, match="need Linux or macOS; on Windows use offbeat"):
        processes.run_job(Job("digits"), lambda event: None)


def test_workers_on_macos_use_its_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    def start(worker: WorkerProcess) -> None:
        raise StartedError(worker.environment["GLOO_SOCKET_IFNAME"])

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(processes, "_start", start)
    with pytest.raises(StartedError, match=r"^lo0$"):
        processes.run_job(Job("digits"), lambda event: None)
