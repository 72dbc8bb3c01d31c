"""Each simulated worker draws as a process of its own would."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offbeat.simulate.randomness import RandomState


@pytest.fixture(autouse=True)
def _own() -> Iterator[None]:
    before = RandomState.current()
    yield
    before.load()


def _draw(kind: str) -> float:
    match kind:
        case "normal":  # numpy makes them in pairs, and keeps the second
            return float(np.random.normal())
        case "uniform":
            return float(np.random.random())
        case "torch":
            return float(torch.rand(()))
    return random.random()


def _alone(seed: int, rank: int, kinds: list[str]) -> list[float]:
    """With generators of its own, which nobody else touches."""
    a, b, c = (int(x) for x in np.random.SeedSequence((seed, rank)).generate_state(3))
    one, two, three = torch.Generator().manual_seed(a), np.random.RandomState(b), random.Random(c)
    draws = {
        "torch": lambda: float(torch.rand((), generator=one)),
        "normal": two.normal,
        "uniform": two.random_sample,
        "random": three.random,
    }
    return [draws[kind]() for kind in kinds]


def test_workers_draw_as_if_alone_in_any_order_of_turns():
    turns = random.Random(0)
    states = [RandomState.seeded(5, rank) for rank in range(3)]
    kinds: list[list[str]] = [[], [], []]
    found: list[list[float]] = [[], [], []]
    for turn in range(200):
        rank = turns.randrange(2 if turn < 100 else 3)  # the last one begins late
        chosen = turns.choices(["normal", "uniform", "torch", "random"], k=turns.randrange(3))
        states[rank].load()
        for kind in chosen:
            kinds[rank].append(kind)
            found[rank].append(_draw(kind))
        states[rank].save()
    for rank in range(3):
        assert found[rank] == _alone(5, rank, kinds[rank])
        assert len(found[rank]) > 20


def test_the_state_of_the_process_is_restored():
    np.random.seed(3)
    np.random.normal()
    before = RandomState.current()
    RandomState.seeded(0, 0).load()
    np.random.normal()
    before.load()
    alone = np.random.RandomState(3)
    alone.normal()
    assert [np.random.normal() for _ in range(3)] == [alone.normal() for _ in range(3)]


def test_a_worker_may_install_another_generator():
    first, second = RandomState.seeded(0, 0), RandomState.seeded(0, 1)
    first.load()
    np.random.set_bit_generator(np.random.PCG64(4))
    first.save()
    second.load()
    second.save()
    first.load()
    assert np.random.random() == np.random.RandomState(np.random.PCG64(4)).random()
