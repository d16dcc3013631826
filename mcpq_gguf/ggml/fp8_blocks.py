"""FP8 into GGML, which has no FP8 type: BF16 as the reference decompresses it, or Q8_0 on the source's own grid.

Q8_0 holds q x d with an integer |q| <= 127 and an FP16 d for 32 columns. FP8 numbers of one scale s are integers k
times s x 2^-9 (E4M3) or s x 2^-16 (E5M2), so a block is exact when some common divisor t of its k leaves
max|k| / t <= 127 and t x s x 2^-9 is an FP16 number. Every k is a power of two times an odd number up to 15, so the
common divisors worth trying are a power of two times one of those.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from ..errors import PlanError
from ..formats.fp8codes import VALUES, Fp8

BLOCK = 32
_TILE = 1 << 16  # numbers worked on at once, so that the passes over them stay in a core's cache
_ODD = (3, 5, 7, 9, 11, 13, 15)
_FIRST_ODD = 25  # bits of `_divisors`: 2^1..2^25, enough to bring the largest code within 127; then _ODD
_POWERS = np.uint32((1 << _FIRST_ODD) - 1)
_UNIT = {"E4M3": 9, "E5M2": 16}  # codes are multiples of 2^-unit
_MANTISSA = {"E4M3": 3, "E5M2": 2}
# Scales to try, as the integer that the largest number of a block becomes; 127 is what plain quantization takes.
_LARGEST = (127, 124)
_SMALLEST_F16 = np.float32(2.0**-24)
_TOO_LARGE = np.float32(65519.0 * 127)  # above it even the largest FP16 scale cannot reach a number


class Q8Report(NamedTuple):
    """How FP8 went into Q8_0: both errors are RMS, relative to the RMS of the numbers."""

    blocks: int
    exact_blocks: int
    rms: float
    rms_plain: float


def bf16(codes: Fp8) -> np.ndarray:
    """BF16 rows, uint8 (rows, 2 x columns), equal bit for bit to the reference decompression.

    Raises PlanError where the reference itself overflows (F16 scales times large codes, or beyond BF16).
    """
    rows, columns = codes.shape
    out = np.empty((rows, columns), np.uint16)
    for start, stop in _tiles(rows, columns):
        tile = codes.take(slice(start, stop)).bf16()
        lost = int(np.count_nonzero((tile & 0x7FFF) >= 0x7F80))
        if lost:
            raise PlanError(f"{lost} values lie beyond {codes.scale_dtype} in the reference decompression, which "
                            "multiplies codes and scales in that type; the scales are damaged")
        out[start:stop] = tile
    return out.view(np.uint8).reshape(rows, -1)


def q8_0(codes: Fp8) -> np.ndarray:
    """Q8_0 rows, uint8 (rows, columns / 32 x 34): exact where the block allows it, else with little squared error.

    Raises PlanError for rows that do not divide into blocks of 32, or numbers that no FP16 scale reaches.
    """
    return np.concatenate([raw for raw, _, _ in _blocks(codes)] or [np.empty((0, 34), np.uint8)]
                          ).reshape(codes.shape[0], -1)


def q8_0_report(codes: Fp8) -> Q8Report:
    """Count exact blocks, and compare the error with that of plain Q8_0 quantization (ggml's reference)."""
    blocks = exact = 0
    error = plain = reference = 0.0
    for raw, values, same in _blocks(codes):
        blocks += len(raw)
        exact += int(np.count_nonzero(same))
        want = np.ascontiguousarray(values.T)
        reference += float(np.square(want.astype(np.float64)).sum())
        error += _squared_error(raw, want)
        plain += _squared_error(quantize(want, GGMLQuantizationType.Q8_0), want)
    scale = reference or 1.0
    return Q8Report(blocks, exact, float(np.sqrt(error / scale)), float(np.sqrt(plain / scale)))


def _squared_error(raw: np.ndarray, want: np.ndarray) -> float:
    return float(np.square(dequantize(raw, GGMLQuantizationType.Q8_0).astype(np.float64) - want).sum())


def _tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _TILE // max(columns, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _blocks(codes: Fp8) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tile by tile: the blocks as uint8 (n, 34), their float32 values (32, n), and bool (n,) which came out exact."""
    rows, columns = codes.shape
    if columns % BLOCK:
        raise PlanError(f"rows of {columns} columns do not divide into Q8_0 blocks of {BLOCK}")
    for start, stop in _tiles(rows, columns):
        tile = codes.take(slice(start, stop))
        if tile.shape[1]:
            yield _encode(tile)


def _encode(tile: Fp8) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One tile. Numbers lie as (32, n) with a block in a column, so that every reduction runs along whole rows."""
    grid = np.ascontiguousarray(tile.codes.reshape(-1, BLOCK).T)
    scale = _block_scales(tile)
    values = np.take(VALUES[tile.kind], grid, mode="clip")
    with np.errstate(over="ignore"):
        values *= scale
    top = (grid & 0x7F).max(0)
    largest = np.abs(values).max(0)
    if scale.ndim > 1:
        scale = np.take_along_axis(scale, np.abs(values).argmax(0)[None], 0)[0]
    if largest.max() > _TOO_LARGE:
        raise PlanError(f"values up to {largest.max():g} lie beyond Q8_0, whose FP16 scale ends at 65504; "
                        "choose BF16 or F32")
    shared = np.bitwise_and.reduce(np.take(_DIVISORS[tile.kind], grid, mode="clip"), 0)
    divisor = np.frexp((shared & _POWERS).astype(np.float64))[1]  # the largest power of two among the divisors
    # The least j for which the largest number is at most 127 x 2^j.
    mantissa = _MANTISSA[tile.kind]
    reach = np.maximum((top >> mantissa).astype(np.int32) - 1, 0) - (6 - mantissa)
    d, exact = _exact(np.ldexp(scale, divisor - _UNIT[tile.kind]), shared, reach - divisor, values)
    fine = np.ldexp(scale, np.maximum(divisor, reach) - _UNIT[tile.kind])
    # Half of it cuts a largest number of 128 steps off at 127, and is right for all others.
    guesses = np.stack([fine * np.float32(0.5), fine, *(largest / np.float32(n) for n in _LARGEST)])
    d = np.where(exact, d, _best(_f16(guesses), values))
    empty = largest == 0
    d[empty], exact[empty] = 0, True
    out = np.empty((len(d), 2 + BLOCK), np.uint8)
    out[:, :2] = d.astype(np.float16).view(np.uint8).reshape(-1, 2)
    q = _quants(values, d, np.empty_like(values)).astype(np.int8)
    out[:, 2:] = np.ascontiguousarray(q.T).view(np.uint8)
    return out, values, exact


def _block_scales(tile: Fp8) -> np.ndarray:
    """float32 (n,) with a scale for each block of 32, or (32, n) where blocks hold several."""
    width, columns = tile.block[1], tile.shape[1]
    scales = tile.row_scales()
    if scales.shape[1] == 1:
        return np.repeat(scales[:, 0], columns // BLOCK)
    if width % BLOCK == 0:
        return scales[:, np.arange(columns // BLOCK) * BLOCK // width].reshape(-1)
    return np.ascontiguousarray(scales[:, np.arange(columns) // width].reshape(-1, BLOCK).T)


def _exact(step: np.ndarray, shared: np.ndarray, excess: np.ndarray, values: np.ndarray
           ) -> tuple[np.ndarray, np.ndarray]:
    """float32 (n,) FP16 scales and bool (n,): where a scale of `step` times 1 or an odd divisor gives every number.

    A block whose largest number is over 127 x 2^excess steps can only be helped by odd divisors up to 15.
    """
    d, exact = np.zeros_like(step), np.zeros(len(step), bool)
    for odd, possible in ((1, excess <= 0), *((o, shared >> np.uint32(bit) & np.uint32(1) != 0)
                                              for bit, o in enumerate(_ODD, _FIRST_ODD))):
        index = np.flatnonzero(possible & ~exact)
        if index.size:
            d[index] = _f16(step[index] * np.float32(odd))
            exact[index] = _reproduces(values[:, index], d[index])
    return d, exact


def _reproduces(values: np.ndarray, d: np.ndarray) -> np.ndarray:
    q = _quants(values, d, np.empty_like(values))
    q *= d
    same: np.ndarray = (q == values).all(0)
    return same


def _best(guesses: np.ndarray, values: np.ndarray) -> np.ndarray:
    """float32 (n,): the FP16 scale of least squared error among `guesses` (m, n) and a least-squares fit from there."""
    # One piece of scratch memory for all passes: fresh memory costs more than the arithmetic.
    ratio, q = np.empty_like(values), np.empty_like(values)

    def error(d: np.ndarray) -> np.ndarray:
        np.multiply(values, np.float32(1) / d, out=ratio)
        np.rint(ratio, out=q)
        np.clip(q, -127, 127, out=q)
        np.subtract(ratio, q, out=ratio)
        squares: np.ndarray = np.einsum("ij,ij->j", ratio, ratio)
        squares *= d * d
        return squares

    errors = np.stack([error(d) for d in guesses])
    choice = errors.argmin(0)[None]
    best = np.take_along_axis(guesses, choice, 0)[0]
    # With the integers of the best guess kept, this scale would fit them best.
    _quants(values, best, q)
    squares = np.einsum("ij,ij->j", q, q)
    fitted = _f16(np.einsum("ij,ij->j", q, values) / np.maximum(squares, 1))
    better = error(fitted) < np.take_along_axis(errors, choice, 0)[0]
    return np.where(better, fitted, best)


def _quants(values: np.ndarray, d: np.ndarray, out: np.ndarray) -> np.ndarray:
    """float32 integers within +-127 nearest to values / d, written to `out`; 0 where d is 0."""
    np.multiply(values, np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0), out=out)
    np.rint(out, out=out)
    return np.clip(out, -127, 127, out=out)


def _f16(d: np.ndarray) -> np.ndarray:
    """The nearest FP16 number, as float32, but neither 0 nor infinite."""
    held: np.ndarray = np.clip(d, _SMALLEST_F16, np.float32(65504)).astype(np.float16).astype(np.float32)
    return held


def _divisors(kind: str) -> np.ndarray:
    """uint32 (256,): what divides the code's integer. Bit j for 2^(j + 1), from _FIRST_ODD on one for each of _ODD."""
    out = np.zeros(256, np.uint32)
    for code, value in enumerate(VALUES[kind]):
        k = abs(int(np.ldexp(float(value), _UNIT[kind]))) if np.isfinite(value) else 0
        bits = [j for j in range(_FIRST_ODD) if k % (2 << j) == 0]
        bits += [j for j, odd in enumerate(_ODD, _FIRST_ODD) if k % odd == 0]
        out[code] = sum(1 << j for j in bits)
    return out


_DIVISORS = {kind: _divisors(kind) for kind in VALUES}
