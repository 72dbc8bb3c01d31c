"""Streams of the double of a GPU (``gpu.py``), and a check that no two of them race.

The double executes each operation at once. A GPU executes the operations of a stream in order, and
those of different streams in any order that events and waits of the host allow. So every stream has
a *vector clock*: for each stream, how many of its operations end before its next one. Two
operations on the same memory, one of which writes, must be ordered by these clocks.

Memory belongs to the stream on which it was allocated. When it is freed, the next allocation on
this stream gets it. So its last uses on other streams must come before what the stream does next,
or be known to the allocator (``record_stream``).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Clock = dict[int, int]  # index of a stream → number of its operations that have ended


def join(clock: Clock, other: Clock) -> None:
    """Add what ``other`` knows to ``clock``."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Event:
    """What a stream had done when the event was recorded."""

    def __init__(self, clock: Clock) -> None:
        self.clock = dict(clock)

    def query(self) -> bool:
        """Return True: the double executes everything at once."""
        return True


class Stream:
    """A stream of the double."""

    def __init__(self, streams: "Streams", device: Any = None) -> None:
        self.device, self.index = device, len(streams.all)
        self.clock: Clock = {self.index: 0}
        streams.all.append(self)

    def record_event(self) -> Event:
        """Return an event after all operations so far."""
        return Event(self.clock)

    def wait_event(self, event: Event) -> None:
        """Let all later operations wait for an event."""
        join(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        """Let all later operations wait for those of another stream so far."""
        join(self.clock, other.clock)


class _Memory:
    """A storage, and its last uses: each is (stream, number of the operation, place)."""

    def __init__(self, tensor: Tensor, owner: Stream) -> None:
        self.reference = StorageWeakRef(tensor.untyped_storage())
        self.owner, self.recorded = owner, {owner.index}
        self.write: tuple[int, int, str] | None = None
        self.reads: dict[int, tuple[int, int, str]] = {}

    def uses(self) -> Iterator[tuple[int, int, str]]:
        """Yield the last uses."""
        yield from self.reads.values()
        if self.write is not None:
            yield self.write


class Streams:
    """All streams of the double.

    Attributes:
        all: The streams. The first one is the default of all threads.
        races: A text for each race.
    """

    def __init__(self) -> None:
        self.all: list[Stream] = []
        self.races: list[str] = []
        self._default = Stream(self)
        self._current = threading.local()
        self._memories: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []
        self._lock = threading.RLock()

    def current(self, device: Any = None) -> Stream:
        """Return the current stream of this thread."""
        stream: Stream = getattr(self._current, "stream", self._default)
        return stream

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Make ``stream`` the current one of this thread; None changes nothing."""
        before = self.current()
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def _host(self) -> Clock:
        """Return what this thread has waited for."""
        clock: Clock = self._current.__dict__.setdefault("host", {})
        return clock

    def host_waits(self, *, everything: bool = False) -> None:
        """Note that this thread has waited for its current stream, or for all."""
        with self._lock:
            for stream in self.all if everything else [self.current()]:
                join(self._host(), stream.clock)

    def allocate(self, tensor: Tensor) -> None:
        """Note that ``tensor`` was allocated on the current stream of this thread."""
        with self._lock:
            self._memory_of(tensor)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Note that the allocator knows of the uses of ``tensor`` on ``stream``."""
        with self._lock:
            self._memory_of(tensor).recorded.add(stream.index)

    def operation(self, reads: list[Tensor], writes: list[Tensor], place: str) -> None:
        """Note an operation on the current stream of this thread."""
        with self._lock:
            stream = self.current()
            join(stream.clock, self._host())
            self._check_freed(stream)
            stream.clock[stream.index] += 1
            use = stream.index, stream.clock[stream.index], place
            for tensor in reads:
                memory = self._memory_of(tensor)
                self._require(stream, [memory.write] if memory.write else [], use)
                memory.reads[stream.index] = use
            for tensor in writes:
                memory = self._memory_of(tensor)
                self._require(stream, [*memory.uses()], use)
                memory.write, memory.reads = use, {}

    def _memory_of(self, tensor: Tensor) -> _Memory:
        pointer = tensor.untyped_storage().data_ptr()
        memory = self._memories.get(pointer)
        if memory is not None and memory.reference.expired():
            self._freed.append(memory)
            memory = None
        if memory is None:
            memory = self._memories[pointer] = _Memory(tensor, self.current())
        return memory

    def _require(self, stream: Stream, uses: list[Any], use: tuple[int, int, str]) -> None:
        for other, number, place in uses:
            if stream.clock.get(other, 0) < number:
                self.races.append(f"{use[2]} on stream {use[0]} does not wait for {place}")

    def _check_freed(self, stream: Stream) -> None:
        """Check the memory that ``stream`` may get for the operation that it begins."""
        for pointer, memory in [*self._memories.items()]:
            if memory.reference.expired():
                self._freed.append(self._memories.pop(pointer))
        for memory in [each for each in self._freed if each.owner is stream]:
            self._freed.remove(memory)
            uses = [use for use in memory.uses() if use[0] not in memory.recorded]
            self._require(stream, uses, (stream.index, 0, "the next owner of the memory"))
