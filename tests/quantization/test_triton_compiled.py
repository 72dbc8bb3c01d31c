"""The Triton kernels compile for GPUs of two kinds, and no product is fused with a sum.

A GPU is not needed. Not in ``make test``, which has no Triton; ``make triton`` runs it.
"""

import os
from typing import Any

import pytest
import torch

from offbeat.quantization.codecs import CODECS

pytest.importorskip("triton", reason="not installed: pip install triton==3.7.1")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the compiler: unset TRITON_INTERPRET", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from offbeat.quantization import triton_kernels as kernels

TYPES = {
    **dict.fromkeys(("rows", "updates", "first", "second", "sent"), "*u8"),
    **dict.fromkeys(("shared", "errors", "values", "shift", "velocity", "squares"), "*fp32"),
    **dict.fromkeys(("inverse", "momentum", "direct", "lookahead"), "fp32"),
    **dict.fromkeys(("elements", "width", "workers", "stride"), "i32"),
    **{"entries": "*i64", "ranges": "*i32", "error": "*bf16", "finite": "*i1"},
}
DTYPES = [kernels._DTYPES[dtype] for dtype in (torch.float32, torch.float16, torch.bfloat16)]
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("_encode", {"ERROR": True, "DTYPE": d, "BITS": 4}) for d in DTYPES[1:]),
    *(("_add", {"ERROR": i > 0, "DTYPE": d}) for i, d in enumerate(DTYPES)),
]
for bits in (kind.bits for kind in CODECS.values()):
    CASES += [("_encode", {"ERROR": False, "DTYPE": DTYPES[0], "BITS": bits})]
    CASES += [("_add_up", {"BITS": bits})]
    CASES += [("_move", {"SEVERAL": s, "VELOCITY": s, "BITS": bits}) for s in (False, True)]


def ptx(name: str, constants: dict[str, Any], arch: int, *, fusion: bool) -> str:
    """Return the assembly of a kernel for GPUs of compute capability ``arch`` / 10."""
    kernel = getattr(kernels, name)
    signature = {each: TYPES.get(each, "constexpr") for each in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target, options={"enable_fp_fusion": fusion})
    assert compiled.asm["cubin"]
    text: str = compiled.asm["ptx"]
    return text


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("name", "constants"), CASES, ids=str)
def test_no_product_is_fused_with_a_sum(name: str, constants: dict[str, Any], arch: int) -> None:
    text = ptx(name, constants, arch, fusion=False)
    assert f".target sm_{arch}" in text
    assert ".f32" in text
    assert "fma" not in text
    assert ".ftz" not in text, "subnormal numbers become zero"


def test_the_compiler_fuses_if_it_may() -> None:
    """Otherwise the other test would show nothing."""
    constants = {"SEVERAL": True, "VELOCITY": True, "BITS": 4}
    assert "fma.rn.f32" in ptx("_move", constants, 80, fusion=True)
