"""Implementations of the commands ``run`` and ``store``."""

import importlib.util
import os
import signal
import socket
from importlib.machinery import PathFinder
from typing import NoReturn

from offbeat.elastic.address import WorkerCount, parse_address
from offbeat.launcher import output
from offbeat.launcher.launch import launch
from offbeat.launcher.store import listen, serve
from offbeat.launcher.supervisor import signal_name
from offbeat.units import to_seconds


def run(
    script: str,
    arguments: list[str] | None,
    *,
    workers: str,
    here: int | None,
    store: str | None,
    module: bool,
    fresh: bool,
    max_restarts: int,
    grace: str,
) -> NoReturn:
    """Run a script on workers, and restart those that fail. Exits with the launcher's code."""
    workers_here = _workers_here(workers, here, store)
    grace_seconds = to_seconds(grace, allow_zero=True)
    if store is not None:
        _require_store(store)
    _require_program(script, module)
    code = launch(
        [script, *(arguments or ())],
        is_module=module,
        workers=workers,
        here=workers_here,
        store=store,
        max_restarts=max_restarts,
        fresh=fresh,
        grace_seconds=grace_seconds,
    )
    raise SystemExit(code)


def _workers_here(workers: str, here: int | None, store: str | None) -> int:
    """Return the number of workers on this machine. Raises ValueError if options conflict."""
    try:
        most = WorkerCount.parse(workers).most
    except ValueError as error:
        raise ValueError(f"--workers: {error}") from None
    if here is None:
        if store is not None:
            raise ValueError("--store needs --here, the number of workers on this machine")
        return most
    if here > most:
        raise ValueError(f"--here {here}: there are --workers {workers} in all")
    if here < most and store is None:
        raise ValueError(
            f"--here {here} of {most}: the other machines need a store. Start offbeat store on one "
            "machine, and give all --store, as in --store 10.0.0.1:29500"
        )
    return here


def _require_store(address: str) -> None:
    """Raise ValueError if ``address`` has a wrong form, or its file cannot be created."""
    path = parse_address(address)
    if not isinstance(path, str):
        return
    if os.path.isdir(path):
        raise ValueError(f"{address} is a directory; name a file in it, which may not exist yet")
    if not os.path.isdir(folder := os.path.dirname(path)):
        raise ValueError(f"{address}: the directory {folder} does not exist")


def _require_program(script: str, module: bool) -> None:
    """Raise ValueError or FileNotFoundError unless the script or module exists."""
    if module:
        package = script.partition(".")[0]
        # The workers also search the current directory.
        if not (PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package)):
            raise ValueError(f"there is no module {package}, here or among the installed packages")
    elif not os.path.exists(script):
        raise FileNotFoundError(f"there is no script {script}")
    elif os.path.isdir(script):
        raise ValueError(f"{script} is a directory; name a script, or a module with -m")


def store(port: int, host: str | None) -> None:
    """Run a store until SIGINT or SIGTERM."""
    listener = listen(host, port)
    name = host or socket.gethostname()
    address = f"{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
    output.report(f"the store is at {address}")
    output.report(f"on each machine: offbeat run --store {address} --workers 4 --here 2 train.py")
    ends = {signal.SIGTERM, signal.SIGINT}
    # A background job of a shell script ignores SIGINT, and must continue to ignore it.
    ends = {number for number in ends if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the store starts its threads
    kept = serve(listener)
    output.report(f"{signal_name(signal.sigwait(ends))}: the store ends")
    del kept
