"""The trial of low-rank parts: what all hold in common, and what it may lose."""

import pytest
import torch
from benchmarks.low_rank import LowRank
from torch import Tensor, nn

import offbeat

WORKERS = 3


def train(strategy: LowRank, gradient: list[Tensor], rests: int) -> tuple[Tensor, Tensor, int]:
    """One step of SGD with this worker's gradient, others with none; the model before the end.

    Returns:
        The weights and the offset before the last mean, and how many exchanges there were.
    """
    model = nn.Linear(4, 6)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with offbeat.attach(model, optimizer, strategy) as sync:
        for step in range(1 + rests):
            model(torch.ones(1, 4)).sum().backward()
            given = gradient[torch.distributed.get_rank()] * (step == 0)
            model.weight.grad, model.bias.grad = given[:, :4].clone(), given[:, 4].clone()
            optimizer.step()
        found = torch.cat([model.weight, model.bias[:, None]], 1).detach().clone()
    whole = torch.cat([model.weight, model.bias[:, None]], 1).detach().clone()
    return found, whole, sync.stats.details["exchanges"]


def run(
    strategy: LowRank, gradient: list[Tensor], rests: int = 60
) -> list[tuple[Tensor, Tensor, int]]:
    return offbeat.simulate(lambda: train(strategy, gradient, rests), workers=WORKERS).results


def different() -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    return [torch.randn(6, 5, generator=random) for _ in range(WORKERS)]


@pytest.mark.parametrize("strategy", [LowRank(rank=1), LowRank(rank=2, slices=3), LowRank(rank=9)])
def test_gradients_that_are_alike_and_of_rank_one_arrive_whole(strategy: LowRank) -> None:
    """G is 1 there: the models are minus the gradient, on all workers and at once."""
    same = torch.outer(torch.arange(1.0, 7.0), torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0]))
    for before, after, exchanges in run(strategy, [same] * WORKERS):
        torch.testing.assert_close(before, -same)
        torch.testing.assert_close(after, -same)
        assert exchanges > 3


@pytest.mark.parametrize("strategy", [LowRank(rank=4), LowRank(rank=1, slices=2)])
def test_what_is_not_sent_at_first_is_sent_later(strategy: LowRank) -> None:
    """Without further steps all workers end with one model."""
    found = run(strategy, different())
    for before, after, _ in found:
        torch.testing.assert_close(before, found[0][0], atol=2e-3, rtol=0)
        torch.testing.assert_close(after, found[0][1], atol=0, rtol=0)


def test_what_cancels_in_the_mean_is_sent_last() -> None:
    """The directions are those of the mean: workers stay apart in others, where no rows help."""
    models = [before for before, _, _ in run(LowRank(rank=1), different())]
    assert float((models[0][:, :4] - models[1][:, :4]).norm()) > 0.1
    torch.testing.assert_close(models[0][:, 4], models[1][:, 4])  # of one dimension


def test_every_row_goes_once_a_turn() -> None:
    strategy = LowRank(rank=1, slices=3)
    turn = [strategy._rows(exchange, 8) for exchange in range(3, 6)]
    assert [row for rows in turn for row in range(8)[rows]] == list(range(8))


def test_the_outer_momentum_fades() -> None:
    """It goes on to move the models when the workers rest, by e^(-2) as much 100 steps later."""
    at = {rests: run(LowRank(rank=4), different(), rests)[0][0] for rests in (100, 200, 300, 400)}
    early, late = (at[200] - at[100]).norm(), (at[400] - at[300]).norm()
    assert early > 1e-3
    assert 0 < late < 0.1 * early


def test_workers_that_meet_while_something_is_under_way() -> None:
    """Looks at the consensus, workers of which some are ahead, and one that ends early."""

    def train_unevenly() -> Tensor:
        rank = torch.distributed.get_rank()
        model = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with offbeat.attach(model, optimizer, LowRank(rank=1, slices=2)) as sync:
            for step in range(40 if rank else 25):
                model(torch.full((1, 4), 1.0 + rank)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step in (3, 4, 11, 20):
                    with sync.consensus():
                        pass
        return model.weight.detach().clone()

    done = offbeat.simulate(
        train_unevenly,
        workers=WORKERS,
        network=offbeat.Network("1Mbit/s", latency="2ms"),
        compute=offbeat.Compute("5ms", jitter=0.5),
    )
    for one in done.results:
        torch.testing.assert_close(one, done.results[0], atol=0, rtol=0)


def test_the_mean_of_the_models_stays_where_there_is_no_gain() -> None:
    """Workers with opposite gradients, and one with none: D is 0, so G is not measured."""
    one = different()[0]
    for before, after, _ in run(LowRank(rank=1), [one, -one, 0 * one], rests=5):
        torch.testing.assert_close(after, torch.zeros(6, 5), atol=1e-5, rtol=0)
        assert float(before[:, :4].norm()) < float(one[:, :4].norm())
