"""Data injection: senders, samples, batches, and the absence of deadlocks.

Most tests run on simulated workers (``run``). Those about processes, and one of each kind of
training, run on real processes (``real``); ``--world gloo`` runs all of them there.
"""

import dataclasses
import itertools
import math
import os
import re
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from cells import nightly
from offbeat.data import DataInjection, injected_batch_size
from offbeat.data.samples import count_samples, join, take
from offbeat.data.senders import count_to_send, draw_samples, draw_senders
from worlds import real, run

few = settings(deadline=None, max_examples=30)
fractions = st.sampled_from(["0.05", "0.1", "0.25", "0.3", "0.5", "0.7", "0.9", "1"])

# -- who sends, and how much ----------------------------------------------------------------------


@few
@given(fractions, st.integers(1, 40), st.integers(-3, 3), st.integers(0, 50))
def test_ceil_alpha_n_different_workers_send(alpha: str, n: int, seed: int, step: int) -> None:
    """⌈αN⌉ distinct ranks, ascending, the same in every call."""
    senders = draw_senders(seed, (0, step), n, float(alpha))
    assert len(senders) == math.ceil(Fraction(alpha) * n)
    assert senders == sorted(set(senders))
    assert set(senders) <= set(range(n))
    assert senders == draw_senders(seed, (0, step), n, float(alpha))


def test_every_worker_sends_about_equally_often() -> None:
    """Over 4000 steps within 4 standard deviations; another seed or consensus draws otherwise."""
    n, steps, alpha = 8, 4000, 0.3  # 3 of 8
    drawn = [draw_senders(0, (0, step), n, alpha) for step in range(steps)]
    counts = [sum(rank in senders for senders in drawn) for rank in range(n)]
    p = 3 / 8
    assert all(abs(c - steps * p) < 4 * math.sqrt(steps * p * (1 - p)) for c in counts)
    for other in ([draw_senders(1, (0, s), n, alpha) for s in range(20)],
                  [draw_senders(0, (1, s), n, alpha) for s in range(20)]):  # fmt: skip
        assert other != drawn[:20]


@few
@given(st.integers(1, 500), fractions, fractions, st.integers(1, 64))
def test_equation_3(b: int, alpha: str, beta: str, n: int) -> None:
    """b' = b / (1 + αβN), in exact arithmetic, rounded to nearest, a half up; at least 1."""
    exact = Fraction(b) / (1 + Fraction(alpha) * Fraction(beta) * n)
    own = injected_batch_size(b, float(alpha), float(beta), n)
    assert own == max(1, math.floor(exact + Fraction(1, 2)))


@few
@given(st.integers(1, 500), fractions, fractions, st.integers(1, 64))
def test_an_injected_batch_holds_about_b(b: int, alpha: str, beta: str, n: int) -> None:
    """Within the bounds that the rounding of b', S and k gives, for any b, α, β and N."""
    a, share = Fraction(alpha), Fraction(beta)
    own = injected_batch_size(b, float(alpha), float(beta), n)
    given_by_each = count_to_send(own, float(beta))
    assume(2 * b >= 1 + a * share * n)  # else b' would be 0
    assume(2 * share * own >= 1)  # else k would be 0
    senders = len(draw_senders(0, (0, 0), n, float(alpha)))
    over = own + senders * given_by_each - b
    rounding = (1 + a * share * n) / 2 + Fraction(senders, 2)
    assert -rounding <= over <= rounding + (senders - a * n) * share * own


@few
@given(st.integers(1, 100), fractions)
def test_a_sender_gives_beta_of_its_samples(samples: int, beta: str) -> None:
    """β of them, a half rounded up, at least one."""
    exact = Fraction(beta) * samples
    want = max(1, math.floor(exact + Fraction(1, 2)))
    assert count_to_send(samples, float(beta)) == want
    chosen = draw_samples(0, (0, 3), 1, samples, float(beta))
    assert len(set(chosen)) == want
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(range(samples))


# -- samples as bytes -----------------------------------------------------------------------------


class Pair(NamedTuple):
    image: Tensor
    label: Any


@dataclasses.dataclass
class Sample:
    tokens: Tensor
    mask: Tensor | None = None


def nest(kind: str, first: int, samples: int) -> Any:
    """A batch of ``samples`` samples, numbered from ``first`` on."""
    numbers = torch.arange(first, first + samples)
    image = numbers.float().reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2)  # not contiguous
    return {
        "tensor": lambda: numbers,
        "tuple": lambda: (image, numbers),
        "list": lambda: [image.half(), (numbers.bool(), [numbers.to(torch.int16)])],
        "dict": lambda: {"x": image.bfloat16(), "y": numbers, "none": None},
        "ordered": lambda: OrderedDict(b=numbers.double(), a=torch.complex(image, -image)),
        "named": lambda: Pair(image, [f"é{i}" * (i % 3) for i in numbers.tolist()]),
        "dataclass": lambda: Sample(numbers.reshape(-1, 1).repeat(1, 7)),
        "numbers": lambda: (numbers.to(torch.uint8), numbers.tolist(), numbers.double().tolist()),
        "flags": lambda: ([i % 2 == 0 for i in numbers.tolist()], tuple(numbers.tolist())),
        "empty": lambda: (image[:, :0], numbers),
    }[kind]()


KINDS = ["tensor", "tuple", "list", "dict", "ordered", "named", "dataclass", "numbers", "flags",
         "empty"]  # fmt: skip


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return type(left) is type(right) and list(left) == list(right) and all(
            same(left[key], right[key]) for key in left
        )  # fmt: skip
    if dataclasses.is_dataclass(left):
        return same(vars(left), vars(right))
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(
            map(same, left, right)
        )  # fmt: skip
    return bool(type(left) is type(right) and left == right)


@pytest.mark.parametrize("kind", KINDS)
def test_any_nest_of_tensors_numbers_and_strings(kind: str) -> None:
    """Three own samples joined with those of two others equal one batch, bit for bit."""
    own, other = nest(kind, 0, 3), nest(kind, 3, 9)
    assert count_samples(own) == 3
    parts = [(1, take(other, [0, 1]).data), (2, take(other, [2, 3, 4]).data)]
    joined = join(own, parts)
    assert joined.samples == 5
    assert same(joined.batch, nest(kind, 0, 8))
    assert joined.values_bytes == take(other, [0, 1, 2, 3, 4]).values_bytes
    assert join(own, []).batch is own
    assert same(join(own, [(1, take(other, []).data)]).batch, own)


def test_samples_in_another_dimension() -> None:
    """Sequence batches [time, batch]; the lengths of the sequences stay."""
    own, other = torch.arange(12).reshape(4, 3), torch.arange(100, 120).reshape(4, 5)
    part = take((other, other.double()), [1, 4], dimension=1)
    assert (part.samples, part.values_bytes) == (2, 8 * 8 + 8 * 8)
    joined = join((own, own.double()), [(2, part.data)], dimension=1).batch
    assert torch.equal(joined[0], torch.cat([own, other[:, [1, 4]]], dim=1))
    assert torch.equal(joined[1], joined[0].double())


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"rank 7 sent .* \[\*, 4\]; this rank .* \[\*, 3\]"),
        ([torch.zeros(2)], [torch.zeros(2).long()], r"batch\[0\]: torch.int64.* batch\[0\]: torch"),
        ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}, r"batch\['y'\].* this rank has batch\['x'"),
        ((torch.zeros(2), [1, 2]), (torch.zeros(2),), r"nothing more; .* batch\[1\]: list of int"),
        ((torch.zeros(2), [1, 2]), (torch.zeros(2), ["a", "b"]), "list of str; .* list of int"),
    ],
)
def test_batches_of_another_structure_are_refused(own: Any, other: Any, words: str) -> None:
    """The error names the rank, the place and both sides."""
    with pytest.raises(offbeat.MismatchError, match=words):
        join(own, [(7, take(other, [0]).data)])


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ((torch.zeros(3), torch.zeros(2)), ValueError, r"batch\[0\] holds 3 .* batch\[1\] 2"),
        ({"x": torch.tensor(1.0)}, ValueError, r"batch\['x'\] must be a dense tensor"),
        ((torch.zeros(3), object()), TypeError, r"batch\[1\] is a object"),
        ((torch.zeros(2), [1, "a"]), TypeError, r"batch\[1\]\[0\] is a int"),
        ((), ValueError, "no tensor"),
    ],
)
def test_batches_that_have_no_samples_are_refused(batch: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        count_samples(batch)


# -- between workers ------------------------------------------------------------------------------

Batches = list[tuple[Tensor, Tensor]]


def own_batches(rank: int, epoch: int, length: int, samples: int = 4) -> Batches:
    """Images whose pixels and labels say whose they are: rank, epoch, step, index."""
    made = []
    for step in range(length):
        label = 10**6 * rank + 10**4 * epoch + 10 * step + torch.arange(samples)
        made.append((label.double().reshape(-1, 1).expand(-1, 3).clone(), label))
    return made


class Epochs:
    """A loader whose epochs have the given lengths."""

    def __init__(self, rank: int, lengths: list[int], samples: int = 4) -> None:
        self.rank, self.lengths, self.samples, self.epoch = rank, lengths, samples, -1

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.epoch += 1
        length = self.lengths[self.epoch]
        return iter(own_batches(self.rank, self.epoch, length, self.samples))


def make(strategy: offbeat.Strategy, seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    return model, optimizer, offbeat.attach(model, optimizer, strategy, timeout_seconds=20)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def train(
    strategy: offbeat.Strategy,
    lengths: list[list[int]],
    alpha: float = 0.5,
    beta: float = 0.5,
    meet_every: int = 0,
    samples: int = 4,
) -> dict[str, Any]:
    """Epochs of ``lengths[rank]``; inside, a consensus every ``meet_every`` steps."""
    rank = dist.get_rank()
    model, optimizer, sync = make(strategy)
    loader = Epochs(rank, lengths[rank], samples)
    injection = DataInjection(loader, alpha, beta, sync=sync, seed=3)
    epochs = []
    for _ in lengths[rank]:
        labels = []
        for i, (x, y) in enumerate(injection, start=1):
            assert torch.equal(x, y.double().reshape(-1, 1).expand(-1, 3)), "labels stay with x"
            labels.append(y.tolist())
            step(model, optimizer, x)
            if meet_every and i % meet_every == 0:
                with sync.consensus():
                    pass
        epochs.append(labels)
        with sync.consensus():
            pass
    sync.finish()
    return {
        "epochs": epochs,
        "details": dict(sync.stats.details),
        "own": (injection.samples_received, injection.bytes_received),
        "sent": (injection.samples_sent, injection.bytes_sent),
        "model": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "wait": sync.stats.wait_seconds,
    }


def in_world(rank: int, size: int, *args: Any) -> dict[str, Any]:
    return train(*args)


def on_simulator(*args: Any, workers: int = 3, **options: Any) -> list[Any]:
    return offbeat.simulate(lambda: train(*args), workers=workers, **options).results


def check(results: list[Any], alpha: float, beta: float, samples: int = 4) -> None:
    """What the definition demands of batches of equally many steps, read from their labels."""
    size = len(results)
    given_each = max(1, math.floor(beta * samples + 0.5))
    for epoch, batches in enumerate(zip(*(r["epochs"] for r in results), strict=True)):
        for number, rows in enumerate(zip(*batches, strict=True)):
            givers: dict[int, list[int]] = {}  # rank → what it gave, the same to all
            for rank, labels in enumerate(rows):
                own = own_batches(rank, epoch, number + 1, samples)[number][1].tolist()
                assert labels[:samples] == own
                rest = labels[samples:]
                sources = [label // 10**6 for label in rest]
                assert sources == sorted(sources)
                assert rank not in sources
                for source, group in itertools.groupby(rest, key=lambda label: label // 10**6):
                    part = list(group)
                    assert givers.setdefault(source, part) == part
                    theirs = own_batches(source, epoch, number + 1, samples)[number][1].tolist()
                    assert len(part) == given_each
                    assert set(part) <= set(theirs)
            assert len(givers) == math.ceil(alpha * size)
            for rank, labels in enumerate(rows):
                missing = set(givers) - {label // 10**6 for label in labels[samples:]} - {rank}
                assert not missing


EQUAL = [[6, 5]] * 3


def test_batches_hold_own_samples_and_those_of_the_senders_at_this_step() -> None:
    """On real processes; the simulator gives the same batches, even on a slow network."""
    args = (offbeat.LocalSGD(period=3), EQUAL)
    results = real(in_world, *args, workers=3)
    check(results, 0.5, 0.5)
    again = on_simulator(*args)
    slow = on_simulator(
        *args, compute=offbeat.Compute("1ms", jitter=0.9), network=offbeat.Network("1Mbit/s")
    )
    for result, simulated, delayed in zip(results, again, slow, strict=True):
        assert result["epochs"] == simulated["epochs"] == delayed["epochs"]
        assert result["details"] == simulated["details"]


@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 1.0), (1.0, 0.3), (0.6, 0.01)])
def test_any_alpha_and_beta(alpha: float, beta: float) -> None:
    """Five workers; the batches follow the definition for any α and β."""
    args = (offbeat.SelSync(delta=0.3), [[7]] * 5, alpha, beta, 0, 5)
    check(on_simulator(*args, workers=5), alpha, beta, samples=5)


def test_bytes_and_samples_are_counted() -> None:
    """Workers receive as much as they send: 8 bytes per label, 24 per image, also in the stats."""
    results = on_simulator(offbeat.LocalSGD(period=3), EQUAL)
    received = [sum(len(y) - 4 for e in r["epochs"] for y in e) for r in results]
    for result, samples in zip(results, received, strict=True):
        assert result["own"] == (samples, 32 * samples)
        assert result["details"]["injected_samples"] == samples
        assert result["details"]["injected_bytes_received"] == 32 * samples
        assert result["sent"] == (
            result["details"]["injected_samples_sent"],
            result["details"]["injected_bytes_sent"],
        )
        assert result["sent"][1] == 32 * result["sent"][0]
    assert sum(r["sent"][0] for r in results) == sum(received) == 11 * 2 * 2 * 2


UNEQUAL = [[5, 3, 1], [8, 0, 4], [11, 7, 2]]


@pytest.mark.parametrize(
    "strategy",
    [offbeat.BSP(), offbeat.LocalSGD(period=3), offbeat.SelSync(delta=0.3)],
    ids=str,
)
def test_workers_may_take_different_numbers_of_steps(strategy: offbeat.Strategy) -> None:
    """Early workers give nothing more in this epoch; all reach finish with one model."""
    start = real if isinstance(strategy, offbeat.LocalSGD) else run
    results = start(in_world, strategy, UNEQUAL, workers=3)
    for rank, result in enumerate(results):
        assert [len(epoch) for epoch in result["epochs"]] == UNEQUAL[rank]
        assert torch.equal(result["model"], results[0]["model"])
        for epoch, batches in enumerate(result["epochs"]):
            for number, labels in enumerate(batches):
                for label in labels[4:]:
                    source, place = divmod(label, 10**6)
                    assert place // 10**4 == epoch, "of the same epoch"
                    assert place % 10**4 // 10 == number, "of the same step"
                    assert number < UNEQUAL[source][epoch]


@pytest.mark.parametrize(
    "strategy",
    [
        offbeat.LocalSGD(period=4, warmup_steps=2),
        *nightly([offbeat.SelSync(delta=0.3, flags="deferred")]),
        *nightly([offbeat.FedAvg(period=3, fraction=0.5), offbeat.DiLoCo(period=4)]),
        *nightly([offbeat.AsyncAveraging(staleness=4)]),
        offbeat.AsyncAveraging(staleness=3, schedule="eager"),
    ],
    ids=str,
)
def test_no_strategy_deadlocks_on_unequal_epochs(strategy: offbeat.Strategy) -> None:
    """Workers are then out of phase: one waits for a mean, the other for samples."""
    for seed in range(2):
        options = {"compute": offbeat.Compute("5ms", jitter=0.5), "seed": seed}
        for lengths in (UNEQUAL, [[1, 9], [3, 8], [5, 7]]):
            results = on_simulator(strategy, lengths, 1.0, **options)
            for rank, result in enumerate(results):
                assert [len(epoch) for epoch in result["epochs"]] == lengths[rank]
                assert torch.equal(result["model"], results[0]["model"])


@pytest.mark.parametrize("strategy", [offbeat.BSP(), offbeat.AsyncAveraging(staleness=4)], ids=str)
def test_a_consensus_inside_the_loop_changes_no_batch(strategy: offbeat.Strategy) -> None:
    """The batch loaded ahead keeps its samples, for any relative speed of the workers."""
    first = on_simulator(strategy, EQUAL, 0.5, 0.5, 2)
    check(first, 0.5, 0.5)
    for seed in range(3):
        options = {"compute": offbeat.Compute("5ms", jitter=0.9), "shuffle_ties": seed}
        again = on_simulator(strategy, EQUAL, 0.5, 0.5, 2, seed=seed, **options)
        assert [r["epochs"] for r in again] == [r["epochs"] for r in first]


def test_samples_travel_while_the_model_computes() -> None:
    """A step takes longer than its samples: no worker waits after the first steps."""

    def work() -> list[float]:
        model, optimizer, sync = make(offbeat.LocalSGD(period=1000))
        batches = [(torch.zeros(100, 3).double(),) for _ in range(20)]
        waited = []
        for (x,) in DataInjection(batches, 1.0, 1.0, sync=sync):
            step(model, optimizer, x)
            waited.append(sync.stats.wait_seconds)
        sync.finish()
        return waited

    network = offbeat.Network("10Mbit/s", latency="1ms")
    for waited in offbeat.simulate(work, workers=4, network=network).results:
        assert waited[0] > 0
        assert waited[-1] == pytest.approx(waited[2], abs=1e-9)


def abandon(rank: int, size: int) -> Any:
    model, optimizer, sync = make(offbeat.LocalSGD(period=4))
    injection = DataInjection(Epochs(rank, [8, 8]), 1.0, 0.5, sync=sync)
    labels = []
    for _ in range(2):
        for i, (x, y) in enumerate(injection):
            labels.append(y.tolist())
            step(model, optimizer, x)
            if i == 3:
                break
    sync.finish()
    return labels


def test_an_epoch_may_be_left_in_the_middle() -> None:
    """The batch loaded ahead is lost with its number; the next epoch continues after it."""
    for rank, labels in enumerate(run(abandon, workers=2)):
        for number, batch in enumerate(labels):
            place = 10**4 * (number // 4) + 10 * (number % 4)
            assert batch[0] == 10**6 * rank + place
            assert len(batch) == 6
            assert batch[4] // 10 * 10 == 10**6 * (1 - rank) + place


# -- without a synchronizer ----------------------------------------------------------------------


def alone(rank: int, size: int, lengths: list[int], end: str) -> Any:
    loader = Epochs(rank, [lengths[rank]] * 2)
    epochs = []
    with DataInjection(loader, 0.5, 0.5, seed=3, timeout_seconds=20) as injection:
        for _ in range(2):
            epochs.append([y.tolist() for _, y in injection])
            if end == "barrier":
                injection.pause()
                dist.barrier()
                injection.resume()
    with pytest.raises(offbeat.OffbeatError, match="DataInjection is closed"):
        iter(injection)
    injection.close()
    return {"epochs": epochs, "own": (injection.samples_received, injection.bytes_received)}


def test_without_a_synchronizer() -> None:
    """The same definition; workers that have left give nothing and are not waited for."""
    check(run(alone, [5, 5, 5], "go on", workers=3), 0.5, 0.5)


def test_without_a_synchronizer_epochs_may_differ() -> None:
    """A worker at the end of its loader gives nothing; a barrier restarts the count of steps."""
    results = run(alone, [3, 6, 9], "barrier", workers=3)
    for rank, result in enumerate(results):
        assert [len(epoch) for epoch in result["epochs"]] == [3 * (rank + 1)] * 2
        assert any(len(labels) > 4 for labels in result["epochs"][1][:3])


def leave_early(rank: int, size: int) -> Any:
    injection = DataInjection(Epochs(rank, [4 + 6 * rank]), 1.0, 0.5, timeout_seconds=20)
    labels = [y.tolist() for _, y in injection]
    injection.close()
    return labels


def test_a_worker_may_end_long_before_the_others() -> None:
    """The others continue with the remaining samples."""
    results = run(leave_early, workers=3)
    for rank, labels in enumerate(results):
        for number, batch in enumerate(labels):
            others = sum(number < 4 + 6 * r for r in range(3) if r != rank)
            assert len(batch) == 4 + 2 * others


# -- loaders --------------------------------------------------------------------------------------


def load(rank: int, size: int, workers: int) -> list[list[int]]:
    if workers:  # a process of the test may not have children otherwise
        mp.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model, optimizer, sync = make(offbeat.LocalSGD(period=2))
    labels = torch.arange(18) + 10**6 * rank
    images = labels.double().reshape(-1, 1).expand(-1, 3).clone()
    generator = torch.Generator().manual_seed(rank)
    loader = DataLoader(
        TensorDataset(images, labels), 4, shuffle=True, generator=generator, num_workers=workers
    )
    batches = []
    for _ in range(2):
        for x, y in DataInjection(loader, 0.5, 0.5, sync=sync) if not batches else loader:
            assert torch.equal(x[:, 0], y.double())
            batches.append(y.tolist())
            step(model, optimizer, x)
    sync.finish()
    return batches


def test_a_data_loader_with_worker_processes() -> None:
    """The same batches as without them; the last batch is shorter and gives less."""
    with_processes = real(load, 2, workers=2)
    assert with_processes == run(load, 0, workers=2)
    for rank, batches in enumerate(with_processes):
        own = [[label for label in y if label // 10**6 == rank] for y in batches[:5]]
        assert [len(y) for y in own] == [4, 4, 4, 4, 2]
        given_here = [len(y) - len(mine) for y, mine in zip(batches, own, strict=False)]
        assert set(given_here[:4]) <= {0, 2}
        assert given_here[4] in {0, 1}
        assert [len(y) for y in batches[5:]] == [4, 4, 4, 4, 2]


def two(rank: int, size: int) -> Any:
    model, optimizer, sync = make(offbeat.BSP())
    first = DataInjection(Epochs(rank, [5]), 1.0, 0.5, sync=sync)
    second = DataInjection(Epochs(rank, [5], samples=8), 1.0, 0.25, sync=sync, seed=9)
    sizes = []
    for (x, y), (_, z) in zip(first, second, strict=True):
        sizes.append((len(y), len(z), len({label // 10**6 for label in z.tolist()})))
        step(model, optimizer, x)
    sync.finish()
    return sizes


def test_two_injections_do_not_mix() -> None:
    """Each has its own messages, on one synchronizer."""
    assert run(two, workers=3) == [[(8, 12, 3)] * 5] * 3


# -- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_injection_draws_what_it_would_have_drawn(stop: int) -> None:
    """The state is saved between two steps, around a consensus at step 3."""

    def work(resume: bool) -> list[Any]:
        rank = dist.get_rank()
        model, optimizer, sync = make(offbeat.LocalSGD(period=2))
        data = own_batches(rank, 0, 8)
        injection = DataInjection(data, 0.5, 0.5, sync=sync, seed=5)
        labels: list[Any] = []
        while len(labels) < 8:
            for x, y in injection:
                labels.append(y.tolist())
                step(model, optimizer, x)
                if len(labels) == 3:
                    with sync.consensus():
                        pass
                if resume and len(labels) == stop:
                    state = injection.state_dict(), model.state_dict(), sync.state_dict()
                    sync.detach()
                    model, optimizer, sync = make(offbeat.LocalSGD(period=2))
                    model.load_state_dict(state[1])
                    sync.load_state_dict(state[2])
                    injection = DataInjection(data[stop:], 0.5, 0.5, sync=sync, seed=5)
                    injection.load_state_dict(state[0])
                    break
        sync.finish()
        return labels

    whole = offbeat.simulate(lambda: work(False), workers=3).results
    for seed in range(2):
        options: Any = {"compute": offbeat.Compute("5ms", jitter=0.9), "seed": seed}
        assert offbeat.simulate(lambda: work(True), workers=3, **options).results == whole


def test_the_state_of_other_settings_is_refused() -> None:
    def work() -> None:
        state = DataInjection([], 0.5, 0.5).state_dict()
        with pytest.raises(ValueError, match=r"saved with beta=0\.5, .* has beta=0\.25"):
            DataInjection([], 0.5, 0.25).load_state_dict(state)
        with pytest.raises(ValueError, match=r"saved with dimension=0, .* has dimension=1"):
            DataInjection([], 0.5, 0.5, dimension=1).load_state_dict(state)
        DataInjection([], 0.5, 0.5).load_state_dict(state)

    offbeat.simulate(work, workers=1)


# -- what goes wrong ------------------------------------------------------------------------------


def die(rank: int, size: int) -> Any:
    model, optimizer, sync = make(offbeat.LocalSGD(period=100))
    started = time.perf_counter()
    try:
        for i, (x, _) in enumerate(DataInjection(Epochs(rank, [50]), 1.0, 0.5, sync=sync)):
            if rank == 2 and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer, x)
    except offbeat.CommunicationError as error:
        return str(error), time.perf_counter() - started
    return "nothing was raised", 0.0


def test_a_worker_that_dies_is_named_at_once() -> None:
    """Long before the time-out of 20 s, although no worker synchronizes."""
    for rank, (text, seconds) in enumerate(real(die, workers=3, may_die=(2,))[:2]):
        assert text.startswith(f"rank {rank}: "), text
        # The other survivor may have given up by then.
        assert re.search(r"lost the connection to ranks? ([01], )?2,|given up", text), text
        assert seconds < 10


def stall(rank: int, size: int) -> str:
    injection = DataInjection(Epochs(rank, [3]), 1.0, 0.5, timeout_seconds=1.0)
    iterator = iter(injection)
    next(iterator)
    text = "nothing was raised"
    if rank == 0:
        try:
            for _ in iterator:
                pass
        except offbeat.CommunicationTimeout as error:
            text = str(error)
    dist.barrier()  # rank 1 takes no step before the time-out of rank 0
    return text


def test_a_stalled_worker_ends_in_a_time_out() -> None:
    """The error names the rank, the operation, and the argument to change."""
    text = real(stall, workers=2)[0]
    assert text.startswith("rank 0: samples of rank 1 for step 2 failed after 1."), text
    assert "timeout_seconds=1" in text


def fail(rank: int, size: int, how: str) -> Any:
    model, optimizer, sync = make(offbeat.LocalSGD(period=100))
    labels: list[int] = []
    if how == "detach":
        for i, (x, y) in enumerate(DataInjection(Epochs(rank, [9]), 1.0, 0.5, sync=sync)):
            if rank == 1 and i == 4:
                break
            labels.append(len(y))
            step(model, optimizer, x)
        sync.detach()  # without finish
        return labels
    try:
        with sync:
            for i, (x, y) in enumerate(DataInjection(Epochs(rank, [9]), 1.0, 0.5, sync=sync)):
                if rank == 1 and i == 4:
                    raise KeyError("mistake")
                labels.append(len(y))
                step(model, optimizer, x)
            return labels if rank == 1 else "at the end"
    except KeyError:
        return "mistake"
    except offbeat.CommunicationError as error:
        return str(error)


def test_detach_without_finish_leaves_the_others_alone() -> None:
    """They still get the samples that it had loaded, continue without it, and finish."""
    first, gone, third = run(fail, "detach", workers=3)
    assert len(gone) == 4
    assert len(first) == len(third) == 9
    for lengths in (first, third):
        assert lengths == [8] * 6 + [6] * 3


def test_an_exception_in_the_loop_does_not_stop_the_loops_of_others() -> None:
    """The others fail where they need the worker: in finish(), as without injection."""
    first, gone, third = real(fail, "raise", workers=3)
    assert gone == "mistake"
    for text in (first, third):
        assert "lost the connection to rank" in text or "no answer" in text, text


def disagree(rank: int, size: int) -> str:
    _, _, sync = make(offbeat.BSP())
    try:
        DataInjection([], 0.5, 0.5 + 0.25 * rank, sync=sync)
    except offbeat.MismatchError as error:
        return str(error)
    return "nothing was raised"


def test_all_workers_need_the_same_settings() -> None:
    for text in run(disagree, workers=2):
        assert "rank 1 has alpha=0.5, beta=0.75" in text
        assert "rank 0 has alpha=0.5, beta=0.5" in text


def differ(rank: int, size: int) -> str:
    batches = [torch.zeros(4, 3 + rank)] * 3
    with DataInjection(batches, 1.0, 0.5, timeout_seconds=5) as injection:
        try:
            list(injection)
        except offbeat.MismatchError as error:
            return str(error)
    return "nothing was raised"


def test_different_batches_are_an_error_on_every_worker() -> None:
    for rank, text in enumerate(run(differ, workers=2)):
        theirs, ours = f"[*, {4 - rank}]", f"[*, {3 + rank}]"
        assert text.startswith(f"rank {1 - rank} sent samples of batch: torch.float32"), text
        assert text.index(theirs) < text.index(ours)


def construct(**changes: Any) -> Callable[[], Any]:
    def work() -> Any:
        return DataInjection(**{"loader": [], "alpha": 0.5, "beta": 0.5, **changes})

    return lambda: offbeat.simulate(work, workers=1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"alpha": 0}, ValueError, "alpha must be above 0 and at most 1, got 0"),
        ({"alpha": 1.5}, ValueError, "alpha must be above 0 and at most 1"),
        ({"beta": -0.1}, ValueError, "beta must be above 0 and at most 1"),
        ({"beta": math.nan}, ValueError, "beta must be above 0"),
        ({"beta": "half"}, TypeError, "beta must be a number, got 'half'"),
        ({"alpha": True}, TypeError, "alpha must be a number, got True"),
        ({"seed": 0.5}, TypeError, "seed must be an integer"),
        ({"dimension": -1}, ValueError, "dimension must be at least 0"),
        ({"loader": 3}, TypeError, "loader must be an iterable .* got int"),
        ({"loader": iter([])}, TypeError, "iterated again, .* got list_iterator"),
        ({"sync": "sync"}, TypeError, r"sync must be what offbeat.attach\(\) returned"),
        ({"sync": "sync", "group": 1}, ValueError, "sync or group, not both"),
        ({"timeout_seconds": 0}, ValueError, "timeout_seconds must be positive"),
        ({"no_such_setting": 1}, TypeError, "no_such_setting"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        construct(**changes)()


def test_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(offbeat.AttachError, match="init_process_group"):
        DataInjection([], 0.5, 0.5)


def test_a_finished_synchronizer_is_refused() -> None:
    def work() -> None:
        _, _, sync = make(offbeat.BSP())
        sync.finish()
        with pytest.raises(offbeat.AttachError, match="finished or detached"):
            DataInjection([], 0.5, 0.5, sync=sync)

    offbeat.simulate(work, workers=2)


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=2), min_size=2, max_size=3),
    st.sampled_from([0.3, 1.0]),
    st.integers(0, 5),
)
def test_any_lengths_end(lengths: list[list[int]], alpha: float, seed: int) -> None:
    """Training ends for any lengths, and every worker sees all of its own batches."""
    options: Any = {"compute": offbeat.Compute("5ms", jitter=0.9), "seed": seed}
    results = on_simulator(
        offbeat.LocalSGD(period=3), lengths, alpha, workers=len(lengths), **options
    )
    for own, result in zip(lengths, results, strict=True):
        assert [len(epoch) for epoch in result["epochs"]] == own
