"""Workers: plan entries in, GGML bytes out. Memory is bounded by the chunks in flight, not by the model.

A step is a run of rows of one tensor, for every file that holds it: the source rows are read once, and encoded once
for each type that some file wants them in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .arch import Part
from .checkpoint import Checkpoint
from .errors import PlanError
from .formats import SourceWeight
from .formats.codes import Codes, Dense
from .ggml.encode import carries_over, encode
from .loss import Loss, measure
from .plan import Entry, Exactness, FilePlan

CHUNK = 4 << 20  # output bytes; small enough to stay in a core's cache for the passes over it, large enough to write

# (entry, index of the part among the entry's parts, columns) -> weights of the columns, or None: see imatrix
Importance = Callable[[Entry, int, int], np.ndarray | None]


@dataclass(frozen=True, slots=True)
class Step:
    """Rows start..stop of one tensor, for all files that have it: (index of the file, its entry) pairs."""

    targets: tuple[tuple[int, Entry], ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one step made for one file: `data` is uint8 (rows, bytes a row)."""

    file: int
    entry: Entry
    offset: int
    data: np.ndarray
    loss: Loss


def steps(plans: Sequence[FilePlan]) -> list[Step]:
    """All steps, in an order that is each file's own: files share tensors by name, and hold them in the same order."""
    names: list[str] = []
    targets: dict[str, list[tuple[int, Entry]]] = {}
    for file, plan in enumerate(plans):
        at = 0
        for entry in plan.entries:
            key = entry.name + "@" + entry.parts[0].module  # a model and a projector may use one name for two tensors
            if key not in targets:
                targets[key] = []
                names.insert(at, key)
                at += 1
            else:
                at = names.index(key) + 1
            targets[key].append((file, entry))
    out = []
    for key in names:
        entries = tuple(targets[key])
        rows, nbytes = entries[0][1].rows, max(e.nbytes for _, e in entries)
        size = max(1, CHUNK * rows // max(nbytes, 1))
        out += [Step(entries, start, min(start + size, rows)) for start in range(0, rows, size)]
    return out


def prefetch(step: Step, weights: Mapping[str, SourceWeight], checkpoint: Checkpoint) -> None:
    """Start reading what `transcode` of this step will need."""
    entry = step.targets[0][1]
    for _, part, low, high, first in _parts(entry, step):
        weight = weights[part.module]
        rows = _shift(entry.layout.source_rows(low - first, high - first), part.start or 0)
        if entry.kind == "weight" and isinstance(rows, slice) and weight.shape:
            for ref in weight.refs:
                checkpoint.prefetch(ref, rows.start, rows.stop, weight.shape[0])


def transcode(step: Step, weights: Mapping[str, SourceWeight], checkpoint: Checkpoint,
              importance: Importance | None = None) -> list[Result]:
    """The bytes of a step for each of its files; files that want the same type share one array.

    Raises CheckpointError for values that no format allows (NaN scales), PlanError for those that the type cannot hold;
    both name the tensor.
    """
    wanted = {(e.type, e.scales): e for _, e in step.targets}
    made = {key: _Maker(entry, step, importance) for key, entry in wanted.items()}
    entry = step.targets[0][1]
    for number, part, low, high, first in _parts(entry, step):
        weight = weights[part.module]
        if entry.kind != "weight":
            for maker in made.values():
                maker.factor(number, weight)
            continue
        rows = _shift(entry.layout.source_rows(low - first, high - first), part.start or 0)
        codes = entry.layout.apply(weight.read(rows), part.module)
        plain = cache(codes.dequantize)  # for all types that need numbers, once
        for maker in made.values():
            maker.add(number, weight, codes, plain, low - step.start)
        if isinstance(rows, slice) and weight.shape:
            for ref in weight.refs:
                checkpoint.release(ref, rows.start, rows.stop, weight.shape[0])
    return [Result(file, e, e.offset + step.start * (e.nbytes // e.rows), made[e.type, e.scales].out,
                   made[e.type, e.scales].loss) for file, e in step.targets]


class _Maker:
    """Collects one type's rows of a step."""

    def __init__(self, entry: Entry, step: Step, importance: Importance | None) -> None:
        self.entry, self.start, self.importance, self.loss = entry, step.start, importance, Loss()
        self.out = np.empty((step.stop - step.start, entry.nbytes // entry.rows), np.uint8)

    def add(self, number: int, weight: SourceWeight, codes: Codes, plain: Callable[[], np.ndarray], at: int) -> None:
        try:
            if not carries_over(codes, self.entry.type):
                codes = Dense(plain(), "F32")
            given = self.importance(self.entry, number, codes.shape[-1]) if self.importance else None
            encoded = encode(codes, self.entry.type, given)
        except PlanError as e:
            raise PlanError(f"{weight.module} -> {self.entry.name}: {e}") from None
        self.out[at:at + len(encoded)] = encoded
        if self.entry.exactness is Exactness.LOSSY:
            factor = scale_factor(weight, self.entry.type)
            self.loss += measure(encoded, self.entry.type, plain(), factor)

    def factor(self, number: int, weight: SourceWeight) -> None:
        scale = self.entry.kind == "scale"
        value = np.float32(scale_factor(weight, self.entry.scales) if scale else weight.input_scale)
        self.out[number - self.start] = np.frombuffer(value.tobytes(), np.uint8)


def scale_factor(weight: SourceWeight, kind: str) -> float:
    """What the weight is multiplied by at run time when it is carried over to `kind`; 1 for nothing."""
    carry = weight.carry(kind)
    return 1.0 if carry is None or carry.factor is None else float(carry.factor)


def _parts(entry: Entry, step: Step) -> Iterator[tuple[int, Part, int, int, int]]:
    """The parts that a step touches: number, part, first and last row of the step in it, first row of the part."""
    first = 0
    for number, part in enumerate(entry.parts):
        count = 1 if entry.kind != "weight" else (part.stop or 0) - (part.start or 0)
        low, high = max(step.start, first), min(step.stop, first + count)
        if low < high:
            yield number, part, low, high, first
        first += count


def _shift(rows: np.ndarray | slice, by: int) -> np.ndarray | slice:
    return slice(rows.start + by, rows.stop + by) if isinstance(rows, slice) else rows + by
