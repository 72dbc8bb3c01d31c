"""Events as lines of JSON."""

import pytest

from offbeat import Stats
from offbeat_lab.events import (
    End,
    Evaluation,
    Event,
    Start,
    Step,
    Waiting,
    from_json,
    to_json,
)

STATS = Stats(4, 1, 8, 0.5, 1.5, details={"flags": 2})
EVENTS: list[Event] = [
    Start(12, 400),
    Step(3, 0.25, 0.125, 800),
    Step(3, 0.25, loss=1.5),
    Evaluation(4, 0.5, 0.75, {"accuracy": 0.75, "loss": 1.5}),
    Waiting("evaluating"),
    End((), 0.25),
    End((STATS,)),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_read_from_its_line(event: Event) -> None:
    text = to_json(event)
    assert "\n" not in text
    assert from_json(text.encode()) == event
