"""What a strategy would cost: the letters in which its forecast is written, and the forecast.

Steady state, without warm-up. Computing costs seconds a step, the network what the formulas of
``offbeat.costs`` say, and nothing else costs anything: neither the arithmetic of sums and codecs
nor copies, so what is predicted is what the simulator finds.
The file is long because every letter is explained beside the formulas that are made of it.
"""

import math
from collections import deque
from dataclasses import dataclass
from itertools import repeat

from offbeat.costs import (
    FORWARD_SHARE,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
)
from offbeat.fabric.codec import CODECS
from offbeat.fabric.coding import SECOND, gathers
from offbeat.fabric.wire import Precision
from offbeat.kernels import BLOCK
from offbeat.means.gradient_mean import FIRST_BUCKET_BYTES
from offbeat.means.replica import BUCKET_BYTES
from offbeat.strategies.node_costs import NodeCosts, maximum_of_normals
from offbeat.strategies.roll import Ballot
from offbeat.strategies.server_costs import ServerCosts

ROLL_BYTES = 8 * Ballot.SLOTS
"""The numbers that precede a mean of models."""
FAR_APART = 64
"""Steps; beyond it a forecast warns."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one strategy would do.

    Attributes:
        strategy: Text form, as ``offbeat.parse_strategy`` reads it.
        wire: How means travel; where the strategy chooses, what it would choose.
        step_seconds: Mean time from one step to the next, computing and waiting.
        overlapped_step_seconds: The same if all of the communication of BSP were hidden behind
            computing, which no backward quite reaches; equal to ``step_seconds`` for the others.
        throughput: Samples a second, relative to one worker alone; N at best.
        idle: Share of the time spent waiting, in [0, 1]; for other nodes, where there are some.
        apart_steps: The most own steps of a worker that no mean of models contains: 0 with BSP,
            H, H + k, τ; s with SSP, the longer interval with Downpour and the steps of an exchange.
            The average where there is no most: 1/(1 − LSSR) with SelSync, ``inf`` if it never
            synchronizes; H/C with FedAvg where workers that were not drawn keep their model; H/α
            with EASGD, whose workers keep 1 − α of their distance at each exchange.
        payload_bytes: Bytes a step that a worker hands to collectives and servers, as in ``Stats``.
        memory_bytes: Flat copies on top of model, gradients and optimizer.
        note: What the setting hides or spreads over steps.
    """

    strategy: str
    wire: Precision
    step_seconds: float
    overlapped_step_seconds: float
    throughput: float
    idle: float
    apart_steps: float
    payload_bytes: float
    memory_bytes: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What computing and the network cost, for one model on one cluster.

    The letters of all forecasts, S any number of bytes, k any number of steps:

        A(S) = 2(N−1)·(α + S/(N·B))                    a sum of S bytes as they are: a ring
        r = A(56)                                      a roll
        c = ⌈elements of S / (512·N)⌉ blocks           a worker's chunk over a lossy wire
        E(S) = G(S) = (N−1)·(α + bytes of c/B)         its exchange and its gathering; if that
                                                       sends more than S, as it is: E = A, G = 0
        m(S) = Σ E + G over buckets of S               a mean of models that is waited for
        z_N = ∫ z·N·φ(z)·Φ(z)^(N−1) dz                 expected maximum of N normal numbers
        W(k) = k·t + √k·σ·z_N                          k steps of the slowest worker
        C(k, d) = max(k·t + √k·σ·z_N/(1 + f), d)       a cycle of k steps beside communication of
                                                       d; f = max(0, k·t − d)/(√k·σ)

    With nodes of L workers N is the number of nodes, t and σ are those of a node with the mean of
    its gradients, and B is that of a node's link: L parts of 1/L of the bytes, at 1/L of B each.
    Whoever waits for a result waits for its parts to be put together, too (``NodeCosts``).

    C is no theorem: a Monte-Carlo of 2 to 64 workers gives at most 15 % more than its term with f,
    and, with less slack than √k·σ, down to half of it.

    Attributes:
        workers: N.
        step_seconds: t, a step computed alone.
        jitter: σ/t, the standard deviation of a step, normal and independent.
        bytes_per_second: B, of every worker's link in each direction.
        latency_seconds: α.
        model_bytes: M, of the parameters and floating-point buffers as they travel exactly.
        bytes_per_parameter: Of these.
        wire: Of ``attach``.
        lssr: Share of local steps that SelSync is asked for, or taken to have.
        bucket_bytes: Of the sums in which a model travels, the last one may have less.
        first_bucket_bytes: Of the first one of gradients.
        updates: Whether means are of updates of which the sender keeps what rounding takes away.
            Few workers gather them whole: E(S) = (N−1)·(α + bytes of ⌈elements of S / 512⌉
            blocks/B), G = 0.
        node: Of what each of the ``workers`` consists; None: it is one worker.
    """

    workers: int
    step_seconds: float
    bytes_per_second: float
    latency_seconds: float
    model_bytes: float
    jitter: float = 0.0
    bytes_per_parameter: float = 4.0
    wire: Precision = "float32"
    lssr: float = 0.9
    bucket_bytes: float = BUCKET_BYTES
    first_bucket_bytes: float = FIRST_BUCKET_BYTES
    updates: bool = False
    node: NodeCosts | None = None

    # -- computing -------------------------------------------------------------------------------

    def slowest(self, steps: float) -> float:
        """W(k): how long the slowest worker takes for k steps."""
        return steps * self.step_seconds + self._spread(steps) * maximum_of_normals(self.workers)[0]

    def pipelined(self, steps: float, hidden: float) -> float:
        """C(k, d): a cycle of k steps, during which ``hidden`` seconds of communication go on."""
        computing, spread = steps * self.step_seconds, self._spread(steps)
        late = 0.0
        if spread:
            slack = max(0.0, computing - hidden)
            late = spread * maximum_of_normals(self.workers)[0] / (1 + slack / spread)
        return max(computing + late, hidden)

    def _spread(self, steps: float) -> float:
        return math.sqrt(steps) * self.jitter * self.step_seconds

    def idle(self, step_seconds: float) -> float:
        """Share of a step that is not computing."""
        return max(0.0, 1 - self.step_seconds / step_seconds)

    def steps_for(self, seconds: float) -> int:
        """⌈seconds/t⌉, at least 1; a hair above an integer is that integer."""
        return max(1, math.ceil(seconds / self.step_seconds * (1 - 1e-9)))

    def in_steps(self, seconds: float) -> str:
        """Text: how many steps take so long."""
        return f"{number(seconds / self.step_seconds)} steps"

    # -- sums ------------------------------------------------------------------------------------

    def sum_seconds(self, size: float) -> float:
        """A(S)."""
        return self._ring(size) + self._inside(size)

    def _ring(self, size: float) -> float:
        rate, latency = self.bytes_per_second, self.latency_seconds
        return all_reduce_seconds(size, self.workers, rate, latency)

    def _inside(self, size: float) -> float:
        """Until the parts of so many bytes are together in a node of several workers."""
        return 0.0 if self.node is None else self.node.gather_seconds(size)

    def agree_seconds(self, numbers: int) -> float:
        """Until a node of several workers has agreed on so many numbers."""
        return 0.0 if self.node is None else self.node.agree_seconds(numbers)

    @property
    def roll_seconds(self) -> float:
        """r: a roll."""
        return self.sum_seconds(ROLL_BYTES)

    @property
    def lossy(self) -> bool:
        """Whether means are quantised."""
        return self.wire != "float32" and self.workers > 1

    def _gathered(self, size: float) -> int:
        """Bytes of a worker's update that all gather; 0 if they do not."""
        if not (self.updates and self.lossy and gathers(self.wire, self.workers)):
            return 0
        blocks = math.ceil(size / self.bytes_per_parameter / BLOCK)
        return blocks * CODECS[self.wire].block_bytes if self._chunks(size)[0] else 0

    def _chunks(self, size: float) -> tuple[int, int]:
        """Bytes of a worker's chunk of a quantised sum on both stages; 0 if it goes as it is."""
        if not self.lossy:
            return 0, 0
        blocks = math.ceil(size / self.bytes_per_parameter / (BLOCK * self.workers))
        second = SECOND.get(self.wire, self.wire)
        chunks = blocks * CODECS[self.wire].block_bytes, blocks * CODECS[second].block_bytes
        return chunks if self.workers * max(chunks) < size else (0, 0)

    def stages(self, size: float) -> tuple[float, float]:
        """E(S) and G(S): the two stages of a sum over the wire, without ``_landing``."""
        first, second = self._chunks(size)
        if not first:
            return self._ring(size), 0.0
        network = self.workers, self.bytes_per_second, self.latency_seconds
        gathered = self._gathered(size)
        if gathered:
            return all_gather_seconds(gathered, *network), 0.0
        return (
            # Its parts are put together before the second stage.
            all_to_all_seconds(self.workers * first, *network) + self._inside(self.workers * first),
            all_gather_seconds(second, *network),
        )

    def _landing(self, size: float) -> float:
        """From the end of both stages to the result; of several sums it is hidden but for one."""
        gathered = self._gathered(size) or self._chunks(size)[1]
        return self._inside(self.workers * gathered or size)

    def _sent(self, size: float) -> float:
        """Bytes that a worker hands over for a sum over the wire."""
        first, second = self._chunks(size)
        return self._gathered(size) or self.workers * first + second or size

    def _buckets(self, size: float) -> tuple[int, float, float]:
        """How many full buckets so many bytes make, the size of each, and that of the last one."""
        full = max(0, math.ceil(size / self.bucket_bytes) - 1)
        bucket = self.bucket_bytes if full else size
        return full, bucket, size - full * bucket

    def mean_seconds(self, size: float) -> float:
        """m(S): a mean of so many bytes of models that is waited for."""
        full, bucket, last = self._buckets(size)
        return full * sum(self.stages(bucket)) + sum(self.stages(last)) + self._landing(last)

    def mean_bytes(self, size: float) -> float:
        """Bytes that a worker hands over for such a mean."""
        full, bucket, last = self._buckets(size)
        return full * self._sent(bucket) + self._sent(last)

    def merge_seconds(self, size: float, steps: float, ahead: float = 0.0) -> float:
        """From its start to the mean of so many bytes, of which ``steps`` steps are not waited for.

        m(S) over an exact wire. Over a lossy one the second stage of a bucket starts at the first
        step boundary after its first one, or at once where that is waited for:

            ended = ahead + Σ E
            max(ended + Σ G, ⌈ended/t⌉·t + Σ G of the buckets that ended in the last step)

        Args:
            size: S.
            steps: Own steps, after which it is waited for.
            ahead: Seconds that the link is still busy when it starts, with a roll; they count.
        """
        full, bucket, last = self._buckets(size)
        (first, second), (last_first, last_second) = self.stages(bucket), self.stages(last)
        before = ahead + full * first
        landing = self._landing(last)
        ended, left = before + last_first, full * second + last_second + landing
        boundary = self.steps_for(ended) * self.step_seconds
        if not self.lossy or boundary > steps * self.step_seconds:
            return ended + left
        late = min(full, max(0, math.ceil((before - boundary + self.step_seconds) / first)))
        return max(ended + left, boundary + late * second + last_second + landing)

    def _gradient_buckets(self) -> list[float]:
        """Sizes of the buckets of gradients, in the order in which backward completes them."""
        first = min(self.first_bucket_bytes, self.bucket_bytes)
        if self.model_bytes <= first:
            return [self.model_bytes]
        full, bucket, last = self._buckets(self.model_bytes - first)
        return [first, *repeat(bucket, full), last]

    def gradients_seconds(self, computing: float, numbers: int, *, overlap: bool) -> float:
        """From the beginning of a step to the mean of its gradients, over k buckets.

        What the workers agree on, ``numbers`` of them, goes ahead of the last bucket; in its tail
        if it is the only one, over an exact wire. With ``overlap`` the others leave when backward
        has completed them; F = 1/3 of computing comes before it:

            ready = (F + (1 − F)·(S_1 + … + S_i)/M)·computing      i < k
            free = max(free, ready) + G of those whose E has ended by then + E
            end = max(free, computing) + A(numbers) + E and G of what is left

        Args:
            computing: Seconds from the beginning of a step to the end of backward.
            numbers: Those of the caller, and two; one more for each tensor is left out.
            overlap: Whether buckets leave while backward runs. Those of a node do not: its mean
                has them first.
        """
        overlap = overlap and self.node is None
        sizes = self._gradient_buckets()
        known = {size: self.stages(size) for size in set(sizes)}  # most are alike
        *early, last = sizes
        if not early and not self.lossy:
            return computing + self.sum_seconds(self.model_bytes + 4 * numbers)
        done = free = 0.0
        waiting: deque[tuple[float, float]] = deque()  # end of the first stage; second stage
        for size in early:
            done += size
            share = FORWARD_SHARE + (1 - FORWARD_SHARE) * done / self.model_bytes
            ready = share * computing if overlap else computing
            free = max(free, ready)
            while waiting and waiting[0][0] <= ready:
                free += waiting.popleft()[1]
            first, second = known[size]
            free += first
            waiting.append((free, second))
        left = sum(known[last]) + sum(second for _, second in waiting)
        return max(free, computing) + self._ring(8 * numbers) + left + self._landing(last)

    def gradients_bytes(self, numbers: int) -> float:
        """Bytes that a worker hands over for a mean of gradients."""
        sizes = self._gradient_buckets()
        if len(sizes) == 1 and not self.lossy:
            return self.model_bytes + 4 * numbers
        return sum(map(self._sent, sizes)) + 8 * numbers

    # -- memory ----------------------------------------------------------------------------------

    @property
    def error_copies(self) -> float:
        """What a lossy wire keeps of rounding: what was sent, and this worker's chunk of sums."""
        if self.updates:
            return 1 / self.workers if self.lossy and not self._gathered(self.model_bytes) else 0.0
        return 1 + 1 / self.workers if self.lossy else 0.0

    def flying_copies(self, size: float) -> float:
        """Of a sum of updates of so many bytes: its payloads; of an exact one u and the sum."""
        gathered = self._gathered(size)
        if gathered:
            return (self.workers + 1) * gathered / size
        first, second = self._chunks(size)
        return self.workers * (first + second) / size if first else 2.0

    @property
    def mean_copies(self) -> float:
        """For means of models: the staging copy; over a lossy wire the last mean and the errors."""
        return 1 + self.lossy + self.error_copies

    def gradient_copies(self, *, overlap: bool) -> float:
        """For means of gradients; what leaves early over a lossy wire may have to be taken back."""
        early = sum(self._gradient_buckets()[:-1]) / self.model_bytes if overlap else 0.0
        return 1 + self.error_copies * (1 + early)

    # -- parameter server ------------------------------------------------------------------------

    def server(self, servers: tuple[int, ...] | None) -> ServerCosts:
        """Messages to and from a parameter server on the ranks ``servers``; None is all."""
        return ServerCosts.of(
            servers,
            self.workers,
            self.model_bytes,
            self.bytes_per_second,
            self.latency_seconds,
            self.bytes_per_parameter,
            self.wire,
            self.node,
        )

    # -- the forecast ----------------------------------------------------------------------------

    def forecast(
        self,
        strategy: object,
        *,
        step: float,
        apart: float,
        payload: float,
        copies: float,
        note: str,
        overlapped: float | None = None,
    ) -> Forecast:
        """A forecast from what a strategy has to say; see ``Forecast``.

        Args:
            strategy: It.
            step: Seconds from one step to the next.
            apart: Steps.
            payload: Bytes a step.
            copies: Of the model, in memory.
            note: One line.
            overlapped: Seconds of a step with all communication hidden; None is ``step``.
        """
        alone, node = self.workers == 1, self.node
        throughput = self.workers * self.step_seconds / step
        if node is not None:
            throughput = self.workers * node.workers * node.step_seconds / step
            payload, copies = payload / node.workers, copies + 1  # for the mean inside
        far = "" if apart <= FAR_APART else f"; {number(apart)} steps apart, watch the final metric"
        return Forecast(
            strategy=str(strategy),
            wire=self.wire,
            step_seconds=step,
            overlapped_step_seconds=step if overlapped is None else overlapped,
            throughput=throughput,
            idle=self.idle(step),
            apart_steps=apart,
            payload_bytes=0.0 if alone else payload,
            memory_bytes=copies * self.model_bytes,
            note=("nobody to wait for" if alone else note) + far,
        )


def number(value: float) -> str:
    """Three digits, and all that are before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def percent(share: float) -> str:
    """``"4.9 %"`` from 0.049."""
    value = 100 * share
    return f"{value:.1f} %" if 0.05 <= value < 9.95 else f"{value:.0f} %"
