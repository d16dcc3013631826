"""From a checkpoint directory to GGUF files: the one function behind `mcpq-gguf convert` and `inspect`."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from . import __version__
from .arch import Model, describe
from .checkpoint import Checkpoint, open_checkpoint
from .errors import PlanError, WriteError
from .formats import SourceWeight, open_weights
from .general import Identity, identify
from .ggml.metadata import Metadata, string, u32
from .plan import Entry, Exactness, FilePlan, float_policy, layout_file, native_policy, plan_entries
from .schemes import parse_schemes
from .tokenizer import vocabulary
from .writer import Finished, check_space, write_files

# GGML type that most weights have -> general.file_type (llama.h, enum llama_ftype).
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12,
               "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "BF16": 32, "MXFP4": 38, "NVFP4": 39}
OUTTYPES = ("native", "bf16", "f16", "f32")


@dataclass(frozen=True)
class Prepared:
    """Everything known before a byte is written."""

    checkpoint: Checkpoint
    weights: Mapping[str, SourceWeight]
    model: Model
    identity: Identity
    plan: FilePlan
    notes: tuple[str, ...]


def prepare(source: str | os.PathLike[str], outtype: str = "native",
            overrides: Mapping[str, str] | None = None) -> Prepared:
    """Read headers, resolve schemes, and plan the output.

    outtype: native (each weight in the GGML type that carries it), bf16, f16 or f32 (decoded).
    overrides: general.* keys (name, license, quantized_by, ...) that win over those found in the checkpoint.
    Raises a McpqError for everything that would make the file wrong.
    """
    if outtype not in OUTTYPES:
        raise PlanError(f"outtype {outtype!r} is not known; known are {', '.join(OUTTYPES)}")
    checkpoint = open_checkpoint(source)
    # Which class it is comes first: a user with an unsupported model should not read about its tensors.
    quantization = checkpoint.config.get("quantization_config")
    schemes = parse_schemes(quantization)
    modules = frozenset(n.removesuffix(".weight").removesuffix(".weight_packed") for n in checkpoint.tensors)
    model = describe(checkpoint.architecture, checkpoint.config, modules)
    weights = open_weights(checkpoint, schemes.resolve)
    policy = native_policy if outtype == "native" else float_policy(outtype.upper())
    entries = plan_entries(model, weights, policy)
    identity = _identify(checkpoint, entries, overrides or {})
    main = _main_type(entries)
    metadata = _metadata(checkpoint, model, identity, entries, main, weights)
    plan = layout_file(identity.file_name(main), metadata, entries)
    return Prepared(checkpoint, weights, model, identity, plan, (*checkpoint.notes, *schemes.notes, *model.notes))


def convert(prepared: Prepared, out: Path, workers: int | None = None,
            progress: Callable[[int], object] = lambda n: None, resume: bool = True,
            note: Callable[[str], object] = lambda text: None) -> Finished:
    """Write the planned file to `out`, a directory or a path that ends in .gguf, and return what was written.

    progress is called with the bytes just finished, note with what the user should know; resume: go on with a run of
    the same checkpoint, plan and version that was killed here.
    """
    path = out if out.suffix == ".gguf" else out / prepared.plan.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise WriteError(f"{path.parent}: cannot be made a directory: {e.strerror}") from None
    check_space(path.parent, prepared.plan.nbytes)
    return write_files([prepared.plan], [path], prepared.weights, prepared.checkpoint, workers or os.cpu_count() or 1,
                       progress, key=_key(prepared), resume=resume, note=note)[0]


def _key(prepared: Prepared) -> str:
    """What must be the same for a run to be continued: the header names every tensor, type and offset."""
    digest = hashlib.sha256(f"{__version__} {prepared.checkpoint.fingerprint}".encode())
    digest.update(prepared.plan.header)
    return digest.hexdigest()


def exactness(entries: tuple[Entry, ...]) -> dict[str, int]:
    """How many weights have each exactness."""
    counts = Counter(e.exactness.value for e in entries if e.kind == "weight")
    return {e.value: counts[e.value] for e in Exactness if counts[e.value]}


def _identify(checkpoint: Checkpoint, entries: list[Entry], overrides: Mapping[str, str]) -> Identity:
    """Parameter counts for the size label, as gguf's writer counts them."""
    weights = [e for e in entries if e.kind == "weight"]
    total = sum(prod(e.shape) for e in weights)
    stacked = [e for e in weights if e.role.startswith("expert_")]
    experts = stacked[0].shape[0] if stacked else 0
    routed = sum(prod(e.shape) for e in stacked)
    return identify(checkpoint, total, total - routed, routed // experts if experts else 0, experts, overrides)


def _main_type(entries: list[Entry]) -> str:
    """The type that holds most parameters."""
    size: dict[str, int] = defaultdict(int)
    for e in entries:
        size[e.type] += prod(e.shape)
    return max(size, key=size.__getitem__)


def _metadata(checkpoint: Checkpoint, model: Model, identity: Identity, entries: list[Entry], main: str,
              weights: Mapping[str, SourceWeight]) -> Metadata:
    rows = next(e.shape[0] for e in entries if e.role == "embedding")
    counts = exactness(tuple(entries))
    formats = sorted({w.format for w in weights.values()} - {"dense"}) or ["dense"]
    return {
        "general.architecture": string(model.arch),
        "general.type": string("model"),
        **identity.metadata,
        "general.file_type": u32(_FILE_TYPES.get(main, 1024)),
        "general.quantization_version": u32(2),
        "mcpq.version": string(__version__),
        "mcpq.source_formats": string(",".join(formats)),
        "mcpq.source_fingerprint": string(checkpoint.fingerprint),
        **{f"mcpq.tensors.{name}": u32(n) for name, n in counts.items()},
        **model.metadata,
        **vocabulary(checkpoint.path, rows),
    }
