"""Launches and landings of parts, recorded in a training and replayed by hand.

Two nodes of two workers train ``make_model`` with SGD; a node takes the mean of its two gradients.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from loops import attach, close, sgd
from problems import gradients, loss_of, make_batch, make_model

LR = 0.1
Event = tuple[
    str, int, float
]  # "step", "launch" or "land"; the part; the weight of this node, or the sum


def logged(averager: Any) -> list[Event]:
    """The launches and landings of ``averager`` from now on."""
    events: list[Event] = []
    begin, end = averager.begin_launch, averager.finish_landing

    def launched(*args: Any) -> Any:
        flight = begin(*args)
        events.extend(("launch", part.index, flight.weight) for part in flight.parts)
        return flight

    def landed(flight: Any, **options: Any) -> None:
        events.extend(("land", part.index, flight.total()) for part in flight.parts)
        end(flight, **options)

    averager.begin_launch, averager.finish_landing = launched, landed
    return events


def whole(tensors: Any) -> Tensor:
    """Return all numbers of tensors and DTensors."""
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().reshape(-1).double() for t in full]).clone()


def recorded(
    rank: int, text: str, model: nn.Module, steps: int
) -> tuple[Tensor, list[Event], Tensor]:
    """Return the model before each step and after the last landing, the events, and a consensus.

    Steps take different times.
    """
    optimizer, trace = sgd(model, LR), []
    sync = attach(model, optimizer, text, wire="float32", node_group="auto")
    events = logged(sync._iteration.flow)
    for step in range(steps):
        if step:
            trace.append(whole(model.parameters()))
        time.sleep(0.002 * ((rank + step) % 3))
        loss = loss_of(model, make_batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        events.append(("step", 0, 0.0))
        optimizer.step()
    with sync.consensus():
        shown = whole(model.parameters())
    sync.state_dict()  # lands what is in flight
    trace.append(whole(model.parameters()))
    sync.detach()
    return torch.stack(trace), events, shown


def require_replayed(results: list[Any], parts: int, *, rows: bool) -> None:
    """Check what ``recorded`` returned on four workers: the models follow from the events.

    The events are equal inside a node, and the consensus is equal on all workers.
    """
    events = [events for _, events, _ in results]
    assert events[::2] == events[1::2]
    assert sum(kind == "land" for kind, *_ in events[0]) > 2
    expected = replay(part_of_each_number(parts, rows=rows), events[::2])
    for rank, (trace, _, shown) in enumerate(results):
        close(trace, torch.stack(expected[rank // 2]))
        assert torch.equal(shown, results[0][2])


def part_of_each_number(parts: int, *, rows: bool) -> Tensor:
    """The part of each parameter of ``make_model``, in its order.

    The two workers of a node divide each tensor. Each worker cuts the list of its halves, in the
    order of the names, into parts of equal bytes: number k of n belongs to part ⌊k·P/n⌋. With more
    parts than numbers each number is a part.

    Args:
        parts: P.
        rows: True if the rows of each tensor are divided, as by ``fully_shard``. False: its
            numbers.
    """
    model = make_model()
    places = {}  # of each parameter, in the model's order
    start = 0
    for name, p in model.named_parameters():
        places[name] = torch.arange(start, start + p.numel()).view(p.shape)
        start += p.numel()
    found = torch.full((start,), -1)
    for rank in (0, 1):
        held = []
        for name in sorted(places):
            whole = places[name] if rows else places[name].reshape(-1)
            half = -(-len(whole) // 2)  # of the first worker
            held.append((whole[:half] if rank == 0 else whole[half:]).reshape(-1))
        numbers = torch.cat(held)
        part = torch.arange(len(numbers)) * parts // len(numbers)
        found[numbers] = part.unique(return_inverse=True)[1]
    return found


def replay(part_of: Tensor, events: list[list[Event]]) -> list[list[Tensor]]:
    """The models of two nodes after each step, and after their last events, by hand.

    launch:   u = x − P
    landing:  D = Σ w·u / Σ w;  P ← P + D;  x ← x + D − u     (u = 0 with w = 0)
    """
    nodes = [make_model(0), make_model(0)]
    x = [nn.utils.parameters_to_vector(m.parameters()).detach().clone() for m in nodes]
    shared, places, steps, landed = [x[0].clone(), x[0].clone()], [0, 0], [0, 0], [0, 0]
    updates: list[list[tuple[float, Tensor]]] = [[], []]  # of each node, by launch
    traces: list[list[Tensor]] = [[], []]

    def step(n: int) -> None:
        nn.utils.vector_to_parameters(x[n], nodes[n].parameters())
        each = [gradients(nodes[n], make_batch(2 * n + i, steps[n])) for i in (0, 1)]
        mean = [(a + b) / 2 for a, b in zip(*each, strict=True)]
        x[n] = x[n] - LR * torch.cat([g.reshape(-1) for g in mean])
        steps[n] += 1

    def land(n: int, here: Tensor, total: float) -> None:
        (w, own), (v, other) = (updates[m][landed[n]] for m in (n, 1 - n))
        mean = (w * own + v * other) / total if total else 0 * own
        shared[n][here] += mean[here]
        x[n][here] += (mean - own)[here]
        landed[n] += 1

    while places != [len(one) for one in events]:
        for n in (0, 1):
            while places[n] < len(events[n]):
                kind, part, weight = events[n][places[n]]
                if kind == "land" and len(updates[1 - n]) <= landed[n]:
                    break  # the other node comes first
                places[n] += 1
                if kind == "step":
                    if steps[n]:
                        traces[n].append(x[n].clone())
                    step(n)
                elif kind == "launch":
                    updates[n].append((weight, x[n] - shared[n] if weight else 0 * x[n]))
                else:
                    land(n, part_of == part, weight)
    return [[*trace, one] for trace, one in zip(traces, x, strict=True)]
