"""GPTQ: integers of 2, 3, 4 or 8 bits, stored with inputs first.

`qweight` int32 (words, rows): code + 2^(bits - 1) along the inputs, a dense stream (auto_gptq and GPTQModel,
nn_modules/qlinear); `scales` F16 (groups, rows); `qzeros` int32 (groups, words), zero points packed along the rows,
one too small in `checkpoint_format` gptq and as they are in gptq_v2; `g_idx` int32 (inputs,), the group of each input,
which activation ordering (desc_act) scatters. A value is (code - zero point) x scale. A stored 15 of 4 bits stands for
the zero point 16, as llama.cpp's converter and the exllama kernels read it (some older kernels read 0).
"""

from collections.abc import Mapping

import numpy as np

from ..checkpoint import TensorRef
from ..errors import CheckpointError
from . import Format, Module, Rows, SourceWeight, require_scheme
from .bits import signed, unpack, word_count
from .fp8 import refuse_others
from .intcarry import IntSource, open_int
from .intcodes import BLOCK
from .packed import FLOATS, bounds, checked_index, group_size

SUFFIXES = frozenset({"qweight", "qzeros", "scales", "g_idx"})


def _matches(params: Mapping[str, TensorRef]) -> bool:
    return "qweight" in params and not is_awq(params)


def is_awq(params: Mapping[str, TensorRef]) -> bool:
    """Whether a `qweight` is packed along the rows: then `scales` has more columns than it."""
    weight, scales = params.get("qweight"), params.get("scales")
    return weight is not None and scales is not None and len(weight.shape) == len(scales.shape) == 2 and \
        "g_idx" not in params and weight.shape[1] < scales.shape[1]


def _open(module: Module) -> SourceWeight:
    refuse_others(module, SUFFIXES)
    scheme = require_scheme(module, "GPTQ's qweight (packed along the inputs)", ("gptq", "gptq_v2"))
    bits = scheme.weights.num_bits
    weight, scale = module.need("qweight", ("I32",)), module.need("scales", FLOATS)
    if len(weight.shape) != 2 or weight.shape[0] * 32 % bits:
        raise CheckpointError(f"{weight}: expected two dimensions, [inputs x {bits} / 32, rows]")
    shape = weight.shape[1], weight.shape[0] * 32 // bits
    group = group_size(weight, scheme.weights, shape[1])
    groups = shape[1] // group
    module.need("scales", FLOATS, (groups, shape[0]))
    zero = module.need("qzeros", ("I32",), (groups, word_count(shape[0], bits, True)))
    index = None
    if "g_idx" in module.params or scheme.weights.actorder:
        ref = module.need("g_idx", ("I32", "I64"), (shape[1],))
        index = checked_index(ref, module.array("g_idx"), shape[1], group)
    array = module.checkpoint.array
    # Stored fields -> the domain of signed codes, where the usual zero point is 0.
    shift = np.int16((1 << bits - 1) - (scheme.format == "gptq"))

    def codes(rows: Rows) -> np.ndarray:
        words = np.ascontiguousarray(array(weight)[:, rows].T)
        if bits == 4 and shape[1] % BLOCK == 0:
            return words.view(np.uint8)
        return signed(unpack(words, bits, shape[1], True), bits)

    def scales(rows: Rows) -> np.ndarray:
        return np.ascontiguousarray(array(scale)[:, rows].T)

    def zeros(rows: Rows) -> np.ndarray:
        low, high, some = bounds(rows, shape[0])
        first = low // 32 * 32
        words = array(zero)[:, first * bits // 32:word_count(high, bits, True)]
        values: np.ndarray = unpack(words, bits, high - first, True)[:, low - first:].T[some].astype(np.int16)
        values -= shift
        return values

    return open_int(IntSource(module, scheme.format, shape, scheme, bits, group, codes, scales, scale, zeros, index))


FORMAT = Format("gptq", SUFFIXES, _matches, _open)
