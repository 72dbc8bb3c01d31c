"""Implementations of the commands ``run`` and ``store``."""

import importlib.util
import os
import re
import socket
import sys
import time
from typing import NoReturn

from offbeat.arguments import require_integer
from offbeat.elastic.address import parse_address
from offbeat.launcher import output
from offbeat.launcher.launch import Launch, launch
from offbeat.launcher.signals import Interruption, signal_name
from offbeat.launcher.worker import Program
from offbeat.units import to_seconds

_ONE_MACHINE = "127.0.0.1:0"
_POLL_SECONDS = 0.2


def run(
    script: str,
    arguments: list[str] | None,
    *,
    workers: str | None,
    here: int | None,
    store: str | None,
    join: str | None,
    module: bool,
    fresh: bool,
    max_restarts: int,
    grace: str,
) -> NoReturn:
    """Run a script on workers that are restarted. Exits with the code of the launcher."""
    address = join or store or _ONE_MACHINE
    settings = Launch(
        program=Program(script, tuple(arguments or ()), module),
        workers=workers,
        here=_workers_here(workers, here, store, join),
        store=address,
        keeps_store=join is None and not address.startswith("file://"),
        max_restarts=max_restarts,
        fresh=fresh,
        grace_seconds=to_seconds(grace, allow_zero=True),
    )
    require_integer("max-restarts", max_restarts, least=0)
    path = parse_address(address)
    if isinstance(path, str) and os.path.isdir(path):
        raise ValueError(f"{address} is a directory; name a file in it, which may not exist yet")
    if isinstance(path, str) and not os.path.isdir(folder := os.path.dirname(path)):
        raise ValueError(f"{address}: the directory {folder} does not exist")
    _require_program(script, module)
    raise SystemExit(launch(settings))


def _workers_here(
    workers: str | None, here: int | None, store: str | None, join: str | None
) -> int:
    """Return the number of workers on this machine. Raises ValueError for a contradiction."""
    alone = store is None and join is None
    if store is not None and join is not None:
        raise ValueError("--store keeps the store here and --join finds it elsewhere: give one")
    if workers is None and join is None:
        raise ValueError("run needs --workers, as in --workers 4, or --join host:port")
    most = None if workers is None else parse_workers(workers)
    usual = 1 if most is None or join is not None else most
    here = usual if here is None else here
    require_integer("here", here, least=1)
    if most is not None and here > most:
        raise ValueError(f"--here {here}: there are --workers {workers} in all")
    if most is not None and here < most and alone:
        raise ValueError(
            f"--here {here} of {most}: the other machines need --store with an address of this "
            "one, as in --store 10.0.0.1:29500, or a file on a shared disk"
        )
    return here


def parse_workers(text: str) -> int:
    """Return the largest number in ``"4"`` or ``"2:4"``. Raises ValueError for other text."""
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if match is None or not 1 <= int(match[1] or match[2]) <= int(match[2]):
        raise ValueError(
            f"--workers {text}: give a number, as in 4, or the least and the usual one, as in 2:4"
        )
    return int(match[2])


def _require_program(script: str, module: bool) -> None:
    """Raise ValueError or FileNotFoundError unless the script or module exists."""
    if module:
        package = script.partition(".")[0]
        sys.path.insert(0, os.getcwd())  # as in the workers
        try:
            found = importlib.util.find_spec(package)
        finally:
            sys.path.remove(os.getcwd())
        if found is None:
            raise ValueError(f"there is no module {package}, here or among the installed packages")
    elif not os.path.exists(script):
        raise FileNotFoundError(f"there is no script {script}")
    elif os.path.isdir(script):
        raise ValueError(f"{script} is a directory; name a script, or a module with -m")


def store(port: int, host: str | None) -> None:
    """Keep a store until a signal."""
    from offbeat.launcher.store import keep_store

    require_integer("port", port, least=0)
    if port > 65535:
        raise ValueError(f"port must be at most 65535, got {port}")
    with Interruption() as interruption:
        kept = keep_store(host, port)
        address = f"{host or socket.gethostname()}:{kept.port}"
        output.report(f"the store is at {address}")
        output.report(
            f"on each machine: offbeat run --join {address} --workers 4 --here 2 train.py"
        )
        while not interruption:
            time.sleep(_POLL_SECONDS)
        output.report(f"{signal_name(interruption.signal or 0)}: the store ends")
