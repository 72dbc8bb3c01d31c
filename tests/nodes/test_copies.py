"""Processes of a node that hold the whole model, and average a share of it each."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from loops import attach, sgd
from offbeat.averaging.copies import Copies
from offbeat.averaging.flat import Share, cut, make_spaces
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Node, Team
from problems import flat, make_batch, make_wide, train_step
from worlds import simulated


def tensors() -> list[Tensor]:
    """Return tensors of which a share of three may be empty, transposed, or have gaps in memory."""
    generator = torch.Generator().manual_seed(0)
    gaps = torch.randn(6, 8, generator=generator)[:, ::2]
    return [
        torch.randn(1, generator=generator),
        torch.randn(5, 4, generator=generator).t(),
        torch.randn(7, generator=generator).double(),
        gaps,
        torch.randn(10, generator=generator).bfloat16(),
        torch.randn(3, generator=generator).to(torch.complex64),
    ]


def numbers(values: list[Tensor]) -> list[list[complex]]:
    return [each.reshape(-1).tolist() for each in values]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_shares_of_a_node_are_the_whole_model(size: int) -> None:
    """Each number is in exactly one share."""
    values = tensors()
    for share in (Share(place, size) for place in range(size)):
        for space in make_spaces(values, shared=False, velocity=False, share=share):
            space.x.add(0, torch.ones(space.x.elements, dtype=space.x.dtype))
    for found, before in zip(values, tensors(), strict=True):
        real = torch.view_as_real if found.is_complex() else lambda tensor: tensor
        assert torch.equal(real(found), (real(before) + 1).to(real(before).dtype))


@pytest.mark.parametrize(("size", "parts"), [(2, 1), (3, 1), (3, 4)])
def test_what_one_process_has_averaged_reaches_the_others(size: int, parts: int) -> None:
    """Of the parts that are named, and of no others."""

    def work(rank: int, _: int) -> Any:
        inside: Any = dist.group.WORLD.make_communicator(60.0)
        team = Team(SingleCommunicator(), node=Node(inside, inside))
        values = tensors()
        slices_of = []
        for place in range(size):
            spaces = make_spaces(values, shared=False, velocity=False, share=Share(place, size))
            slices = cut(spaces, parts)
            slices_of.append(slices + [[] for _ in range(parts - len(slices))])
        for part in slices_of[rank]:  # this process changes its own share only
            for piece in part:
                moved = torch.full((len(piece),), float(rank + 1), dtype=piece.space.x.dtype)
                piece.space.x.write(piece.start, moved)
        copies = Copies(team, slices_of)
        copies.share([0])
        first = numbers(values)
        copies.share(range(1, parts))
        return first, numbers(values), [sum(map(len, part)) for part in slices_of[rank]]

    results = simulated(work, workers=size)
    before = numbers(tensors())
    allowed = {complex(a, b) for a in (1, 2, 3) for b in (0, 1, 2, 3)}  # a complex one: two shares
    for first, last, _ in results:
        assert last == results[0][1]
        assert all(complex(number) in allowed for each in last for number in each)
        if parts > 1:
            assert first != last
            assert any(set(now) & set(old) for now, old in zip(first, before, strict=True))
    assert sum(sum(sizes) for _, _, sizes in results) == 1 + 20 + 7 + 24 + 10 + 6


@pytest.mark.parametrize("text", ["streaming", "diloco:period=2", "local:period=1"])
def test_a_process_stores_its_share_of_the_shared_model(text: str) -> None:
    """P and v of the two processes of a node together are as large as the model."""

    def work(rank: int, size: int) -> Any:
        model = make_wide(rank)
        optimizer = sgd(model)
        sync = attach(model, optimizer, text, node_group="auto")
        for step in range(4):
            train_step(model, optimizer, make_batch(rank, step, 8, torch.float32))
        state = sync._iteration.flow.state
        sizes = [sum(t.numel() for t in each) for each in (state.shared, state.velocity)]
        sync.finish()
        return sizes, flat(model)

    results = simulated(work, workers=4, workers_per_node=2)
    total = results[0][1].numel()
    for index in (0, 1):
        held = [sizes[index] for sizes, _ in results]
        assert held[0] + held[1] in (0, total)
        assert held[:2] == held[2:]
        assert abs(held[0] - held[1]) <= 6
    assert (results[0][0][0] > 0) == (text != "local:period=1")


def in_nodes(function: Any) -> list[Any]:
    return simulated(function, workers=4, workers_per_node=2)


def test_a_node_agrees_on_the_largest_of_each_number() -> None:
    """Over the workers of the node alone. The time counts as waiting."""

    def work(rank: int, size: int) -> Any:
        across, node = dist.group.WORLD.make_nodes(60.0)  # type: ignore[union-attr]
        team = Team(across, node=node)
        team.host.sleep(0.5 * (rank % 2), "some workers come later")
        agreed = team.agree(float(rank), -float(rank), 3.0)
        waited = round(team.account.wait_seconds, 1)
        return [
            *agreed,
            waited,
            *team.sum_over_node(float(rank)),
            *team.sum_over_shards(float(rank)),
        ]

    assert in_nodes(work) == [
        *([1.0, 0.0, 3.0, 0.5, 1.0, 0.0], [1.0, 0.0, 3.0, 0.0, 1.0, 1.0]),
        *([3.0, -2.0, 3.0, 0.5, 5.0, 2.0], [3.0, -2.0, 3.0, 0.0, 5.0, 3.0]),
    ]


def test_without_a_node_agree_returns_its_arguments() -> None:
    assert Team(SingleCommunicator()).agree(2.0, -1.0) == [2.0, -1.0]
