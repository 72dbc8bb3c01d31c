"""The averager: memory of messages."""

import gc
import weakref

import pytest

from loops import attach, sgd
from offbeat.averaging.averager import Averager, Flight
from problems import make_wide, wide_step
from worlds import simulated


@pytest.mark.parametrize("wire", ["float32", "int2"])
@pytest.mark.parametrize("text", ["streaming:parts=2", "diloco:period=2,fragments=2,overlap=1"])
def test_a_message_is_freed_when_it_has_landed(
    text: str, wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without garbage collection, so it is in no cycle of references."""
    flights: list[weakref.ref[Flight]] = []
    land = Averager.finish_landing

    def finish_landing(self: Averager, flight: Flight, *, take: bool = True) -> None:
        land(self, flight, take=take)
        flights.append(weakref.ref(flight))

    def train(rank: int, size: int) -> int:
        model = make_wide(seed=rank)
        optimizer = sgd(model)
        with attach(model, optimizer, text, wire=wire):
            for step in range(12):
                wide_step(model, optimizer, rank, step)
            return sum(flight() is not None for flight in flights)

    monkeypatch.setattr(Averager, "finish_landing", finish_landing)
    gc.disable()
    try:
        kept = simulated(train, workers=2)
    finally:
        gc.enable()
    assert len(flights) > 10
    assert max(kept) <= 2, "each worker may land one now"
