"""The state that ``Synchronizer.state_dict`` returns, and whether it belongs to this worker.

It says whose it is (format, strategy, wire, rank, number of workers, the model's tensors) and holds
a digest of all its values. Everything is checked, and all workers agree, before anything is loaded.

The state of a *consensus* belongs to a model that all workers hold, so it fits any strategy and any
number of workers. They start again from that model, and only the totals continue.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offbeat.averaging import Flow
from offbeat.checkpoint.state import check, check_value, digest, load, require_keys, save
from offbeat.errors import CheckpointError
from offbeat.telemetry import Stats
from offbeat.training.agreement import copy_rank_0

FORMAT = 2
_CONSENSUS = ("format", "of", "model", "stats", "digest")
_IDENTITY = ("strategy", "wire", "rank", "size")
_POSITION = ("step", "state", "errors")
_WORKER = (*_CONSENSUS, *_IDENTITY, *_POSITION)


def state_of(flow: Flow, stats: Stats) -> dict[str, Any]:
    """The state of one worker. Everything in flight must have arrived."""
    worker = flow.worker
    return _sealed(
        {
            "format": FORMAT,
            "of": "worker",
            "strategy": repr(flow.strategy),
            "wire": worker.wire.precision,
            "rank": worker.rank,
            "size": worker.size,
            "model": worker.replica.describe(),
            "stats": dataclasses.asdict(stats),
            "step": worker.step,
            "state": save(flow.state),
            "errors": worker.wire.state_dict(),
        }
    )


def consensus_of(flow: Flow, stats: Stats) -> dict[str, Any]:
    """The state of a consensus: which model it belongs to, and this worker's totals so far."""
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


# -- whether it belongs here -----------------------------------------------------------------------


def check_state(state: Any, flow: Flow, stats: Stats) -> None:
    """Raise unless all of ``state`` can be put back on this worker.

    Raises:
        CheckpointError: it is another worker's, was saved in another training, or is damaged.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(
            "this is no state that sync.state_dict() gives, or one of a version before format "
            f"{FORMAT}: give what it returned, or load the model alone and start again"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"the state was saved in format {state['format']}, this version reads {FORMAT}: "
            "resume with the version that saved it"
        )
    _whole(_check_keys, state)
    if state["of"] == "consensus":
        _require_beginning(flow, stats)
    else:
        _require_identity(state, flow)
    _require_model(state["model"], flow.worker.replica.describe())
    _whole(_check_values, state, flow)


def _whole(checks: Any, state: dict[str, Any], *args: Any) -> None:
    try:
        checks(state, *args)
    except CheckpointError as error:
        raise CheckpointError(
            f"the state is damaged: {error}; load another checkpoint of this training"
        ) from None


def _check_keys(state: dict[str, Any]) -> None:
    if state.get("of") not in ("worker", "consensus"):
        raise CheckpointError(f"of must be 'worker' or 'consensus', got {state.get('of')!r}")
    require_keys(state, _WORKER if state["of"] == "worker" else _CONSENSUS, "it")
    check_value(state["model"], list[str], "model")


def _require_identity(state: dict[str, Any], flow: Flow) -> None:
    worker, strategy = flow.worker, flow.strategy
    size, rank, wire = state["size"], state["rank"], state["wire"]
    if state["strategy"] != repr(strategy):
        raise CheckpointError(
            f"the state was saved under {state['strategy']}, this is {strategy!r}: attach with "
            "the strategy of the saved run"
        )
    if wire != worker.wire.precision:
        raise CheckpointError(
            f"the state was saved with wire={wire!r}, this is wire={worker.wire.precision!r}: "
            "attach with that of the saved run"
        )
    if size != worker.size:
        raise CheckpointError(
            f"the state was saved by one of {size} workers, here are {worker.size}: start as many, "
            "or load a checkpoint that was saved inside consensus(), which fits any number"
        )
    if rank != worker.rank:
        raise CheckpointError(
            f"the state was saved by rank {rank}, this is rank {worker.rank}: each worker loads "
            "what it has saved itself"
        )


def _require_beginning(flow: Flow, stats: Stats) -> None:
    if stats.steps or flow.worker.step:
        raise CheckpointError(
            f"the state is that of a consensus, from which training starts again, and "
            f"{stats.steps} steps were taken here: load it before the first step, or detach() and "
            "attach again"
        )


def _require_model(saved: Sequence[str], here: Sequence[str]) -> None:
    for i in range(max(len(saved), len(here))):
        theirs = saved[i] if i < len(saved) else "nothing more"
        ours = here[i] if i < len(here) else "nothing more"
        if theirs != ours:
            raise CheckpointError(
                f"the state was saved for another model: that one has {theirs}, this one has "
                f"{ours}; build the model of the saved run"
            )


def _check_values(state: dict[str, Any], flow: Flow) -> None:
    _check_stats(state["stats"])
    if state["of"] == "worker":
        _check_count(state["step"], "step")
        check(flow.state, state["state"], "state")
        check_value(state["errors"], dict[str, dict[str, Tensor]], "errors")
        for stream, errors in state["errors"].items():
            require_keys(errors, ("sent", "summed"), f"errors[{stream!r}]")
    check_value(state["digest"], int, "digest")
    if digest({name: one for name, one in state.items() if name != "digest"}) != state["digest"]:
        raise CheckpointError("its values are not those that were saved, by their digest")


def _check_stats(saved: Any) -> None:
    check(Stats(), saved, "stats")
    for one in dataclasses.fields(Stats):
        if one.name != "details" and saved[one.name] < 0:
            raise CheckpointError(f"stats.{one.name} must be at least 0, got {saved[one.name]}")


def _check_count(value: Any, where: str) -> None:
    check_value(value, int, where)
    if value < 0:
        raise CheckpointError(f"{where} must be at least 0, got {value}")


def answer_of(state: Any, refused: CheckpointError | None) -> bytes:
    """What this worker tells the others: why it cannot load ``state``, or which one it is."""
    about = None if refused else [state["of"], state.get("step")]
    return json.dumps([None if refused is None else str(refused), about]).encode()


def require_all(answers: Sequence[bytes]) -> None:
    """All workers load, states of one step, or none does.

    Args:
        answers: Of every worker, in rank order.

    Raises:
        CheckpointError: one of them cannot load, or they would load states of different steps.
    """
    everyone = [json.loads(answer) for answer in answers]
    for rank, (error, _) in enumerate(everyone):
        if error is not None:
            raise CheckpointError(f"rank {rank} cannot load, so no worker does: {error}")
    for rank, (_, (of, step)) in enumerate(everyone):
        if [of, step] != everyone[0][1]:
            first = everyone[0][1]
            raise CheckpointError(
                f"rank {rank} was given the state of {_named(of, step)}, rank 0 that of "
                f"{_named(*first)}: load states that were saved together"
            )


def _named(of: str, step: int | None) -> str:
    return "a consensus" if of == "consensus" else f"a worker at step {step}"


def load_state(state: dict[str, Any], flow: Flow) -> Stats:
    """Continue from a state that was checked. A collective. Returns the totals."""
    worker = flow.worker
    totals = dict(state["stats"])
    worker.details.clear()
    worker.details.update(totals.pop("details"))
    if state["of"] == "consensus":
        copy_rank_0(worker.team, worker.replica.everything())
        flow.start()
        worker.barrier("the start from a consensus")
    else:
        worker.wire.load_state_dict(state["errors"])
        worker.step = state["step"]
        load(flow.state, state["state"])
        flow.after_load()
    return Stats(**totals, details=worker.details)
