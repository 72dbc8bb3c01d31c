"""What is left of the epochs in progress, for a checkpoint from which any workers can continue."""

import json
from collections.abc import Mapping

from offbeat.data.leasing.leases import Leases
from offbeat.data.leasing.plan import Plan, Range
from offbeat.data.leasing.prefetch import Prefetch
from offbeat.transport.team import Team


def gather_left(
    team: Team,
    leases: Leases,
    prefetch: Prefetch,
    used: Mapping[tuple[int, int], int],
    epoch: int,
) -> tuple[int, dict[int, list[Range]]]:
    """Return what no worker has trained on. A collective.

    Args:
        team: The workers.
        leases: The leases of this worker.
        prefetch: The background activity of this worker, which is settled.
        used: For each chunk that this worker has not acknowledged, given by its epoch and its
            number: the number of batches that this worker has trained on.
        epoch: Newest epoch of which this worker may have trained on batches.

    Returns:
        The epoch from which to continue, and the positions that are left, by epoch. No worker has
        begun epochs that are later than these.
    """
    own = {
        "used": [[*chunk, count] for chunk, count in used.items()],
        "epochs": [min([epoch, *leases.unfinished_epochs]), epoch],
    }
    with team.account.paused():
        reports = [json.loads(text) for text in _gather(team, own, "data in use")]
        epochs = range(
            min(report["epochs"][0] for report in reports),
            max(report["epochs"][1] for report in reports) + 1,
        )

        def read() -> list[tuple[Plan, list[int]]]:
            return [(leases.plan(e), leases.done(e, team.rank, team.size)) for e in epochs]

        # Each worker reads a part of the chunks.
        plans, own_done = zip(*prefetch.call(read), strict=True)
        done = [json.loads(text) for text in _gather(team, own_done, "data that is done")]
    left: dict[int, list[Range]] = {}
    for plan, *parts in zip(plans, *done, strict=True):
        counts = [0] * plan.chunks
        for rank, part in enumerate(parts):
            counts[rank :: team.size] = part
        for report in reports:
            for number, chunk, count in report["used"]:
                if number == plan.epoch:
                    counts[chunk] = max(counts[chunk], count)
        left[plan.epoch] = plan.left(counts)
    return min((epoch for epoch in epochs if left[epoch]), default=epochs[-1]), left


def _gather(team: Team, value: object, what: str) -> list[str]:
    payload = json.dumps(value).encode()
    return [text.decode() for text in team.communicator.gather_bytes(payload, what=what)]
