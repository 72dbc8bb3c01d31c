"""How commands are declared, those of the laboratory included."""

import importlib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ParamSpec

import typer.core

from offbeat.strategies.registry import STRATEGIES

Options = ParamSpec("Options")


def implemented_in(module: str) -> Callable[[Callable[Options, None]], Callable[Options, None]]:
    """Return a decorator that makes a command call its implementation.

    The decorated function only declares a command: its options and help text. The implementation
    is the function with the same name in ``module``, which is imported when the command runs. Help
    and shell completion are fast this way, because they do not import torch.

    Args:
        module: Name of the module in full.
    """

    def decorate(function: Callable[Options, None]) -> Callable[Options, None]:
        @wraps(function)
        def command(*args: Options.args, **values: Options.kwargs) -> None:
            implementation = importlib.import_module(module)
            getattr(implementation, function.__name__)(*args, **values)

        return command

    return decorate


def complete_strategy(incomplete: str) -> Iterable[str]:
    """Return the names of strategies that begin with ``incomplete``, for the shell."""
    return [name for name in STRATEGIES if name.startswith(incomplete)]


class Command(typer.core.TyperCommand):
    """A command that refuses an option given twice. Typer would ignore all values but the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ValueError if an option with a single value is repeated."""
        if not ctx.resilient_parsing:  # not while a shell completes the line
            _, _, given = self.make_parser(ctx).parse_args(args=[*args])
            for parameter in given:
                if given.count(parameter) > 1 and not parameter.multiple:
                    raise ValueError(f"{parameter.opts[0]} is given twice: give it once")
        return super().parse_args(ctx, args)
