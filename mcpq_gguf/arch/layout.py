"""Layout transforms as data: what happens to a weight between the checkpoint and GGUF, whatever its format.

A transform moves whole rows or whole runs of columns, so that it applies to packed codes and to plain numbers by the
same code; `value` is for the few unquantized tensors whose numbers llama.cpp wants in another form.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import UnsupportedFormat
from ..formats.codes import Codes, Dense


@dataclass(frozen=True, slots=True)
class HeadRegroup:
    """Value heads from grouped to tiled order, from position `start` on.

    The checkpoint stores the value heads of one key head together (k0v0 k0v1 k1v0 k1v1 ...); ggml repeats key heads as
    a whole, so it needs k0v0 k1v0 ... k0v1 k1v1 ... (llama.cpp, src/models/qwen35.cpp). `width` values make a head.
    """

    key_heads: int
    per_key: int
    width: int
    start: int = 0

    def heads(self) -> np.ndarray:
        """Source head of each output head."""
        heads: np.ndarray = np.arange(self.key_heads * self.per_key).reshape(self.key_heads, self.per_key).T.reshape(-1)
        return heads

    def index(self) -> np.ndarray:
        """Source position of each output position, the untouched ones before `start` included."""
        moved = self.heads()[:, None] * self.width + np.arange(self.width)
        return np.concatenate([np.arange(self.start), self.start + moved.reshape(-1)])


@dataclass(frozen=True, slots=True)
class Layout:
    """What to do with a weight: `rows` and `columns` regroup heads, `value` is "", "add_one" or "neg_exp"."""

    rows: HeadRegroup | None = None
    columns: HeadRegroup | None = None
    value: str = ""

    def source_rows(self, start: int, stop: int) -> np.ndarray | slice:
        """Which rows of the source make output rows start..stop."""
        if self.rows is None:
            return slice(start, stop)
        index: np.ndarray = self.rows.index()[start:stop]
        return index

    def apply(self, codes: Codes, module: str) -> Codes:
        """Everything but the choice of rows. UnsupportedFormat when a value transform meets quantized codes."""
        if self.columns is not None:
            codes = codes.permute_columns(self.columns.heads(), self.columns.width)
        if self.value:
            if not isinstance(codes, Dense):
                raise UnsupportedFormat(f"{module}: is quantized, but llama.cpp needs other numbers "
                                        f"({self.value}); leave it unquantized")
            x = codes.dequantize()
            codes = Dense(x + np.float32(1) if self.value == "add_one" else -np.exp(x), "F32")
        return codes


AS_IS = Layout()
