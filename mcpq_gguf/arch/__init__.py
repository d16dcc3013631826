"""Architectures: which source tensor becomes which GGUF tensor. One table a family, looked up by model class.

A table is expanded with the sizes in config.json into the complete list of tensors that the model needs, so that a
layer or an expert that is missing is found, and a tensor that nothing asks for is named.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import UnsupportedArchitecture
from ..ggml.metadata import Metadata
from .layout import AS_IS, Layout

# What a tensor is for; tiers choose a type by role. Roles in ALWAYS_F32 are small, and llama.cpp computes with them
# in float32 or would round activations to BF16 for them.
ALWAYS_F32 = frozenset({"norm", "router", "shared_router", "ssm_small", "vision_f32"})
ROLES = ALWAYS_F32 | {
    "embedding", "output", "attn_q", "attn_k", "attn_v", "attn_output", "linear_in", "linear_gate", "linear_out",
    "linear_alpha_beta", "expert_gate", "expert_up", "expert_down", "shared_gate", "shared_up", "shared_down",
    "ffn_gate", "ffn_up", "ffn_down", "mtp", "vision", "vision_embedding",
}

# Roles whose weights llama.cpp multiplies by a `.scale` after the matrix product (src/llama-model.cpp, the generic pass
# of load_tensors; `output` only for NVFP4).
SCALED_ROLES = ROLES - ALWAYS_F32 - {"embedding", "vision", "vision_embedding"}


@dataclass(frozen=True, slots=True)
class Part:
    """A run of rows of one source module; `start`..`stop` count in the source's rows, None means all of them."""

    module: str
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """One GGUF tensor that the architecture needs.

    name      its GGUF name without `.weight` or other suffix; `suffix` is the rest
    shape     expected logical shape, outermost first (experts, rows, columns)
    sources   alternatives: the first whose modules are all there is taken
    optional  may be absent (tied output)
    scaled    llama.cpp reads a `.scale` beside it
    """

    name: str
    role: str
    shape: tuple[int, ...]
    sources: tuple[tuple[Part, ...], ...]
    layout: Layout = AS_IS
    suffix: str = ".weight"
    optional: bool = False
    scaled: bool = True


@dataclass(frozen=True)
class Model:
    """An architecture's answer for one checkpoint: GGUF architecture name, tensors, hyperparameters.

    ignored   source modules that this file leaves out: prefix -> reason
    notes     what the user should know (MTP layers announced and absent, unknown config keys)
    """

    arch: str
    needs: tuple[Need, ...]
    metadata: Metadata
    ignored: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


Table = Callable[[Mapping[str, Any], frozenset[str]], Model]


def tables() -> dict[str, Table]:
    """Model class in config.json -> its table."""
    from . import qwen35
    return qwen35.CLASSES


def describe(architecture: str, config: Mapping[str, Any], modules: frozenset[str]) -> Model:
    """The model of a checkpoint. `modules` are the names of all its logical weights.

    Raises UnsupportedArchitecture for a class without a table.
    """
    known = tables()
    if architecture not in known:
        raise UnsupportedArchitecture(f"config.json names the model class {architecture!r}, which has no table here; "
                                      f"known are {', '.join(sorted(known))}")
    return known[architecture](config, modules)
