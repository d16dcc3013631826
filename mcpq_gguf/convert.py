"""From a checkpoint directory to GGUF files: the functions behind `mcpq-gguf convert` and `inspect`."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np

from . import __version__
from .arch import Model, describe
from .checkpoint import Checkpoint, open_checkpoint
from .errors import PlanError, WriteError
from .formats import FormatOptions, SourceWeight, disagreements, open_weights
from .formats.unused import notices
from .general import Identity, identify
from .ggml.metadata import Metadata, string, u32
from .imatrix import Imatrix, load_imatrix
from .manifest import write_manifest
from .mmproj import plan_projector
from .modelopt_schemes import quantization_config
from .plan import FLOATS, Entry, Exactness, FilePlan, float_policy, layout_shards, native_policy, plan_entries, tags
from .schemes import parse_schemes
from .tiers import distinct, file_token, load_tiers
from .tokenizer import vocabulary
from .transcode import Importance
from .writer import Finished, check_space, write_files

# GGML type that most weights have -> general.file_type (llama.h, enum llama_ftype).
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 12,
              "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ1_S": 24,
              "IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "MXFP4": 38, "NVFP4": 39}
OUTTYPES = ("native", "bf16", "f16", "f32")


@dataclass(frozen=True)
class Options:
    """What to make of a checkpoint.

    outtype         native (each weight in the GGML type that carries it), bf16, f16 or f32 (decoded)
    tiers           instead: rungs of the ladder, "all", names with commas between, or a .toml file (see tiers.py)
    imatrix         importance matrix for the types that a tier quantizes to
    shard_size      bytes of tensor data a file may hold before it is split, None for one file each
    model, mmproj   whether to write the language model, and the projector of a checkpoint that has one
    mmproj_type     type of the projector's large matrices: f32, f16, bf16 or q8_0
    projector       clip.projector_type, None for the one that belongs to the model
    llama_build     the oldest llama.cpp build that should load the projector, None for a current one
    asymmetric      integers with zero points: "exact", "q8_0" or "q4_1" (see formats.FormatOptions)
    overrides       general.* keys (name, license, quantized_by, ...) that win over those found in the checkpoint
    """

    outtype: str = "native"
    tiers: str | None = None
    imatrix: Path | None = None
    shard_size: int | None = None
    model: bool = True
    mmproj: bool = True
    mmproj_type: str = "bf16"
    projector: str | None = None
    llama_build: int | None = None
    asymmetric: str = "exact"
    overrides: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything known before a byte is written. `plans` are the files in the order they are written.

    tiers    of each file: its tier, an outtype, or "mmproj"
    """

    checkpoint: Checkpoint
    weights: Mapping[str, SourceWeight]
    model: Model
    plans: tuple[FilePlan, ...]
    tiers: tuple[str, ...]
    notes: tuple[str, ...]
    imatrix: Imatrix | None = None

    @property
    def plan(self) -> FilePlan:
        """The first file's plan: the language model's where there is one."""
        return self.plans[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(p.nbytes for p in self.plans)


def prepare(source: str | os.PathLike[str], options: Options | None = None) -> Prepared:
    """Read headers, resolve schemes, and plan the output. Raises a McpqError for all that would make a file wrong."""
    o = options or Options()
    if o.outtype not in OUTTYPES:
        raise PlanError(f"outtype {o.outtype!r} is not known; known are {', '.join(OUTTYPES)}")
    checkpoint = open_checkpoint(source)
    schemes = parse_schemes(quantization_config(checkpoint))
    resolve = cache(schemes.resolve)
    weights = open_weights(checkpoint, resolve, FormatOptions(o.asymmetric), schemes.all)
    model = describe(checkpoint.architecture, checkpoint.config, frozenset(weights))
    native = plan_entries(model, weights, native_policy)
    identity = _identify(checkpoint, native, o.overrides or {})
    imatrix = load_imatrix(o.imatrix) if o.imatrix else None
    notes = [*checkpoint.notes, *schemes.notes, *notices(checkpoint.tensors), *model.notes,
             *_told(weights), *disagreements(weights, resolve, list(schemes.unmatched_ignores(weights)))]
    plans: list[FilePlan] = []
    tiers: list[str] = []
    rungs, said = _rungs(o, model, weights, native, imatrix) if o.model else ([], [])
    notes += said
    for name, entries, encoding in rungs:
        metadata = _metadata(checkpoint, model, identity, entries, name, weights)
        if imatrix is not None and any(e.exactness is Exactness.LOSSY and e.name in imatrix for e in entries):
            metadata |= imatrix.metadata()
        shards = layout_shards(identity.file_name(encoding), metadata | tags(entries), entries, o.shard_size)
        plans += shards
        tiers += [name] * len(shards)
    if o.mmproj:
        projector = plan_projector(checkpoint, weights, identity, o.mmproj_type, o.projector, o.llama_build)
        if projector is not None:
            plans.append(projector.plan)
            tiers.append("mmproj")
            notes += projector.notes
    if not plans:
        raise PlanError(f"{checkpoint.path}: has no vision tower, so there is no projector to write")
    twice = [name for name, n in Counter(p.name for p in plans).items() if n > 1]
    if twice:
        raise PlanError(f"two tiers would be written to {twice[0]}; give them different suffixes")
    return Prepared(checkpoint, weights, model, tuple(plans), tuple(tiers), tuple(notes), imatrix)


def _rungs(o: Options, model: Model, weights: Mapping[str, SourceWeight], native: list[Entry],
           imatrix: Imatrix | None) -> tuple[list[tuple[str, list[Entry], str]], list[str]]:
    """(name, tensors, file name's last token) of each language model to write, and notes on those that are not."""
    if o.tiers is None and o.outtype != "native":
        return [(o.outtype, plan_entries(model, weights, float_policy(o.outtype.upper())), o.outtype.upper())], []
    main = main_type(native)
    tied = all(e.role != "output" for e in native)
    ladder = [(tier, plan_entries(model, weights, tier.policy(imatrix or (), tied)))
              for tier in load_tiers(o.tiers or "exact")]
    for _, entries in ladder:
        for e in entries:
            if imatrix is not None and e.kind == "weight":
                imatrix.check(e.name, e.shape)
    kept, notes = distinct(ladder)
    rungs: dict[str, tuple[str, list[Entry], str]] = {}
    for tier, entries in (ladder[i] for i in kept):
        own = main_type(entries)
        token = file_token(tier, own, main)
        if token in rungs:  # a tier named by its type alone, in a checkpoint where an earlier one consists of it, too
            token = f"{own}_{tier.suffix}"
        rungs[token] = tier.name, entries, token
    return list(rungs.values()), notes


def convert(prepared: Prepared, out: Path, workers: int | None = None,
            progress: Callable[[int], object] = lambda n: None, resume: bool = True,
            note: Callable[[str], object] = lambda text: None) -> list[Finished]:
    """Write the planned files and return what was written, in the order of the plans.

    out: a directory, or for a single model a path that ends in .gguf (a projector then goes beside it).
    progress is called with the bytes just finished, note with what the user should know; resume: go on with a run of
    the same checkpoint, plan and version that was killed here.
    """
    paths = _paths(prepared, out)
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise WriteError(f"{paths[0].parent}: cannot be made a directory: {e.strerror}") from None
    check_space(paths, prepared.plans)
    files = write_files(prepared.plans, paths, prepared.weights, prepared.checkpoint, workers or os.cpu_count() or 1,
                        progress, importance=_importance(prepared.imatrix), key=_key(prepared), resume=resume,
                        note=note)
    write_manifest(prepared, files)
    return files


def _importance(imatrix: Imatrix | None) -> Importance | None:
    """The columns' weights for a part of an entry; a stacked tensor has a part for each expert."""
    if imatrix is None:
        return None

    def look_up(entry: Entry, part: int, columns: int) -> np.ndarray | None:
        return imatrix.importance(entry.name, part if len(entry.shape) == 3 else None, columns)

    return look_up


def exactness(entries: Sequence[Entry]) -> dict[str, int]:
    """How many weights have each exactness."""
    counts = Counter(e.exactness for e in entries if e.kind == "weight")
    return {e.value: counts[e] for e in Exactness if counts[e]}


def _paths(prepared: Prepared, out: Path) -> list[Path]:
    if out.suffix != ".gguf":
        return [out / plan.name for plan in prepared.plans]
    return [out, *(out.parent / plan.name for plan in prepared.plans[1:])]


def _key(prepared: Prepared) -> str:
    """What must be the same for a run to be continued: the headers name every tensor, type and offset."""
    digest = hashlib.sha256(f"{__version__} {prepared.checkpoint.fingerprint}".encode())
    for plan in prepared.plans:
        digest.update(plan.header)
    for name, values in (prepared.imatrix.values if prepared.imatrix else {}).items():
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def _told(weights: Mapping[str, SourceWeight]) -> list[str]:
    """What formats have to say of their weights, each thing once."""
    told: dict[str, list[str]] = {}
    for weight in weights.values():
        for note in weight.notes:
            told.setdefault(note, []).append(weight.module)
    return [f"{m[0]}{f' and {len(m) - 1} more' if len(m) > 1 else ''}: {note}" for note, m in told.items()]


def _identify(checkpoint: Checkpoint, entries: list[Entry], overrides: Mapping[str, str]) -> Identity:
    """Parameter counts for the size label, as gguf's writer counts them."""
    weights = [e for e in entries if e.kind == "weight"]
    total = sum(prod(e.shape) for e in weights)
    stacked = [e for e in weights if e.role.startswith("expert_")]
    experts = stacked[0].shape[0] if stacked else 0
    routed = sum(prod(e.shape) for e in stacked)
    return identify(checkpoint, total, total - routed, routed // experts if experts else 0, experts, overrides)


def main_type(entries: Sequence[Entry]) -> str:
    """The block type that holds most parameters; in a file without blocks the float type that does."""
    size: dict[str, int] = defaultdict(int)
    for e in entries:
        size[e.type] += prod(e.shape)
    return max(size, key=lambda kind: (kind not in FLOATS, size[kind]))


def _metadata(checkpoint: Checkpoint, model: Model, identity: Identity, entries: list[Entry], tier: str,
              weights: Mapping[str, SourceWeight]) -> Metadata:
    rows = next(e.shape[0] for e in entries if e.role == "embedding")
    formats = sorted({w.format for w in weights.values()} - {"dense"}) or ["dense"]
    return {
        "general.architecture": string(model.arch),
        "general.type": string("model"),
        **identity.metadata,
        "general.file_type": u32(FILE_TYPES.get(main_type(entries), 1024)),
        "general.quantization_version": u32(2),
        "mcpq.version": string(__version__),
        "mcpq.tier": string(tier),
        "mcpq.source_formats": string(",".join(formats)),
        "mcpq.source_fingerprint": string(checkpoint.fingerprint),
        **{f"mcpq.tensors.{name}": u32(n) for name, n in exactness(entries).items()},
        **model.metadata,
        **vocabulary(checkpoint.path, rows),
    }
