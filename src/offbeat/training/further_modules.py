"""Further modules that a consensus averages: ``consensus(also=…)`` and ``finish(also=…)``.

An example is a moving average (EMA) of the weights. The consensus averages all parameters of these
modules, also frozen ones, with equal weights. It combines their buffers as those of the model.
"""

from collections.abc import Sequence

from torch import nn

from offbeat.averaging import Replica, Worker
from offbeat.averaging.votes import ALSO, Vote
from offbeat.errors import AttachError, MismatchError
from offbeat.training.checks.compatibility import require_usable


def tensors_of(also: Sequence[nn.Module], model: Replica, call: str, *, sharded: bool) -> Replica:
    """Return the tensors of the modules ``also``.

    The modules may share tensors with each other. A shared tensor is averaged once.

    Args:
        also: The modules.
        model: The model that is trained.
        call: Name of the public call, such as "finish".
        sharded: True if ``fully_shard`` has divided the model.

    Raises:
        TypeError: ``also`` is not a list of modules.
        AttachError: a module shares tensors with the model, a tensor cannot be written in place, or
            ``sharded`` is set.
    """
    modules = [] if isinstance(also, nn.Module) else list(also)
    if isinstance(also, nn.Module) or not all(isinstance(m, nn.Module) for m in modules):
        got = type(also).__name__ + "".join(f" of {type(m).__name__}" for m in modules[:1])
        raise TypeError(f"{call}(also=…) takes a list of modules such as [ema], got a {got}")
    if modules and sharded:
        raise AttachError(
            f"{call}(also=…) with a model that fully_shard has divided: no worker holds the "
            "modules whole; leave also out"
        )
    container = nn.ModuleList(modules)
    require_usable(container)
    tensors = Replica(container, container.parameters())
    known = {id(t) for t in model.everything()}
    if not known.isdisjoint(map(id, tensors.everything())):
        raise AttachError(
            f"{call}(also=…): a module shares tensors with the model, which is averaged already; "
            "give only modules with tensors of their own"
        )
    return tensors


def agree_on_modules(worker: Worker, sums: Vote, also: Replica, *, finishing: bool) -> bool:
    """Compare the modules ``also`` before a consensus. A collective if a worker has modules.

    ``sums`` is the sum of the votes of the last round. ``finishing`` is True if this worker
    ends training. It then takes part in a consensus without modules, although it has given some
    to ``finish``. Returns True if the modules are averaged.

    Raises:
        MismatchError: the modules of two workers differ. Raised on all workers.
    """
    if not sums.has(ALSO):
        return False
    own, what = [finishing, also.describe()], "comparison of the modules"
    reports = worker.team.everyone.gather_values(own, what=what)
    modules = [each for _, each in reports]
    asking = [each for ended, each in reports if not ended] or modules
    given: list[str] = next((each for each in asking if each), [])
    differing = [rank for rank, each in enumerate(modules) if each != given]
    if given and differing:
        rank, first = differing[0], modules.index(given)
        raise MismatchError(
            f"rank {rank} has other modules in consensus(also=…) or finish(also=…) than rank "
            f"{first}: give modules with equal names and shapes to both calls on every rank"
        )
    return bool(given)
