"""Exchange of averaged slices between the processes of a node, if each holds the whole model."""

from collections.abc import Sequence

import torch

from offbeat.averaging.flat import Slice
from offbeat.transport.team import Team


class Copies:
    """The equal models of the processes of a node, each of which averages a share of the model.

    Args:
        team: The workers. Each is a node.
        slices_of: ``slices_of[process][part]`` are the slices that a process of this node averages,
            as views of this process's model.
    """

    def __init__(self, team: Team, slices_of: Sequence[Sequence[Sequence[Slice]]]) -> None:
        assert team.node is not None
        self._inside, self._slices_of = team.node.inside, slices_of

    def share(self, parts: Sequence[int]) -> None:
        """Give this process's share of some parts to the others, and receive theirs.

        A collective of the node; blocks. Afterwards the models are equal in all bits.
        """
        shares = [[piece for part in parts for piece in own[part]] for own in self._slices_of]
        # Slices of one dtype have different lengths on the processes, and a process may have none.
        kinds = {
            (each.space.x.stored_dtype, each.space.x.device): None
            for share in shares
            for each in share
        }
        for dtype, device in kinds:
            of_kind = [
                [s for s in share if (s.space.x.stored_dtype, s.space.x.device) == (dtype, device)]
                for share in shares
            ]
            longest = max(sum(map(len, share)) for share in of_kind)
            sent = torch.zeros(longest, dtype=dtype, device=device)
            own = of_kind[self._inside.rank]
            for piece, values in zip(own, _split(sent, own), strict=True):
                piece.space.x.read(piece.start, values)
            what = f"shares of part {', '.join(map(str, parts))}"
            received = self._inside.gather(sent, what=what).wait()
            for rank, (share, values) in enumerate(zip(of_kind, received, strict=True)):
                if rank != self._inside.rank:
                    for piece, numbers in zip(share, _split(values, share), strict=True):
                        piece.space.x.write(piece.start, numbers)


def _split(values: torch.Tensor, slices: Sequence[Slice]) -> list[torch.Tensor]:
    lengths = [len(each) for each in slices]
    return list(values[: sum(lengths)].split(lengths)) if lengths else []
