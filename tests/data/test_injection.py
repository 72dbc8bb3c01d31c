"""Data injection: senders, samples, batches, and what is refused.

Most tests run on simulated workers. Those about processes, and one of each kind of training, run
on real processes (``real``); ``--world gloo`` runs those with ``run`` there, too.
"""

import itertools
import math
import os
import re
import signal
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
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
from offbeat.data import DataInjection, injected_batch_size
from offbeat.data.injection import count_to_send, draw_samples, draw_senders
from strategies.rows import ROWS, Row, each
from worlds import real, run

few = settings(deadline=None, max_examples=30)
fractions = st.sampled_from(["0.05", "0.1", "0.25", "0.3", "0.5", "0.7", "0.9", "1"])

# -- who sends, and how much ----------------------------------------------------------------------


@few
@given(fractions, st.integers(1, 40), st.integers(-3, 3), st.integers(0, 50))
def test_ceil_alpha_n_different_workers_send(alpha: str, n: int, seed: int, step: int) -> None:
    """⌈αN⌉ distinct ranks, ascending, the same in every call."""
    senders = draw_senders(seed, step, n, float(alpha))
    assert len(senders) == math.ceil(Fraction(alpha) * n)
    assert senders == sorted(set(senders))
    assert set(senders) <= set(range(n))
    assert senders == draw_senders(seed, step, n, float(alpha))


def test_every_worker_sends_about_equally_often() -> None:
    """Over 4000 steps within 4 standard deviations; another seed draws otherwise."""
    n, steps, alpha = 8, 4000, 0.3  # 3 of 8
    drawn = [draw_senders(0, step, n, alpha) for step in range(steps)]
    counts = [sum(rank in senders for senders in drawn) for rank in range(n)]
    p = 3 / 8
    assert all(abs(c - steps * p) < 4 * math.sqrt(steps * p * (1 - p)) for c in counts)
    assert [draw_senders(1, step, n, alpha) for step in range(20)] != drawn[:20]


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
    senders = len(draw_senders(0, 0, n, float(alpha)))
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
    chosen = draw_samples(0, 3, 1, samples, float(beta))
    assert len(set(chosen)) == want
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(range(samples))


# -- batches --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    image: Tensor
    label: Tensor


def nest(kind: str, numbers: Tensor) -> Any:
    """Return a batch with one sample for each of ``numbers``."""
    image = numbers.float().reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2)  # not contiguous
    return {
        "tensor": lambda: numbers,
        "tuple": lambda: (image, numbers),
        "list": lambda: [image.half(), (numbers.bool(), [numbers.to(torch.int16)])],
        "dict": lambda: {"x": image.bfloat16(), "y": numbers},
        "ordered": lambda: OrderedDict(b=numbers.double(), a=torch.complex(image, -image)),
        "user": lambda: UserDict(b=numbers),  # like the batches of Hugging Face's tokenizers
        "named": lambda: Pair(image, numbers.to(torch.uint8)),
        "empty": lambda: (image[:, :0], numbers),
    }[kind]()


KINDS = ["tensor", "tuple", "list", "dict", "ordered", "user", "named", "empty"]


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict | UserDict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    return len(left) == len(right) and all(map(same, left, right))


def inject(batches: Callable[[int], list[Any]], beta: float = 1.0, workers: int = 3) -> list[Any]:
    """Inject samples of all workers into the batches of each rank. Return batches or errors."""

    def work() -> Any:
        _, _, sync = make(offbeat.BSP())
        try:
            return list(DataInjection(batches(dist.get_rank()), 1.0, beta, sync=sync))
        except (offbeat.MismatchError, TypeError, ValueError) as error:
            return error

    return offbeat.simulate(work, workers=workers).results


@pytest.mark.parametrize("kind", KINDS)
def test_any_nest_of_tensors(kind: str) -> None:
    """Own samples joined with those of two others equal one batch, bit for bit."""
    numbers = torch.arange(9).split(3)
    results = inject(lambda rank: [nest(kind, numbers[rank])])
    for rank, (joined,) in enumerate(results):
        order = [rank, *(other for other in range(3) if other != rank)]
        assert same(joined, nest(kind, torch.cat([numbers[i] for i in order])))


def test_a_batch_without_samples_takes_part() -> None:
    results = inject(lambda rank: [torch.arange(2 * rank)])
    assert [joined.tolist() for (joined,) in results] == [[0, 1, 0, 1, 2, 3]] * 2 + [
        [0, 1, 2, 3, 0, 1]
    ]


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"rank 1 sent .* \[\*, 4\]; this rank .* \[\*, 3\]"),
        ([torch.zeros(2)], [torch.zeros(2).long()], r"batch\[0\]: torch.int64.* batch\[0\]: torch"),
        ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}, r"batch\['y'\].* this rank has batch\['x'"),
        ((torch.zeros(2),) * 2, (torch.zeros(2),), r"of shape \[\*\]; this rank .*batch\[1\]"),
    ],
)
def test_batches_of_another_structure_are_refused(own: Any, other: Any, words: str) -> None:
    """The error names the rank, the place and both sides, on every worker."""
    errors = inject(lambda rank: [other if rank else own], workers=2)
    assert all(isinstance(error, offbeat.MismatchError) for error in errors)
    assert re.search(words, str(errors[0])), errors[0]
    assert str(errors[1]).startswith("rank 0 sent samples of batch"), errors[1]


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ((torch.zeros(3), torch.zeros(2)), ValueError, r"'batch\[0\]': \[3\], 'batch\[1\]': \[2\]"),
        ({"x": torch.tensor(1.0)}, ValueError, r"got shapes {\"batch\['x'\]\": \[\]}"),
        ((), ValueError, "a batch needs tensors .* got shapes {}"),
        ((torch.zeros(3), object()), TypeError, r"batch\[1\] is a object: data injection takes"),
        ([torch.zeros(2), ["a", "b"]], TypeError, r"batch\[1\]\[0\] is a str"),
        ({"x": torch.zeros(2), "y": None}, TypeError, r"batch\['y'\] is a NoneType"),
    ],
)
def test_other_batches_are_refused(batch: Any, error: type[Exception], words: str) -> None:
    """The error is one line and names the type or the shapes, on every worker."""
    for found in inject(lambda rank: [batch], workers=2):
        assert type(found) is error
        assert re.search(words, str(found)), found
        assert "\n" not in str(found)


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


def make(strategy: offbeat.Strategy, timeout_seconds: float = 20) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-12)  # DES-LOC averages its moments
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=timeout_seconds)
    return model, optimizer, sync


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
        "model": nn.utils.parameters_to_vector(model.parameters()).detach(),
        "payload_bytes": sync.stats.payload_bytes,
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
    """Workers receive as much as they send: 8 bytes per label, 24 per image.

    The strategy's bytes are those of the model, 8 parameters of 8 bytes, every third step.
    """
    results = on_simulator(offbeat.LocalSGD(period=3), EQUAL)
    received = [sum(len(y) - 4 for e in r["epochs"] for y in e) for r in results]
    for result, samples in zip(results, received, strict=True):
        details = result["details"]
        assert details["injected_samples"] == samples
        assert details["injected_bytes_received"] == 32 * samples
        assert details["injected_bytes_sent"] == 32 * details["injected_samples_sent"]
    sent = [result["details"]["injected_samples_sent"] for result in results]
    assert sum(sent) == sum(received) == 11 * 2 * 2 * 2


def test_the_exchange_takes_time_on_the_network() -> None:
    """Each of four workers sends 2400 bytes to three others: 57.6 ms at 1 Mbit/s.

    This counts as waiting. The bytes of the strategy stay.
    """

    def work(injected: bool) -> tuple[float, int]:
        model, optimizer, sync = make(offbeat.LocalSGD(period=1000))
        batches = [(torch.zeros(100, 3).double(),) for _ in range(20)]
        for (x,) in DataInjection(batches, 1.0, 1.0, sync=sync) if injected else batches:
            step(model, optimizer, x)
        waited, sent = sync.stats.wait_seconds, sync.stats.payload_bytes
        sync.finish()
        return waited, sent

    network, compute = offbeat.Network("1Mbit/s", latency="1us"), offbeat.Compute("1ms")
    found = [
        offbeat.simulate(
            partial(work, injected), workers=4, network=network, compute=compute
        ).results
        for injected in (True, False)
    ]
    for (waited, sent), (waited_alone, sent_alone) in zip(*found, strict=True):
        assert sent == sent_alone
        # The archive of a message has about another 1500 bytes.
        assert 20 * 0.0576 < waited - waited_alone < 20 * 0.1


UNEQUAL = [[5, 3, 1], [8, 1, 4], [11, 7, 2]]


@pytest.mark.parametrize(
    "strategy",
    [offbeat.BSP(), offbeat.LocalSGD(period=3), offbeat.SelSync(delta=0.3)],
    ids=str,
)
def test_the_shortest_loader_ends_the_iteration_of_all_workers(strategy: offbeat.Strategy) -> None:
    """At the same step, in each epoch; also with two workers that end together."""
    start = real if isinstance(strategy, offbeat.LocalSGD) else run
    results = start(in_world, strategy, UNEQUAL, workers=3)
    check(results, 0.5, 0.5)
    for result in results:
        assert [len(epoch) for epoch in result["epochs"]] == [5, 1, 1]
        assert torch.equal(result["model"], results[0]["model"])


def test_a_loader_without_batches_ends_the_iteration_at_once() -> None:
    for result in on_simulator(offbeat.BSP(), [[0, 2], [3, 2], [2, 2]]):
        assert [len(epoch) for epoch in result["epochs"]] == [0, 2]


APART = ("async", "streaming", "ssp", "downpour", "easgd")  # the workers do not wait for all others


@each(ROWS)
def test_each_strategy_trains_or_is_refused(row: Row) -> None:
    """No strategy blocks two workers that wait for each other, however fast they are."""
    if not row.text.startswith(APART) and "overlap" not in row.text:
        for seed in range(2):
            options: Any = {"compute": offbeat.Compute("5ms", jitter=0.9), "seed": seed}
            results = on_simulator(row.strategy, [[9, 4]] * 3, 0.5, 0.5, 3, **options)
            check(results, 0.5, 0.5)
            assert [len(epoch) for epoch in results[0]["epochs"]] == [9, 4]
        return

    def work() -> None:
        _, _, sync = make(row.strategy)
        words = r"data injection with .*: its workers do not wait .*; use BSP, LocalSGD, SelSync"
        with pytest.raises(offbeat.AttachError, match=words):
            DataInjection([], 0.5, 0.5, sync=sync)
        sync.finish()

    offbeat.simulate(work, workers=2)


@pytest.mark.parametrize("strategy", [offbeat.BSP(), offbeat.DiLoCo(period=4)], ids=str)
def test_a_consensus_inside_the_loop_changes_no_batch(strategy: offbeat.Strategy) -> None:
    """Nor do the relative speeds of the workers."""
    first = on_simulator(strategy, EQUAL)
    for seed in range(2):
        options = {"compute": offbeat.Compute("5ms", jitter=0.9), "shuffle_ties": seed}
        again = on_simulator(strategy, EQUAL, 0.5, 0.5, 2, seed=seed, **options)
        assert [r["epochs"] for r in again] == [r["epochs"] for r in first]


def test_senders_and_samples_of_published_results() -> None:
    """The draws of the results in docs/reproduction.md, which a change would invalidate."""
    assert [draw_senders(0, step, 10, 0.5) for step in range(3)] == [
        [2, 3, 6, 8, 9],
        [1, 2, 4, 5, 7],
        [2, 5, 6, 7, 8],
    ]
    assert [draw_samples(2, step, 7, 9, 0.5) for step in range(3)] == [
        [0, 3, 4, 5, 7],
        [2, 4, 6, 7, 8],
        [1, 5, 6, 7, 8],
    ]


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
    """By all workers at the same step."""
    for rank, labels in enumerate(run(abandon, workers=2)):
        assert len(labels) == 8
        for number, batch in enumerate(labels):
            place = 10**4 * (number // 4) + 10 * (number % 4)
            assert batch[0] == 10**6 * rank + place
            assert len(batch) == 6
            assert batch[4] // 10 * 10 == 10**6 * (1 - rank) + place


def test_one_worker_gets_the_batches_of_its_loader() -> None:
    results = on_simulator(offbeat.BSP(), [[3, 2]], workers=1)
    for epoch, labels in enumerate(results[0]["epochs"]):
        assert labels == [y.tolist() for _, y in own_batches(0, epoch, 3 - epoch)]


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


@pytest.mark.parametrize("stop", [2, 5])
def test_a_resumed_injection_draws_what_it_would_have_drawn(stop: int) -> None:
    """The state is saved between two steps."""

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
                if resume and len(labels) == stop:
                    state = injection.state_dict(), model.state_dict(), sync.state_dict()
                    sync.detach()
                    model, optimizer, sync = make(offbeat.LocalSGD(period=2))
                    model.load_state_dict(state[1])
                    sync.load_state_dict(state[2])
                    injection = DataInjection(data[stop:], 0.5, 0.5, sync=sync, seed=5)
                    injection.load_state_dict(state[0])
                    break
        details = sync.stats.details
        sync.finish()
        return [labels, details["injected_samples"], details["injected_bytes_sent"]]

    whole = offbeat.simulate(lambda: work(False), workers=3).results
    for seed in range(2):
        options: Any = {"compute": offbeat.Compute("5ms", jitter=0.9), "seed": seed}
        assert offbeat.simulate(lambda: work(True), workers=3, **options).results == whole


def test_the_state_of_other_settings_is_refused() -> None:
    def work() -> None:
        _, _, sync = make(offbeat.BSP())
        state = DataInjection([], 0.5, 0.5, sync=sync).state_dict()
        with pytest.raises(ValueError, match=r"saved with beta=0\.5, .* has beta=0\.25"):
            DataInjection([], 0.5, 0.25, sync=sync).load_state_dict(state)
        DataInjection([], 0.5, 0.5, sync=sync).load_state_dict(state)

    offbeat.simulate(work, workers=1)


def test_workers_at_different_steps_are_refused() -> None:
    """A worker has loaded no state, another one that of step 2. An integer α equals 1.0."""

    def work() -> str:
        _, _, sync = make(offbeat.BSP())
        rank = dist.get_rank()
        injection = DataInjection([torch.zeros(2)], 1 if rank else 1.0, 0.5, sync=sync)
        if rank:
            injection.load_state_dict({**injection.state_dict(), "step": 2})
        with pytest.raises(offbeat.MismatchError) as found:
            list(injection)
        return str(found.value)

    first, second = offbeat.simulate(work, workers=2).results
    assert first.startswith("data injection: rank 1 is at step 2, rank 0 at step 0: ")
    assert second.startswith("data injection: rank 0 is at step 0, rank 1 at step 2: ")


# -- what goes wrong ------------------------------------------------------------------------------


def die(rank: int, size: int) -> Any:
    model, optimizer, sync = make(offbeat.LocalSGD(period=100), timeout_seconds=100)
    try:
        for i, (x, _) in enumerate(DataInjection(Epochs(rank, [50]), 1.0, 0.5, sync=sync)):
            if rank == 2 and i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer, x)
    except offbeat.CommunicationError as error:
        return str(error)
    return "nothing was raised"


def test_a_worker_that_dies_is_named_at_once() -> None:
    """Long before the time-out of 100 s, although no worker synchronizes."""
    for rank, text in enumerate(real(die, workers=3, may_die=(2,))[:2]):
        assert text.startswith(f"rank {rank}: "), text
        assert "injected samples at step 5" in text, text
        # The other survivor may have given up by then.
        assert re.search(r"lost the connection to ranks? ([01], )?2,|given up", text), text


def stall(rank: int, size: int) -> list[str]:
    model, optimizer, sync = make(offbeat.LocalSGD(period=100), timeout_seconds=2)
    injection, texts = DataInjection(Epochs(rank, [3, 3, 3]), 1.0, 0.5, sync=sync), []
    for x, _ in injection:
        step(model, optimizer, x)
        break
    for _ in range(2 if rank == 0 else 0):
        try:
            next(iter(injection))
        except offbeat.CommunicationTimeout as error:
            texts.append(str(error))
    dist.barrier()  # rank 1 takes no step before the time-out of rank 0
    return texts


def test_a_stalled_worker_ends_in_a_time_out() -> None:
    """The error names the rank, the operation and the setting. The next call raises it again."""
    text, again = real(stall, workers=2)[0]
    assert re.match(r"rank 0: (length of )?injected samples at step 2 failed after 2\.", text), text
    assert "timeout_seconds=2" in text
    assert text == again


def fail(rank: int, size: int, how: str) -> Any:
    model, optimizer, sync = make(offbeat.LocalSGD(period=100))
    labels: list[int] = []
    try:
        with sync:
            for i, (x, y) in enumerate(DataInjection(Epochs(rank, [9]), 1.0, 0.5, sync=sync)):
                if rank == 1 and i == 4:
                    if how == "detach":
                        break
                    raise KeyError("mistake")
                labels.append(len(y))
                step(model, optimizer, x)
            sync.detach()
    except KeyError:
        return "mistake"
    except offbeat.CommunicationError as error:
        return f"{len(labels)} batches, {error}"
    return f"{len(labels)} batches"


@pytest.mark.parametrize("how", ["raise", "detach"])
def test_the_others_fail_at_once_when_a_worker_leaves(how: str) -> None:
    """With an error of communication, in the exchange of the next step."""
    first, gone, third = real(fail, how, workers=3)
    assert gone == ("mistake" if how == "raise" else "4 batches")
    for text in (first, third):
        assert text.startswith("5 batches, "), text
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
        ({"loader": 3}, TypeError, "loader must be an iterable .* got int"),
        ({"loader": iter([])}, TypeError, "iterated again, .* got list_iterator"),
        ({"sync": "sync"}, TypeError, r"sync must be what offbeat.attach\(\) returned"),
        ({"no_such_setting": 1}, TypeError, "no_such_setting"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    def work() -> Any:
        _, _, sync = make(offbeat.BSP())
        arguments: dict[str, Any] = {"loader": [], "alpha": 0.5, "beta": 0.5, "sync": sync}
        return DataInjection(**(arguments | changes))

    with pytest.raises(error, match=words):
        offbeat.simulate(work, workers=1)


def test_a_finished_synchronizer_is_refused() -> None:
    """``test_nodes`` and ``test_elastic`` cover nodes and elastic training."""

    def work() -> None:
        _, _, sync = make(offbeat.BSP())
        injection = DataInjection([], 0.5, 0.5, sync=sync)
        sync.finish()
        with pytest.raises(offbeat.AttachError, match=r"DataInjection\(\) after finish\(\)"):
            DataInjection([], 0.5, 0.5, sync=sync)
        with pytest.raises(offbeat.AttachError, match="iterating over DataInjection after finish"):
            iter(injection)

    offbeat.simulate(work, workers=2)


@settings(deadline=None, max_examples=8)
@given(
    st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=2, max_size=3),
    st.sampled_from([0.3, 1.0]),
    st.integers(0, 5),
)
def test_any_lengths_end(lengths: list[list[int]], alpha: float, seed: int) -> None:
    """An epoch ends for any lengths of the loaders, with the shortest."""
    options: Any = {"compute": offbeat.Compute("5ms", jitter=0.9), "seed": seed}
    results = on_simulator(
        offbeat.LocalSGD(period=3), lengths, alpha, workers=len(lengths), **options
    )
    check(results, alpha, 0.5)
    for result in results:
        assert [len(epoch) for epoch in result["epochs"]] == list(map(min, *lengths))
