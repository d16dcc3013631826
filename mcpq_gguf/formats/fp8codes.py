"""FP8 weights in memory: one byte a number, and scales over tiles of the matrix.

Every granularity is a tile size: (rows, columns) for one scale a tensor, (1, columns) for a channel, (1, g) for groups,
128 x 128 for blocks. Decoders refuse NaN and infinite bytes, so that arithmetic here need not.
"""

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import numpy as np

from .codes import E4M3, f32_to_bf16, permute_blocks

Kind = Literal["E4M3", "E5M2"]
ScaleDtype = Literal["F32", "BF16", "F16"]

# E5M2 is the upper byte of an IEEE half (OCP 8-bit floating point, section 5.1).
E5M2 = (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)
VALUES: dict[str, np.ndarray] = {"E4M3": E4M3, "E5M2": E5M2}
LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
_FIRST_NAN = {"E4M3": 0x7F, "E5M2": 0x7C}  # of the byte without its sign; E5M2's 0x7C is infinity


def e8m0(scales: np.ndarray) -> np.ndarray:
    """float32 2^(byte - 127) of uint8; exact, 0 and 1 included (2^-127 is subnormal). 255 is NaN, and infinite here."""
    with np.errstate(over="ignore"):
        values: np.ndarray = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return values


@dataclass(frozen=True)
class Fp8:
    """E4M3 (FN) or E5M2 bytes with a float32 scale for each tile of `block` = (height, width) numbers.

    codes        uint8 (rows, columns)
    scales       float32 (ceil(rows / height), ceil(columns / width)); the last tiles may be smaller
    scale_dtype  the type that the scales are stored in, and in which the reference multiplies
    """

    codes: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]
    kind: Kind = "E4M3"
    scale_dtype: ScaleDtype = "F32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def take(self, rows: np.ndarray | slice) -> "Fp8":
        """Rows by index; tiles become one row high, since any rows may come together."""
        height, width = self.block
        index = rows if height == 1 else np.arange(self.shape[0])[rows] // height
        return replace(self, codes=self.codes[rows], scales=self.scales[index], block=(1, width))

    def permute_columns(self, blocks: np.ndarray, width: int) -> "Fp8":
        """Runs of `width` columns in another order; tiles that this cuts become narrower."""
        columns, tile = self.shape[1], self.block[1]
        codes = permute_blocks(self.codes, blocks, width)
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes)
        fine = gcd(tile, width)
        scales = self.scales[:, np.arange(0, columns, fine) // tile]
        return replace(self, codes=codes, scales=permute_blocks(scales, blocks, width // fine),
                       block=(self.block[0], fine))

    def row_scales(self) -> np.ndarray:
        """float32 (rows, ceil(columns / width)): the scales with each row's own."""
        return self.scales if self.block[0] == 1 else self.scales[np.arange(self.shape[0]) // self.block[0]]

    def dequantize(self) -> np.ndarray:
        """float32: code x scale, rounded once. compressed-tensors gives the same where it multiplies in float32."""
        values = np.take(VALUES[self.kind], self.codes, mode="clip")
        return self._scaled(values)

    def bf16(self) -> np.ndarray:
        """BF16 bits (uint16) that equal compressed-tensors' `decompress`, cast to BF16 if it gives another type.

        Its `_dequantize` casts the codes to the scales' dtype and multiplies there. In BF16 and float32 that is the
        float32 product rounded to nearest even: 4 x 8 bits are exact before the rounding. In F16 the product is rounded
        to F16 first; a product beyond F16 becomes infinite, as it does there, and callers should refuse it.
        """
        product = self.dequantize()
        if self.scale_dtype == "F16":
            with np.errstate(over="ignore"):
                product = product.astype(np.float16).astype(np.float32)
        return f32_to_bf16(product)

    def invalid(self) -> tuple[int, int] | None:
        """Row and column of the first byte that is NaN or infinite, if there is one."""
        bad = (self.codes & 0x7F) >= _FIRST_NAN[self.kind]
        if not bad.any():
            return None
        row, column = np.argwhere(bad)[0]
        return int(row), int(column)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        """`values`, one a number, times the scales; float32. `values` may be overwritten."""
        rows, columns = self.shape
        scales, width = self.row_scales(), self.block[1]
        with np.errstate(over="ignore"):
            if scales.shape[1] == 1:
                values *= scales
            elif columns % width:
                values *= np.repeat(scales, width, axis=1)[:, :columns]
            else:
                tiles = values.reshape(rows, -1, width)
                tiles *= scales[:, :, None]
        return values
