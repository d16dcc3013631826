"""What a checkpoint holds and what would become of it, as data: the census behind `mcpq-gguf inspect`."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from .convert import Prepared, exactness
from .formats import SourceWeight
from .manifest import tensor


@dataclass(frozen=True, order=True)
class Row:
    """Modules that are stored alike and become alike: one line of the census."""

    format: str
    scheme: str
    activations: str
    roles: str
    target: str
    exactness: str
    why: str
    modules: int
    nbytes: int


def census(prepared: Prepared) -> list[Row]:
    """One row for each distinct (source format, scheme, target, exactness), largest first."""
    groups: dict[tuple[str, ...], list[tuple[str, SourceWeight]]] = {}
    for entry in (e for plan in prepared.plans for e in plan.entries):
        if entry.kind != "weight":
            continue
        for module in dict.fromkeys(p.module for p in entry.parts):
            weight = prepared.weights[module]
            key = (weight.format, *_scheme(weight), entry.type, entry.exactness.value, entry.reason)
            groups.setdefault(key, []).append((entry.role, weight))
    rows = []
    for (fmt, scheme, acts, target, exact, why), members in groups.items():
        weights = {w.module: w for _, w in members}
        roles = ", ".join(sorted({role for role, _ in members}))
        rows.append(Row(fmt, scheme, acts, roles, target, exact, why, len(weights),
                        sum(w.nbytes for w in weights.values())))
    return sorted(rows, key=lambda r: -r.nbytes)


def report(prepared: Prepared, tensors: bool = False) -> dict[str, Any]:
    """Everything `inspect` prints, as JSON-ready data. `tensors` adds one object for each output tensor."""
    checkpoint = prepared.checkpoint
    dtypes: Counter[str] = Counter()
    for ref in checkpoint.tensors.values():
        dtypes[ref.dtype] += 1
    out: dict[str, Any] = {
        "checkpoint": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "gguf_architecture": prepared.model.arch,
        "shards": [s.name for s in checkpoint.shards],
        "source_tensors": len(checkpoint.tensors),
        "source_bytes": checkpoint.nbytes,
        "source_dtypes": dict(dtypes.most_common()),
        "census": [asdict(r) for r in census(prepared)],
        "files": [{"file": p.name, "bytes": p.nbytes, "tensors": len(p.entries), "exactness": exactness(p.entries)}
                  for p in prepared.plans],
        "notes": list(prepared.notes),
    }
    if tensors:
        out["tensors"] = [tensor(e) for plan in prepared.plans for e in plan.entries]
    return out


def _scheme(weight: SourceWeight) -> tuple[str, str]:
    if weight.format == "dense" or weight.scheme is None:
        return weight.refs[0].dtype, ""
    inputs = weight.scheme.inputs
    return str(weight.scheme.weights), "" if inputs is None else f"{inputs}{' dynamic' if inputs.dynamic else ''}"
