"""`general.*` metadata and file names: what a model is called, where it comes from, how it likes to be sampled.

Facts come from the model card's header, generation_config.json and the directory's name, read by gguf's own
`Metadata`; the name components are those of ggml's docs/gguf.md, section Naming convention.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from gguf import GGUFValueType

from .checkpoint import Checkpoint
from .ggml.metadata import Metadata, Value, array, f32, string, u32

_STRINGS = ("author", "version", "organization", "finetune", "basename", "description", "quantized_by", "size_label",
            "license_name", "license_link", "url", "doi", "uuid", "repo_url", "source_url", "source_doi",
            "source_uuid", "source_repo_url")
_SAMPLING = {"top_k": int, "top_p": float, "min_p": float, "xtc_probability": float, "xtc_threshold": float,
             "temp": float, "penalty_last_n": int, "penalty_repeat": float, "mirostat": int, "mirostat_tau": float,
             "mirostat_eta": float}
# Words in a checkpoint's name that say how it was quantized, and GGUF's name says by its encoding.
_QUANT_WORDS = {"NVFP4", "NVFP4A16", "MXFP4", "BF16", "FP16", "F16", "FP32", "F32"}


@dataclass(frozen=True)
class Identity:
    """A model's name in its parts, and the `general.*` keys that follow from the checkpoint."""

    name: str
    stem: str
    metadata: Metadata

    def file_name(self, encoding: str, prefix: str = "") -> str:
        """`[prefix-]Base-Size[-FineTune]-ENCODING.gguf`."""
        return f"{prefix + '-' if prefix else ''}{self.stem}-{encoding}.gguf"


def identify(checkpoint: Checkpoint, total: int, shared: int, expert: int, experts: int,
             overrides: Mapping[str, str]) -> Identity:
    """The model's identity.

    total, shared, expert, experts: parameter counts (all; outside the routed experts; of one expert; how many) for the
    size label when the name has none. `overrides` (name, quantized_by, license, ...) win over what is found.
    """
    name = overrides.get("name") or _directory_name(checkpoint.path.resolve())
    found = gguf.Metadata.load(None, checkpoint.path.resolve(), None, total)
    found.version = None
    found.basename, found.size_label, found.finetune = split_name(name)
    for key, value in overrides.items():
        setattr(found, key, value)
    if found.size_label is None:
        found.size_label = gguf.size_label(total, shared, expert, experts)
    if found.sampling_penalty_repeat is None:
        found.sampling_penalty_repeat = (checkpoint.json("generation_config.json") or {}).get("repetition_penalty")
    fine = "-".join(w for w in (found.finetune or "").split("-") if w and w.upper() not in _QUANT_WORDS)
    stem = gguf.naming_convention(name, found.basename, fine or None, None, found.size_label, None)
    return Identity(name, stem.replace("/", "-"), _keys(found, name))


def split_name(name: str) -> tuple[str, str | None, str | None]:
    """A model's name as (base name, size label, fine-tune): `MiniCPM-V-4.7`, `35B-A3B` and `W4A16`.

    The size is the first word of the form 35B, 0.8B or 8x7B, with the active size (A3B) that may follow; what comes
    after it is the fine-tune. Without a size, all of it is the base name.
    """
    words = name.strip().replace(" ", "-").split("-")
    for i, word in enumerate(words):
        if i and re.fullmatch(r"(\d+x)?\d+(\.\d+)?[QTBMK]", word, re.IGNORECASE):
            n = 2 if i + 1 < len(words) and re.fullmatch(r"A\d+(\.\d+)?[BM]", words[i + 1], re.IGNORECASE) else 1
            return "-".join(words[:i]), "-".join(words[i:i + n]), "-".join(words[i + n:]) or None
    while len(words) > 1 and words[-1].upper() in _QUANT_WORDS:  # the encoding will say it
        words.pop()
    return "-".join(words), None, None


def _directory_name(path: Path) -> str:
    """The directory's name; inside a Hugging Face cache (models--org--name/snapshots/revision) the model's."""
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.split("--")[-1]
    return path.name


def _keys(found: gguf.Metadata, name: str) -> Metadata:
    keys: Metadata = {"general.name": string(name)}
    for key in _STRINGS:
        value = getattr(found, key)
        if value is not None:
            keys["general." + key.replace("license_", "license.").replace("source_", "source.")] = string(str(value))
    if found.license is not None:
        keys["general.license"] = string(",".join(found.license) if isinstance(found.license, list) else found.license)
    for key, kind in _SAMPLING.items():
        value = getattr(found, f"sampling_{key}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            keys[f"general.sampling.{key}"] = Value(GGUFValueType.INT32, value) if kind is int else f32(value)
    _sources(keys, "base_model", found.base_models)
    _sources(keys, "dataset", found.datasets)
    for key in ("tags", "languages"):
        if values := getattr(found, key):
            keys[f"general.{key}"] = array(GGUFValueType.STRING, [str(v) for v in values])
    return keys


def _sources(keys: Metadata, kind: str, entries: list[dict[str, Any]] | None) -> None:
    if entries:
        keys[f"general.{kind}.count"] = u32(len(entries))
        for i, entry in enumerate(entries):
            for field, value in entry.items():
                keys[f"general.{kind}.{i}.{field}"] = string(str(value))
