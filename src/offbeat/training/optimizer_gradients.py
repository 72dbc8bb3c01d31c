"""The parameters and gradients of one attached optimizer, as ``Iteration`` sees them."""

import operator
from itertools import chain

from torch import Tensor

from offbeat.averaging import AttachedOptimizer
from offbeat.errors import AttachError
from offbeat.nodes.shards import unsharded

# Functions without a Python frame, for every step:
_parameters_of = operator.itemgetter("params")
_trains = operator.attrgetter("requires_grad")
_dtype_of = operator.attrgetter("dtype")

NOT_HANDLED = object()


class OptimizerGradients:
    """Notices if the training loop has replaced the gradients or the parameters of an optimizer.

    Attributes:
        handled: What ``newest`` returned directly after the gradients of this iteration were
            averaged or measured. ``NOT_HANDLED``: they have not been yet.
    """

    def __init__(self, attached: AttachedOptimizer) -> None:
        self._optimizer = attached.optimizer
        groups = attached.optimizer.param_groups
        self._held: list[Tensor] = [*chain.from_iterable(map(_parameters_of, groups))]
        self._dtypes = [*map(_dtype_of, self._held)]
        self._frozen = [p for p in self._held if not p.requires_grad]
        self._smallest_first = sorted(map(unsharded, attached.parameters), key=Tensor.numel)
        self.handled: object = NOT_HANDLED

    def newest(self) -> Tensor | None:
        """Return the gradient of the smallest parameter that has one."""
        for parameter in self._smallest_first:
            if parameter.grad is not None:
                return parameter.grad
        return None

    def require_trainable(self) -> None:
        """Raise AttachError if a step would be wrong.

        The optimizer has other parameters than at ``attach``, or a frozen one became trainable.
        """
        groups = self._optimizer.param_groups
        held: list[Tensor] = [*chain.from_iterable(map(_parameters_of, groups))]
        if len(held) != len(self._held) or not all(map(operator.is_, held, self._held)):
            raise AttachError(
                "parameters were added to the optimizer, removed or replaced after attach(): "
                "detach() and attach again so that all workers agree on what is averaged"
            )
        if [*map(_dtype_of, held)] != self._dtypes:
            raise AttachError(
                "parameters were converted to another dtype after attach(), so this worker would "
                "send messages of another size than the others: convert the model before attach()"
            )
        if any(map(_trains, self._frozen)):
            raise AttachError(
                "parameters that were frozen at attach() no longer are, and would not be averaged: "
                "detach() and attach again"
            )
