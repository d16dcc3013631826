"""How far what was written is from what was read, measured on the values while a lossy tensor is converted."""

from dataclasses import dataclass

import libgguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over compared values.

    error, reference  sums of squares of the differences, and of the reference
    worst, largest    their largest magnitudes
    blocks, exact     runs of 32 values, and how many of them came out without any difference
    """

    count: int = 0
    error: float = 0.0
    reference: float = 0.0
    worst: float = 0.0
    largest: float = 0.0
    blocks: int = 0
    exact: int = 0

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.count + other.count, self.error + other.error, self.reference + other.reference,
                    max(self.worst, other.worst), max(self.largest, other.largest), self.blocks + other.blocks,
                    self.exact + other.exact)

    @property
    def rms(self) -> float:
        """Root mean square of the error, relative to that of the reference; 0 when nothing differs."""
        return float(np.sqrt(self.error / self.reference)) if self.error else 0.0

    @property
    def maximum(self) -> float:
        """Largest error, relative to the largest reference value."""
        return self.worst / self.largest if self.worst else 0.0

    def __str__(self) -> str:
        share = f", {100 * self.exact / self.blocks:.1f} % of blocks exact" if self.exact else ""
        return f"RMS {self.rms:.2e}, max {self.maximum:.2e}, relative{share}"


def _squares(x: np.ndarray) -> float:
    return float(np.einsum("i,i->", x.reshape(-1), x.reshape(-1), dtype=np.float64))


def measure(encoded: np.ndarray, kind: str, reference: np.ndarray, factor: float = 1.0) -> Loss:
    """Compare rows of a GGML type, uint8 (rows, bytes), read back as ggml reads them, with float32 `reference`."""
    number = GGMLQuantizationType[kind]
    if kind in ("F16", "F32", "BF16"):
        got = dequantize(encoded, number)
    else:
        block, size = GGML_QUANT_SIZES[number]
        got = libgguf.dequantize_rows(encoded, number.value, encoded.shape[-1] // size * block)
    want = reference.reshape(got.shape)
    difference = np.abs(got * np.float32(factor) - want)
    runs = difference.reshape(-1, 32) if difference.size % 32 == 0 else difference.reshape(1, -1)
    return Loss(want.size, _squares(difference), _squares(want),
                float(difference.max(initial=0)), float(np.abs(want).max(initial=0)),
                len(runs), int(np.count_nonzero(~runs.any(1))))
