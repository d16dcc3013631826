"""Does it fit? The memory that llama.cpp takes on the GPUs for a planned file, term by term, before it is written.

Sizes of caches and states are llama.cpp's own sums (src/llama-kv-cache.cpp, src/llama-memory-recurrent.cpp,
src/llama-hparams.cpp), to the byte. Only the compute reserve is an estimate, and stated as one.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from .errors import PlanError
from .ggml.encode import row_bytes
from .plan import FilePlan

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")  # llama.cpp's -ctk and -ctv
SLOTS = 4       # llama-server's default --parallel; they share the KV cache, but each has its own recurrent state
UBATCH = 512    # llama.cpp's default: so many rows of logits are held at once while a prompt is read
RESERVE = 512 << 20  # a GPU: the rest of the compute buffers (text and vision) and what the backend takes for itself


@dataclass(frozen=True)
class MemorySum:
    """Bytes that a model takes on the GPUs, with the settings that the sum is for.

    weights    of all layers and the output
    projector  the mmproj file
    kv         cache of the full-attention layers for `context` tokens, of type `kv_type`
    recurrent  states of the linear-attention layers, float32, for each of `slots` sequences
    reserve    compute buffers and the backend's own needs, an estimate
    gpus       what each GPU takes of all of it, layers split in order so that the fullest takes least
    host       the token embedding, which llama.cpp leaves in system memory; not part of the sum
    """

    weights: int
    projector: int
    kv: int
    recurrent: int
    reserve: int
    gpus: tuple[int, ...]
    host: int
    context: int
    kv_type: str
    slots: int

    @property
    def total(self) -> int:
        """All terms; the GPUs' shares add up to it."""
        return self.weights + self.projector + self.kv + self.recurrent + self.reserve

    def fits(self, limit: int) -> bool:
        """Whether no GPU takes more than `limit` bytes."""
        return max(self.gpus) <= limit

    def __str__(self) -> str:
        rows = [("weights", self.weights), ("projector", self.projector),
                (f"KV cache ({self.kv_type}, {self.context:,} tokens)", self.kv),
                (f"recurrent state ({self.slots} slots)", self.recurrent),
                (f"compute reserve ({len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)})", self.reserve),
                ("sum", self.total)]
        lines = [f"{name:<36}{_mib(size):>14}" for name, size in rows]
        if len(self.gpus) > 1:
            lines.append(f"{'on each GPU':<36}  {', '.join(_mib(g) for g in self.gpus)}")
        return "\n".join([*lines, f"{'token embedding, in system memory':<36}{_mib(self.host):>14}"])


def memory(plan: FilePlan, context: int, kv: str = "f16", gpus: int = 1, projector: int = 0,
           slots: int = SLOTS) -> MemorySum:
    """The memory of a language model's file with all layers on `gpus` GPUs.

    context    tokens of context; llama.cpp rounds up to 256
    kv         type of the KV cache, one of KV_TYPES
    projector  bytes of the mmproj file, 0 for none
    slots      sequences at once (llama-server --parallel)
    MTP layers count as loaded. Raises PlanError for settings that make no sense.
    """
    if kv.lower() not in KV_TYPES:
        raise PlanError(f"KV cache type {kv!r} is not known; known are {', '.join(KV_TYPES)}")
    if min(context, gpus, slots) < 1:
        raise PlanError(f"context {context}, {gpus} GPUs, {slots} slots: each should be at least 1")
    context = -(-context // 256) * 256
    keys = _Keys(plan)
    layers = [0] * keys.number("block_count")
    last = host = 0
    tied = all(e.name != "output.weight" for e in plan.entries)
    for e in plan.entries:
        if e.name.startswith("blk."):
            layers[int(e.name.split(".")[1])] += e.nbytes
        elif e.role == "embedding":
            host += e.nbytes
            last += e.nbytes if tied else 0
        else:
            last += e.nbytes
    weights = sum(layers) + last
    caches = [_cache(keys, i, context, kv.upper()) for i in range(len(layers))]
    states = [_state(keys, i) * slots for i in range(len(layers))]
    rows = next(e.shape[0] for e in plan.entries if e.role == "embedding")
    fixed, logits = [RESERVE] * gpus, min(UBATCH, context) * rows * 4
    fixed[0] += projector
    fixed[-1] += last + logits  # the output layer goes with the last layers
    shares = _split([sum(parts) for parts in zip(layers, caches, states)], fixed)
    return MemorySum(weights, projector, sum(caches), sum(states), RESERVE * gpus + logits, shares, host, context,
                     kv.lower(), slots)


def best(sums: Sequence[MemorySum], limit: int) -> int | None:
    """Index of the first that fits into `limit` bytes a GPU, None when none does. `sums` come best tier first."""
    return next((i for i, s in enumerate(sums) if s.fits(limit)), None)


def parse_size(text: str) -> int:
    """Bytes that a size means: 16GiB = 16 x 2^30; 16GB and 16G = 16 x 10^9, as the Hub and llama.cpp's tools have it.

    A card sold as 16 GB has 16 GiB. Raises PlanError for what is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        raise PlanError(f"{text!r} is no size; write for instance 16GiB (2^30), 20GB or 20G (10^9), 500MB, or bytes")
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    if size < 1:
        raise PlanError(f"{text!r}: a size should be at least one byte")
    return int(size)


class _Keys:
    """Hyperparameters of a planned file by their names without the architecture."""

    def __init__(self, plan: FilePlan) -> None:
        self.plan = plan
        self.arch = str(plan.metadata["general.architecture"].value)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.plan.metadata.get(f"{self.arch}.{name}")
        if value is None and default is None:
            raise PlanError(f"{self.plan.name}: has no {self.arch}.{name}, which the memory sum needs")
        return default if value is None else value.value

    def number(self, name: str, layer: int = 0, default: int | None = None) -> int:
        value = self.get(name, default)
        return int(value[layer] if isinstance(value, tuple) else value)


def _recurrent(keys: _Keys, layer: int) -> bool | None:
    """Whether a layer has a recurrent state; None for MTP layers, which have neither state nor cache."""
    if layer >= keys.number("block_count") - keys.number("nextn_predict_layers", default=0):
        return None
    kinds = keys.get("attention.recurrent_layers", ())
    return bool(kinds[layer]) if kinds else False


def _cache(keys: _Keys, layer: int, context: int, kind: str) -> int:
    """Bytes of K and V of a full-attention layer."""
    if _recurrent(keys, layer) is not False:
        return 0
    heads = keys.number("attention.head_count_kv", layer)
    return context * sum(row_bytes(kind, heads * keys.number(f"attention.{x}_length")) for x in ("key", "value"))


def _state(keys: _Keys, layer: int) -> int:
    """Bytes of one sequence's convolution window and state matrix of a linear-attention layer, float32."""
    if not _recurrent(keys, layer):
        return 0
    inner, state = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
    window = (keys.number("ssm.conv_kernel") - 1) * (inner + 2 * keys.number("ssm.group_count") * state)
    return 4 * (window + inner * state)


def _split(layers: Sequence[int], fixed: Sequence[int]) -> tuple[int, ...]:
    """Give runs of layers to GPUs that start with `fixed` bytes, so that the fullest takes as little as possible."""

    def fill(limit: int) -> list[int] | None:
        taken, gpu = list(fixed), 0
        for size in layers:
            while gpu < len(taken) and taken[gpu] + size > limit:
                gpu += 1
            if gpu == len(taken):
                return None
            taken[gpu] += size
        return taken if max(taken) <= limit else None

    low, high = 0, sum(layers) + max(fixed)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(middle) is not None else (middle + 1, high)
    taken = fill(high)
    assert taken is not None
    return tuple(taken)


def _mib(size: int) -> str:
    return f"{ceil(size / (1 << 20)):,} MiB"
