"""How far what was written is from what was read, measured on the values while a lossy tensor is converted."""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize


@dataclass(frozen=True, slots=True)
class Loss:
    """Sums over compared values: `error` and `reference` are sums of squares, `worst` and `largest` maxima of |x|."""

    count: int = 0
    error: float = 0.0
    reference: float = 0.0
    worst: float = 0.0
    largest: float = 0.0

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.count + other.count, self.error + other.error, self.reference + other.reference,
                    max(self.worst, other.worst), max(self.largest, other.largest))

    @property
    def rms(self) -> float:
        """Root mean square of the error, relative to that of the reference; 0 when nothing differs."""
        return float(np.sqrt(self.error / self.reference)) if self.error else 0.0

    @property
    def maximum(self) -> float:
        """Largest error, relative to the largest reference value."""
        return self.worst / self.largest if self.worst else 0.0

    def __str__(self) -> str:
        return f"RMS {self.rms:.2e}, max {self.maximum:.2e}, relative"


def measure(encoded: np.ndarray, kind: str, reference: np.ndarray, factor: float = 1.0) -> Loss:
    """Compare rows of a GGML type, uint8 (rows, bytes), read back by gguf's dequantizer, with float32 `reference`."""
    got = dequantize(encoded, GGMLQuantizationType[kind]).astype(np.float64) * factor
    want = reference.astype(np.float64).reshape(got.shape)
    difference = np.abs(got - want)
    return Loss(want.size, float(np.square(difference).sum()), float(np.square(want).sum()),
                float(difference.max(initial=0)), float(np.abs(want).max(initial=0)))
