"""Implementation of the command ``plan``: predicts the time of a training step."""

import json
from typing import Any

from offbeat.cli.view import console, print_narrow_table
from offbeat.display.table import Table
from offbeat.plan import Plan
from offbeat.plan import plan as make_plan
from offbeat.plan.result import SPEED_UP_MEANS

_MOST_WORKERS = 10_000


def plan(*, workers: int, strategy: list[str] | None, as_json: bool, **question: Any) -> None:
    """Predict the time of a step under each strategy, and recommend one."""
    if workers > _MOST_WORKERS:
        raise ValueError(f"workers must be at most {_MOST_WORKERS:,}, got {workers}")
    strategies = strategy or []
    repeated = {text for text in strategies if strategies.count(text) > 1}
    if repeated:
        raise ValueError(f"{min(repeated)!r} is given twice")
    answer = make_plan(workers=workers, strategies=strategy, **question)
    if as_json:
        console.print_json(json.dumps(answer.to_dict()))
    else:
        _print_plan(answer)


def _print_plan(answer: Plan) -> None:
    table = answer.table()
    figures = tuple(row[:-1] for row in table.rows)  # the notes are too long for a column
    print_narrow_table(Table(table.headings[:-1], figures, table.caption))
    for row in table.rows:
        console.print(f"{row[0]}: {row[-1]}", style="dim", highlight=False)
    console.print(f"\n{SPEED_UP_MEANS}", style="dim", highlight=False)
    advice = f"Try {answer.recommendation.strategy} first: {answer.reason}."
    console.print(f"\n{advice}", highlight=False)
