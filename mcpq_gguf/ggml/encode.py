"""Encoders: codes in memory -> rows of a GGML type, as uint8 (rows, bytes a row).

`encode` looks in one table for (kind of codes, GGML type); what is not there goes through float32 when the target is a
plain float type. Block layouts are those of ggml/src/ggml-common.h.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import PlanError
from ..formats.codes import Codes, Dense, Fp4, f32_to_bf16
from ..formats.fp8codes import Fp8
from ..formats.intcodes import IntCodes
from . import fp8_blocks, int_blocks
from .quantize import quantize

Encoder = Callable[[Any], np.ndarray]


def row_bytes(kind: str, columns: int) -> int:
    """Bytes of one row; PlanError when the type's block does not divide the row."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if columns % block:
        raise PlanError(f"rows of {columns} columns do not divide into {kind} blocks of {block}")
    return columns // block * size


def encode(codes: Codes, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Rows of `codes` in the GGML type `kind`.

    Where an encoder carries the codes over, it is taken. F32, F16 and BF16 are made from the float32 reference, rounded
    to nearest even, and every other type is quantized from it; `importance` (float32, columns) weights the columns
    then. Raises PlanError for a number that F16 cannot hold, or what the quantizer refuses.
    """
    direct = _direct(codes, kind)
    if direct is not None:
        return direct(codes)
    if kind in _FLOATS:
        if isinstance(codes, Dense) and codes.dtype == kind:
            return _as_bytes(codes.values)
        return _as_bytes(_FLOATS[kind](codes.dequantize()))
    return quantize(codes.dequantize(), kind, importance)


def carries_over(codes: Codes, kind: str) -> bool:
    """Whether `encode` works on the codes themselves for this type, and not on the numbers that they stand for."""
    return _direct(codes, kind) is not None or (isinstance(codes, Dense) and codes.dtype == kind)


def _direct(codes: Codes, kind: str) -> Encoder | None:
    if isinstance(codes, IntCodes) and kind not in codes.factors:
        return None
    return _ENCODERS.get((type(codes), kind))


def nvfp4(codes: Fp4) -> np.ndarray:
    """NVFP4, type 40: blocks of 64 columns, 4 UE4M3 scales and then 4 x 8 bytes.

    Byte j of a sub-block of 16 holds column j in the low and column j + 8 in the high nibble, where the source pairs
    neighbours: source bytes 0..3 give the low nibbles and 4..7 the high ones, even columns before odd.
    """
    rows, columns = codes.shape
    out = np.empty((rows, columns // 64, 36), np.uint8)
    out[:, :, :4] = (codes.scales & 0x7F).reshape(rows, -1, 4)
    out[:, :, 4:] = _repair(codes.packed, 8).reshape(rows, -1, 32)
    return out.reshape(rows, -1)


def mxfp4(codes: Fp4) -> np.ndarray:
    """MXFP4, type 39: blocks of 32 columns, the E8M0 byte and then 16 bytes, nibbles paired as (j, j + 16)."""
    rows, columns = codes.shape
    out = np.empty((rows, columns // 32, 17), np.uint8)
    out[:, :, 0] = codes.scales
    out[:, :, 1:] = _repair(codes.packed, 16).reshape(rows, -1, 16)
    return out.reshape(rows, -1)


def _repair(packed: np.ndarray, half: int) -> np.ndarray:
    """Nibble pairs (2i, 2i + 1) of blocks of 2 x `half` columns, paired anew as (j, j + half)."""
    words = np.ascontiguousarray(packed).reshape(-1, 2, half // 2).view(np.uint32)
    low, high = words[:, 0], words[:, 1]
    out = np.empty((len(words), half), np.uint8)
    mask = np.uint32(0x0F0F0F0F)
    out[:, 0::2] = (low & mask | (high & mask) << np.uint32(4)).view(np.uint8)
    out[:, 1::2] = (low >> np.uint32(4) & mask | high & ~mask).view(np.uint8)
    return out


def _as_bytes(values: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(values)
    return values.view(np.uint8).reshape(values.shape[0], -1)


def _f16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        out = values.astype(np.float16)
    lost = int(np.count_nonzero(np.isinf(out) & np.isfinite(values)))
    if lost:
        raise PlanError(f"{lost} values lie beyond F16's range (largest {np.abs(values).max():g}, limit 65504); "
                        "choose BF16 or F32")
    return out


_FLOATS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda x: x.astype(np.float32, copy=False), "BF16": f32_to_bf16, "F16": _f16,
}
_ENCODERS: dict[tuple[type, str], Encoder] = {
    (Fp4, "NVFP4"): nvfp4,
    (Fp4, "MXFP4"): mxfp4,
    (Fp8, "BF16"): fp8_blocks.bf16,
    (Fp8, "Q8_0"): fp8_blocks.q8_0,
    (IntCodes, "Q4_0"): int_blocks.q4_0,
    (IntCodes, "Q4_1"): int_blocks.q4_1,
    (IntCodes, "Q5_0"): int_blocks.q5_0,
    (IntCodes, "Q5_1"): int_blocks.q5_1,
    (IntCodes, "Q8_0"): int_blocks.q8_0,
}
