"""The plan: every tensor of an output file with its sources, type, size, offset and expected exactness.

It is pure data, made from headers before a byte is written; the dry run, the size prediction, the writer and the
progress bar all read it. GGUF layout: docs/gguf.md in ggml, version 3.
"""

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod

from gguf import GGMLQuantizationType, GGUFValueType

from .arch import ALWAYS_F32, SCALED_ROLES, Model, Need, Part
from .arch.layout import AS_IS, Layout
from .errors import PlanError
from .formats import SourceWeight
from .ggml.encode import row_bytes
from .ggml.metadata import Metadata, Value, array, encode_string

ALIGNMENT = 32
FLOATS = ("F32", "BF16", "F16")


class Exactness(str, Enum):
    """How an output tensor relates to its source.

    EXACT  every code and every block scale, or every number, is carried over bit for bit; a per-tensor float32 factor
           may be rounded once
    F32    equal bit for bit to the float32 that the reference decompression gives
    BF16   equal bit for bit to that float32 rounded to BF16
    LOSSY  the size of the error is measured while converting
    """

    EXACT = "exact"
    F32 = "f32"
    BF16 = "bf16"
    LOSSY = "lossy"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the output.

    kind         "weight", or "scale" and "input_scale" for the float32 factors beside one
    shape        outermost first (experts, rows, columns); `rows` counts source rows, spread evenly over `nbytes`
    weight_only  FP4 codes whose activations must not be rounded to 4 bits
    scales       for a scale: the GGML type of the weight that it belongs to
    offset       of its data from the start of the file
    """

    name: str
    role: str
    kind: str
    parts: tuple[Part, ...]
    layout: Layout
    shape: tuple[int, ...]
    rows: int
    type: str
    nbytes: int
    exactness: Exactness
    reason: str = ""
    weight_only: bool = False
    scales: str = ""
    offset: int = 0


@dataclass(frozen=True)
class FilePlan:
    """One output file: `header` is everything up to the tensor data, entry offsets count from the start of the file."""

    name: str
    metadata: Metadata
    entries: tuple[Entry, ...]
    header: bytes
    nbytes: int


Policy = Callable[[Need, Sequence[SourceWeight]], str]


def native_policy(need: Need, weights: Sequence[SourceWeight]) -> str:
    """Every tensor in the type that carries its source: the first in which all its parts are exact, else the first."""
    common = [c.type for c in weights[0].carries() if all(w.carry(c.type) for w in weights)]
    if not common:
        kinds = sorted({w.carries()[0].type for w in weights})
        raise PlanError(f"{need.name}: its sources have different formats ({', '.join(kinds)}), but a GGUF "
                        "tensor has one type; convert with --outtype bf16, or have all of them quantized alike")
    return next((kind for kind in common if all(c is not None and c.exact for c in (w.carry(kind) for w in weights))),
                common[0])


def float_policy(kind: str) -> Policy:
    """Every tensor decoded to one plain type."""
    return lambda need, weights: kind


def plan_entries(model: Model, weights: Mapping[str, SourceWeight], policy: Policy) -> list[Entry]:
    """The tensors of a file in the architecture's order, each followed by its scales.

    Raises PlanError when a tensor, a layer or an expert is missing, has another shape, is used twice or not at all.
    """
    entries: list[Entry] = []
    used: Counter[str] = Counter()
    for need in model.needs:
        parts = _choose(need, weights)
        if parts is None:
            continue
        used.update({p.module for p in parts})
        entries += _entries(need, parts, [weights[p.module] for p in parts], policy)
    _check_all_used(model, weights, used)
    return entries


def split_entries(entries: Sequence[Entry], size: int) -> list[list[Entry]]:
    """Entries in runs of at most `size` bytes of data each, in order; one entry alone may be larger."""
    runs: list[list[Entry]] = [[]]
    held = 0
    for e in entries:
        if runs[-1] and held + _align(e.nbytes) > size:
            runs.append([])
            held = 0
        runs[-1].append(e)
        held += _align(e.nbytes)
    return runs


def layout_shards(name: str, metadata: Metadata, entries: Sequence[Entry], size: int | None) -> list[FilePlan]:
    """One file, or several by GGUF's split convention (`-00001-of-00003`, split.* keys; all others in the first)."""
    runs = split_entries(entries, size) if size else [list(entries)]
    if len(runs) == 1:
        return [layout_file(name, metadata, entries)]
    out = []
    for number, run in enumerate(runs):
        keys = {"split.no": Value(GGUFValueType.UINT16, number), "split.count": Value(GGUFValueType.UINT16, len(runs)),
                "split.tensors.count": Value(GGUFValueType.INT32, len(entries))}
        shard = f"{name.removesuffix('.gguf')}-{number + 1:05d}-of-{len(runs):05d}.gguf"
        out.append(layout_file(shard, (metadata if number == 0 else {}) | keys, run))
    return out


def tags(entries: Sequence[Entry]) -> Metadata:
    """The keys that keep llama.cpp from rounding activations to 4 bits beside weight-only FP4 codes."""
    tagged = [e for e in entries if e.weight_only]
    return {
        "general.tensor_extra.name": array(GGUFValueType.STRING, [e.name for e in tagged]),
        "general.tensor_extra.prec_a4": array(GGUFValueType.BOOL, [False] * len(tagged)),
    } if tagged else {}


def layout_file(name: str, metadata: Metadata, entries: Sequence[Entry]) -> FilePlan:
    """Give every entry its offset and encode the header."""
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(metadata)))
    for key, value in metadata.items():
        header += encode_string(key) + value.encode()
    offset = 0
    for e in entries:
        header += encode_string(e.name) + struct.pack(f"<I{len(e.shape)}QIQ", len(e.shape), *reversed(e.shape),
                                                      GGMLQuantizationType[e.type], offset)
        offset += _align(e.nbytes)
    header += bytes(_align(len(header)) - len(header))
    start, placed = len(header), []
    for e in entries:
        placed.append(replace(e, offset=start))
        start += _align(e.nbytes)
    return FilePlan(name, metadata, tuple(placed), bytes(header), start)


def _align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _choose(need: Need, weights: Mapping[str, SourceWeight]) -> tuple[Part, ...] | None:
    """The alternative whose modules are all there, with row ranges filled in."""
    for parts in need.sources:
        if all(p.module in weights for p in parts):
            return tuple(Part(p.module, p.start or 0, _rows(weights[p.module]) if p.stop is None else p.stop)
                         for p in parts)
    if need.optional:
        return None
    missing = {alt: [p.module for p in alt if p.module not in weights] for alt in need.sources}
    closest = min(missing, key=lambda alt: len(missing[alt]) / len(alt))
    gone = missing[closest]
    raise PlanError(f"{need.name}{need.suffix}: {len(gone)} of {len(closest)} sources missing, the first is {gone[0]}; "
                    "the checkpoint is incomplete, or config.json describes another model")


def _rows(weight: SourceWeight) -> int:
    return weight.shape[0] if weight.shape else 1


def _entries(need: Need, parts: tuple[Part, ...], weights: list[SourceWeight], policy: Policy) -> list[Entry]:
    _check_shape(need, parts, weights)
    rows = sum((p.stop or 0) - (p.start or 0) for p in parts)
    columns = need.shape[-1] if len(need.shape) > 1 else prod(need.shape) // rows
    kind = "F32" if need.role in ALWAYS_F32 or len(need.shape) == 1 else policy(need, weights)
    kind, exactness, reason = _carry(need, weights, kind, columns)
    name = need.name + need.suffix
    fp4 = kind in ("NVFP4", "MXFP4")
    out = [Entry(name, need.role, "weight", parts, need.layout, need.shape, rows, kind, rows * row_bytes(kind, columns),
                 exactness, reason, fp4 and all(w.input_scale is None for w in weights))]
    n = need.shape[0] if len(need.shape) == 3 else 1
    one_each = parts if len(parts) == n else parts * n  # a stacked source has one factor for all its experts
    if any(c is not None and c.factor is not None for c in (w.carry(kind) for w in weights)):
        out.append(_scale(need, "scale", one_each, kind))
    inputs = [w.input_scale is not None for w in weights]
    if fp4 and all(inputs):
        out.append(_scale(need, "input_scale", one_each, kind))
    elif fp4 and any(inputs):
        raise PlanError(f"{need.name}: some of its sources quantize their activations to 4 bits and some do not")
    return out


def _scale(need: Need, kind: str, parts: tuple[Part, ...], scales: str) -> Entry:
    n = len(parts)
    return Entry(f"{need.name}.{kind}", need.role, kind, parts, AS_IS, (n,), n, "F32", 4 * n, Exactness.EXACT,
                 "float32, rounded once", scales=scales)


def _carry(need: Need, weights: list[SourceWeight], kind: str, columns: int) -> tuple[str, Exactness, str]:
    """The type that is really written, with its exactness and the reason where it needs one."""
    carries = [c for c in (w.carry(kind) for w in weights) if c is not None]
    if kind not in FLOATS:
        if len(carries) < len(weights):
            return kind, Exactness.LOSSY, f"quantized to {kind}"
        if any(c.factor is not None for c in carries) and not reads_scale(need, kind):
            return "BF16", Exactness.BF16, "llama.cpp reads no .scale here"
        try:
            row_bytes(kind, columns)
        except PlanError as e:
            return "BF16", Exactness.BF16, str(e)
        return kind, Exactness.EXACT if all(c.exact for c in carries) else Exactness.LOSSY, carries[0].why
    plain = all(w.format == "dense" for w in weights)
    if plain and (len(carries) == len(weights) or kind == "F32"):
        if kind == "F32" and need.layout.value:
            return kind, Exactness.F32, f"computed in float32: {need.layout.value}"
        return kind, Exactness.EXACT, "" if len(carries) == len(weights) else "widened to F32"
    if kind == "F32":
        return kind, Exactness.F32, "decoded"
    if kind == "BF16":
        why = next((c.why for c in carries if c.why), "decoded and rounded to BF16")
        return kind, Exactness.BF16, why
    return kind, Exactness.LOSSY, f"decoded and rounded to {kind}"


def reads_scale(need: Need, kind: str) -> bool:
    """Whether llama.cpp multiplies by a `.scale` beside this tensor when it is of type `kind`."""
    return need.scaled and need.role in SCALED_ROLES and (need.role != "output" or kind == "NVFP4")


def _check_shape(need: Need, parts: tuple[Part, ...], weights: list[SourceWeight]) -> None:
    """Each part must be as large as its share of the tensor, with rows of the right length."""
    share = prod(need.shape) // len(parts)
    for part, weight in zip(parts, weights):
        size = prod(weight.shape)
        rows = (part.stop or 0) - (part.start or 0)
        columns = size // _rows(weight) if size else 0
        want = need.shape[-1] if len(need.shape) > 1 else columns
        if rows * columns != share or columns != want or (part.stop or 0) > _rows(weight):
            raise PlanError(f"{part.module}: stored as {list(weight.shape)} in {weight.refs[0].file.name}; "
                            f"{need.name}{need.suffix} needs {list(need.shape)} from {len(parts)} of them")


def _check_all_used(model: Model, weights: Mapping[str, SourceWeight], used: Counter[str]) -> None:
    left = [m for m in weights if m not in used and not any(m.startswith(p) for p in model.ignored)]
    if left:
        ref = weights[left[0]].refs[0]
        raise PlanError(f"{left[0]}: not used by the {model.arch} architecture ({ref.dtype} {list(ref.shape)} in "
                        f"{ref.file.name}; {len(left)} such tensors); leaving it out could change the model")
