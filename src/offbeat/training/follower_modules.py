"""Follower modules, such as an average of the weights (EMA): averaged only in a consensus."""

from collections.abc import Sequence

from torch import Tensor, nn

from offbeat.averaging import Replica
from offbeat.averaging.exact_mean import ExactMean
from offbeat.errors import AttachError
from offbeat.training.compatibility import require_usable
from offbeat.training.consistency import copy_rank_0, require_consistency
from offbeat.transport.team import Team


class FollowerModules:
    """The follower modules of an attached model.

    All workers start from rank 0's modules. Each worker then changes its own, and every consensus
    averages them with equal weights.

    Args:
        team: The workers.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._modules: list[nn.Module] = []
        self._use([])

    def _use(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        together = nn.ModuleList(modules)
        self._replica = Replica(together, together.parameters())
        self._mean = ExactMean(self._team, self._replica)

    def check(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Raise unless ``modules`` can be added. Sends nothing.

        Args:
            model: The attached model.
            modules: The new follower modules.

        Raises:
            TypeError: one is not a module.
            AttachError: one shares tensors with the model, or cannot be written in place.
        """
        if not all(isinstance(m, nn.Module) for m in modules):
            raise TypeError(f"follow() takes modules, got {modules!r}")
        known = (model, *self._modules)
        known_tensors = {id(t) for m in known for t in (*m.parameters(), *m.buffers())}
        for module in modules:
            require_usable(module)
            if not known_tensors.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
                raise AttachError(
                    f"the follower {type(module).__name__} shares tensors with the model, which is "
                    "averaged already: give only modules with tensors of their own"
                )

    def add(self, modules: Sequence[nn.Module]) -> None:
        """Add ``modules`` and copy rank 0's values of them to all workers. A collective.

        Raises:
            MismatchError: another worker gave other modules.
        """
        together = nn.ModuleList(modules)
        new = Replica(together, together.parameters())
        require_consistency(self._team.everyone, [f"follower {line}" for line in new.describe()])
        copy_rank_0(self._team, new.everything())
        self._use([*self._modules, *modules])

    def average(self, *, final: bool) -> None:
        """Replace the modules by their mean over the workers. A collective.

        Args:
            final: True if the mean is permanent. The modules are then written only after the whole
                mean has arrived.
        """
        size = self._team.size
        if size == 1 or not self._replica.everything():
            return
        what = f"{'final mean' if final else 'consensus'} of the followers"
        if final:
            self._mean.average(1.0, size, what=what)
        else:
            self._mean.show(1.0, size, what=what)
        copy_rank_0(self._team, self._replica.other_buffers())

    def snapshot(self) -> list[Tensor]:
        """Return a copy of all tensors of the modules."""
        return self._replica.snapshot()

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Write the values of ``snapshot`` back into the modules."""
        self._replica.restore(snapshot)
