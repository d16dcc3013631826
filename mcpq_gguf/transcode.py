"""Workers: plan entries in, GGML bytes out. Memory is bounded by the chunks in flight, not by the model."""

from collections.abc import Iterator, Mapping

import numpy as np

from .checkpoint import Checkpoint
from .errors import PlanError
from .formats import SourceWeight
from .ggml.encode import encode
from .loss import Loss, measure
from .plan import Entry, Exactness

CHUNK = 4 << 20  # output bytes; small enough to stay in a core's cache for the passes over it, large enough to write


def chunks(entry: Entry) -> Iterator[tuple[int, int]]:
    """Row ranges of an entry that make about CHUNK bytes each; they cover it in order."""
    step = max(1, CHUNK * entry.rows // max(entry.nbytes, 1))
    for start in range(0, entry.rows, step):
        yield start, min(start + step, entry.rows)


def transcode(entry: Entry, start: int, stop: int, weights: Mapping[str, SourceWeight],
              checkpoint: Checkpoint) -> tuple[np.ndarray, Loss]:
    """Rows start..stop of an entry as uint8 (rows, bytes a row), and the measured loss of a lossy one.

    Raises CheckpointError for values that no format allows (NaN scales), PlanError for those that the type cannot hold;
    both name the tensor.
    """
    if entry.kind != "weight":
        return _factors(entry, weights)[start:stop].view(np.uint8).reshape(stop - start, 4), Loss()
    loss = Loss()
    out = np.empty((stop - start, entry.nbytes // entry.rows), np.uint8)
    first = 0  # of the part, in the entry's rows
    for part in entry.parts:
        assert part.start is not None
        assert part.stop is not None
        low, high = max(start, first), min(stop, first + part.stop - part.start)
        if low < high:
            weight = weights[part.module]
            rows = entry.layout.source_rows(low - first, high - first)
            codes = entry.layout.apply(weight.read(_shift(rows, part.start)), part.module)
            try:
                encoded = encode(codes, entry.type)
            except PlanError as e:
                raise PlanError(f"{part.module} -> {entry.name}: {e}") from None
            out[low - start:high - start] = encoded
            if entry.exactness is Exactness.LOSSY:
                loss += measure(encoded, entry.type, codes.dequantize(), _factor(weight, entry.type))
            if high - low == weight.shape[0]:
                for ref in weight.refs:
                    checkpoint.release(ref)
        first += part.stop - part.start
    return out, loss


def _shift(rows: np.ndarray | slice, by: int) -> np.ndarray | slice:
    return slice(rows.start + by, rows.stop + by) if isinstance(rows, slice) else rows + by


def _factors(entry: Entry, weights: Mapping[str, SourceWeight]) -> np.ndarray:
    """float32 (parts,): the factor of each part's weight, or its activations' scale."""
    if entry.kind == "input_scale":
        return np.array([weights[p.module].input_scale for p in entry.parts], np.float32)
    return np.array([_factor(weights[p.module], entry.scales) for p in entry.parts], np.float32)


def _factor(weight: SourceWeight, kind: str) -> float:
    """What the weight is multiplied by at run time when it is carried over to `kind`; 1 for nothing."""
    carry = weight.carry(kind)
    return 1.0 if carry is None or carry.factor is None else float(carry.factor)
