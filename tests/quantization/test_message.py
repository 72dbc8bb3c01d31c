"""Messages of several sections: sums, votes, bytes and error feedback.

The reference quantizes each section with the codecs, which ``test_codecs.py`` tests. It knows
nothing of the blocks that a worker owns, of pieces, or of the layout of a message.
"""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.message import ExactMessage, Message, QuantizedMessage, Section, Stream
from offbeat.quantization.wire import Precision, Wire
from offbeat.transport.team import Team
from quantization.rounding import most, values
from quantization.wires import every_world, simulated

CPU = torch.device("cpu")
LENGTHS = [700, 5, 1300, 3 * BLOCK, 1, 2900]
BLOCKS = [2, 1, 3, 3, 1, 6]
FEEDBACK = 3  # the section whose stream also keeps the errors of the first stage
BLOCK_BYTES = {"int8": 516, "int4": 260, "int2": 108}
MESSAGES: list[tuple[Precision | None, tuple[int, ...]]] = [
    ("int4", (0, 1, 2)),
    ("int2", (0, 1, 2)),
    ("int4", ()),
    ("int8", (0, 2)),
    ("int8", (0, 1, 2)),
    (None, (0, 1, 2)),
    (None, (1,)),
    ("int2", (1,)),
]
"""Precision of each message of the same sections, and the workers that contribute to it."""


def updates(number: int, rank: int) -> list[Tensor]:
    """Return the update of a worker for message ``number``."""
    return [values(1000 * number + 100 * rank + i, n) for i, n in enumerate(LENGTHS)]


def make_streams(workers: int, stages: int = 2) -> list[Stream]:
    """Return a stream for each section."""
    streams = [Stream(n, torch.float32, CPU) for n in LENGTHS]
    for index, stream in enumerate(streams if stages == 2 else []):
        stream.make_errors(workers, residual=index == FEEDBACK)
    return streams


def exchange(
    wire: Wire,
    team: Team,
    precision: Precision | None,
    streams: list[Stream],
    update: list[Tensor],
    *,
    contribute: bool = True,
    blocks: int = 1,
) -> tuple[Message, bool, list[Tensor], list[Tensor]]:
    """Send an update, in pieces of some blocks. A worker that does not contribute clears it.

    It does not write the section whose stream would keep the errors.

    Returns:
        The message, its ``finite``, the sum and the own update.
    """
    sections = [Section(each, 0, each.elements) for each in streams]
    message: Message = ExactMessage(team, sections, "a message", keep=True)
    if precision is not None:
        wire.precision = precision
        message = QuantizedMessage(wire, sections, "a message", vote=2)
    for index, numbers in enumerate(update):
        for k, piece in enumerate(numbers.split(blocks * BLOCK)):
            if contribute or streams[index].residual is None:
                message.write(index, k * blocks * BLOCK, piece.clone())
    finite = message.finite()
    if not contribute:
        message.clear()
    future = message.start(torch.tensor([team.rank, math.pi], dtype=torch.float64))
    counted = team.account.payload_bytes
    future.wait()
    assert team.account.payload_bytes == counted, "all bytes count at the start"
    totals, sent = ([torch.full((n,), 9.0) for n in LENGTHS] for _ in range(2))
    for index, elements in enumerate(LENGTHS):
        for start in range(0, elements, 2 * blocks * BLOCK):
            some = slice(start, start + 2 * blocks * BLOCK)
            message.read(index, start, totals[index][some], sent[index][some])
    return message, finite, totals, sent


def all_messages(
    wire: Wire, team: Team, *, stages: int
) -> list[tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]]:
    """Return, of each message, the sum, this worker's update, and its errors of both stages."""
    streams, seen = make_streams(team.size, stages), []
    chunks = sum(-(-blocks // team.size) for blocks in BLOCKS)
    blocks, rows = sum(BLOCKS), 1
    if stages == 2:
        blocks, rows = (team.size + 1) * chunks, team.size
    for number, (precision, contributors) in enumerate(MESSAGES):
        before, contribute = team.account.payload_bytes, team.rank in contributors
        update, pieces = updates(number, team.rank), 1 + number % 2
        message, _, total, sent = exchange(
            wire, team, precision, streams, update, contribute=contribute, blocks=pieces
        )
        summed = [s.errors.clone() for s in streams if s.errors is not None]
        residual = streams[FEEDBACK].residual
        first = torch.zeros(3 * BLOCK) if residual is None else residual.clone()
        seen.append((total, sent, summed, first))
        assert message.votes == [[rank, math.pi] for rank in range(team.size)]
        assert message.quantized == (precision is not None)
        sent_bytes = 4 * sum(LENGTHS) + 16
        if precision:
            sent_bytes = BLOCK_BYTES[precision] * blocks + 16 * rows
        assert team.account.payload_bytes - before == sent_bytes
    return seen


def quantized(precision: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` after quantization, and its errors."""
    codec, errors = CODECS[precision](), x.clone()
    rows = torch.empty(len(x) // BLOCK, codec.block_bytes, dtype=torch.uint8)
    codec.encode(errors, rows)
    codec.decode(rows, decoded := torch.empty_like(x))
    return decoded, errors


@every_world
@pytest.mark.parametrize(("workers", "stages"), [(2, 1), (2, 2), (3, 2)])
def test_the_sum_of_each_message_is_that_of_the_reference(
    world: Any, workers: int, stages: int
) -> None:
    """Sums and errors have the same bits, and no error is lost.

    In a single stage, updates are quantized once. In two stages, their sum is quantized, too. Its
    errors are added to the next quantized message to which a worker contributes, and so are those
    of one section in the first stage. A worker that does not contribute keeps the latter.
    """
    results = world(partial(all_messages, stages=stages), "int8", workers=workers)
    errors = [torch.zeros(blocks * BLOCK) for blocks in BLOCKS]
    first = [torch.zeros(3 * BLOCK) for _ in range(workers)]
    received, put_in = ([torch.zeros(n) for n in LENGTHS] for _ in range(2))
    for number, (precision, contributors) in enumerate(MESSAGES):
        seen = [result[number] for result in results]
        two_stages = stages == 2 and precision and contributors
        for place, n in enumerate(LENGTHS):
            total = errors[place].clone() if two_stages else torch.zeros_like(errors[place])
            for rank in range(workers):
                update, sent = updates(number, rank)[place], torch.zeros_like(total)
                if rank in contributors:
                    put_in[place] += update
                    kept = place == FEEDBACK and two_stages
                    if kept:
                        update = update + first[rank]
                    sent = pad(update, (0, -n % BLOCK))
                    if precision:
                        sent, lost = quantized(precision, sent)
                        assert ((sent[:n] - update).abs() <= most(update, precision)).all()
                        if kept:
                            first[rank] = lost
                        else:
                            put_in[place] -= lost[:n]
                assert torch.equal(seen[rank][1][place], sent[:n])
                total += sent
            if two_stages:
                total, errors[place] = quantized(precision, total)
            for one in seen:
                assert torch.equal(one[0][place], seen[0][0][place])
            if precision:
                assert torch.equal(seen[0][0][place], total[:n])
            else:  # the order of the additions is not defined
                torch.testing.assert_close(seen[0][0][place], total[:n], rtol=1e-5, atol=1e-4)
            received[place] += seen[0][0][place]
        assert all(torch.equal(one[3], lost) for one, lost in zip(seen, first, strict=True))
        for place, blocks in enumerate(BLOCKS if stages == 2 else []):
            owned = [one[2][place].view(-1, BLOCK) for one in seen]
            dealt = [owned[block % workers][block // workers] for block in range(blocks)]
            assert torch.equal(torch.cat(dealt), errors[place])
    received[FEEDBACK] += sum(first)
    for place, n in enumerate(LENGTHS):
        scale = float(put_in[place].abs().max())
        torch.testing.assert_close(
            received[place] + errors[place][:n], put_in[place], rtol=1e-5, atol=1e-6 * scale
        )
    assert bool(errors[0].any()) == all(e.any() for e in first) == (stages == 2)


def poisoned(wire: Wire, team: Team) -> None:
    """Worker 1 writes numbers that are not finite, to sections that keep errors and do not."""
    for precision, bad in itertools.product(CODECS, (math.nan, math.inf)):
        streams, update = make_streams(team.size, team.size - 1), updates(0, team.rank)
        if team.rank == 1:
            update[2][BLOCK + 3] = update[FEEDBACK][BLOCK + 3] = bad
        _, finite, totals, _ = exchange(wire, team, precision, streams, update)
        assert finite == (team.rank != 1)
        for place in (2, FEEDBACK):
            block = totals[place][BLOCK : 2 * BLOCK]
            assert not block.isfinite().any()
            block.zero_()
        _, _, later, _ = exchange(wire, team, precision, streams, updates(1, team.rank))
        for total in (*totals, *later):
            assert total.isfinite().all()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("device", ["cpu", "as on a GPU"])
def test_a_number_that_is_not_finite_is_reported_and_leaves_no_error(
    device: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``finite`` is False on this worker only."""
    monkeypatch.setattr(Tensor, "is_cpu", device == "cpu")
    assert simulated(poisoned, "int8", workers=workers) == [None] * workers
