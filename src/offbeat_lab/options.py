"""Options of the command line, declared as fields of a dataclass such as ``Job``."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from offbeat.extend import setting


class Panel(StrEnum):
    """Titles of the groups of options in the help of a command, in the order of the help."""

    TRAINED = "What is trained"
    STRATEGIES = "Strategies and their settings"
    WORKERS = "Workers and network"
    LIMITS = "Time limits"
    OUTPUT = "Output"


@dataclass(frozen=True)
class Option:
    """The command-line option of a dataclass field.

    Attributes:
        panel: Group of the option in the help.
        help: Help text, one sentence.
        flags: Flags such as ``--workers`` and ``-n``. Empty: one flag, made from the field's name.
        metavar: Placeholder of the value in the help. Empty: the type of the value.
        unset: Text that the help shows in place of a default that is None.
        is_path: True if the value is a path.
        names: Function that returns the names to complete in a shell. None: as the type has it.
    """

    panel: Panel
    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    unset: str = ""
    is_path: bool = False
    names: Callable[[], Iterable[str]] | None = None

    def flag(self, name: str) -> str:
        """Return the long flag of the field ``name``."""
        return self.flags[0] if self.flags else f"--{name.replace('_', '-')}"


def option(
    panel: Panel,
    help: str,
    *flags: str,
    default: Any = None,
    metavar: str = "",
    unset: str = "",
    is_path: bool = False,
    names: Callable[[], Iterable[str]] | None = None,
    least: int | None = None,
    above: float | None = None,
) -> Any:
    """Return a dataclass field that is also a command-line option.

    The arguments are the attributes of ``Option``, the default, and the range of the value:
    ``least`` ≤ value, ``above`` < value.
    """
    declared = Option(panel, help, flags, metavar, unset, is_path, names)
    metadata: dict[str, Any] = {"option": declared}
    if flags:
        metadata["label"] = flags[0].removeprefix("--")
    return setting(default, least=least, above=above, metadata=metadata)


def option_of(field: "dataclasses.Field[Any]") -> Option | None:
    """Return the command-line option of a dataclass field; None if the field has no option."""
    return field.metadata.get("option")
