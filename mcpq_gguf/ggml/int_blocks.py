"""IntCodes -> Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 blocks of 32 columns (ggml/src/ggml-common.h).

Each kernel fills `out`, uint8 (rows, blocks, bytes of a block), of some rows that fit into a core's cache.
A scale that is not an FP16 number is rounded to nearest; one that would become infinite is an error.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import PlanError
from ..formats.bits import signed_limits
from ..formats.intcodes import BLOCK, IntCodes, common_unit

TILE = 1 << 17  # codes encoded together
Kernel = Callable[[IntCodes, np.float32, np.ndarray], None]


def q4_0(codes: IntCodes) -> np.ndarray:
    """Q4_0: d, then (code - zero) + 8 in nibbles paired as (j, j + 16)."""
    return _encode(codes, "Q4_0", _q4_0)


def q4_1(codes: IntCodes) -> np.ndarray:
    """Q4_1: d, m, then code - smallest code in nibbles paired as (j, j + 16)."""
    return _encode(codes, "Q4_1", _q4_1)


def q5_0(codes: IntCodes) -> np.ndarray:
    """Q5_0: d, the fifth bits of all 32, then the low four bits of (code - zero) + 16 paired as (j, j + 16)."""
    return _encode(codes, "Q5_0", _q5_0)


def q5_1(codes: IntCodes) -> np.ndarray:
    """Q5_1: d, m, then code - smallest code as in Q5_0."""
    return _encode(codes, "Q5_1", _q5_1)


def q8_0(codes: IntCodes) -> np.ndarray:
    """Q8_0: d, then code - zero as int8.

    Where groups with different scales meet in a block, `codes.mixed` says whether d is the number of which all its
    values are multiples, or the block is rounded to 255 steps.
    """
    return _encode(codes, "Q8_0", _q8_0)


def _encode(codes: IntCodes, kind: str, kernel: Kernel) -> np.ndarray:
    """uint8 (rows, bytes a row), made tile by tile."""
    rows, columns = codes.shape
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    out = np.empty((rows, columns // BLOCK, size), np.uint8)
    if kind not in codes.factors:
        raise PlanError(f"{kind} does not hold these codes; it holds {', '.join(codes.factors) or 'none'}")
    step = max(1, TILE // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        kernel(codes.take(part), codes.factors[kind], out[part])
    return out.reshape(rows, -1)


def _q4_0(codes: IntCodes, factor: np.float32, out: np.ndarray) -> None:
    _halves(codes, codes.scales / factor, out[:, :, :2], "scales")
    if codes.zeros is None:
        _nibbles(codes, 8, out[:, :, 2:])
    else:  # codes of 2 and 3 bits less their zero points are codes of 4
        _put(_pair(_unsigned(codes.multiples(8), 16)), out[:, :, 2:])


def _q4_1(codes: IntCodes, factor: np.float32, out: np.ndarray) -> None:
    _halves(codes, codes.scales / factor, out[:, :, :2], "scales")
    _halves(codes, _minimums(codes, factor), out[:, :, 2:4], "minimums")
    _nibbles(codes, -signed_limits(codes.bits)[0], out[:, :, 4:])


def _q5_0(codes: IntCodes, factor: np.float32, out: np.ndarray) -> None:
    _halves(codes, codes.scales / factor, out[:, :, :2], "scales")
    _five_bits(_unsigned(codes.multiples(16), 32), out[:, :, 2:])


def _q5_1(codes: IntCodes, factor: np.float32, out: np.ndarray) -> None:
    _halves(codes, codes.scales / factor, out[:, :, :2], "scales")
    _halves(codes, _minimums(codes, factor), out[:, :, 2:4], "minimums")
    _five_bits((codes.codes() - np.int8(signed_limits(codes.bits)[0])).view(np.uint8), out[:, :, 4:])


def _q8_0(codes: IntCodes, factor: np.float32, out: np.ndarray) -> None:
    scales = codes.scales / factor
    if codes.scattered and codes.per_block(scales) is None:
        _q8_0_mixed(codes, scales, out)
        return
    _halves(codes, scales, out[:, :, :2], "scales")
    multiples = codes.multiples()
    if codes.zeros is not None and (int(multiples.min()) < -128 or int(multiples.max()) > 127):
        raise PlanError(f"codes less zero points run from {multiples.min()} to {multiples.max()}, beyond int8")
    _put(np.ascontiguousarray(multiples, np.int8), out[:, :, 2:])


def _q8_0_mixed(codes: IntCodes, scales: np.ndarray, out: np.ndarray) -> None:
    if codes.mixed == "refuse":
        raise PlanError(f"groups with different scales meet within blocks of {BLOCK}")
    shape = (out.shape[0], -1, BLOCK)
    columns = codes.per_column(scales).reshape(shape)
    multiples = codes.multiples().reshape(shape)
    if codes.mixed == "unit":
        d, times = common_unit(columns)
        quotient = multiples.astype(np.int64) * times
        if np.abs(quotient).max() > 127:
            raise PlanError(f"groups with different scales meet within blocks of {BLOCK}")
    else:
        values = multiples * columns
        d = _half(np.maximum(values.max(-1, keepdims=True), -values.min(-1, keepdims=True)) / np.float32(127), "scales")
        step = d.astype(np.float32)
        quotient = np.rint(values / np.where(step == 0, np.float32(np.inf), step))
        np.clip(quotient, -127, 127, out=quotient)
    out[:, :, :2] = _half(d, "scales").view(np.uint8)
    _put(np.ascontiguousarray(quotient.reshape(out.shape[0], -1), np.int8), out[:, :, 2:])


def _minimums(codes: IntCodes, factor: np.float32) -> np.ndarray:
    """float64 (rows, groups): the value of the smallest code, exactly."""
    low = signed_limits(codes.bits)[0]
    zeros = np.int16(0) if codes.zeros is None else codes.zeros
    values: np.ndarray = codes.scales.astype(np.float64) * (low - zeros) / factor
    return values


def _halves(codes: IntCodes, values: np.ndarray, out: np.ndarray, what: str) -> None:
    """(rows, groups) as an FP16 number in each block of `out`, uint8 (rows, blocks, 2)."""
    blocks = codes.per_block(_half(values, what).view(np.uint16))
    if blocks is None:
        raise PlanError(f"groups with different {what} meet within blocks of {BLOCK}")
    out.view(np.uint16)[:, :, 0] = blocks


def _half(values: np.ndarray, what: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.isinf(half).any():
        raise PlanError(f"{int(np.isinf(half).sum()):,} {what} lie beyond FP16's range (largest "
                        f"{np.abs(values).max():g}, limit 65504)")
    return half


def _nibbles(codes: IntCodes, offset: int, out: np.ndarray) -> None:
    """code + offset as nibbles in `out`, uint8 (rows, blocks, 16); stored pairs have offset 8 already."""
    if codes.paired:
        _put(_repair(codes.stored), out)
    else:
        _put(_pair((codes.stored + np.int8(offset)).view(np.uint8)), out)


def _unsigned(values: np.ndarray, limit: int) -> np.ndarray:
    """int8 as contiguous uint8; PlanError where a value is not in 0 ... limit - 1."""
    out: np.ndarray = np.ascontiguousarray(values).view(np.uint8)
    if out.size and int(out.max()) >= limit:
        raise PlanError(f"codes less zero points do not fit into {limit} values")
    return out


def _five_bits(values: np.ndarray, out: np.ndarray) -> None:
    """uint8 0 ... 31, (rows, columns), as 4 bytes of high bits and 16 of nibbles: `out`, uint8 (rows, blocks, 20)."""
    _put(np.packbits((values >> np.uint8(4)).reshape(-1), bitorder="little"), out[:, :, :4])
    _put(_pair(values & np.uint8(15)), out[:, :, 4:])


def _pair(values: np.ndarray) -> np.ndarray:
    """uint8 values 0 ... 15 in blocks of 32 as nibbles paired (j, j + 16), uint8."""
    first, second = _split(values, 16)
    second <<= np.uint8(4)
    second |= first
    return second


def _repair(packed: np.ndarray) -> np.ndarray:
    """Nibble pairs (2i, 2i + 1) of blocks of 32, paired anew as (j, j + 16): each uint16 of the result takes a byte of
    the first half, with nibbles 0 and 1, and one of the second, 2 and 3, and orders them 0, 2, 1, 3.
    """
    first, second = _split(packed, 8)
    out = second.astype(np.uint16)
    out <<= np.uint16(8)
    out |= first.astype(np.uint16)
    one = out & np.uint16(0x00F0)
    one <<= np.uint16(4)
    two = out >> np.uint16(4)
    two &= np.uint16(0x00F0)
    out &= np.uint16(0xF00F)
    out |= one
    out |= two
    return out.view(np.uint8)


def _split(values: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies of the first and of the second `half` bytes of each 2 x half."""
    runs = np.ascontiguousarray(values).reshape(-1).view(f"V{half}")
    return runs[0::2].copy().view(np.uint8), runs[1::2].copy().view(np.uint8)


def _put(data: np.ndarray, out: np.ndarray) -> None:
    """Contiguous bytes into a slice of blocks, uint8 (rows, blocks, n): n bytes a step is what numpy copies fastest."""
    n = f"V{out.shape[-1]}"
    out.view(n)[:, :, 0] = data.view(n).reshape(out.shape[:2])
