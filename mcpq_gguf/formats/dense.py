"""Plain numbers: BF16, F16 and F32 tensors, quantized by nobody."""

from collections.abc import Mapping
from math import prod

from ..checkpoint import TensorRef
from . import Carry, Format, Module, Rows, SourceWeight, always
from .codes import Dense

_DTYPES = ("BF16", "F16", "F32")  # GGML types of the same names hold the same bits


def _matches(params: Mapping[str, TensorRef]) -> bool:
    return len(params) == 1 and next(iter(params.values())).dtype in _DTYPES


def _open(module: Module) -> SourceWeight:
    (ref,) = module.params.values()
    array = module.checkpoint.array
    # Leading dimensions are all rows: stacked experts, convolution kernels.
    shape = ref.shape if len(ref.shape) < 3 else (prod(ref.shape[:-1]), ref.shape[-1])

    def read(rows: Rows) -> Dense:
        return Dense(array(ref).reshape(shape)[rows], ref.dtype)

    return SourceWeight(module.name, "dense", shape, (ref,), read, always(Carry(ref.dtype)),
                        scheme=module.scheme)


FORMAT = Format("dense", frozenset({"weight"}), _matches, _open)
