"""Tensors that training does not average: frozen ones that the script changes, and late ones."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from loops import Recorded, all_numbers, attach, close, error_of, sgd
from problems import flat, make_batch, make_model, train_step
from worlds import run, simulated

TEXTS = ["bsp", "local:period=2", "streaming", "async:staleness=4"]
NAMED = "consensus() and finish() average what training does not"


class Student(nn.Module):
    """A mean teacher: a frozen target follows the trained network."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.online = make_model(seed)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.online(x)

    def follow(self) -> None:
        pairs = zip(self.online.parameters(), self.target.parameters(), strict=True)
        for p, q in pairs:
            q.data.mul_(0.9).add_(p.data, alpha=0.1)  # not counted by version counters


def taught(rank: int, size: int, text: str) -> Any:
    model = Student(rank)
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, wire="float32")
    for step in range(5):
        train_step(model, optimizer, make_batch(rank, step))
        model.follow()
    own = flat(model.target)
    with sync.consensus():
        inside = flat(model.target)
    back = flat(model.target)
    with sync.consensus():
        pass
    sync.finish()
    return own, inside, back, flat(model.target), all_numbers(model)


@pytest.mark.parametrize("text", TEXTS)
def test_a_frozen_part_that_the_script_changes_is_averaged_at_a_consensus(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Temporarily in consensus, and at the end. Under BSP it is equal anyway, and unchanged."""
    results = simulated(taught, text, workers=2)
    mean = (results[0][0] + results[1][0]) / 2
    for own, inside, back, final, everything in results:
        close(inside, mean)
        assert torch.equal(back, own)
        close(final, mean)
        assert torch.equal(everything, results[0][4])
    warned = [record.getMessage() for record in caplog.records if NAMED in record.getMessage()]
    equal = torch.equal(results[0][0], results[1][0])
    assert equal == (text == "bsp")
    assert len(warned) == (not equal)
    assert all("'target.0." in each for each in warned), warned


def frozen_in_nodes(rank: int, size: int, text: str) -> Any:
    """Two nodes of two workers. Each worker freezes one layer, and adds a buffer after attach."""
    model = make_model(rank)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    sync = attach(model, optimizer, text, wire="float32", node_group="auto")
    model.register_buffer("late", torch.full((3,), float(rank)))
    for step in range(5):
        train_step(model, optimizer, make_batch(rank, step))
        if rank == 1:
            model[2].weight.data.add_(1.0)  # not the first worker of its node
    own = model[2].weight.detach().clone()
    with sync.consensus():
        inside = model[2].weight.detach().clone(), model.late.clone()
    back = model[2].weight.detach().clone(), model.late.clone()
    sync.finish()
    return own, inside, back, (model[2].weight.detach(), model.late), all_numbers(model)


@pytest.mark.parametrize("text", TEXTS)
def test_tensors_that_training_does_not_average_are_averaged_over_all_workers_of_nodes(
    text: str,
) -> None:
    """Whichever worker of a node has changed one."""
    results = simulated(frozen_in_nodes, text, workers=4, workers_per_node=2)
    weight = sum(own for own, *_ in results) / 4
    assert not torch.equal(results[0][0], results[1][0])
    for rank, (own, inside, back, final, everything) in enumerate(results):
        for found in (inside, final):
            close(found[0], weight)
            assert found[1].tolist() == [1.5] * 3
        assert torch.equal(back[0], own)
        assert back[1].tolist() == [float(rank)] * 3
        assert torch.equal(everything, results[0][4])


class Centred(nn.Module):
    """Its buffer is filled in the first forward pass, and replaced in each further one."""

    mean: Tensor | None

    def __init__(self, registered: bool) -> None:
        super().__init__()
        if registered:
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        if "mean" not in self._buffers:
            self.register_buffer("mean", now)
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return x - self.mean


def late(rank: int, size: int, text: str, registered: bool) -> Any:
    model = nn.Sequential(Centred(registered), make_model(0)).double()
    optimizer = sgd(model)
    sync = attach(model, optimizer, text)
    for step in range(4):
        train_step(model, optimizer, make_batch(rank, step))
    if not registered:  # a pruning mask with equally many zeros on all workers, and a new layer
        prune.l1_unstructured(model[1][0], "weight", amount=0.5)
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            model.append(nn.Linear(1, 1))
    own = [b.clone() for b in model.buffers()]
    with sync.consensus():
        inside = [b.clone() for b in model.buffers()]
    back = [b.clone() for b in model.buffers()]
    sync.finish()
    return own, inside, back, all_numbers(model)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_what_appears_after_attach_is_averaged_at_a_consensus(
    text: str, registered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Buffers, pruning masks and layers. One warning names some of them."""
    results = run(late, text, registered, workers=2)
    for own, inside, back, final in results:
        assert len(own) == (1 if registered else 2)
        for i, value in enumerate(inside):
            close(value, (results[0][0][i] + results[1][0][i]) / 2)
        assert all(map(torch.equal, own, back))
        assert torch.equal(final, results[0][3])
    warned = [record.getMessage() for record in caplog.records if NAMED in record.getMessage()]
    assert len(warned) == 1
    assert "'0.mean'" in warned[0]


def uneven(rank: int, size: int) -> Tensor:
    model = make_model(0)
    sync = attach(model, sgd(model), "local:period=2")
    train_step(model, sync._worker.optimizers[0].optimizer, make_batch(rank, 0))
    model.register_buffer("shape", torch.full((2 + rank,), float(rank)))
    if rank:
        model.register_buffer("alone", torch.ones(1))
    sync.finish()
    return flat(model)


def test_what_some_workers_lack_is_named_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """It has no mean. The parameters do."""
    first, second = simulated(uneven, workers=2)
    assert torch.equal(first, second)
    assert "final model of rank 1 differs from that of rank 0: 'alone', 'shape'. " in caplog.text
    assert NAMED not in caplog.text


def quiet(rank: int, size: int, text: str) -> Any:
    """The model has a frozen part, an unsaved buffer that changes, and a late constant."""
    model = Student(rank)
    model.register_buffer("table", torch.zeros(3), persistent=False)
    optimizer, transport = torch.optim.SGD(model.online.parameters(), lr=0.05), Recorded()
    sync = attach(model, optimizer, text, group=transport)
    for step in range(4):
        train_step(model, optimizer, make_batch(rank, step))
        model.table += rank
    with sync.consensus():
        model.online.train()
    before = [what for _, what, _ in transport.operations]
    model.register_buffer("mask", torch.ones(3))
    with sync.consensus():
        pass
    sync.finish()
    return before, [what for _, what, _ in transport.operations]


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_more_is_sent_without_such_tensors(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A tensor that is equal on all workers is compared, and causes no warning."""
    for before, operations in simulated(quiet, text, workers=2):
        assert "comparison of the tensors" not in before
        assert "comparison of the tensors" in operations
    assert not caplog.records


def target_network(rank: int, size: int) -> Any:
    model = Student(rank)
    optimizer = torch.optim.SGD(model.online.parameters(), lr=0.05)
    sync = attach(model, optimizer, "streaming")
    for step in range(4):
        train_step(model, optimizer, make_batch(rank, step))
        model.target.load_state_dict(model.online.state_dict())
    refused = error_of(lambda: model.online.load_state_dict(model.target.state_dict()))
    sync.finish()
    return refused[1], all_numbers(model)


def test_a_frozen_part_can_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """The target network of a DQN, but not the trained network."""
    (refused, first), (_, second) = simulated(target_network, workers=2)
    assert "model.load_state_dict() on an attached model" in refused
    assert torch.equal(first, second)
    assert logging.getLevelName(caplog.records[0].levelno) == "WARNING"
