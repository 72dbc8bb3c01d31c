"""Vectors that are decoded piece by piece when they are read."""

import pytest
import torch

from offbeat.quantization import kernels
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.decoding import LazyVector, PayloadVector, TensorVector
from offbeat.quantization.kernels import BLOCK
from quantization.rounding import values


def encoded(precision: str, elements: int, chunk: int) -> tuple[LazyVector, torch.Tensor]:
    """Return a vector of payloads, and the numbers that each payload decodes to by itself."""
    codec, x = CODECS[precision](), values(0, elements)
    payloads, decoded = [], []
    for start in range(0, elements, chunk):
        errors = torch.zeros(chunk)
        payload = torch.empty(chunk // BLOCK * codec.block_bytes, dtype=torch.uint8)
        codec.encode(errors, payload, plus=x[start : start + chunk])
        codec.decode(payload, part := torch.empty(min(chunk, elements - start)))
        payloads.append([payload])
        decoded.append(part)
    return PayloadVector(codec, payloads, chunk, TensorVector(x)), torch.cat(decoded)


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int2"])
@pytest.mark.parametrize("step", [1, 2, 5, 400])
def test_pieces_of_payloads_join_to_the_vector(precision: str, step: int) -> None:
    """Pieces of any number of blocks, across chunks, to an end inside a block."""
    elements = 8 * BLOCK + 17
    vector, expected = encoded(precision, elements, 3 * BLOCK)
    read = torch.full((elements,), 9.0)
    for start in range(0, elements, step * BLOCK):
        vector.read(read[start : start + step * BLOCK], start)
    assert torch.equal(read, expected)
    assert torch.equal(vector.to_tensor(), expected)
    assert (vector.elements, vector.nbytes) == (elements, 4 * elements)


def test_chunks_longer_than_a_piece() -> None:
    vector, expected = encoded("int4", 1300 * BLOCK, 650 * BLOCK)
    assert torch.equal(vector.to_tensor(), expected)


@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int2"])
def test_a_whole_vector_is_decoded_at_once_on_a_gpu(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device only selects the operations here: all tensors are on the CPU."""
    elements = 8 * BLOCK + 17
    vector, expected = encoded(precision, elements, 3 * BLOCK)
    monkeypatch.setattr(kernels, "kernels", lambda: None)
    vector.device = torch.device("cuda")
    vector.read(read := torch.empty(elements))
    assert torch.equal(read, expected)
    assert isinstance(vector, PayloadVector)
    twice = [[*payloads, *payloads] for payloads in vector._chunks]  # as two workers of two send
    total = PayloadVector(vector._codec, twice, 3 * BLOCK, vector)
    total.read(read)
    assert torch.equal(read, 2 * expected)
