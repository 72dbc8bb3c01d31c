"""What ``Synchronizer.state_dict`` gives, and whether such a state belongs to this worker.

It says whose it is (format, strategy, wire, rank, number of workers, the model's tensors) and holds
a digest of all its values. Everything is checked, and all workers agree, before anything is loaded.

A state of the *consensus* is that of a model which all workers hold: it fits any strategy and any
number of workers. They begin anew from that model, and only the totals go on.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offbeat.checkpoint import (
    check,
    check_tensors,
    check_value,
    digest,
    load,
    require_keys,
    save,
)
from offbeat.errors import CheckpointError
from offbeat.strategies.base import Strategy, Worker
from offbeat.telemetry import Stats
from offbeat.training.agreement import copy_rank_0

FORMAT = 1
_CONSENSUS = ("format", "of", "model", "stats", "digest")
_IDENTITY = ("strategy", "wire", "rank", "size")
_POSITION = ("step", "steps_since_sync", "has_news", "state", "errors", "references")
_WORKER = (*_CONSENSUS, *_IDENTITY, *_POSITION)


def state_of(strategy: Strategy, worker: Worker, stats: Stats) -> dict[str, Any]:
    """The state of one worker; what was in flight has arrived."""
    return _sealed(
        {
            "format": FORMAT,
            "of": "worker",
            "strategy": repr(strategy),
            "wire": worker.wire.precision,
            "rank": worker.rank,
            "size": worker.size,
            "model": worker.replica.describe(),
            "stats": dataclasses.asdict(stats),
            "step": worker.step,
            "steps_since_sync": worker.steps_since_sync,
            "has_news": worker.has_news,
            "state": save(worker.state),
            "errors": worker.wire.state_dict(),
            "references": worker.models.state_dict(),
        }
    )


def consensus_of(worker: Worker, stats: Stats) -> dict[str, Any]:
    """The state of the consensus: which model it is of, and this worker's totals so far."""
    return _sealed(
        {
            "format": FORMAT,
            "of": "consensus",
            "model": worker.replica.describe(),
            "stats": dataclasses.asdict(stats) | {"details": {}},  # those of one strategy
        }
    )


def _sealed(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "digest": digest(values)}


# -- whether it belongs here -----------------------------------------------------------------------


def check_state(state: Any, strategy: Strategy, worker: Worker, stats: Stats) -> None:
    """Raise unless all of ``state`` can be put back on this worker.

    Raises:
        CheckpointError: it is another worker's, was saved in another training, or is damaged.
    """
    if not isinstance(state, dict) or "format" not in state:
        raise CheckpointError(
            "this is no state that sync.state_dict() gives, or one of a version before format "
            f"{FORMAT}: give what it returned, or load the model alone and begin anew"
        )
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"the state was saved in format {state['format']}, this version reads {FORMAT}: "
            "resume with the version that saved it"
        )
    _whole(_check_keys, state)
    if state["of"] == "consensus":
        _require_beginning(worker, stats)
    else:
        _require_identity(state, strategy, worker)
    _require_model(state["model"], worker.replica.describe())
    _whole(_check_values, state, worker)


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


def _require_identity(state: dict[str, Any], strategy: Strategy, worker: Worker) -> None:
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


def _require_beginning(worker: Worker, stats: Stats) -> None:
    if stats.steps or worker.step:
        raise CheckpointError(
            f"the state is that of a consensus, from which training begins anew, and {stats.steps} "
            "steps were taken here: load it before the first step, or detach() and attach again"
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


def _check_values(state: dict[str, Any], worker: Worker) -> None:
    _check_stats(state["stats"])
    if state["of"] == "worker":
        for name in ("step", "steps_since_sync"):
            _check_count(state[name], name)
        check_value(state["has_news"], bool, "has_news")
        check(worker.state, state["state"], "state")
        check_value(state["errors"], dict[str, dict[str, Tensor]], "errors")
        for stream, errors in state["errors"].items():
            require_keys(errors, ("sent", "summed"), f"errors[{stream!r}]")
        check_tensors(worker.models.state_dict(), state["references"], "references")
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


def put_back(state: dict[str, Any], strategy: Strategy, worker: Worker) -> Stats:
    """Continue from a state that was checked. A collective. Returns the totals."""
    totals = dict(state["stats"])
    worker.details.clear()
    worker.details.update(totals.pop("details"))
    if state["of"] == "consensus":
        _begin_anew(strategy, worker)
    else:
        worker.wire.load_state_dict(state["errors"])
        worker.models.load_state_dict(state["references"])
        worker.step = state["step"]
        worker.steps_since_sync = state["steps_since_sync"]
        worker.has_news = state["has_news"]
        load(worker.state, state["state"])
        strategy.after_load(worker)
    return Stats(**totals, details=worker.details)


def _begin_anew(strategy: Strategy, worker: Worker) -> None:
    """As ``attach`` does, from the model as it is now on rank 0."""
    copy_rank_0(worker.team, worker.replica.everything())
    worker.models.begin_anew()
    worker.state = strategy.start(worker)
    worker.barrier("beginning anew from a consensus")  # nobody pushes before all have begun
