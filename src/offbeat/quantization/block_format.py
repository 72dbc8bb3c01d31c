"""The format of a quantized block, for ``codecs.py`` and the compiled loops of ``kernels.py``.

A *block* of 512 numbers becomes integers from −L to L and one float32 scale:

    L = 2^(bits − 1) − 1            127, 7 or 1
    scale = (largest absolute value of the block) / L
    |error| ≤ scale / 2, plus float32 rounding errors

With 2 bits most numbers would become 0, and the result would have less than a third of the squared
norm of the block. So the threshold and the scale differ with 2 bits. A number becomes ±scale if its
absolute value is at least ``TERNARY_THRESHOLD`` times the mean absolute value of its block, else 0.
The scale is the mean absolute value of the numbers that do not become 0, which has the least
squared error.

Two kinds of blocks are exceptions:

- A block with NaN or infinity gets the scale NaN. It decodes to NaN, and its errors are 0.
- A block whose scale would be below ``SMALLEST_SCALE`` gets the scale 0. It decodes to zeros, and
  its errors are the numbers themselves.

An encoded block is a *row* of bytes: the scale and then the integers. If the integers take B bytes,
byte j of them holds the numbers j, j + B, j + 2·B, …, so packing works on contiguous memory. With 8
and 4 bits they are packed in two's complement, from the lowest bits up.

With 2 bits a byte holds five integers, increased by 1, as the digits of a number d < 3⁵, the
highest digit first. The byte is f = d·256/243, rounded up. So f/256 is the fraction 0.d₀d₁d₂… in
base 3, and digit k is ⌊3·(3ᵏ·f mod 256)/256⌋, which needs no division.
"""

BLOCK = 512
"""Numbers in a block. The integers of a block share one scale."""
SMALLEST_SCALE = 2.0**-100
"""A smaller scale is replaced by 0, because the inverses of the smallest float32 overflow."""
TERNARY_THRESHOLD = 0.75
"""With 2 bits, numbers below 0.75 times the mean absolute value of their block become 0."""
TERNARY_BYTES = 104
"""Bytes of the integers of a block with 2 bits: five of them share a byte, because 3⁵ < 2⁸."""
