"""Modules beside the attached model, such as its moving average: their mean, where it is wanted."""

from collections.abc import Sequence

from torch import Tensor, nn

from offbeat.errors import AttachError
from offbeat.fabric import Team, Wire
from offbeat.means import ModelMean, Replica
from offbeat.training.agreement import copy_rank_0
from offbeat.training.usable import require_usable


def require_beside(model: nn.Module, modules: Sequence[nn.Module]) -> None:
    """Raise unless ``modules`` can be averaged beside ``model``.

    Raises:
        TypeError: they are no list of modules.
        AttachError: one shares tensors with the model, or cannot be written in place.
    """
    if isinstance(modules, nn.Module) or not all(isinstance(m, nn.Module) for m in modules):
        raise TypeError(f"companions must be a list of modules, got {modules!r}")
    mine = {id(t) for t in (*model.parameters(), *model.buffers())}
    for module in modules:
        require_usable(module)
        if not mine.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
            raise AttachError(
                f"the companion {type(module).__name__} shares tensors with the model, which is "
                "averaged already: give only modules with tensors of their own"
            )


class Beside:
    """The modules beside a model: those of rank 0 at first, and their mean at a consensus.

    In between each worker's are its own. The mean counts all workers alike.

    Args:
        team: The workers.
        modules: As given to ``attach``.
    """

    def __init__(self, team: Team, modules: Sequence[nn.Module]) -> None:
        self._team = team
        together = nn.ModuleList(modules)
        self._replica = Replica(together, together.parameters())
        self._mean = ModelMean(team, self._replica, Wire(team, "float32"), referenced=False)

    def describe(self) -> list[str]:
        """What must be alike on all workers."""
        return [f"companion {line}" for line in self._replica.describe()]

    def begin(self) -> None:
        """All take rank 0's. A collective."""
        copy_rank_0(self._team, self._replica.everything())

    def average(self, *, final: bool) -> None:
        """All take the mean. A collective.

        Args:
            final: Whether it stays, so that nothing is written before all of it has come.
        """
        size = self._team.size
        if size == 1 or not self._replica.everything():
            return
        what = f"{'final mean' if final else 'consensus'} of the companions"
        if final:
            self._mean.average(1.0, size, exact=True, what=what)
        else:
            self._mean.look(1.0, size, what=what)
        copy_rank_0(self._team, self._replica.other_buffers())

    def snapshot(self) -> list[Tensor]:
        """A copy of everything."""
        return self._replica.snapshot()

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Put a ``snapshot`` back."""
        self._replica.restore(snapshot)
