"""The protocol by which workers lease chunks of an epoch from a board.

A *chunk* is a run of batches. A *board* is a key-value store that all workers share. A worker's
*number* is never used by another worker, also not after a restart. The keys:

    resumed                 after a restart from a checkpoint: what is left of the epochs, for
                            workers that join later, too
    plan/<epoch>            the plan of the epoch (``Plan``); the first proposal is accepted
    cursor/<epoch>          number of chunks that workers were pointed at
    held/<worker>           at least what the worker holds (``_Held``). Written by this worker
                            alone, before it points and before it leases
    lease/<epoch>/<chunk>   state of a chunk
    used/<epoch>/<chunk>    number of batches of the chunk, from the first, that were trained on by
                            workers that have left as planned

To lease a chunk, a worker adds 1 to the cursor, which points it at a chunk, and then changes the
state of this chunk from "" to "w#1", where w is its number. When the chunk is done, it changes the
state to "done#1". If w is lost before that, another worker v changes "w#1" to "v#2". The states
change by compare-and-set only. So a chunk has one owner at any time, and an owner that was replaced
cannot acknowledge the chunk. Before w leaves as planned, it changes "w#1" to "#1". Its chunks are
then found like those of a lost worker, and the next owner begins after the used batches.

*Without losses every chunk is used exactly once*, because an owner is never replaced.

*With losses no chunk is skipped.* Each chunk below the cursor was pointed at by some worker w.

- If w has leased the chunk, or was about to, ``held/w`` names it: it was written before.
- If w was lost before it could write that, ``held/w`` still names the last position of the cursor
  that w had read. The chunk is between this position and the cursor.

The other workers read ``held/w`` when w is lost and lease these chunks, unless they are done or
have another owner. They read it once more at the end of an epoch, because the last writes of w may
reach the board after its loss was noticed.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from offbeat.data.leasing.plan import Plan, Range
from offbeat.errors import MismatchError
from offbeat.transport.board import Board

_DONE = "done"
_READ_AGAIN = 8  # number of workers, lost last, whose ``held/<worker>`` is read after each epoch
_PLANS = 8  # number of plans kept in memory; each has the order of an epoch


@dataclass(frozen=True, eq=False)
class Lease:
    """A chunk that this worker owns.

    Attributes:
        plan: Plan of the chunk's epoch.
        chunk: Number of the chunk in the plan.
        state: State of the chunk on the board while this worker owns it.
        first: Number of batches of the chunk that are left out, because they were trained on.
    """

    plan: Plan
    chunk: int
    state: str
    first: int = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self.plan.epoch

    @property
    def batches(self) -> int:
        """Number of batches."""
        return self.plan.chunk_batches(self.chunk) - self.first

    def batch(self, number: int) -> list[int]:
        """Return the samples of batch ``number``, counted from 0."""
        return self.plan.batch(self.chunk, self.first + number)


@dataclass
class _Held:
    """What a worker may hold.

    Attributes:
        chunks: Pairs of an epoch and a chunk.
        pointing: Epoch, and the last position of the cursor that the worker has read, while the
            worker adds to the cursor. None otherwise.
    """

    chunks: list[tuple[int, int]] = field(default_factory=list)
    pointing: tuple[int, int] | None = None


@dataclass
class _Resumed:
    """What a training that continues from a checkpoint has left to do.

    Attributes:
        first: Number of the first epoch.
        left: Positions that are left of some epochs, by number as text. Other epochs from ``first``
            on are whole.
    """

    first: int = 0
    left: Mapping[str, Sequence[Range]] = field(default_factory=dict)


class Leases:
    """The leases of one worker. All methods block for a few round trips to the board.

    Args:
        board: The board.
        worker: Number of this worker.
        propose: Function that returns this worker's proposal for the plan of an epoch.

    Attributes:
        repeated: Number of samples in chunks that a lost worker had leased before. It may have
            trained on some of them.
    """

    def __init__(self, board: Board, worker: int, propose: Callable[[int], Plan]) -> None:
        self._board, self._worker, self._propose = board, worker, propose
        self._resumed: _Resumed | None = None  # as on the board, once it is known
        self._plans: dict[int, Plan] = {}
        self._positions: dict[int, int] = {}  # last position of each cursor that was read
        self._owned: dict[tuple[int, int], Lease] = {}
        self._lost: dict[int, str] = {}  # lost worker → what it held, as read last
        self._left: deque[tuple[int, int]] = deque()  # chunks that lost workers may have left
        self.repeated = 0

    @property
    def unfinished_epochs(self) -> set[int]:
        """Epochs of the chunks that this worker, or a lost worker that it knows, has not done."""
        return {epoch for epoch, _ in (*self._owned, *self._left)}

    def open(self) -> None:
        """Read what is left after a restart. Waits for one round trip to the board."""
        text = self._board.get("resumed")
        self._resumed = _Resumed(**json.loads(text)) if text else _Resumed()

    def resume(self, first: int, left: Mapping[str, Sequence[Range]]) -> None:
        """Continue from a checkpoint; see ``_Resumed``."""
        self._resumed = _Resumed(first, left)
        self._board.put("resumed", json.dumps(vars(self._resumed)))

    def proposal(self, epoch: int) -> Plan:
        """Return this worker's proposal for the plan of an epoch."""
        own = self._propose(epoch)
        if self._resumed is None:
            self.open()
        assert self._resumed is not None
        left = self._resumed.left.get(str(epoch), () if epoch < self._resumed.first else own.ranges)
        return replace(own, ranges=tuple((start, end) for start, end in left))

    def plan(self, epoch: int) -> Plan:
        """Return the plan of an epoch.

        Raises:
            MismatchError: another worker has other settings.
        """
        if epoch not in self._plans:
            own = self.proposal(epoch)
            plan = Plan.from_text(self._board.compare_set(f"plan/{epoch}", "", own.to_text()))
            if plan.settings != own.settings:
                raise MismatchError(
                    f"the workers lease different data: this one has {own.settings}, another one "
                    f"has {plan.settings}"
                )
            while len(self._plans) >= _PLANS:
                del self._plans[min(self._plans)]
            self._plans[epoch] = plan
        return self._plans[epoch]

    def lease(self, epoch: int) -> Lease | None:
        """Lease the next chunk of an epoch. Returns None if no chunk is left."""
        plan = self.plan(epoch)
        while (position := self._positions.get(epoch, 0)) < plan.chunks:
            self._write_held((epoch, position))
            chunk = self._board.add(f"cursor/{epoch}", 1) - 1
            self._positions[epoch] = chunk + 1
            if chunk >= plan.chunks:
                self._write_held()
                return None
            if lease := self._take(epoch, chunk, ""):
                return lease
        return None

    def acknowledge(self, lease: Lease) -> None:
        """Mark a chunk as done. Does nothing if another worker has taken it over."""
        issue = lease.state.partition("#")[2]
        key = f"lease/{lease.epoch}/{lease.chunk}"
        self._board.compare_set(key, lease.state, f"{_DONE}#{issue}")
        self._owned.pop((lease.epoch, lease.chunk), None)

    def give_back(self, used: Mapping[tuple[int, int], int]) -> None:
        """Return all chunks of this worker. The others lease them when it has left.

        ``used``: for each chunk, by epoch and number, the number of its batches, from the first,
        that are in the models of all workers. Chunks without an entry were not begun.
        """
        for (epoch, chunk), lease in self._owned.items():
            batches = used.get((epoch, chunk), lease.first)
            self._board.put(f"used/{epoch}/{chunk}", str(batches))
            issue = lease.state.partition("#")[2]
            self._board.compare_set(f"lease/{epoch}/{chunk}", lease.state, f"#{issue}")

    # -- lost workers ----------------------------------------------------------------------------

    def lose(self, workers: Collection[int]) -> None:
        """Look for chunks that lost workers have left. ``workers``: all that are lost by now."""
        for worker in set(self._lost).difference(workers):  # it joins with a smaller number
            del self._lost[worker]
        for worker in workers:
            if worker not in self._lost:
                self._lost[worker] = ""
                self._read(worker)

    def look_again(self) -> None:
        """Look once more for chunks that the workers that were lost last have left."""
        for worker in list(self._lost)[-_READ_AGAIN:]:
            self._read(worker)

    def reclaim(self, last_epoch: int | None = None) -> Lease | None:
        """Lease a chunk that a lost worker has left. Returns None if none was found.

        ``last_epoch``: leave chunks of later epochs to a later call.
        """
        later: list[tuple[int, int]] = []
        try:
            while self._left:
                epoch, chunk = self._left.popleft()
                if last_epoch is not None and epoch > last_epoch:
                    later.append((epoch, chunk))
                    continue
                before = self._board.get(f"lease/{epoch}/{chunk}")
                owner = before.partition("#")[0]
                if owner == _DONE or (owner and int(owner) not in self._lost):
                    continue
                if lease := self._take(epoch, chunk, before):
                    if owner:
                        self.repeated += lease.plan.chunk_samples(chunk)
                    return lease
                self._left.append((epoch, chunk))  # its new owner may be lost, too
            return None
        finally:
            self._left += later

    def outstanding(self, workers: Collection[int], last_epoch: int) -> set[tuple[int, int, str]]:
        """Return the chunks up to an epoch that ``workers`` may hold and that are not done.

        Each with its epoch, its number and its state.
        """
        texts = [self._board.get(f"held/{worker}") for worker in workers]
        held = [_Held(**json.loads(text)) for text in texts if text]
        chunks = {(epoch, chunk) for one in held for epoch, chunk in one.chunks}
        found = {
            (epoch, chunk, self._board.get(f"lease/{epoch}/{chunk}"))
            for epoch, chunk in chunks
            if epoch <= last_epoch
        }
        return {each for each in found if each[2].partition("#")[0] != _DONE}

    def _read(self, worker: int) -> None:
        text, before = self._board.get(f"held/{worker}"), self._lost[worker]
        if not text:
            return
        held, self._lost[worker] = _Held(**json.loads(text)), text
        if text == before and held.pointing is None:
            return
        self._left += [(epoch, chunk) for epoch, chunk in held.chunks]
        if held.pointing is not None:
            epoch, position = held.pointing
            end = min(int(self._board.get(f"cursor/{epoch}") or 0), self.plan(epoch).chunks)
            self._left += [(epoch, chunk) for chunk in range(position, end)]

    # -- states ----------------------------------------------------------------------------------

    def done(self, epoch: int, first: int = 0, step: int = 1) -> list[int]:
        """Return for every ``step``-th chunk from ``first`` how many of its batches are done.

        All of an acknowledged chunk, and those in ``used/…``. Two round trips at most for each of
        these chunks. Chunks at which the cursor has not pointed are not read.
        """
        plan = self.plan(epoch)
        pointed = int(self._board.get(f"cursor/{epoch}") or 0)

        def batches(chunk: int) -> int:
            state = self._board.get(f"lease/{epoch}/{chunk}")
            if state.partition("#")[0] == _DONE:
                return plan.chunk_batches(chunk)
            return self._used(epoch, chunk) if state else 0

        chunks = range(first, plan.chunks, step)
        return [batches(chunk) if chunk < pointed else 0 for chunk in chunks]

    def _used(self, epoch: int, chunk: int) -> int:
        return int(self._board.get(f"used/{epoch}/{chunk}") or 0)

    def _take(self, epoch: int, chunk: int, before: str) -> Lease | None:
        """Lease a chunk whose state is ``before``. Returns None if the state has changed."""
        issue = int(before.partition("#")[2] or 0) + 1
        first = self._used(epoch, chunk) if before else 0
        lease = Lease(self.plan(epoch), chunk, f"{self._worker}#{issue}", first)
        self._owned[epoch, chunk] = lease
        self._write_held()
        if self._board.compare_set(f"lease/{epoch}/{chunk}", before, lease.state) == lease.state:
            return lease
        del self._owned[epoch, chunk]
        return None

    def _write_held(self, pointing: tuple[int, int] | None = None) -> None:
        held = _Held(sorted(self._owned), pointing)
        self._board.put(f"held/{self._worker}", json.dumps(vars(held)))
