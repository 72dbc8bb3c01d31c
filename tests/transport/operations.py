"""One operation of every kind, and its expected result on all workers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.host import Promise


def start_all(communicator: Communicator) -> dict[str, Any]:
    """Return the result, or the text of the ValueError, of one operation of each kind."""
    rank, size = communicator.rank, communicator.size
    promise: Promise[str] = communicator.host.promise()
    promise.fulfil("kept")

    def own(numbers: int = 3) -> Tensor:
        return torch.tensor([1.0, 10.0, 100.0])[:numbers] * (rank + 1)

    starts: dict[str, Callable[[str], Handle[Any]]] = {
        "sum": lambda what: communicator.sum(own(), what=what),
        "maximum": lambda what: communicator.maximum(own(), what=what),
        "gather": lambda what: communicator.gather(own(), what=what),
        "exchange": lambda what: communicator.exchange(own(1).repeat(size), what=what),
        "broadcast": lambda what: communicator.broadcast(own(), source=size - 1, what=what),
        "send": lambda what: communicator.send(
            own(), destination=(rank + 1) % size, tag=3, what=what
        ),
        "receive": lambda what: communicator.receive(
            own(), source=(rank - 1) % size, tag=3, what=what
        ),
        "promise": lambda what: communicator.await_promise(promise, what=what),
    }
    handles: dict[str, Handle[Any]] = {}
    results: dict[str, Any] = {}
    for kind, start in starts.items():
        try:
            handles[kind] = start(kind)
        except ValueError as error:
            results[kind] = str(error)
    for kind, handle in handles.items():
        result = handle.wait()
        results[kind] = result.tolist() if isinstance(result, Tensor) else result
    results["gather"] = [part.tolist() for part in results["gather"]]
    return results


def expected(rank: int, size: int) -> dict[str, Any]:
    """Return the expected result of ``start_all``."""
    rows = [[scale * (other + 1) for scale in (1.0, 10.0, 100.0)] for other in range(size)]
    lone = "a single worker has no rank 0 to"
    return {
        "sum": [sum(column) for column in zip(*rows, strict=True)],
        "maximum": rows[-1],
        "gather": rows,
        "exchange": [row[0] for row in rows],
        "broadcast": rows[-1],
        "send": rows[rank] if size > 1 else f"send: {lone} send to",
        "receive": rows[(rank - 1) % size] if size > 1 else f"receive: {lone} receive from",
        "promise": "kept",
    }
