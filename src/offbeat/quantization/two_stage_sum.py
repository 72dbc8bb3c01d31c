"""A quantized sum over the workers in two stages.

1. All-to-all: each worker divides its blocks into one chunk per worker, and sends chunk k to worker
   k.
2. All-gather: worker k adds the received chunks in float32, quantizes the sum, and sends it to all
   workers.

So each number is quantized only twice, and all workers decode the same bytes. The quantization
errors of both stages are added to the next sum of the same tensor (error feedback).

A background thread starts the second stages, in the order in which the sums were started
(``transport/stages.py``). They run on a twin (a second communicator), so that their order is
independent of other collectives.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.quantization.base import Codec, pieces
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team


def start_two_stages(
    sent: Tensor,
    add_up: Callable[[Tensor], Tensor],
    team: Team,
    twin: Communicator,
    *,
    sum_bytes: int,
    what: str,
) -> Handle[Tensor]:
    """Start both stages of a sum.

    Args:
        sent: Bytes for each worker: uint8, [workers, bytes].
        add_up: Function that receives the bytes from all workers, [workers, bytes], and returns the
            bytes of this worker's chunk of the sum, 1-D. The background thread calls it.
        team: The workers.
        twin: Communicator of the second stages.
        sum_bytes: Number of bytes that ``add_up`` returns.
        what: Name of the operation in errors.

    Returns:
        Handle of the bytes of the sum: [workers, ``sum_bytes``], row k from worker k.
    """

    def start_second(received: Tensor) -> Handle[list[Tensor]]:
        return twin.gather(add_up(received.view(team.size, -1)), what=what)

    flat = sent.flatten()
    first = team.communicator.exchange(flat, what=what)
    # Count the second stage now, because the step in which it starts may vary.
    team.account.sent(sum_bytes)
    return team.stages.start(first, start_second, what=what, like=flat).then(torch.stack)


def add_chunks(received: Tensor, errors: Tensor, first: Codec, second: Codec, out: Tensor) -> None:
    """out ← Q(Σ received + errors);  errors ← the quantization errors.

    Args:
        received: Encoded chunk of each worker: [workers, blocks · bytes of a block].
        errors: float32, 1-D, as long as the chunk.
        first: Codec of ``received``.
        second: Codec of ``out``.
        out: [blocks, bytes of a block].
    """
    for rows, numbers in pieces(len(out), whole=not errors.is_cpu):
        part = errors[numbers]
        for chunk in received:
            first.add(chunk.view(-1, first.block_bytes)[rows], part)
        second.encode(part, out[rows])
