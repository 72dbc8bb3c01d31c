"""Mirror mode: few workers run, and all others are taken to do the same at the same moments.

Workers that do the same operations in the same order need not all be run. Of each collective the
running workers wait for each other; the others take part, whenever it is, in the same way.

* One worker runs. Without jitter all clocks agree, and it stands for all. With jitter each of the
  others is a clock: it computes its own seconds, starts each collective when its own clock says so,
  and waits for its end. So the durations are those of a full run, as long as nothing that a worker
  does depends on the time. A question whose answer would differ between the clocks
  (``Handle.done``) raises ``DivergedError``.
* One worker of each node runs, or every worker. These differ as they would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from offbeat.errors import OffbeatError
from offbeat.plan.steps import Steps
from offbeat.simulate.cluster import Collective, Line, SimulatedCluster, Span
from offbeat.simulate.compute import Compute
from offbeat.simulate.kernel import Signal
from offbeat.simulate.network import Network
from offbeat.simulate.workers import Workers

_JITTER = 0x6D6972726F72  # the purpose in (seed, purpose)


class DivergedError(Exception):
    """The workers would go different ways, so one of them cannot stand for all."""


class End(Signal):
    """The end of a collective.

    Attributes:
        seconds: When it is, virtual seconds; infinite until all have started it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = np.inf


class _Cost(NamedTuple):
    """Cost of the collectives of one kind on one line: seconds of one without bytes, and a byte."""

    fixed: float
    per_byte: float


@dataclass(eq=False)
class _Drawn:
    """Seconds of all workers or nodes in one step, and how many have taken theirs."""

    seconds: NDArray[np.float64]
    taken: int = 0


@dataclass(eq=False)
class _Meeting:
    """One collective, from the first worker that starts it to its end."""

    kind: Collective
    what: str
    end: End = field(default_factory=End)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    places: list[Callable[[Any], object]] = field(default_factory=list)


class MirrorCluster(SimulatedCluster):
    """A simulated cluster of which some workers run, and the others are taken to do the same.

    Args:
        workers: The running ones.
        members: Their ranks.
        size: How many workers there are in all.
        network: The links.
        steps: The seconds of a step.
        scale: ``Host.scale``.
        seed: Of the jitter.

    Attributes:
        clocks: Virtual seconds of every worker, where one runs and steps vary; else None.
        computed: Seconds that the workers have computed, on average, where there are clocks.
    """

    def __init__(
        self,
        workers: Workers,
        members: Sequence[int],
        size: int,
        network: Network,
        steps: Steps,
        scale: float,
        seed: int = 0,
    ) -> None:
        super().__init__(workers, network, Compute(steps.seconds), seed, scale=scale)
        self.members, self._pace = frozenset(members), steps
        self._random = np.random.default_rng([seed, _JITTER])
        self._drawn: dict[int, _Drawn] = {}
        self._computing: dict[int, NDArray[np.float64]] = {}  # by rank: of its step at hand
        self._units = size // steps.workers
        self.clocks: NDArray[np.float64] | None = None
        self.computed = 0.0
        if steps.jitter and len(self.members) == 1 < self._units:
            self.clocks = np.zeros(self._units)
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._costs: dict[tuple[Collective, Line], _Cost] = {}
        self._running: dict[Line, list[int]] = {}
        self._free: dict[tuple[bool, int], float] = {}  # network cards: inside or not, member

    # -- computing and waiting -------------------------------------------------------------------

    @override
    def compute_step(self, rank: int, progress: float) -> None:
        before, ends = self._progress[rank], progress >= 1
        self._progress[rank] = 0.0 if ends else progress
        part, tail = progress - before, self._pace.tail if ends else 0.0
        own = self._pace.seconds
        if self._pace.jitter:
            if before == 0:
                self._computing[rank] = self._draw(rank)
            drawn = self._computing[rank]
            own = float(drawn[rank // self._pace.workers])
            if self.clocks is not None:
                self.clocks += drawn * part + tail
                self.computed += float(drawn.mean()) * part + tail
        self.workers.sleep(own * part + tail, "computing a step")

    def _draw(self, rank: int) -> NDArray[np.float64]:
        """The computing of all workers or nodes in the next step of ``rank``, the same for all."""
        step = self._steps[rank]
        self._steps[rank] += 1
        if step not in self._drawn:
            self._drawn[step] = _Drawn(self._pace.draw(self._random, self._units))
        drawn = self._drawn[step]
        drawn.taken += 1
        if drawn.taken == len(self.members):
            del self._drawn[step]
        return drawn.seconds

    @override
    def wait(self, rank: int, signal: Signal, what: str) -> None:
        self.workers.wait(signal, what)
        if self.clocks is not None and isinstance(signal, End):
            np.maximum(self.clocks, signal.seconds, out=self.clocks)

    @override
    def nap(self, rank: int, seconds: float, what: str) -> None:
        self.workers.sleep(seconds, f"polling {what}")
        if self.clocks is not None:
            self.clocks += seconds

    def require_same(self, end: End) -> None:
        """Raise DivergedError if the ``end`` has come for some workers and not for others."""
        if self.clocks is not None and end.seconds != np.inf:
            come = int(np.count_nonzero(self.clocks >= end.seconds))
            if 0 < come < len(self.clocks):
                raise DivergedError

    # -- collectives -----------------------------------------------------------------------------

    def running(self, line: Line) -> list[int]:
        """The members of ``line`` that run."""
        if line not in self._running:
            self._running[line] = [one for one in line.members if one in self.members]
        return self._running[line]

    def meet(
        self,
        line: Line,
        group: int,
        member: int,
        kind: Collective,
        tensor: Tensor,
        size_bytes: float,
        what: str,
        combine: Callable[[Sequence[Tensor]], Any],
        place: Callable[[Any], object],
    ) -> End:
        """``join``, with tensors of ``size_bytes``; ``combine`` gets those of the running ones."""
        number = self._joined.get((group, member), 0)
        self._joined[group, member] = number + 1
        meeting = self._meetings.setdefault((group, number), _Meeting(kind, what))
        first = next(iter(meeting.tensors.values()), tensor)
        if (meeting.kind, first.shape, first.dtype) != (kind, tensor.shape, tensor.dtype):
            raise OffbeatError(
                f"collective {number}: rank {member} starts {what} ({kind}, {tuple(tensor.shape)} "
                f"{tensor.dtype}), but another one started {meeting.what} ({meeting.kind}, "
                f"{tuple(first.shape)} {first.dtype})"
            )
        meeting.tensors[member] = tensor
        meeting.places.append(place)
        if len(meeting.tensors) == len(self.running(line)):
            del self._meetings[group, number]
            self._transfer_all(meeting, line, size_bytes, combine)
        return meeting.end

    def _transfer_all(
        self,
        meeting: _Meeting,
        line: Line,
        size_bytes: float,
        combine: Callable[[Sequence[Tensor]], Any],
    ) -> None:
        kernel, running = self.workers.kernel, self.running(line)
        inside = not self.network.crosses(line.members)
        joined = kernel.now
        if self.clocks is not None and not self.workers.current.background:
            joined = float(self.clocks.max())
        start = max(joined, *(self._free.get((inside, one), 0.0) for one in running))
        cost = self._cost(meeting.kind, line)
        end = meeting.end.seconds = start + cost.fixed + cost.per_byte * size_bytes
        for one in running:
            self._free[inside, one] = end
        what = meeting.what
        self.spans.append(Span(running[0], "transfer", start, end, what, inside=inside))

        def finish() -> None:
            result = combine([meeting.tensors[one] for one in running])
            for place in meeting.places:
                place(result)
            meeting.end.fire()

        kernel.at(end, finish, what)

    def _cost(self, kind: Collective, line: Line) -> _Cost:
        if (kind, line) not in self._costs:
            network = self.network
            seconds = {
                "reduce": network.all_reduce_seconds,
                "broadcast": network.broadcast_seconds,
                "gather": network.all_gather_seconds,
                "exchange": network.all_to_all_seconds,
            }[kind]
            sharing = 1 if kind == "broadcast" else line.sharing
            none, much = (seconds(size, line.members, sharing) for size in (0, 1e9))
            self._costs[kind, line] = _Cost(none, (much - none) / 1e9)
        return self._costs[kind, line]
