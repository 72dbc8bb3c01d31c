"""Exchange of averaged slices between the processes of a node, if each holds the whole model."""

from collections.abc import Sequence

import torch

from offbeat.averaging.flat import Slice
from offbeat.transport.communicator import Communicator


def exchange_shares(
    inside: Communicator, slices_of: Sequence[Sequence[Sequence[Slice]]], parts: Sequence[int]
) -> None:
    """Give this process's share of some parts to the others of the node, and receive theirs.

    A collective of the node; blocks. Afterwards the models are equal in all bits.

    Args:
        inside: Communicator between the processes of this node.
        slices_of: ``slices_of[process][part]`` are the slices that a process of this node averages,
            as views of this process's model.
        parts: Indices of the parts.
    """
    shares = [[piece for part in parts for piece in own[part]] for own in slices_of]
    # Slices of one dtype have different lengths on the processes, and a process may have none.
    kinds = {
        (each.space.x.stored_dtype, each.space.x.device): None for share in shares for each in share
    }
    for dtype, device in kinds:
        of_kind = [
            [s for s in share if (s.space.x.stored_dtype, s.space.x.device) == (dtype, device)]
            for share in shares
        ]
        longest = max(sum(map(len, share)) for share in of_kind)
        sent = torch.zeros(longest, dtype=dtype, device=device)
        own = of_kind[inside.rank]
        for piece, values in zip(own, _split(sent, own), strict=True):
            piece.space.x.read(piece.start, values)
        what = f"shares of part {', '.join(map(str, parts))}"
        received = inside.gather(sent, what=what).wait()
        for rank, (share, values) in enumerate(zip(of_kind, received, strict=True)):
            if rank != inside.rank:
                for piece, numbers in zip(share, _split(values, share), strict=True):
                    piece.space.x.write(piece.start, numbers)


def _split(values: torch.Tensor, slices: Sequence[Slice]) -> list[torch.Tensor]:
    lengths = [len(each) for each in slices]
    return list(values[: sum(lengths)].split(lengths)) if lengths else []
