"""Slow references of the strategies: all workers in one process, by the published equations.

Written without Offbeat. A reference takes one step after the other; ``mean()`` is the model that a
consensus shows, and with which training ends.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from problems import (
    OPTIMIZERS,
    PARAMETERS,
    Simulated,
    assign,
    changes,
    flat,
    gradients,
    make_batch,
    make_model,
    squared,
    train_step,
)


class Reference:
    """N workers, of which worker n takes ``counts[n]`` steps.

    Attributes:
        synced: Of each step so far, whether the workers were synchronized.
        news: Of each part and worker, whether it has steps that the others have not received.
        launches: Number of means launched.
        numbers: Numbers that each worker has sent in rounds and means.
    """

    vote_numbers = 8
    launches = 0
    numbers: float = 0

    def __init__(self, counts: Sequence[int], kind: str, parts: int = 1) -> None:
        self.counts, self.size, self.time = list(counts), len(counts), 0
        self.sim = Simulated.start(self.size, kind)
        self.synced: list[bool] = []
        self.news = [[False] * self.size for _ in range(parts)]

    @property
    def stepping(self) -> list[int]:
        """The workers that take the present step."""
        return [n for n, count in enumerate(self.counts) if self.time <= count]

    def step(self) -> None:
        """One step of every worker that has one left, and what the strategy does after it."""
        self.time += 1
        self.synced.append(self.advance())

    def advance(self) -> bool:
        raise NotImplementedError

    def weights(self) -> list[float]:
        """Return 1 for each worker with steps that the others have not received, otherwise 0."""
        return [float(any(column)) for column in zip(*self.news, strict=True)]

    def mean(self) -> Tensor:
        return self.weighted(self.models(), self.weights())

    def last_numbers(self) -> int:
        """Numbers that ``finish`` sends in a mean, besides one vote."""
        return PARAMETERS if self.unsynced() else 0

    def unsynced(self) -> bool:
        """True if a worker has steps that the others have not received."""
        return any(self.weights())

    def local_steps(self) -> None:
        for n in self.stepping:
            self.local_step(n)
            for new in self.news:
                new[n] = True

    def local_step(self, n: int) -> None:
        train_step(self.sim.models[n], self.sim.optimizers[n], make_batch(n, self.time - 1))

    def models(self) -> list[Tensor]:
        return self.sim.flat()

    def vectors(self) -> list[Tensor]:
        """Return the models as vectors, their parameters sorted by name."""
        return [torch.cat([p.detach().reshape(-1) for p in by_name(m)]) for m in self.sim.models]

    def add(self, n: int, where: slice, shift: Tensor) -> None:
        moved = self.vectors()[n]
        moved[where] += shift
        with torch.no_grad():
            nn.utils.vector_to_parameters(moved, by_name(self.sim.models[n]))

    def weighted(self, models: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """The weighted mean; if no worker has a weight, all hold the same."""
        if not any(weights):
            weights = [1.0] * self.size
        total: Tensor = sum(w * x for w, x in zip(weights, models, strict=True))
        return total / sum(weights)


class BSP(Reference):
    """One worker that uses the mean of the gradients of those that step."""

    vote_numbers = 8 + 1 + 6  # votes, contributors, and which gradients exist

    def __init__(self, counts: Sequence[int], kind: str) -> None:
        super().__init__(counts, kind)
        self.model = make_model(0)
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())

    def advance(self) -> bool:
        each = [gradients(self.model, make_batch(n, self.time - 1)) for n in self.stepping]
        for p, *parts in zip(self.model.parameters(), *each, strict=True):
            p.grad = sum(parts) / len(parts)
        self.optimizer.step()
        self.numbers += self.vote_numbers + PARAMETERS
        return True

    def models(self) -> list[Tensor]:
        return [flat(self.model)] * self.size

    def unsynced(self) -> bool:
        return True  # one more round of gradients, of 0

    def mean(self) -> Tensor:
        return flat(self.model)


@dataclass
class Trigger:
    """SelSync's of one worker: ‖g‖² and Δ of its steps, and its flags."""

    norms: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    flags: list[bool] = field(default_factory=list)


class SelSync(Reference):
    """Section 1 of the algorithms, step by step.

    A worker past its count is averaged once more, with its last steps, and then has weight 0.
    """

    vote_numbers = 8 + 2

    def __init__(
        self,
        counts: Sequence[int],
        kind: str,
        *,
        delta: float,
        smoothing: float | None = None,
        window: int | None = None,
        aggregate: str = "parameters",
        warmup_steps: int = 0,
        max_interval: int = 10**9,
        max_norm: float | None = None,
    ) -> None:
        super().__init__(counts, kind)
        self.delta, self.window, self.max_norm = delta, window, max_norm
        self.a = min(1.0, self.size / 100) if smoothing is None else smoothing
        self.warmup_steps, self.max_interval = warmup_steps, max_interval
        self.of_gradients = aggregate == "gradients"
        self.triggers = [Trigger() for _ in counts]
        self.since = 0

    def decide(self, flagged: bool) -> bool:
        forced = self.time <= self.warmup_steps
        return flagged or forced or self.since + 1 >= self.max_interval

    def advance(self) -> bool:
        stepping, flagged = self.stepping, False
        each = {n: gradients(self.sim.models[n], make_batch(n, self.time - 1)) for n in stepping}
        for n in stepping:
            one = self.triggers[n]
            one.norms.append(squared(each[n]))
            one.changes.append(changes(one.norms, self.a, self.window)[-1])
            one.flags.append(self.delta < math.inf and one.changes[-1] >= self.delta)
            flagged |= one.flags[-1]
        sync = self.decide(flagged)
        if sync and self.of_gradients:
            mean = [sum(parts) / len(stepping) for parts in zip(*each.values(), strict=True)]
            each = dict.fromkeys(stepping, mean)
        for n in stepping:
            model, self.news[0][n] = self.sim.models[n], True
            for p, g in zip(model.parameters(), each[n], strict=True):
                p.grad = g.clone()
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            self.sim.optimizers[n].step()
        if sync and not self.of_gradients:
            self.sim.average(self.weights())
            self.news = [[False] * self.size]
        self.since = 0 if sync else self.since + 1
        self.launches += sync
        self.numbers += self.vote_numbers + sync * (PARAMETERS + self.of_gradients * (1 + 6))
        return sync


def equal_slices(parts: int) -> list[slice]:
    """Return the numbers of each part of the model, sorted by name."""
    places = [math.ceil(i * PARAMETERS / parts) for i in range(parts + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(places)]


@dataclass
class Flight:
    """A mean in flight: its part, the step of its launch, Δ or D, and what each worker has sent."""

    part: int
    launched: int
    mean: Tensor
    sent: list[Tensor]
    outer: tuple[float, float] = (0.0, 0.0)


class DiLoCo(Reference):
    """The definition, with torch's SGD with Nesterov momentum as the outer optimizer."""

    def __init__(
        self,
        counts: Sequence[int],
        kind: str,
        *,
        period: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        overlap: int = 0,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(counts, kind, fragments)
        self.period, self.overlap, self.warmup_steps = period, overlap, warmup_steps
        self.parts = equal_slices(fragments)
        self.theta = [nn.Parameter(self.vectors()[0][part]) for part in self.parts]
        self.outer: list[Optimizer] = [
            torch.optim.SGD([p], outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
            for p in self.theta
        ]
        self.flights: list[Flight] = []
        self.since = 0

    def due(self, part: int) -> bool:
        if self.warmup_steps:  # post-local SGD, of one fragment
            return self.time <= self.warmup_steps or self.since == self.period
        place = (part + 1) * self.period // len(self.parts)
        return self.time % self.period == place % self.period

    def advance(self) -> bool:
        self.local_steps()
        landed = self.land(self.time)
        self.since += 1
        for part in range(len(self.parts)):
            if self.due(part):
                self.launch(part)
        return self.land(self.time) or landed

    def launch(self, part: int) -> None:
        taking = [n for n in range(self.size) if self.news[part][n]]
        self.news[part], self.since = [False] * self.size, 0
        sent, theta = [x[self.parts[part]] for x in self.vectors()], self.theta[part].detach()
        delta: Tensor = sum(theta - sent[n] for n in taking) / len(taking)
        self.flights.append(Flight(part, self.time, delta, sent))
        self.launches += 1
        self.numbers += self.vote_numbers + delta.numel()

    def land(self, time: int) -> bool:
        due = [flight for flight in self.flights if flight.launched + self.overlap <= time]
        for flight in due:
            self.flights.remove(flight)
            theta, where = self.theta[flight.part], self.parts[flight.part]
            theta.grad = flight.mean
            self.outer[flight.part].step()
            for n, sent in enumerate(flight.sent):
                self.add(n, where, theta.detach() - sent)
        return bool(due)

    def mean(self) -> Tensor:
        then = copy.deepcopy(self)
        then.land(then.time + then.overlap)
        return self.weighted(then.models(), self.weights())


class AsyncAveraging(Reference):
    """Algorithm 2 with explicit u, x_init and a server, as the paper writes it."""

    def __init__(
        self,
        counts: Sequence[int],
        kind: str,
        *,
        staleness: int,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
    ) -> None:
        super().__init__(counts, kind)
        self.beta, self.lr, self.momentum = staleness // 2, outer_lr, outer_momentum
        self.x_init = self.models()
        self.servers = [self.x_init[0].clone()]
        self.velocity = torch.zeros_like(self.servers[0])
        self.in_flight: tuple[list[Tensor], list[float]] | None = None

    def advance(self) -> bool:
        self.local_steps()
        if self.time % self.beta:
            return False
        x = self.models()
        updates = [now - start for now, start in zip(x, self.x_init, strict=True)]
        landed = self.reset()
        self.x_init = self.models()
        self.in_flight = updates, self.weights()
        self.news = [[False] * self.size]
        self.launches += 1
        self.numbers += self.vote_numbers + PARAMETERS
        return landed

    def reset(self) -> bool:
        """The merge in flight lands: x ← x + (m − u) + (η_o·(m + μ·v) − m)."""
        if self.in_flight is None:
            return False
        (updates, weights), self.in_flight = self.in_flight, None
        mean = self.weighted(updates, weights)
        self.velocity = self.momentum * self.velocity + mean
        extra = self.lr * (mean + self.momentum * self.velocity) - mean
        self.servers.append(self.servers[-1] + mean + extra)
        for model, u in zip(self.sim.models, updates, strict=True):
            assign(model, flat(model) + (mean - u) + extra)
        return True

    def mean(self) -> Tensor:
        then = copy.deepcopy(self)
        then.reset()
        return self.weighted(then.models(), self.weights())


def by_name(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in sorted(model.named_parameters())]


class Streaming(Reference):
    """The cyclic schedule over an exact wire: parts of equal bytes, with P, v and the outer gain.

    A worker without peers sends nothing.
    """

    vote_numbers = 8 + 3

    def __init__(
        self,
        counts: Sequence[int],
        kind: str,
        *,
        parts: int,
        staleness: int,
        outer_gain: float | None = None,
    ) -> None:
        super().__init__(counts, kind, parts)
        x = self.vectors()
        self.slices, cycle = equal_slices(parts), staleness // 2
        self.every = max(1, cycle // parts)  # steps between two rounds
        self.at_once = math.ceil(parts / min(parts, cycle))  # parts in each of them
        self.lands, self.gain = cycle, outer_gain
        self.p, self.v = x[0].clone(), torch.zeros_like(x[0])
        self.next, self.since = 0, 0
        self.launched = [0.0] * parts  # the workers' mean step at the last launch of each part
        self.flights: list[Flight] = []
        self.squares = torch.zeros(2, self.size, dtype=torch.float64)  # of u and D, by worker
        # Factors on the learning rates of SGD.
        lookahead = outer_gain if outer_gain is not None and self.size > 1 else 1.0
        self.factors = [1 / min(lookahead, 1.0)] * self.size

    def local_step(self, n: int) -> None:
        (group,) = self.sim.optimizers[n].param_groups
        rate = group["lr"]
        if isinstance(self.sim.optimizers[n], torch.optim.SGD):
            group["lr"] = rate * self.factors[n]
        super().local_step(n)
        group["lr"] = rate

    def shorten(self) -> None:
        """A worker's steps become shorter by the root of the gain of its own updates."""
        for n in self.stepping if self.gain is None else ():
            u, d = self.squares[:, n].tolist()
            gain = min(max(math.sqrt(u / d), 1.0), math.sqrt(self.size)) if d else 1.0
            self.factors[n] = 1 / math.sqrt(gain)

    def advance(self) -> bool:
        self.local_steps()
        if self.size == 1:
            return False
        votes = self.squares.sum(1).tolist()  # sent before anything lands in this step
        landed = 0
        while self.flights and self.time - self.flights[0].launched >= self.lands:
            landed += self.land()
        self.shorten()
        self.since += 1
        if self.since == self.every:
            self.since = 0
            self.numbers += self.vote_numbers
            weights = self.weights()
            for _ in range(self.at_once):
                while any(flight.part == self.next for flight in self.flights):
                    landed += self.land()
                self.launch(weights, votes)
        return landed > 0

    def unsynced(self) -> bool:
        return True  # each model differs from P by its residual

    def launch(self, weights: list[float], votes: list[float]) -> None:
        part, self.next = self.next, (self.next + 1) % len(self.slices)
        where, step = self.slices[part], float(self.time)
        sent = [w * (x - self.p)[where] for w, x in zip(weights, self.vectors(), strict=True)]
        gain = self.gain
        if gain is None:
            ratio = math.sqrt(votes[0] / votes[1]) if votes[1] else 1.0
            gain = min(max(ratio, 1.0), math.sqrt(self.size))
        fade = math.exp((self.launched[part] - step) / 50)
        self.launched[part] = step
        mean = sum(sent) / sum(weights)
        outer = (fade, (gain - 1) * (1 - fade)) if gain >= 1 else (0.0, gain - 1)
        self.flights.append(Flight(part, self.time, mean, sent, outer))
        self.news[part] = [False] * self.size
        self.launches += 1
        self.numbers += mean.numel()

    def land(self) -> int:
        flight = self.flights.pop(0)
        where, (fade, ahead), mean = self.slices[flight.part], flight.outer, flight.mean
        self.v[where] = fade * self.v[where] + mean
        shift = mean + ahead * self.v[where]
        self.p[where] += shift
        for n, u in enumerate(flight.sent):
            self.add(n, where, shift - u)
        keep = 1 - 1 / (5 * len(self.slices))  # smoothed over five passes of the model
        now = [
            [float(u.square().sum()) for u in flight.sent],
            [float(mean.square().sum())] * self.size,
        ]
        self.squares = keep * self.squares + torch.tensor(now, dtype=torch.float64)
        return 1

    def mean(self) -> Tensor:
        then = copy.deepcopy(self)
        while then.flights:
            then.land()
        return self.weighted(then.models(), [1.0] * self.size)


class Gossip(Reference):
    """The example of the page on extensions."""

    def __init__(self, counts: Sequence[int], kind: str, *, share: float) -> None:
        super().__init__(counts, kind)
        self.share = share

    def advance(self) -> bool:
        self.local_steps()
        x = self.models()
        for n, model in enumerate(self.sim.models if self.size > 1 else ()):
            assign(model, (1 - self.share) * x[n] + self.share * x[n - 1])
        self.numbers += self.vote_numbers + PARAMETERS
        return self.size > 1

    def weights(self) -> list[float]:
        return [1.0] * self.size


Make = Callable[[Sequence[int], str], Reference]
