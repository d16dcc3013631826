"""Integer codes with scales in memory: what every INT format decodes to, and what the block encoders take."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Literal

import numpy as np

from .codes import permute_blocks

BLOCK = 32  # columns of a GGML block of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (ggml-common.h, QK4_0 ...)
_ONE = np.float32(1)
_FAR = 1 << 20
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@dataclass(frozen=True)
class IntCodes:
    """Rows of a weight whose values are (code - zero) x scale.

    stored   int8 (rows, columns), the codes; or for 4 bits uint8 (rows, columns / 2), the even column + 8 in the low
             nibble and the odd column + 8 in the high one
    scales   float32 (rows, groups), finite
    bits     codes lie in -2^(bits - 1) ... 2^(bits - 1) - 1
    group    columns that share a scale; the last dimension of `scales` is columns / group
    zeros    int16 (rows, groups), the zero points in the domain of the codes; None for none
    index    intp (columns,), the group of each column where activation ordering has scattered them; None for the
             columns' own order
    factors  GGML type -> power of two that the scales are divided by in it; a type that is not there does not hold the
             codes
    mixed    what Q8_0 does with blocks in which groups with different scales meet: "refuse" them, take the "unit" of
             which all their values are multiples, or "round" them
    """

    stored: np.ndarray
    scales: np.ndarray
    bits: int
    group: int
    zeros: np.ndarray | None = None
    index: np.ndarray | None = None
    factors: Mapping[str, np.float32] = field(default_factory=lambda: dict.fromkeys(KINDS, _ONE))
    mixed: Literal["refuse", "unit", "round"] = "refuse"

    @property
    def paired(self) -> bool:
        """Whether two codes share a byte."""
        return self.stored.dtype == np.uint8

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.stored.shape[1] * (2 if self.paired else 1)

    def take(self, rows: np.ndarray | slice) -> "IntCodes":
        return replace(self, stored=self.stored[rows], scales=self.scales[rows],
                       zeros=None if self.zeros is None else self.zeros[rows])

    def permute_columns(self, blocks: np.ndarray, width: int) -> "IntCodes":
        """Runs of `width` columns; groups that a run cuts are split into equal smaller ones."""
        if self.paired and width % 2:
            return replace(self, stored=self.codes()).permute_columns(blocks, width)
        out = replace(self, stored=permute_blocks(self.stored, blocks, width // 2 if self.paired else width))
        if self.index is not None:
            return replace(out, index=permute_blocks(self.index[None], blocks, width)[0])
        if self.scales.shape[1] == 1:
            return out
        unit = gcd(self.group, width)

        def move(values: np.ndarray) -> np.ndarray:
            return permute_blocks(np.repeat(values, self.group // unit, 1), blocks, width // unit)

        return replace(out, scales=move(self.scales), group=unit,
                       zeros=None if self.zeros is None else move(self.zeros))

    def codes(self) -> np.ndarray:
        """int8 (rows, columns)."""
        if not self.paired:
            return self.stored
        out = self._nibbles()
        out -= np.int8(8)
        return out

    def multiples(self, plus: int = 0) -> np.ndarray:
        """code - zero + plus, (rows, columns): int8, but int16 for 8 bits with zero points."""
        kind = np.int16 if self.bits == 8 and self.zeros is not None else np.int8
        codes = self._nibbles() if self.paired else self.stored.astype(kind, "C", copy=self.zeros is not None)
        minus = (8 if self.paired else 0) - plus
        if self.zeros is not None:
            return self._apply(np.subtract, codes, (self.zeros + np.int16(minus)).astype(kind))
        return codes - kind(minus) if minus else codes

    def _nibbles(self) -> np.ndarray:
        """int8 (rows, columns): code + 8 of paired codes."""
        pairs = self.stored.astype(np.uint16, "C")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        return pairs.view(np.int8).reshape(self.shape)  # little-endian: the low nibble comes first

    def dequantize(self) -> np.ndarray:
        """float32: (code - zero) x scale, the order of compressed-tensors' `dequantize`."""
        return self._apply(np.multiply, self.multiples().astype(np.float32, "C"), self.scales)

    def per_block(self, values: np.ndarray) -> np.ndarray | None:
        """(rows, groups) as (rows, columns / BLOCK), or None when a block holds more than one value."""
        rows, columns = values.shape[0], self.shape[1]
        blocks = columns // BLOCK
        if self._blockwise is not None:
            return values[:, self._blockwise]
        if self.index is None and values.shape[1] == 1:
            return np.broadcast_to(values, (rows, blocks))
        if self.index is None and self.group % BLOCK == 0:
            return np.repeat(values, self.group // BLOCK, 1)
        spread = self.per_column(values).reshape(rows, blocks, BLOCK)
        return spread[:, :, 0] if bool((spread == spread[:, :, :1]).all()) else None

    def per_column(self, values: np.ndarray) -> np.ndarray:
        """(rows, groups) as (rows, columns)."""
        return np.repeat(values, self.group, 1) if self.index is None else values[:, self.index]

    @property
    def scattered(self) -> bool:
        """Whether groups meet within a block, so that its columns may have different scales."""
        if self.index is not None:
            return self._blockwise is None
        return self.scales.shape[1] > 1 and self.group % BLOCK != 0

    @cached_property
    def _blockwise(self) -> np.ndarray | None:
        """The group of each block where activation ordering has left blocks whole."""
        return whole_blocks(self.index)

    def _apply(self, operation: np.ufunc, columns: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """`columns` (rows, columns) op `groups` (rows, groups), in place of the first; beyond float32 is infinity."""
        with np.errstate(over="ignore"):
            if self.index is not None:
                operation(columns, groups[:, self.index], out=columns)
            else:
                view = columns.reshape(columns.shape[0], groups.shape[1], -1)
                operation(view, groups[:, :, None], out=view)
        return columns


def whole_blocks(index: np.ndarray | None) -> np.ndarray | None:
    """(columns / BLOCK,) the group of each block, or None when some block has columns of several, or does not fill."""
    if index is None or len(index) % BLOCK:
        return None
    blocks = index.reshape(-1, BLOCK)
    return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else None


def common_unit(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest number of which all scales of a block are multiples, and the multiples.

    float32 (..., BLOCK) -> float32 (..., 1) unit and int32 (..., BLOCK) multiples with scales = unit x multiples. A
    block whose scales lie too far apart for multiples of 8 bits has multiples of 2^20, and no useful unit.
    """
    mantissa, exponent = np.frexp(scales)
    whole = np.ldexp(mantissa, 24).astype(np.int64)
    some = whole != 0
    least = np.where(some, exponent, _FAR).min(-1, keepdims=True)
    shift = np.where(some, exponent - least, 0)
    near = (shift <= 8).all(-1, keepdims=True)
    whole *= 1 << np.minimum(shift, 8)
    divisor = np.gcd.reduce(whole, -1, keepdims=True)
    unit = np.ldexp(divisor.astype(np.float64), np.minimum(least, 512) - 24).astype(np.float32)
    multiples = np.minimum(whole // np.maximum(divisor, 1), _FAR)
    return unit, np.where(near, multiples, _FAR).astype(np.int32)
