"""Implementation of the command ``plan``."""

import json
from typing import Any

from offbeat.cli.options import USUAL_LATENCY, USUAL_WORKERS, PlanOptions
from offbeat.cli.view import console, print_narrow_table
from offbeat.plan import plan as make_plan

_MOST_WORKERS = 10_000
_SPEED_UP = (
    "The speed-up counts steps, not the time to a metric: a strategy may need more steps than "
    "another to reach the same metric."
)


def plan(options: PlanOptions) -> None:
    """Predict the time of a step under each strategy, and recommend one."""
    given: dict[str, Any] = vars(options) | {}
    as_json = given.pop("as_json")
    for name, example in (("parameters", "25M"), ("step_time", "120ms"), ("bandwidth", "5Gbit/s")):
        if given[name] is None:
            raise ValueError(f"plan needs --{name.replace('_', '-')}, like {example}")
    given["workers"] = USUAL_WORKERS if options.workers is None else options.workers
    given["latency"] = options.latency or USUAL_LATENCY
    given["strategies"] = options.strategies or None
    if given["workers"] > _MOST_WORKERS:
        raise ValueError(f"workers must be at most {_MOST_WORKERS:,}, got {options.workers}")
    answer = make_plan(**given)
    if as_json:
        console.print_json(json.dumps(answer.to_dict()))
        return
    print_narrow_table(answer.table())
    console.print(f"{_SPEED_UP}\n", style="dim", highlight=False)
    for line in answer.advice():
        console.print(line, highlight=False)
