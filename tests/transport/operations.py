"""One operation of every class, and its expected result on all workers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.host import Promise
from offbeat.transport.operation import Await, Broadcast, Exchange, Operation, Receive, Send


def classes(parent: type[Any] = Operation) -> Iterator[type[Operation[Any]]]:
    """Return all classes of operations."""
    for kind in parent.__subclasses__():
        if kind.__module__ == Operation.__module__:
            if not kind.__name__.startswith("_"):
                yield kind
            yield from classes(kind)


def example(kind: type[Operation[Any]], communicator: Communicator) -> Operation[Any]:
    """Return an operation of this class, named by it."""
    what, mine = kind.__name__, torch.tensor([1.0, 10.0, 100.0]) * (communicator.rank + 1)
    after, before = (
        (communicator.rank + 1) % communicator.size,
        (communicator.rank - 1) % communicator.size,
    )
    if kind is Broadcast:
        return Broadcast(what=what, tensor=mine, source=communicator.size - 1)
    if kind is Send:
        return Send(what=what, tensor=mine, destination=after, tag=3)
    if kind is Receive:
        return Receive(what=what, tensor=mine, source=before, tag=3)
    if kind is Await:
        promise: Promise[str] = communicator.host.promise()
        promise.fulfil("kept")
        return Await(what=what, promise=promise)
    if kind is Exchange:
        return Exchange(what=what, tensor=mine[:1].repeat(communicator.size))
    return kind(what=what, tensor=mine)  # type: ignore[call-arg]


def start_all(communicator: Communicator) -> dict[str, Any]:
    """Return the result, or the text of the ValueError, of one operation of each class."""
    handles: dict[str, Handle[Any]] = {}
    results: dict[str, Any] = {}
    for kind in classes():
        try:
            handles[kind.__name__] = communicator.start(example(kind, communicator))
        except ValueError as error:
            results[kind.__name__] = str(error)
    for name, handle in handles.items():
        result = handle.wait()
        results[name] = result.tolist() if isinstance(result, Tensor) else result
    results["Gather"] = [part.tolist() for part in results["Gather"]]
    return results


def expected(rank: int, size: int) -> dict[str, Any]:
    """Return the expected result of ``start_all``."""
    rows = [[scale * (other + 1) for scale in (1.0, 10.0, 100.0)] for other in range(size)]
    lone = "a single worker has no rank 0 to"
    return {
        "Sum": [sum(column) for column in zip(*rows, strict=True)],
        "Maximum": rows[-1],
        "Gather": rows,
        "Exchange": [row[0] for row in rows],
        "Broadcast": rows[-1],
        "Send": rows[rank] if size > 1 else f"Send: {lone} send to",
        "Receive": rows[(rank - 1) % size] if size > 1 else f"Receive: {lone} receive from",
        "Await": "kept",
    }
