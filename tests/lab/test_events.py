"""Events as lines of JSON."""

import json

import pytest

from offbeat import Stats
from offbeat.lab.events import (
    End,
    Evaluation,
    EvaluationCount,
    Event,
    Start,
    Step,
    Waiting,
    from_json,
    to_json,
)

STATS = Stats(4, 1, 8, 0.5, 1.5, details={"flags": 2})
LINES: list[tuple[Event, dict[str, object]]] = [
    (Start(12, 400), {"event": "start", "steps": 12, "model_bytes": 400}),
    (
        Step(3, 0.25, 0.125, 800),
        {
            **{"event": "step", "step": 3, "seconds": 0.25},
            **{"wait_seconds": 0.125, "payload_bytes": 800},
        },
    ),
    (
        Step(3, 0.25, loss=1.5),
        {
            **{"event": "step", "step": 3, "seconds": 0.25},
            **{"wait_seconds": 0.0, "payload_bytes": 0, "loss": 1.5},
        },
    ),
    (
        Evaluation(4, 0.5, 0.75, {"accuracy": 0.75, "loss": 1.5}),
        {
            **{"event": "evaluation", "step": 4, "seconds": 0.5},
            **{"metric": 0.75, "metrics": {"accuracy": 0.75, "loss": 1.5}, "finite": True},
        },
    ),
    (Waiting("evaluating"), {"event": "waiting", "what": "evaluating"}),
    (EvaluationCount(6, 1.5), {"event": "chosen", "evaluations": 6, "seconds": 1.5}),
    (End((), 0.25), {"event": "end", "stats": [], "step_seconds": 0.25}),
    (
        End((STATS,)),
        {
            "event": "end",
            "stats": [
                {
                    **{"steps": 4, "syncs": 1, "flags": 2, "payload_bytes": 8},
                    **{"wait_seconds": 0.5, "compute_seconds": 1.5, "details": {"flags": 2}},
                    **{"local_steps": 3, "lssr": 0.75, "idle": 0.25},
                }
            ],
        },
    ),
]


@pytest.mark.parametrize(("event", "line"), LINES)
def test_a_line_holds_the_whole_event(event: Event, line: dict[str, object]) -> None:
    """The line has stable keys, and reading it gives the same event."""
    text = to_json(event)
    assert "\n" not in text
    assert json.loads(text) == line
    assert from_json(text.encode()) == event
