"""The command line ``offbeat``: runs a command, and turns errors and signals into exit codes.

The commands are declared in ``commands.py``. If the extra ``lab`` is installed, the laboratory
(``offbeat_lab``) adds its commands.
"""

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

try:
    import typer
except ImportError:
    sys.stderr.write("the command line needs typer and rich: pip install 'offbeat[cli]'\n")
    raise SystemExit(2) from None

import offbeat
from offbeat.cli.command import Command
from offbeat.cli.commands import COMMANDS
from offbeat.errors import OffbeatError

_HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
_OF_LABORATORY = ("compare", "report", "recipes")

app = typer.Typer(
    context_settings=_HELP_FLAGS,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train PyTorch models data-parallel on slow networks without waiting for them.",
)
# The names of package and extra are text: the library does not depend on the laboratory.
commands = COMMANDS
_has_laboratory = all(map(importlib.util.find_spec, ("offbeat_lab", "jinja2", "matplotlib")))
if _has_laboratory:
    commands = (*importlib.import_module("offbeat_lab.cli.commands").COMMANDS, *COMMANDS)
for command in commands:
    # What follows the first argument of `run` is for its script. Other commands have options there.
    interspersed = command.__name__ != "run"
    settings = {**_HELP_FLAGS, "allow_interspersed_args": interspersed}
    app.command(cls=Command, context_settings=settings)(command)

INTERRUPTED = "interrupted: the run ends; a second signal ends it at once"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the ``offbeat`` command.

    Exit code: 0 for success, 1 for a failed run, 2 for wrong arguments, 130 for Ctrl-C, 143 for
    SIGTERM.

    The first Ctrl-C or SIGTERM is answered at once. It ends the run in an orderly way: all workers
    end, and the network namespaces of ``--bandwidth`` are removed. This can take seconds.

    A second signal ends this process at once. On Linux the kernel then ends the workers. The next
    run with ``--bandwidth`` removes the namespaces that are left.
    """
    handled = [signal.SIGTERM]
    # A background job of a shell script ignores SIGINT, and must continue to ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handled.append(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for handled_number in handled:
            signal.signal(handled_number, _exit_at_once)
        with contextlib.suppress(OSError, RuntimeError):  # it may have interrupted a write
            sys.stderr.write(f"{INTERRUPTED}\n")
        raise KeyboardInterrupt if number == signal.SIGINT else _Terminated

    for number in handled:
        signal.signal(number, interrupt)
    _run()


def _run() -> NoReturn:
    if not _has_laboratory and sys.argv[1:2] and sys.argv[1] in _OF_LABORATORY:
        _fail(f"error: `offbeat {sys.argv[1]}` needs the extra lab: pip install 'offbeat[lab]'", 2)
    try:
        status = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except _Terminated:
        raise SystemExit(143) from None
    except OffbeatError as error:
        _fail(f"error: {error}", 1)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        _fail(f"error: {error}", 2)
    except OSError as error:
        if error.filename is None:
            _fail(f"error: {error}", 1)
        _fail(f"error: {error.filename}: {error.strerror}", 2)
    except OverflowError as error:
        _fail(f"error: a number is too large to compute with: {error}", 2)
    except Exception as error:
        format_message = getattr(error, "format_message", None)  # typer's errors in arguments
        if format_message is None:
            raise
        if not format_message():  # without a command, typer has printed the help
            raise SystemExit(2) from None
        _fail(f"error: {format_message()}", 2)
    raise SystemExit(status)  # typer catches Ctrl-C and returns 130


class _Terminated(BaseException):
    """Raised by SIGTERM, so that ``finally`` blocks end workers and remove namespaces."""


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(message, err=True)
    raise SystemExit(status) from None
