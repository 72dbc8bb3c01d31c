"""Processes of a node that hold the whole model, and average a share of it each."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loops import attach, bits, sgd
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
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


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "text", ["local:period=2", "streaming:parts=4,schedule=cyclic,staleness=4,outer_gain=1"]
)
def test_what_one_process_has_averaged_reaches_the_others(text: str, size: int) -> None:
    """Two nodes train tensors of every kind with given gradients: SGD adds them up."""

    def train(rank: int, _: int) -> Any:
        model = nn.ParameterList([nn.Parameter(each) for each in tensors()])
        optimizer, seen = sgd(model, 0.25), []
        with attach(model, optimizer, text, wire="float32", node_group="auto") as sync:
            for _ in range(6):
                for p in model:
                    p.grad = torch.full_like(p, rank)
                optimizer.step()
                seen.append([bits(p) for p in model])
        assert sync.stats.syncs
        return seen, [p.detach() for p in model]

    results = simulated(train, workers=2 * size, workers_per_node=size)
    moved = 0.25 * 6 * (2 * size - 1) / 2
    for rank, (seen, end) in enumerate(results):
        for one, other in zip(seen, results[rank // size * size][0], strict=True):
            assert all(map(torch.equal, one, other)), "the workers of a node are equal"
        for found, before in zip(end, tensors(), strict=True):
            rounding = 0.05 if before.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(found, before - moved, rtol=0, atol=rounding)


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


def test_a_node_agrees_on_the_largest_of_each_number() -> None:
    """Over the workers of the node alone. The time counts as waiting."""

    def work(rank: int, size: int) -> Any:
        across, node = dist.group.WORLD.make_nodes(60.0)  # type: ignore[union-attr]
        team = Team(across, node=node)
        team.host.sleep(0.5 * (rank % 2), "some workers come later")
        agreed = team.maximum_over_node(float(rank), -float(rank), 3.0)
        waited = round(team.account.wait_seconds, 1)
        return [
            *agreed,
            waited,
            *team.sum_over_node(float(rank)),
            *team.sum_over_shards(float(rank)),
        ]

    assert simulated(work, workers=4, workers_per_node=2) == [
        *([1.0, 0.0, 3.0, 0.5, 1.0, 0.0], [1.0, 0.0, 3.0, 0.0, 1.0, 1.0]),
        *([3.0, -2.0, 3.0, 0.5, 5.0, 2.0], [3.0, -2.0, 3.0, 0.0, 5.0, 3.0]),
    ]


def test_without_a_node_the_maximum_is_of_one_process() -> None:
    assert Team(SingleCommunicator()).maximum_over_node(2.0, -1.0) == [2.0, -1.0]
