"""How sums travel: as they are, or quantised with error feedback."""

from typing import Any, Literal, get_args

from torch import Tensor

from offbeat.fabric.communicator import Communicator, Handle

Precision = Literal["float32", "bfloat16", "int8"]


class Wire:
    """Sums over the workers, at the precision chosen for the wire.

    Args:
        fabric: The communicator.
        precision: "float32" sends tensors as they are. "bfloat16" and "int8" quantise them.
    """

    def __init__(self, fabric: Communicator, precision: Precision = "float32") -> None:
        if precision not in get_args(Precision):
            allowed = ", ".join(f'"{p}"' for p in get_args(Precision))
            raise ValueError(f"wire must be one of {allowed}, got {precision!r}")
        self._fabric, self.precision = fabric, precision

    @property
    def exact(self) -> bool:
        """Whether tensors travel as they are."""
        return self.precision == "float32"

    def sum(self, tensor: Tensor, *, stream: str, what: str) -> Handle[Tensor]:
        """Start replacing the flat ``tensor`` by its sum over the workers.

        Args:
            tensor: 1-D, floating point, alike on all workers. For a lossy wire it should hold
                changes (gradients, updates), not values: the error is relative to them.
            stream: What is sent again and again under this name; the quantisation error of one
                time is added the next. The same on all workers.
            what: Names the operation in errors.
        """
        return self._fabric.sum(tensor, what=what)

    def state_dict(self) -> dict[str, Any]:
        """The errors not yet fed back, by stream."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
