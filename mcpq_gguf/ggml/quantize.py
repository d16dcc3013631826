"""Quantization of plain numbers to K-, IQ- and legacy types, byte for byte as ggml does it (through libgguf).

The quantizer works row by row and without the GIL, so that threads may share the rows of a tensor among them.
"""

import threading

import libgguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import PlanError

TYPES = frozenset("""
    Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K
    IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS
""".split())
# ggml refuses these without weights for the columns (ggml.c, ggml_quantize_requires_imatrix).
NEEDS_IMPORTANCE = frozenset({"IQ1_S", "IQ2_XXS", "IQ2_XS"})
# llama-quantize does not make these without an imatrix either (llama-quant.cpp, tensor_requires_imatrix); ggml can.
WANTS_IMPORTANCE = NEEDS_IMPORTANCE | {"IQ1_M", "IQ2_S", "IQ3_XXS"}
# What stands in for a type whose blocks of 256 do not divide a row (llama-quant.cpp, tensor_type_fallback). Where 32
# does not divide it either, llama-quantize takes F16; BF16 here, which cannot overflow.
FALLBACK = {
    "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "IQ2_XXS": "IQ4_NL", "IQ2_XS": "IQ4_NL", "IQ2_S": "IQ4_NL",
    "IQ3_XXS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ4_XS": "IQ4_NL", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0",
    "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}
_LIMIT = 65504.0  # no type has a block scale above its block's largest number, and scales are FP16

_lock = threading.Lock()
_ready: set[str] = set()


def fitting_type(kind: str, columns: int) -> tuple[str, str]:
    """The type that rows of `columns` numbers get when `kind` is wanted, and why it is another ("" if it is not)."""
    for candidate in (kind, FALLBACK.get(kind, "BF16"), "BF16"):
        if columns % _block(candidate) == 0:
            break
    if candidate == kind:
        return kind, ""
    return candidate, f"rows of {columns} columns do not divide into {kind} blocks of {_block(kind)}"


def quantize(rows: np.ndarray, kind: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Rows in the GGML type `kind`, uint8 (n, bytes a row), equal to ggml_quantize_chunk's byte for byte.

    rows        float32 (n, columns), |x| <= 65504
    importance  float32 (columns,), weight of each column's squared error, or None for ggml's own choice
    Raises PlanError for a type that is not quantized to, a row that its blocks do not divide, numbers that are not
    finite or too large, and a type that needs importance when there is none.
    """
    if kind not in TYPES:
        raise PlanError(f"numbers are not quantized to {kind}; known are {', '.join(sorted(TYPES))}")
    n, columns = rows.shape
    if columns % _block(kind):
        raise PlanError(f"rows of {columns} columns do not divide into {kind} blocks of {_block(kind)}")
    if importance is None and kind in NEEDS_IMPORTANCE:
        raise PlanError(f"{kind} needs an importance matrix that covers the tensor; give one with --imatrix")
    if importance is not None and importance.shape != (columns,):
        raise PlanError(f"importance of {importance.shape[0]} columns for rows of {columns}; "
                        "the imatrix belongs to another model")
    largest = max(float(rows.max(initial=0)), -float(rows.min(initial=0)))
    if not largest <= _LIMIT:
        raise PlanError(f"a weight is {largest:g}, which {kind}'s FP16 scales cannot hold")
    rows = np.ascontiguousarray(rows, np.float32)
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
    number = GGMLQuantizationType[kind].value
    _prepare(kind, number)
    out = np.empty((n, columns // _block(kind) * GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8)
    if n:
        libgguf.quantize_rows_into_raw(number, rows, out, n, columns, importance)
    return out


def bits(kind: str) -> float:
    """Bits a number takes in a GGML type."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return 8 * size / block


def _block(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def _prepare(kind: str, number: int) -> None:
    """IQ-types build tables at first use: do that once, in one thread."""
    if kind in _ready:
        return
    with _lock:
        if kind not in _ready:
            size = _block(kind)
            libgguf.quantize_rows_raw(number, np.zeros((1, size), np.float32), 1, size, np.ones(size, np.float32))
            _ready.add(kind)
