"""Implementation of the command ``plan``."""

import json
from typing import Any

from offbeat.cli.view import console, print_narrow_table
from offbeat.plan import plan as make_plan

_SPEED_UP = (
    "The speed-up counts steps, not the time to a metric: a strategy may need more steps than "
    "another to reach the same metric."
)


def plan(*, strategy: list[str] | None, as_json: bool, **setting: Any) -> None:
    """Predict the time of a step under each strategy, and recommend one."""
    answer = make_plan(strategies=strategy or None, **setting)
    if as_json:
        console.print_json(json.dumps(answer.to_dict()))
        return
    print_narrow_table(answer.table())
    console.print(f"{_SPEED_UP}\n", style="dim", highlight=False)
    for line in answer.advice():
        console.print(line, highlight=False)
