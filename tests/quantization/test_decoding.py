"""Numbers read a stretch at a time are those of the whole."""

import pytest
import torch

from offbeat.quantization.codecs import BLOCK, CODECS, piece_elements
from offbeat.quantization.decoding import Coded, Numbers, Plain
from quantization.rounding import values


def coded(precision: str, elements: int, chunk: int) -> tuple[Numbers, torch.Tensor]:
    """Payloads of chunks, and what each decodes to by itself."""
    codec, x = CODECS[precision](), values(0, elements)
    payloads, decoded = [], []
    for start in range(0, elements, chunk):
        errors = torch.zeros(chunk)
        payload = torch.empty(chunk // BLOCK * codec.block_bytes, dtype=torch.uint8)
        codec.encode(errors, payload, plus=x[start : start + chunk])
        codec.decode(payload, part := torch.empty(min(chunk, elements - start)))
        payloads.append(payload)
        decoded.append(part)
    return Coded(codec, payloads, chunk, Plain(x)), torch.cat(decoded)


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int2"])
@pytest.mark.parametrize("step", [1, 2, 5, 400])
def test_stretches_of_payloads_make_the_whole(precision: str, step: int) -> None:
    """Whichever blocks a stretch begins and ends with, across chunks, to an end inside a block."""
    elements = 8 * BLOCK + 17
    numbers, expected = coded(precision, elements, 3 * BLOCK)
    found = torch.full((elements,), 9.0)
    for start in range(0, elements, step * BLOCK):
        numbers.read(found[start : start + step * BLOCK], start)
    assert torch.equal(found, expected)
    assert torch.equal(numbers.whole(), expected)
    assert (numbers.elements, numbers.nbytes) == (elements, 4 * elements)


def test_chunks_longer_than_what_is_worked_on_at_a_time() -> None:
    numbers, expected = coded("int4", 1300 * BLOCK, 650 * BLOCK)
    assert torch.equal(numbers.whole(), expected)


def test_plain_numbers() -> None:
    x = values(0, 5 * BLOCK, torch.float64)
    found = [torch.empty(BLOCK, dtype=torch.float64) for _ in range(5)]
    for i, one in enumerate(found):
        Plain(x).read(one, i * BLOCK)
    assert torch.equal(torch.cat(found), x)
    assert Plain(x).whole() is not x


def test_pieces_are_whole_blocks_and_a_gpu_works_on_all_at_once() -> None:
    assert piece_elements(10**9, torch.device("cpu")) % BLOCK == 0
    assert piece_elements(10**9, torch.device("cpu")) * 4 <= 2**19, "half of a cache of 1 MiB"
    assert piece_elements(10**6, torch.device("cuda")) == 1954 * BLOCK
    assert piece_elements(0, torch.device("cuda")) == BLOCK
