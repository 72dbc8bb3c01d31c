"""The fork server of this process for workers that train recipes."""

import atexit
import threading
from collections.abc import Mapping

from offbeat.launcher.forking import ForkedProcess, ForkServer

_lock = threading.Lock()
_server: ForkServer | None = None


def fork_worker(
    argument: str, environment: Mapping[str, str], out: int, errors: int
) -> ForkedProcess:
    """Start the equivalent of ``python -m offbeat_lab.train ARGUMENT`` in the current directory.

    Args:
        argument: Result of ``train.encode``.
        environment: Environment of the worker. Variables that libraries read on import, such as
            ``OMP_NUM_THREADS``, have no effect, because the server has imported the libraries.
        out: File descriptor for standard output.
        errors: File descriptor for standard error.

    Raises:
        OffbeatError: The server has ended or has not answered within ten minutes.
    """
    global _server
    with _lock:
        if _server is None or not _server.usable:
            stop()
            _server = ForkServer(["offbeat_lab.train"])
        return _server.fork("offbeat_lab.train:main", [argument], environment, out, errors)


@atexit.register
def stop() -> None:
    """Stop the server, if it runs, and its workers. ``fork_worker`` can start a new one."""
    global _server
    if _server is not None:
        _server.close()
    _server = None
