"""The state that ``Synchronizer.state_dict`` returns: construction, checks, loading.

There are two kinds of states. Both contain a checksum of their values, and the names, shapes and
dtypes of the model's tensors, but not the model itself. All workers check their states, and load
them only if every worker accepts its state.

The state of a *worker* contains strategy, wire, rank and number of workers. Only a worker with the
same four values can load it.

The state of a *consensus* belongs to the mean of the workers' models. It is saved while every
worker holds this mean: inside ``Synchronizer.consensus`` or after ``finish``. It can be loaded with
any strategy and any number of workers. Training then starts again from that mean, and only the
totals (``Stats``) continue.
"""

import dataclasses
import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from offbeat.averaging import Flow
from offbeat.checkpoint.state import check, digest, load, save
from offbeat.errors import CheckpointError
from offbeat.telemetry import Stats
from offbeat.training.checks.consistency import copy_rank_0

FORMAT = 5


def state_of(flow: Flow, stats: Stats) -> dict[str, Any]:
    """Return the state of a worker. Requires that ``flow.before_save`` was called."""
    worker = flow.worker
    return _sealed(
        {
            "format": FORMAT,
            "of": "worker",
            "strategy": repr(flow.strategy),
            "wire": worker.wire.precision,
            "rank": worker.team.everyone.rank,
            "size": worker.team.everyone.size,
            "model": worker.replica.describe(),
            "stats": dataclasses.asdict(stats),
            "step": worker.step,
            "state": save(flow.state),
            "errors": worker.wire.state_dict(),
        }
    )


def consensus_of(flow: Flow, stats: Stats) -> dict[str, Any]:
    """Return the state of a consensus, with this worker's totals."""
    return _sealed(
        {
            "format": FORMAT,
            "of": "consensus",
            "model": flow.worker.replica.describe(),
            "stats": dataclasses.asdict(stats) | {"details": {}},  # details belong to the strategy
        }
    )


def _sealed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "digest": digest(values)}


# -- checks ----------------------------------------------------------------------------------------


def check_state(state: Any, flow: Flow, stats: Stats) -> None:
    """Raise CheckpointError unless this worker can load ``state``.

    The state of a consensus can be loaded before the first step only.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(
            "this is not a state of sync.state_dict(), or one of a version before format "
            f"{FORMAT}: give the returned state, or load the model alone and start again"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"the state was saved in format {state['format']}, this version reads {FORMAT}: "
            "resume with the version that saved it"
        )
    if digest({k: value for k, value in state.items() if k != "digest"}) != state.get("digest"):
        raise CheckpointError(
            "the state is damaged: its values do not match their checksum; load another checkpoint "
            "of this training"
        )
    if state["of"] == "consensus":
        _require_beginning(flow, stats)
    else:
        _require_identity(state, flow)
    _require_model(state["model"], flow.worker.replica.describe())
    if state["of"] == "worker":
        check(flow.state, state["state"], "state")


def _require_identity(state: dict[str, Any], flow: Flow) -> None:
    worker, strategy = flow.worker, flow.strategy
    size, rank, wire = state["size"], state["rank"], state["wire"]
    everyone = worker.team.everyone  # also the other processes of a node, which hold other shards
    if state["strategy"] != repr(strategy):
        raise CheckpointError(
            f"the state was saved under {state['strategy']}, this is {strategy!r}: attach with "
            "the strategy of the saved run"
        )
    if wire != worker.wire.precision:
        raise CheckpointError(
            f"the state was saved with wire={wire!r}, this is wire={worker.wire.precision!r}: "
            "attach with the wire of the saved run"
        )
    if size != everyone.size:
        raise CheckpointError(
            f"the state was saved by one of {size} workers, here are {everyone.size}: start as "
            "many, or load a checkpoint that was saved inside consensus(), which fits any number"
        )
    if rank != everyone.rank:
        raise CheckpointError(
            f"the state was saved by rank {rank}, this is rank {everyone.rank}: each worker loads "
            "what it has saved itself"
        )


def _require_beginning(flow: Flow, stats: Stats) -> None:
    if stats.steps or flow.worker.step:
        raise CheckpointError(
            f"the state is that of a consensus, from which training starts again, and "
            f"{stats.steps} steps were taken here: load it before the first step, or detach() and "
            "attach again"
        )


def _require_model(saved: Sequence[str], present: Sequence[str]) -> None:
    for saved_line, line in zip_longest(saved, present, fillvalue="nothing more"):
        if saved_line != line:
            raise CheckpointError(
                f"the state was saved for another model: that one has {saved_line}, this one has "
                f"{line}; build the model of the saved run"
            )


# -- agreement and loading -------------------------------------------------------------------------


def answer_of(state: Any, refused: CheckpointError | None) -> bytes:
    """Return this worker's answer for ``require_all``: kind and step of its state, or the error.

    ``refused`` is the error of ``check_state``. None: the state can be loaded.
    """
    position = None if refused else [state["of"], state.get("step")]
    return json.dumps([None if refused is None else str(refused), position]).encode()


def require_all(answers: Sequence[bytes]) -> None:
    """Raise CheckpointError unless every worker can load, and all states were saved together.

    All states must belong to a consensus, or all to workers at the same step. ``answers`` are the
    results of ``answer_of``, in rank order.
    """
    decoded = [json.loads(answer) for answer in answers]
    for rank, (error, _) in enumerate(decoded):
        if error is not None:
            raise CheckpointError(f"rank {rank} cannot load, so no worker does: {error}")
    first = decoded[0][1]
    for rank, (_, position) in enumerate(decoded):
        if position != first:
            raise CheckpointError(
                f"rank {rank} was given the state of {_named(*position)}, rank 0 that of "
                f"{_named(*first)}: load states that were saved together"
            )


def _named(of: str, step: int | None) -> str:
    return "a consensus" if of == "consensus" else f"a worker at step {step}"


def load_state(state: dict[str, Any], flow: Flow) -> Stats:
    """Load a state that was checked, and return its totals. A collective for a consensus.

    Requires that the model was loaded before. After loading the state of a consensus, all workers
    start from rank 0's model, and continue to count from the largest number of steps.
    """
    worker = flow.worker
    totals = dict(state["stats"])
    worker.details.clear()
    worker.details.update(totals.pop("details"))
    if state["of"] == "consensus":
        everyone = worker.team.everyone
        steps = torch.tensor([totals["steps"]], dtype=torch.float64, device=everyone.control_device)
        largest = everyone.maximum(steps, what="steps of the loaded consensus").wait()
        totals["steps"] = int(largest.item())
        copy_rank_0(worker.team, worker.replica.everything())
        flow.start()
        worker.barrier("the start from a consensus")
    else:
        worker.wire.load_state_dict(state["errors"])
        worker.step = state["step"]
        load(flow.state, state["state"])
        flow.after_load()
    return Stats(**totals, details=worker.details)
