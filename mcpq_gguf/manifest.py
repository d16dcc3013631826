"""SHA256SUMS and manifest.json beside the files of a conversion: what was made, from what, and how exactly."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .plan import Entry, FilePlan
from .writer import Finished

if TYPE_CHECKING:
    from .convert import Prepared

SUMS, MANIFEST = "SHA256SUMS", "manifest.json"


def write_manifest(prepared: "Prepared", files: Sequence[Finished]) -> None:
    """Write both, atomically; sums of other files that SHA256SUMS already lists stay in it."""
    folder = files[0].path.parent
    sums = _read_sums(folder / SUMS) | {f.path.name: f.sha256 for f in files}
    sums = {name: digest for name, digest in sums.items() if (folder / name).exists()}
    _replace(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
    data = {
        "mcpq_gguf": __version__,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "source": {
            "name": prepared.checkpoint.path.resolve().name,
            "architecture": prepared.checkpoint.architecture,
            "fingerprint": prepared.checkpoint.fingerprint,
            "shards": [{"file": s.name, "bytes": s.stat().st_size} for s in prepared.checkpoint.shards],
        },
        "notes": list(prepared.notes),
        "files": [_file(f, plan, tier) for f, plan, tier in zip(files, prepared.plans, prepared.tiers)],
    }
    _replace(folder / MANIFEST, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def tensor(entry: Entry) -> dict[str, Any]:
    """One planned tensor as JSON-ready data."""
    return {"name": entry.name, "type": entry.type, "shape": list(entry.shape), "bytes": entry.nbytes,
            "offset": entry.offset, "exactness": entry.exactness.value, "why": entry.reason,
            "sources": len(entry.parts), "first_source": entry.parts[0].module}


def _file(file: Finished, plan: FilePlan, tier: str) -> dict[str, Any]:
    tensors = [tensor(e) for e in plan.entries]
    for t in tensors:
        if loss := file.losses.get(t["name"]):
            t["loss"] = {"rms": loss.rms, "max": loss.maximum, "blocks": loss.blocks, "exact_blocks": loss.exact}
    return {"file": file.path.name, "tier": tier, "bytes": file.nbytes, "sha256": file.sha256, "tensors": tensors}


def _read_sums(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines) if name}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
