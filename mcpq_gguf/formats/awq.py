"""AWQ, the gemm layout: integers of 4 bits, stored with inputs first and packed along the rows.

`qweight` int32 (inputs, rows / 8): nibble i of a word, from the low end, is row ORDER[i] of its eight (awq,
modules/linear/gemm.py); `qzeros` int32 (groups, rows / 8) likewise; `scales` F16 (groups, rows). A value is
(code - zero point) x scale, both 0 ... 15.
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError
from . import Format, Module, Rows, SourceWeight, require_scheme
from .fp8 import refuse_others
from .gptq import SUFFIXES, is_awq
from .intcarry import IntSource, open_int
from .packed import FLOATS, bounds, group_size

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _matches(params: Mapping[str, TensorRef]) -> bool:
    return is_awq(params)


def _open(module: Module) -> SourceWeight:
    refuse_others(module, SUFFIXES)
    scheme = require_scheme(module, "AWQ's qweight (packed along the outputs)", ("awq",))
    weight, scale = module.need("qweight", ("I32",)), module.need("scales", FLOATS)
    if len(weight.shape) != 2:
        raise CheckpointError(f"{weight}: expected two dimensions, [inputs, rows / 8]")
    shape = weight.shape[1] * 8, weight.shape[0]
    group = group_size(weight, scheme.weights, shape[1])
    module.need("scales", FLOATS, (shape[1] // group, shape[0]))
    zero = module.need("qzeros", ("I32",), (shape[1] // group, weight.shape[1]))
    array = module.checkpoint.array

    def codes(rows: Rows) -> np.ndarray:
        return unpack_rows(array(weight), rows)

    def scales(rows: Rows) -> np.ndarray:
        return np.ascontiguousarray(array(scale)[:, rows].T)

    def zeros(rows: Rows) -> np.ndarray:
        return unpack_rows(array(zero), rows).astype(np.int16)

    return open_int(IntSource(module, "awq", shape, scheme, 4, group, codes, scales, scale, zeros))


def unpack_rows(words: np.ndarray, rows: Rows) -> np.ndarray:
    """int8 (rows, n), each less 8, from int32 `words` (n, rows / 8)."""
    low, high, index = bounds(rows, words.shape[1] * 8)
    first = low // 8
    some = np.ascontiguousarray(words[:, first:-(-high // 8)].T).view(np.uint32)
    out = np.empty((len(some), 8, some.shape[1]), np.int8)
    for i, row in enumerate(ORDER):
        out[:, row] = some >> np.uint32(4 * i) & np.uint32(15)
    out -= np.int8(8)
    whole: np.ndarray = out.reshape(-1, some.shape[1])[low - first * 8:high - first * 8]
    return whole[index]


FORMAT = Format("awq", SUFFIXES, _matches, _open)
