"""The wire: the precision at which the workers send."""

from typing import get_args

from offbeat.arguments import Precision as Precision
from offbeat.arguments import require_choice
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.kernels import kernels
from offbeat.transport.communicator import Communicator
from offbeat.transport.team import Team


def require_precision(precision: object) -> None:
    """Raise ValueError if ``precision`` is not the name of a precision."""
    require_choice("wire", precision, get_args(Precision))


class Wire:
    """Precision of the messages between the workers, and the communicator of quantized sums.

    The constructor is a collective, unless ``precision`` is "float32" or there is one worker.

    Args:
        team: The workers.
        precision: "float32" sends tensors unchanged. "int8", "int4" and "int2" quantize them.

    Attributes:
        team: The workers.
        precision: The precision.
        duplicate: Communicator of the second stages of sums (``message.py``). None if ``exact``.
    """

    def __init__(self, team: Team, precision: Precision = "float32") -> None:
        require_precision(precision)
        self.team, self.precision = team, precision
        self.duplicate: Communicator | None = None
        if not self.exact:
            kernels()  # compile now, not in the first step
            self.duplicate = team.communicator.duplicate()

    @property
    def exact(self) -> bool:
        """True if no message is quantized: at float32, or with a single worker."""
        return self.precision == "float32" or self.team.size == 1

    def saves(self, elements: int, itemsize: int) -> bool:
        """Return True if a tensor needs fewer bytes padded to whole blocks and quantized."""
        if self.exact:
            return False
        blocks = self.team.size * -(-elements // (BLOCK * self.team.size))
        return blocks * CODECS[self.precision].block_bytes < elements * itemsize
