"""The projector file: the plan of `mmproj-<Model>-<TYPE>.gguf` beside a language model from the same checkpoint."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import __version__
from .arch import Need
from .arch.vision import describe_projector, image_processor
from .checkpoint import Checkpoint
from .errors import PlanError
from .formats import SourceWeight
from .general import Identity
from .ggml.metadata import Metadata, string, u32
from .plan import Entry, Exactness, FilePlan, Policy, float_policy, layout_file, plan_entries

# --mmproj-type -> (GGML type, general.file_type of llama.h)
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}


@dataclass(frozen=True)
class Projector:
    """A planned projector file, and what the user should know about it."""

    plan: FilePlan
    notes: tuple[str, ...]


def plan_projector(checkpoint: Checkpoint, weights: Mapping[str, SourceWeight], identity: Identity, kind: str = "bf16",
                   projector: str | None = None, build: int | None = None) -> Projector | None:
    """Plan the projector of a checkpoint; None when it has no vision tower.

    kind       a key of TYPES: the type of the large matrices; norms, biases and the patch kernel are F32 in every file
    projector  clip.projector_type, None for the one that belongs to the model
    build      the oldest llama.cpp build that should load the file, None for a current one
    Raises what `describe_projector` and `plan_entries` raise: unknown, missing or misshapen tensors are errors.
    """
    if kind not in TYPES:
        raise PlanError(f"--mmproj-type {kind!r} is not known; known are {', '.join(TYPES)}")
    model = describe_projector(checkpoint.architecture, checkpoint.config, image_processor(checkpoint),
                               frozenset(weights), projector, build)
    if model is None:
        return None
    main, file_type = TYPES[kind]
    entries = plan_entries(model, weights, _policy(main))
    metadata: Metadata = {
        "general.architecture": string(model.arch),
        "general.type": string("mmproj"),
        **{k: v for k, v in identity.metadata.items() if not k.startswith("general.sampling.")},
        "general.file_type": u32(file_type),
        "general.quantization_version": u32(2),
        "mcpq.version": string(__version__),
        "mcpq.source_fingerprint": string(checkpoint.fingerprint),
        **_counts(entries),
        **model.metadata,
    }
    return Projector(layout_file(identity.file_name(main, "mmproj"), metadata, entries), model.notes)


def _policy(kind: str) -> Policy:
    """One type for the matrices, whatever the checkpoint stores them in; BF16 where a row has no whole Q8_0 blocks."""
    if kind != "Q8_0":
        return float_policy(kind)

    def choose(need: Need, weights: Sequence[SourceWeight]) -> str:
        return "BF16" if need.role == "vision_embedding" or need.shape[-1] % 32 else "Q8_0"

    return choose


def _counts(entries: Sequence[Entry]) -> Metadata:
    counts = Counter(e.exactness for e in entries if e.kind == "weight")
    return {f"mcpq.tensors.{e.value}": u32(counts[e]) for e in Exactness if counts[e]}
