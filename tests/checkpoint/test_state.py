"""``state_dict`` and ``load_state_dict``: all workers refuse a wrong state."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import all_numbers, attach, error_of
from offbeat.checkpoint.worker_state import FORMAT
from problems import OPTIMIZERS, loss_of, make_batch, make_wide, train_step
from worlds import run

State = dict[str, Any]
STEPS, SAVE_AT = 8, 4
ROWS = [
    ("local:period=3", "int8"),
    ("selsync:target_lssr=0.5,window=4", "float32"),
    ("async:staleness=4,outer_momentum=0.5", "float32"),
    ("streaming:parts=3,schedule=cyclic,staleness=4", "int8"),
    ("bsp", "int8"),
    ("diloco:period=3,fragments=2,overlap=1", "int2"),
]
every_row = pytest.mark.parametrize(
    ("text", "wire"),
    [
        pytest.param(*row, id=row[0], marks=[pytest.mark.nightly] * (i > 3))
        for i, row in enumerate(ROWS)
    ],
)


def train(model: nn.Module, optimizer: Any, rank: int, step: int) -> Tensor:
    train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))
    return all_numbers(model)


def start(rank: int, text: str, wire: str) -> Any:
    model = make_wide(rank, norm=True)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    return model, optimizer, attach(model, optimizer, text, wire=wire)


# -- what is refused -----------------------------------------------------------------------------


SPOILED: dict[str, tuple[Callable[[State], object], str]] = {
    "format": (
        lambda s: s.update(format=5),
        f"the state was saved in format 5, this version reads {FORMAT}: resume with the version",
    ),
    "older": (lambda s: s.pop("format"), "this is not a state that sync.state_dict"),
    "model": (
        lambda s: s["description"].__setitem__(-1, "buffer 'other': shape (3,)"),
        r"saved with buffer 'other': shape \(3,\), here is (buffer|parameter) '",
    ),
    "tensors": (
        lambda s: s["description"].pop(),
        "saved with nothing more, here is (buffer|parameter) '",
    ),
    "wire": (
        lambda s: s["description"].__setitem__(1, "wire 'int4'"),
        "the state was saved with wire 'int4', here is wire '",
    ),
    "strategy": (
        lambda s: s["description"].__setitem__(0, "strategy BSP(9)"),
        r"the state was saved with strategy BSP\(9\), here is strategy ",
    ),
}


def load_spoiled(rank: int, size: int, text: str, wire: str, spoil: bool) -> Any:
    """Train, and load wrong states on rank 1 half-way. Returns the errors and the models."""
    model, optimizer, sync = start(rank, text, wire)
    seen, trace = {}, []
    for step in range(STEPS):
        if step == SAVE_AT - 1:
            before = copy.deepcopy(sync.state_dict())
        if step == SAVE_AT:
            own = sync.state_dict()
            given = {name: copy.deepcopy(own) for name in SPOILED} if spoil else {}
            for name, state in given.items():
                if rank == 1:
                    SPOILED[name][0](state)
                seen[name] = error_of(lambda state=state: sync.load_state_dict(state))
            if spoil:
                more = {"another step": before if rank == 1 else own, "nothing": None}
                for name, state in more.items():
                    seen[name] = error_of(lambda state=state: sync.load_state_dict(state))
        trace.append(train(model, optimizer, rank, step))
    sync.finish()
    return seen, torch.stack([*trace, all_numbers(model)])


@pytest.mark.sampled
@every_row
def test_a_wrong_state_is_refused_by_all_and_changes_nothing(text: str, wire: str) -> None:
    """Both ranks name rank 1 and the reason, and continue training as before."""
    plain = run(load_spoiled, text, wire, False, workers=2)
    for rank, (seen, trace) in enumerate(run(load_spoiled, text, wire, True, workers=2)):
        assert torch.equal(trace, plain[rank][1])
        expected = {name: pattern for name, (_, pattern) in SPOILED.items()}
        expected["another step"] = r"on rank 1 has the state of a worker at step 3, on rank 0 that "
        expected["nothing"] = "this is not a state that sync.state_dict"
        assert seen.keys() == expected.keys()
        for name, pattern in expected.items():
            kinds, message = seen[name]
            assert kinds[:3] == ["CheckpointError", "OffbeatError", "RuntimeError"], (name, message)
            assert "ValueError" in kinds
            assert re.search(pattern, message), (name, message)
            blamed = {
                "another step": "load_state_dict() on rank 1",
                "nothing": "rank 0 cannot take",
            }
            assert message.startswith(blamed.get(name, "rank 1 cannot take part in load_")), message


def states(rank: int, size: int, text: str, wire: str) -> State:
    """Return the state of each worker after some steps."""
    model, optimizer, sync = start(rank, text, wire)
    for step in range(SAVE_AT):
        train(model, optimizer, rank, step)
    found: State = sync.state_dict()
    sync.detach()
    return found


def load_of(rank: int, size: int, text: str, wire: str, given: list[State]) -> Any:
    model, optimizer, sync = start(rank, text, wire)
    error = error_of(lambda: sync.load_state_dict(given[rank]))
    trace = [train(model, optimizer, rank, step) for step in range(3)]
    sync.finish()
    return error, torch.stack([*trace, all_numbers(model)])


def test_states_of_other_ranks_and_worlds_are_refused() -> None:
    """Rank 0's file on both ranks, swapped files, and files of three workers on two."""
    text, wire = ROWS[0]
    two, three = (run(states, text, wire, workers=size) for size in (2, 3))
    fresh = run(load_of, text, wire, [None, None], workers=2)
    wrong = (
        "rank {0} cannot take part in load_state_dict(), so no worker does: the state was saved "
        "with rank {1} of {2} workers, here is rank {0} of 2 workers: build, attach"
    )
    cases = [
        ([two[0], two[0]], wrong.format(1, 0, 2)),
        ([two[1], two[0]], wrong.format(0, 1, 2)),
        (three[:2], wrong.format(0, 0, 3)),
        ([two[0], three[1]], wrong.format(1, 1, 3)),
    ]
    for given, expected in cases:
        results = run(load_of, text, wire, given, workers=2)
        for ((kinds, message), trace), (_, undisturbed) in zip(results, fresh, strict=True):
            assert kinds[0] == "CheckpointError"
            assert message.startswith(expected), message
            assert torch.equal(trace, undisturbed)
    for (kinds, message), _ in run(load_of, text, wire, two, workers=2):
        assert not kinds, message


@pytest.mark.parametrize(
    ("text", "spoil", "message"),
    [
        (
            "async:staleness=4,outer_momentum=0.5",
            lambda s: s.pop("next_part"),
            "state was saved with other fields: next_part",
        ),
        (
            "async:staleness=4,outer_momentum=0.5",
            lambda s: s["shared"].append(torch.zeros(3)),
            r"state.shared has the shapes \[\(\d+,\), \(3,\)\], here \[\(\d+,\)\]",
        ),
        (
            "async:staleness=4,outer_momentum=0.5",
            lambda s: s["velocity"].__setitem__(0, torch.zeros(3)),
            r"state.velocity has the shapes \[\(3,\)\], here \[\(",
        ),
        ("bsp", lambda s: s.update(more=1), "state was saved with other fields: more"),
    ],
)
def test_the_structure_of_a_strategy_s_state_is_checked(
    text: str, spoil: Callable[[State], object], message: str
) -> None:
    """Another version of a strategy may have saved other fields."""

    def load(rank: int, size: int) -> Any:
        model, optimizer, sync = start(rank, text, "float32")
        train(model, optimizer, rank, 0)
        state = sync.state_dict()
        spoil(state["state"])
        error = error_of(lambda: sync.load_state_dict(state))
        sync.finish()
        return error

    for kinds, found in run(load, workers=2):
        assert kinds[0] == "CheckpointError"
        assert re.search(message, found), found


# -- the consensus -------------------------------------------------------------------------------


def consensus_states(rank: int, size: int, text: str, wire: str) -> Any:
    """Return the state in a consensus half-way, and after the end."""
    model, optimizer, sync = start(rank, text, wire)
    found = []
    for step in range(SAVE_AT):
        train(model, optimizer, rank, step)
    with sync.consensus():
        found.append(copy.deepcopy(sync.state_dict()))
    train(model, optimizer, rank, SAVE_AT)
    sync.finish()
    found.append(copy.deepcopy(sync.state_dict()))
    return found


@every_row
def test_every_strategy_gives_the_state_of_its_consensus_at_once(text: str, wire: str) -> None:
    """Inside consensus() and after finish(), without communication."""
    for own in run(consensus_states, text, wire, workers=2):
        for state, steps in zip(own, (SAVE_AT, SAVE_AT + 1), strict=True):
            assert (state["of"], state["stats"]["steps"]) == ("consensus", steps)
            assert not {"state", "step"} & state.keys(), "it holds nothing of the strategy"


def load_late(rank: int, size: int, saved: State, own: State) -> Any:
    model, optimizer, sync = start(rank, "bsp", "float32")
    fresh = sync.state_dict()
    mixed = error_of(lambda: sync.load_state_dict(saved if rank else fresh))
    train(model, optimizer, rank, 0)
    late = error_of(lambda: sync.load_state_dict(saved))
    sync.finish()
    return mixed[1], late[1]


def test_a_consensus_is_loaded_before_the_first_step_and_by_all() -> None:
    """Not after a step, and not on one worker alone."""
    (saved, _), _ = run(consensus_states, "bsp", "float32", workers=2)
    for mixed, late in run(load_late, saved, {}, workers=2):
        assert mixed == (
            "load_state_dict() on rank 1 has the state of a consensus, on rank 0 that of a worker "
            "at step 0: all workers save and load at the same step, or all in a consensus"
        )
        assert re.search("consensus, from which training starts again, and 1 steps were", late)


# -- when ----------------------------------------------------------------------------------------


def wrong_moments(rank: int, size: int, text: str, wire: str) -> Any:
    model, optimizer, sync = start(rank, text, wire)
    state = copy.deepcopy(sync.state_dict())
    seen = {}
    with sync.consensus():
        seen["load inside"] = error_of(lambda: sync.load_state_dict(state))
    loss_of(model, make_batch(rank, 0, dtype=torch.float32)).backward()
    seen["save half-way"] = error_of(sync.state_dict)
    seen["load half-way"] = error_of(lambda: sync.load_state_dict(state))
    optimizer.step()
    sync.state_dict()
    sync.load_state_dict(state)  # back to the start
    assert sync.step == 0
    sync.finish()
    seen["load after finish"] = error_of(lambda: sync.load_state_dict(state))
    other = attach(model, optimizer, text, wire=wire)
    other.detach()
    seen["save after detach"] = error_of(other.state_dict)
    seen["load after detach"] = error_of(lambda: other.load_state_dict(state))
    return seen


def test_states_at_the_wrong_moment_are_refused_at_once() -> None:
    expected = {
        "load inside": r"load_state_dict\(\) inside consensus\(\)",
        "save half-way": r"state_dict\(\) in the middle of an iteration: call it after all",
        "load half-way": r"load_state_dict\(\) in the middle of an iteration",
        "load after finish": r"load_state_dict\(\) after finish\(\) or detach\(\)",
        "save after detach": r"state_dict\(\) after finish\(\) or detach\(\)",
        "load after detach": r"load_state_dict\(\) after finish\(\) or detach\(\)",
    }
    for seen in run(wrong_moments, "bsp", "float32", workers=2):
        assert seen.keys() == expected.keys()
        for name, pattern in expected.items():
            kinds, message = seen[name]
            assert kinds[:1] == ["AttachError"], (name, message)
            assert re.search(pattern, message), (name, message)


def gone_back(rank: int, size: int, text: str, wire: str, at: int, back: bool) -> Tensor:
    """Train, save at step ``at``, and ``back``: at step ``at`` + 2 load that state once."""
    model, optimizer, sync = start(rank, text, wire)
    trace: list[Tensor] = []
    step = 0
    while step < STEPS:
        if step == at:
            state = copy.deepcopy(sync.state_dict())
        if step == at + 2 and back:
            sync.load_state_dict(state)
            assert sync.step == sync.stats.steps == at
            step, back = at, False
            del trace[at:]
        trace.append(train(model, optimizer, rank, step))
        step += 1
    sync.finish()
    return torch.stack([*trace, all_numbers(model)])


@pytest.mark.sampled
@every_row
def test_a_training_can_return_to_an_earlier_state(text: str, wire: str) -> None:
    """Nothing that is in flight when the state is loaded changes the training afterwards."""
    for at in (1, 3):
        whole = run(gone_back, text, wire, at, False, workers=2)
        for got, want in zip(run(gone_back, text, wire, at, True, workers=2), whole, strict=True):
            assert torch.equal(got, want)
