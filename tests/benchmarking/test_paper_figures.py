"""Computations behind the papers' figures, on cases worked out by hand."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.papers import (
    convergence,
    costs,
    curvature,
    delta,
    densities,
    discrepancy,
    distances,
    exponents,
    noniid,
    orders,
    regret,
    speedup,
    transformer,
)
from benchmarks.papers.discrepancy import Problem
from benchmarks.papers.runs import kept
from torch import nn

from benchmarking.race_results import result
from offbeat_lab.results import Result


def curve(method: str, metrics: list[float], seconds: float = 10.0) -> Result:
    """A run that is evaluated after each of its steps, which take so many seconds."""
    points = [(seconds * step, metric) for step, metric in enumerate(metrics, start=1)]
    run = result(method, points)
    both = [replace(one, metrics={**one.metrics, "loss": 1 - one.metric}) for one in run.points]
    return replace(run, points=tuple(both))


def test_a_run_has_converged_when_it_is_nearly_as_good_as_it_gets():
    run = curve("bsp", [0.5, 0.79, 0.796, 0.80, 0.78])
    assert convergence.converged(run, 0.005).step == 3
    assert convergence.converged(run, 0.02).step == 2


def test_the_overall_speed_up_has_each_run_at_its_own_convergence():
    """Means of three: BSP is there after 50 s, the other after 40, at a lower level of its own."""
    names = [*convergence.methods("cifar").values()]
    runs = {one: [curve(one, [0.5, 0.7, 0.8, 0.8, 0.8, 0.8])] for one in names}
    runs[names[-1]] = [curve(names[-1], [0.5, *([0.7] * 5)])]
    *others, last = convergence.facts("cifar", runs)
    assert [one["overall"] for one in others] == [[1.0]] * len(others)
    assert last["overall"] == [1.25]
    assert last["to_bsp"] == [None]  # it never has what BSP has
    assert last["steps"] == [4]
    assert last["step_seconds"] == 10
    assert others[0]["to_bsp"] == [1.0]
    assert others[0]["loss"] == [pytest.approx(0.2)]


def test_the_speed_up_is_to_what_one_worker_ends_with():
    """Four workers take a quarter of the steps: linear; or end short of the target: never."""
    study = speedup.STUDIES[""]
    runs: dict[int, dict[str, list[Result]]] = {1: {}, 2: {}, 4: {}}
    for rate in study.rates:
        one = speedup.at_rate("bsp", rate)
        runs[1][one] = [curve(one, [0.5, 0.99, 1, 1, 1, 1, 1, 1])]
        for n in study.workers:
            for method in speedup.METHODS.values():
                text = speedup.at_rate(method, n * rate)
                runs[n][text] = [curve(text, [1.0, 1.0, 1.0, 1.0] if n == 2 else [0.5, 0.6])]
    facts = speedup.facts(study, runs)
    found = {(one["rate"], one["workers"], one["method"]): one for one in facts}
    assert found[0.25, 2, "BSP"]["speedups"] == [pytest.approx(1 + 0.47 / 0.49)]  # to 0.97
    assert found[0.25, 4, "BSP"]["speedups"] == [None]
    assert found[0.25, 4, "BSP"]["losses"] == [0.4]
    assert found[0.25, 4, "BSP"]["throughput"] == 4.0
    assert found[0.25, 2, "BSP"]["throughput"] == 2.0


def test_the_speed_up_on_a_transformer_is_to_nearly_what_bsp_ends_with():
    """Lower is better, on straight lines: 2 % above 1 are reached after 10 + 10 · 0.07 / 0.19 s."""

    def falling(method: str, metrics: list[float]) -> Result:
        return replace(curve(method, metrics), higher_is_better=False)

    metrics = [1.09, 0.9, 0.8]
    found = {name: [falling(text, metrics)] for name, text in transformer.METHODS.items()}
    found["BSP"] = [falling("bsp", [3.0, 2.0, 1.01, 1.0])]
    last = [*found][-1]
    found[last] = [falling(transformer.METHODS[last], [2.0, 2.0])]
    bsp, other, *_, never = transformer.facts(found)
    assert bsp["faster"] == {"0.02": [1.0], "0.1": [1.0]}
    bsps = {above: 20 + 10 * (1 - above) / 0.99 for above in (0.02, 0.1)}
    others = {0.02: 10 + 10 * 0.07 / 0.19, 0.1: 10}
    for above, seconds in others.items():
        assert other["faster"][f"{above:g}"] == [pytest.approx(bsps[above] / seconds)]
    assert never["faster"] == {"0.02": [None], "0.1": [None]}
    assert never["throughput"] == [2.0]


def test_bytes_and_accuracies_of_a_data_injection_are_medians():
    """2 MB of models and 1 MB of samples; a strategy without a run has an empty cell."""
    rows = [
        {
            "job": {"strategy": "local:period=8", "injection": "0.5,0.5", "seed": seed},
            "final": final,
            "payload_bytes": 2_000_000,
            "sample_bytes": 1_000_000,
        }
        for seed, final in enumerate((0.9, 0.8, 0.95))
    ]
    (row,) = (one for one in noniid.table({"skewed": rows}).splitlines() if "local" in one)
    assert row == "| `local:period=8` |  | 90.0 (80.0–95.0), 3.0 MB |  |"


def test_delta_is_shown_for_each_tenth_of_a_run():
    """A Δ that is not defined does not count. The accuracy rises from 0 in the first two tenths."""
    changes = [None, *([0.5] * 9), *([0.1] * 89), 0.3]
    points = [{"accuracy": one} for one in (0.1, 0.3, 0.5, *([0.6] * 17))]
    found = delta.pieces({"change": changes, "points": points})
    assert [one["mean"] for one in found] == pytest.approx([0.5, *([0.1] * 8), 0.12])
    assert [one["gain"] for one in found] == pytest.approx([0.3, 0.3, *([0.0] * 8)])


def test_the_minimum_of_the_convex_problem():
    """The gradient that autograd takes there is nothing, and nowhere near it is less."""
    x, y = regret.problem(0)
    w, best = regret.minimum(x, y)
    w.requires_grad_()
    (gradient,) = torch.autograd.grad(regret.loss(x, y, w), w)
    assert gradient.norm() < 1e-10
    for seed in range(3):
        nearby = w + 0.1 * torch.randn(w.shape, generator=torch.Generator().manual_seed(seed))
        assert regret.loss(x, y, nearby.detach()) > best


def test_the_regret_of_one_step_is_that_of_the_start():
    x, y = regret.problem(1)
    start = float(regret.loss(x, y, torch.zeros(regret.WIDTH, dtype=x.dtype)))
    assert start == pytest.approx(math.log(2))
    assert regret.regret(1, 2, 1) == pytest.approx(start - regret.minimum(x, y)[1])


def test_changes_are_between_neighbouring_points():
    """The eigenvalue changes by 3, −1, 2 and the variance by 1, −2, 0.5: in the same order."""
    values = [(1.0, 5.0), (4.0, 6.0), (3.0, 4.0), (5.0, 4.5)]
    points = [{"eigenvalue": one, "variance": other} for one, other in values]
    assert curvature.of_changes(points) == pytest.approx(1)


def test_power_iteration_finds_the_largest_eigenvalue():
    x = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss = 0.5 * (torch.tensor([3.0, -5.0, 1.0], dtype=torch.float64) * x * x).sum()
    assert curvature.largest_eigenvalue(loss, [x]) == pytest.approx(-5.0)


def constant(gradient: Callable[[int], list[float]]) -> Problem:
    """Parameters at 0; the gradient of each worker is always the same."""

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.zeros(len(gradient(0))))

    def batches(workers: int, rank: int, seed: int) -> Iterator[torch.Tensor]:
        while True:
            yield torch.tensor(gradient(rank))

    return Problem(Point, batches, lambda model, batch: (model.x * batch).sum(), 0.5)


LINEAR = constant(lambda rank: [1.0, float(rank)])
APART = constant(lambda rank: [float(rank)])


@pytest.mark.parametrize("staleness", [2, 4, 8])
@pytest.mark.parametrize("workers", [2, 4])
def test_the_distance_is_that_of_all_own_steps(staleness: int, workers: int):
    """Just before a reset: τ steps of 0.5·|n − mean(n)|, not the τ/2 that are left after it."""
    found = discrepancy.distances(LINEAR, workers=workers, staleness=staleness, steps=32, seed=0)
    apart = sum(abs(n - (workers - 1) / 2) for n in range(workers)) / workers
    assert found["early"] == found["late"] == pytest.approx(staleness * 0.5 * apart)


@pytest.mark.parametrize("workers", [2, 5])
def test_gradient_delay_grows_with_the_workers(workers: int):
    """Worker k is N − 1 − k steps of 0.5 behind the newest: (N − 1)/2 on average."""
    found = discrepancy.gradient_delay(LINEAR, workers=workers, steps=40, seed=0)
    assert found["early"] == found["late"] == pytest.approx((workers - 1) / 4)


def test_a_study_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run that is in the file is not repeated, and rows come in the order asked for."""
    monkeypatch.setattr("benchmarks.papers.runs.RESULTS", tmp_path)
    done: list[int] = []

    def square(*, x: int) -> dict[str, int]:
        done.append(x)
        return {"square": x * x}

    kept("squares", [{"x": 3}], square)
    rows = kept("squares", [{"x": 2}, {"x": 3}], square)
    assert done == [3, 2]
    assert rows == [{"run": {"x": 2}, "square": 4}, {"run": {"x": 3}, "square": 9}]


def test_the_papers_order_repeats_each_global_batch():
    """Workers together read the same samples in each pass; every worker reads all samples."""
    orders_of = [orders.PaperOrder(24, 3, rank, seed=1) for rank in range(3)]
    read = [[*one] for one in orders_of]
    assert all(sorted(own) == [*range(24)] for own in read)
    batches = [{own[at] for own in read} for at in range(24)]
    assert batches[:8] == batches[8:16] == batches[16:]


def test_the_two_extremes_of_gradient_delay():
    assert discrepancy.equal_gradients(5) == 2.0
    assert discrepancy.independent_gradients(3) == pytest.approx((1 + math.sqrt(2)) / 3)


def test_a_slope_is_the_exponent():
    assert discrepancy.slope([1, 2, 4], [3, 6, 12]) == pytest.approx(1)
    assert discrepancy.slope([1, 2, 4], [5, 5, 5]) == pytest.approx(0)


@pytest.mark.parametrize("method", ["local SGD", "async"])
def test_distances_are_those_before_a_reset(method: str):
    """After τ = 4 own steps of 0.5·n each: the means of |n − 1.5| and |n − m| for n, m = 0…3."""
    found = distances.distances(method, workers=4, staleness=4, seed=0, steps=16, problem=APART)
    assert found == pytest.approx({"mean": 4 * 0.5 * 1.0, "pairs": 4 * 0.5 * 5 / 3})


@pytest.mark.parametrize("staleness", [2, 4])
def test_the_distance_to_the_common_model_is_that_of_all_own_steps(staleness: int):
    """τ steps of 0.5·n each: 0.75 τ on average over n = 0…3, and 0.5 τ to the mean."""
    found = exponents.distances(APART, workers=4, staleness=staleness, steps=16, seed=0)
    expected = {"to the mean": 0.5 * staleness, "to the common model": 0.75 * staleness}
    assert found == {"early": pytest.approx(expected), "late": pytest.approx(expected)}


def test_saved_bytes_are_the_inputs_of_the_layers():
    """A linear layer keeps its input, 4·3 numbers, and the square its own, 4·2; not the weight."""
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    assert costs.saved_bytes(model, lambda: model(x).pow(2).sum()) == 4 * (4 * 3 + 4 * 2)


def test_the_distance_of_two_densities_is_that_of_their_quantiles():
    """{0, 1, 5} and {3, 1, 2} are 1, 1 and 2 apart in order; the order given does not matter."""
    first, second = torch.tensor([5.0, 0.0, 1.0]), torch.tensor([3.0, 1.0, 2.0])
    assert densities.wasserstein(first, second) == pytest.approx(4 / 3)
    assert densities.wasserstein(first, first.flip(0)) == 0


def test_densities_are_in_units_of_the_spread_of_bsp():
    """BSP's ±1 has a spread of √(4/3) with four numbers; one worker is 0.5 off, the other 0."""
    like = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    found = densities.compare([[like + 0.5, like]], [[like, like]])
    unit = math.sqrt(4 / 3)
    assert found == [{"distance": pytest.approx(0.25 / unit)}]
