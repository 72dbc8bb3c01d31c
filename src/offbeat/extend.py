"""Public names for authors of strategies, transports and tools, beyond those of ``offbeat``.

``docs/extending.md`` describes them. ``offbeat_lab`` uses these names, those of ``offbeat`` and of
``offbeat.data``, and nothing else of Offbeat. They may change in a minor version.

The first use of a name imports its module, so tools can show their help without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "offbeat.arguments": "POSITIVE Precision Range check_settings did_you_mean require_integer "
    "require_number setting types_of",
    "offbeat.units": "show_bandwidth show_bytes show_seconds to_bandwidth to_seconds",
    "offbeat": "import_lazily",
    "offbeat.display.table": "Table",
    "offbeat.display.plots": "new_figure",
    "offbeat.strategies.base": "CustomFlow Gradients GlobalModel Outer SummedVotes WorkerView "
    "common local transient",
    "offbeat.strategies.registry": "STRATEGIES read_settings",
    "offbeat.transport.communicator": "Communicator",
    "offbeat.transport.future": "Completed Future Operation explained",
    "offbeat.transport.host": "Promise",
    "offbeat.transport.team": "Team",
    "offbeat.transport.connect": "open_communicator",
    "offbeat.simulate": "Join Kill",
    "offbeat.averaging.flat": "Flat as_real make_flats staging_dtype",
    "offbeat.averaging.flow": "Flow",
    "offbeat.averaging.gradient_flow": "GradientFlow GradientFlowState",
    "offbeat.averaging.gradients": "GradientMean",
    "offbeat.averaging.averager": "RoundAverager",
    "offbeat.averaging.norm": "squared_norm",
    "offbeat.quantization.message": "All Message Section",
    "offbeat.averaging.replica": "Replica",
    "offbeat.averaging.votes": "Round Vote",
    "offbeat.averaging.worker": "AttachedOptimizer Worker",
    "offbeat.training.checks.compatibility": "require_abilities require_timeout",
    "offbeat.training.learning_rate.adam_correction": "require_correctable",
    "offbeat.synchronizer": "clock_of snapshot_of",
    "offbeat.cli.command": "implemented_in",
    "offbeat.cli.view": "console print_narrow_table print_table",
    "offbeat.cli.lists": "print_kinds",
}
"""Module → the public names that it defines."""

__all__ = [name for names in _NAMES.values() for name in names.split()]

if TYPE_CHECKING:
    from offbeat import import_lazily as import_lazily
    from offbeat.arguments import POSITIVE as POSITIVE
    from offbeat.arguments import Precision as Precision
    from offbeat.arguments import Range as Range
    from offbeat.arguments import check_settings as check_settings
    from offbeat.arguments import did_you_mean as did_you_mean
    from offbeat.arguments import require_integer as require_integer
    from offbeat.arguments import require_number as require_number
    from offbeat.arguments import setting as setting
    from offbeat.arguments import types_of as types_of
    from offbeat.averaging.averager import RoundAverager as RoundAverager
    from offbeat.averaging.flat import Flat as Flat
    from offbeat.averaging.flat import as_real as as_real
    from offbeat.averaging.flat import make_flats as make_flats
    from offbeat.averaging.flat import staging_dtype as staging_dtype
    from offbeat.averaging.flow import Flow as Flow
    from offbeat.averaging.gradient_flow import GradientFlow as GradientFlow
    from offbeat.averaging.gradient_flow import GradientFlowState as GradientFlowState
    from offbeat.averaging.gradients import GradientMean as GradientMean
    from offbeat.averaging.norm import squared_norm as squared_norm
    from offbeat.averaging.replica import Replica as Replica
    from offbeat.averaging.votes import Round as Round
    from offbeat.averaging.votes import Vote as Vote
    from offbeat.averaging.worker import AttachedOptimizer as AttachedOptimizer
    from offbeat.averaging.worker import Worker as Worker
    from offbeat.cli.command import implemented_in as implemented_in
    from offbeat.cli.lists import print_kinds as print_kinds
    from offbeat.cli.view import console as console
    from offbeat.cli.view import print_narrow_table as print_narrow_table
    from offbeat.cli.view import print_table as print_table
    from offbeat.display.plots import new_figure as new_figure
    from offbeat.display.table import Table as Table
    from offbeat.quantization.message import All as All
    from offbeat.quantization.message import Message as Message
    from offbeat.quantization.message import Section as Section
    from offbeat.simulate import Join as Join
    from offbeat.simulate import Kill as Kill
    from offbeat.strategies.base import CustomFlow as CustomFlow
    from offbeat.strategies.base import GlobalModel as GlobalModel
    from offbeat.strategies.base import Gradients as Gradients
    from offbeat.strategies.base import Outer as Outer
    from offbeat.strategies.base import SummedVotes as SummedVotes
    from offbeat.strategies.base import WorkerView as WorkerView
    from offbeat.strategies.base import common as common
    from offbeat.strategies.base import local as local
    from offbeat.strategies.base import transient as transient
    from offbeat.strategies.registry import STRATEGIES as STRATEGIES
    from offbeat.strategies.registry import read_settings as read_settings
    from offbeat.synchronizer import clock_of as clock_of
    from offbeat.synchronizer import snapshot_of as snapshot_of
    from offbeat.training.checks.compatibility import require_abilities as require_abilities
    from offbeat.training.checks.compatibility import require_timeout as require_timeout
    from offbeat.training.learning_rate.adam_correction import (
        require_correctable as require_correctable,
    )
    from offbeat.transport.communicator import Communicator as Communicator
    from offbeat.transport.connect import open_communicator as open_communicator
    from offbeat.transport.future import Completed as Completed
    from offbeat.transport.future import Future as Future
    from offbeat.transport.future import Operation as Operation
    from offbeat.transport.future import explained as explained
    from offbeat.transport.host import Promise as Promise
    from offbeat.transport.team import Team as Team
    from offbeat.units import show_bandwidth as show_bandwidth
    from offbeat.units import show_bytes as show_bytes
    from offbeat.units import show_seconds as show_seconds
    from offbeat.units import to_bandwidth as to_bandwidth
    from offbeat.units import to_seconds as to_seconds
else:

    def __getattr__(name: str) -> Any:
        for module, names in _NAMES.items():
            if name in names.split():
                value = globals()[name] = getattr(import_module(module), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
