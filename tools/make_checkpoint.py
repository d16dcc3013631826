#!/usr/bin/env python3
"""Write a synthetic MiniCPM-V-4.7 MoE checkpoint: true architecture, true file layout, random weights.

    make_checkpoint.py --preset demo --out DIR                     a dozen MB with a working tokenizer
    make_checkpoint.py --preset 5gb --out DIR                      true rows and expert count, fewer layers
    make_checkpoint.py --preset 35b --format int4-mixed --out DIR  the shapes of 35B-A3B
    make_checkpoint.py --preset 35b --list                         count tensors and bytes, write nothing

Names, dtypes, shapes and config.json are those that llm-compressor 0.14 writes for
MiniCPMV4_7ForConditionalGeneration; within a shard, tensors lie as safetensors' own writer puts them.
Values come from pools of random bytes, of which each tensor takes a window and XORs it with its own key.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

# ---------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Dims:
    """Sizes of one checkpoint; each field is an option on the command line."""

    layers: int = 4
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    moe_inter: int = 128
    shared_inter: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    lin_k_heads: int = 2
    lin_v_heads: int = 4
    lin_head_dim: int = 64
    vocab: int = 1024
    bpe_vocab: int = 512
    v_hidden: int = 128
    v_inter: int = 512
    v_layers: int = 4
    v_heads: int = 4
    image_size: int = 980
    insert_layer: int = 2
    shard_mb: int = 20000


_35B = Dims(
    layers=40, experts=256, top_k=8, hidden=2048, moe_inter=512, shared_inter=512, heads=16, kv_heads=2, head_dim=256,
    lin_k_heads=16, lin_v_heads=32, lin_head_dim=128, vocab=248320, v_hidden=1152, v_inter=4304, v_layers=27,
    v_heads=16, insert_layer=6,
)
# 5gb keeps the 35B's share of expert bytes (about 70 %): vocabulary and vision tower shrink with the layers.
PRESETS = {"demo": Dims(), "5gb": replace(_35B, layers=8, vocab=65536, v_layers=4, insert_layer=2), "35b": _35B}

# ------------------------------------------------------------------------------- quantization schemes

LINEAR_ATTN = r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$"
ATTN = r"re:.*language_model\..*self_attn\.(q|k|v|o)_proj$"
EXPERTS = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
SHARED = r"re:.*mlp\.shared_expert\.(gate|up|down)_proj$"
LM_HEAD = r"re:.*lm_head$"


@dataclass(frozen=True)
class Group:
    """One config group: compressed-tensors format, code width, values a scale (0: a row), module targets."""

    format: str
    bits: int
    group_size: int
    targets: tuple[str, ...]

    def matches(self, module: str) -> bool:
        return any(re.match(t.removeprefix("re:"), module) for t in self.targets)


GROUPS: dict[str, tuple[Group, ...]] = {
    "nvfp4": (Group("nvfp4-pack-quantized", 4, 16, (EXPERTS, SHARED)),),
    "int4-mixed": (
        Group("pack-quantized", 4, 64, (LINEAR_ATTN, ATTN)),
        Group("pack-quantized", 4, 32, (EXPERTS,)),
        Group("pack-quantized", 8, 128, (LM_HEAD,)),
    ),
    "fp8": (Group("float-quantized", 8, 0, (LINEAR_ATTN, ATTN, EXPERTS, SHARED)),),
    "bf16": (),
}

# (strategy, type, scale_dtype) that llm-compressor writes for a format
_ARGS: dict[str, tuple[str, str, str | None]] = {
    "nvfp4-pack-quantized": ("tensor_group", "float", "torch.float8_e4m3fn"),
    "pack-quantized": ("group", "int", None),
    "float-quantized": ("channel", "float", None),
}


def _args(dynamic: bool, group_size: int | None, bits: int, strategy: str, kind: str, scale: str | None) -> Any:
    return {
        "actorder": None, "block_structure": None, "dynamic": dynamic, "group_size": group_size, "num_bits": bits,
        "observer": None if dynamic else "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": scale,
        "strategy": strategy, "symmetric": True, "type": kind, "zp_dtype": None,
    }  # fmt: skip


def quantization_config(fmt: str, ignore: list[str]) -> dict[str, Any]:
    """config.json's quantization_config for a format, with the linear modules that it leaves alone."""
    groups = {}
    for i, g in enumerate(GROUPS[fmt]):
        strategy, kind, scale = _ARGS[g.format]
        groups[f"group_{i}"] = {
            "format": g.format,
            "input_activations": _args(True, None, 8, "token", "float", None) if fmt == "fp8" else None,
            "output_activations": None,
            "targets": list(g.targets),
            "weights": _args(False, g.group_size or None, g.bits, strategy, kind, scale),
        }
    return {
        "config_groups": groups, "format": GROUPS[fmt][0].format, "global_compression_ratio": None, "ignore": ignore,
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.19.0",
    }  # fmt: skip


# -------------------------------------------------------------------------------------------- tensors

# bytes an element, in the order in which safetensors' writer lays dtypes into a file
ITEMSIZE = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
_FILE_ORDER = {dtype: i for i, dtype in enumerate(ITEMSIZE)}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the checkpoint: `fill` names how its values are made, `size` their magnitude."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: str
    size: float = 0.0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


def _linear(module: str, rows: int, cols: int, size: float = 0.0) -> Tensor:
    return Tensor(f"{module}.weight", "BF16", (rows, cols), "normal", size or min(0.05, max(0.02, 0.6 / cols**0.5)))


def _biased(module: str, rows: int, cols: int) -> Iterator[Tensor]:
    yield _linear(module, rows, cols)
    yield Tensor(f"{module}.bias", "BF16", (rows,), "bias")


def _layer_norm(module: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{module}.weight", "BF16", (width,), "norm_one")
    yield Tensor(f"{module}.bias", "BF16", (width,), "bias")


def _norm(module: str, width: int, fill: str = "norm_zero") -> Tensor:
    return Tensor(f"{module}.weight", "BF16", (width,), fill)


def vision_tensors(d: Dims) -> Iterator[Tensor]:
    """The SigLIP tower with its vit_merger."""
    top, v, window = "model.vision_tower", d.v_hidden, 4 * d.v_hidden

    def attention(at: str) -> Iterator[Tensor]:
        for proj in ("k_proj", "v_proj", "q_proj", "out_proj"):
            yield from _biased(f"{at}.self_attn.{proj}", v, v)

    yield Tensor(f"{top}.embeddings.patch_embedding.weight", "BF16", (v, 3, 14, 14), "normal", 0.04)
    yield Tensor(f"{top}.embeddings.patch_embedding.bias", "BF16", (v,), "bias")
    yield Tensor(f"{top}.embeddings.position_embedding.weight", "BF16", ((d.image_size // 14) ** 2, v), "normal", 0.05)
    for i in range(d.v_layers):
        at = f"{top}.encoder.layers.{i}"
        yield from _layer_norm(f"{at}.layer_norm1", v)
        yield from attention(at)
        yield from _layer_norm(f"{at}.layer_norm2", v)
        yield from _biased(f"{at}.mlp.fc1", d.v_inter, v)
        yield from _biased(f"{at}.mlp.fc2", v, d.v_inter)
    yield from _layer_norm(f"{top}.post_layernorm", v)
    yield from _layer_norm(f"{top}.vit_merger.layer_norm1", v)
    yield from attention(f"{top}.vit_merger")
    yield from _layer_norm(f"{top}.vit_merger.pre_norm", window)
    yield from _biased(f"{top}.vit_merger.linear_1", 4 * d.v_inter, window)
    yield from _biased(f"{top}.vit_merger.linear_2", v, 4 * d.v_inter)


def layer_tensors(d: Dims, i: int) -> Iterator[Tensor]:
    """One layer of the language model: full attention every fourth, Gated DeltaNet else; then the experts."""
    at, h = f"model.language_model.layers.{i}", d.hidden
    out = 1.4 / math.sqrt(2 * d.layers) * 0.02
    if (i + 1) % 4 == 0:
        q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
        for proj, rows in (("q_proj", 2 * q), ("k_proj", kv), ("v_proj", kv)):
            yield _linear(f"{at}.self_attn.{proj}", rows, h)
        yield _linear(f"{at}.self_attn.o_proj", h, q, out)
        yield _norm(f"{at}.self_attn.q_norm", d.head_dim)
        yield _norm(f"{at}.self_attn.k_norm", d.head_dim)
    else:
        k, v = d.lin_k_heads * d.lin_head_dim, d.lin_v_heads * d.lin_head_dim
        lin = f"{at}.linear_attn"
        yield Tensor(f"{lin}.dt_bias", "BF16", (d.lin_v_heads,), "dt_bias")
        yield Tensor(f"{lin}.A_log", "BF16", (d.lin_v_heads,), "a_log")
        yield Tensor(f"{lin}.conv1d.weight", "BF16", (2 * k + v, 1, 4), "conv")
        yield _norm(f"{lin}.norm", d.lin_head_dim, "norm_one")
        yield _linear(f"{lin}.out_proj", h, v, out)
        for proj, rows in (("qkv", 2 * k + v), ("z", v), ("b", d.lin_v_heads), ("a", d.lin_v_heads)):
            yield _linear(f"{lin}.in_proj_{proj}", rows, h)
    yield _linear(f"{at}.mlp.gate", d.experts, h, 5 / h**0.5)

    def mlp(prefix: str, inter: int) -> Iterator[Tensor]:
        yield _linear(f"{prefix}.gate_proj", inter, h)
        yield _linear(f"{prefix}.up_proj", inter, h)
        yield _linear(f"{prefix}.down_proj", h, inter, out)

    for e in range(d.experts):
        yield from mlp(f"{at}.mlp.experts.{e}", d.moe_inter)
    yield from mlp(f"{at}.mlp.shared_expert", d.shared_inter)
    yield _linear(f"{at}.mlp.shared_expert_gate", 1, h)
    yield _norm(f"{at}.input_layernorm", h)
    yield _norm(f"{at}.post_attention_layernorm", h)


def dense_tensors(d: Dims) -> Iterator[Tensor]:
    """Every parameter before quantization, in the model's own order."""
    yield from vision_tensors(d)
    yield Tensor("model.language_model.embed_tokens.weight", "BF16", (d.vocab, d.hidden), "normal", 0.2)
    for i in range(d.layers):
        yield from layer_tensors(d, i)
    yield _norm("model.language_model.norm", d.hidden)
    window = 4 * d.v_hidden
    yield from _layer_norm("model.merger.mlp.0.pre_norm", window)
    yield from _biased("model.merger.mlp.0.linear_1", window, window)
    yield from _biased("model.merger.mlp.0.linear_2", d.hidden, window)
    yield _linear("lm_head", d.vocab, d.hidden, 1.2 / d.hidden**0.5)


# RMS of the codes that the pools below hold; scales divide by it, so that a weight has its intended size
_NVFP4_RMS, _E4M3_RMS = 278.0, 139.0
_INT_RMS = {4: 4.6, 8: 73.9}


def quantize(t: Tensor, group: Group) -> Iterator[Tensor]:
    """The tensors that stand for one linear weight in a config group's format."""
    module, (rows, cols) = t.name.removesuffix(".weight"), t.shape
    if group.group_size and cols % group.group_size:
        raise SystemExit(f"{module}: {cols} columns are no multiple of the group size {group.group_size}")
    if group.format == "nvfp4-pack-quantized":
        yield Tensor(f"{module}.weight_packed", "U8", (rows, cols // 2), "bytes")
        yield Tensor(f"{module}.weight_scale", "F8_E4M3", (rows, cols // 16), "e4m3_scale")
        yield Tensor(f"{module}.weight_global_scale", "F32", (1,), "global_scale", _NVFP4_RMS / t.size)
    elif group.format == "pack-quantized":
        scale = t.size / _INT_RMS[group.bits]
        yield Tensor(f"{module}.weight_packed", "I32", (rows, cols * group.bits // 32), "bytes")
        yield Tensor(f"{module}.weight_scale", "BF16", (rows, cols // group.group_size), "bf16_scale", scale)
        yield Tensor(f"{module}.weight_shape", "I64", (2,), f"shape {rows} {cols}")
    else:
        yield Tensor(t.name, "F8_E4M3", (rows, cols), "e4m3")
        yield Tensor(f"{module}.weight_scale", "BF16", (rows, 1), "bf16_scale", t.size / _E4M3_RMS)


def plan(d: Dims, fmt: str) -> tuple[list[Tensor], list[str]]:
    """All tensors of the checkpoint, and the linear modules that the format leaves alone."""
    tensors: list[Tensor] = []
    ignore: list[str] = []
    for t in dense_tensors(d):
        module = t.name.removesuffix(".weight")
        group = next((g for g in GROUPS[fmt] if g.matches(module)), None) if len(t.shape) == 2 else None
        if group:
            tensors += quantize(t, group)
            continue
        tensors.append(t)
        if len(t.shape) == 2 and not module.endswith(("embed_tokens", "position_embedding")):
            ignore.append(module)
    return tensors, ignore


# --------------------------------------------------------------------------------------------- values

POOL, CHUNK = 8 << 20, 4 << 20  # bytes of a pool; bytes of a tensor that are made at a time

Rng = np.random.Generator


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Finite float32 -> BF16 bits as uint16, rounded to nearest even."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def _e4m3_pool(rng: Rng, _: float) -> np.ndarray:
    """Sign, exponents 14 and down, each half as frequent as the one above: nearly uniform in +-240."""
    exponent = 14 - np.minimum(rng.geometric(0.5, POOL) - 1, 14)
    return (exponent << 3).astype(np.uint8)


# fill -> (bits that a tensor's key may flip without leaving the valid range, maker of the pool)
POOLS: dict[str, tuple[int, Callable[[Rng, float], np.ndarray]]] = {
    "bytes": (0xFFFFFFFFFFFFFFFF, lambda rng, _: rng.integers(0, 2**64, POOL // 8, np.uint64)),
    "e4m3": (0x8787878787878787, _e4m3_pool),
    "e4m3_scale": (0x0707070707070707, lambda rng, _: rng.integers(11, 15, POOL, np.uint8) << 3),
    "bf16_scale": (0x007F007F007F007F, lambda rng, s: to_bf16(s * 2 ** rng.uniform(-0.7, 0.7, POOL // 2))),
    "normal": (0x807F807F807F807F, lambda rng, s: to_bf16(rng.standard_normal(POOL // 2, np.float32) * np.float32(s))),
}

# fill of a small tensor -> its float values
DRAWS: dict[str, Callable[[Rng, tuple[int, ...]], np.ndarray]] = {
    "norm_zero": lambda rng, shape: rng.standard_normal(shape) * 0.1,
    "norm_one": lambda rng, shape: rng.standard_normal(shape) * 0.1 + 1,
    "bias": lambda rng, shape: rng.standard_normal(shape) * 0.03,
    "conv": lambda rng, shape: rng.standard_normal(shape) * 0.3,
    "dt_bias": lambda rng, shape: rng.standard_normal(shape) * 1.5 - 2,
    "a_log": lambda rng, shape: np.log(rng.random(shape) * 15 + 1),
}


class Values:
    """Makes tensors' bytes from a seed; what a tensor holds depends on seed and name only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.pools: dict[tuple[str, float], np.ndarray] = {}
        self.scratch = np.empty(CHUNK // 8, np.uint64)

    def _hash(self, text: str) -> bytes:
        return hashlib.sha256(f"{self.seed}/{text}".encode()).digest()

    def _rng(self, text: str) -> Rng:
        return np.random.Generator(np.random.PCG64(int.from_bytes(self._hash(text)[:16], "little")))

    def _pool(self, fill: str, size: float) -> np.ndarray:
        if (fill, size) not in self.pools:
            self.pools[fill, size] = POOLS[fill][1](self._rng(f"pool/{fill}/{size}"), size).view(np.uint64)
        return self.pools[fill, size]

    def chunks(self, t: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes, CHUNK at a time; each piece is valid until the next is asked for."""
        if t.fill in POOLS:
            pool, mask = self._pool(t.fill, t.size), POOLS[t.fill][0]
            for start in range(0, t.nbytes, CHUNK):
                size = min(CHUNK, t.nbytes - start)
                words = -(-size // 8)
                offset, key = struct.unpack("<QQ", self._hash(f"{t.name}/{start}")[:16])
                offset %= len(pool) - words + 1
                out = self.scratch[:words]
                np.bitwise_xor(pool[offset : offset + words], np.uint64(key & mask), out=out)
                yield out.view(np.uint8)[:size].data
        elif t.fill in DRAWS:
            yield to_bf16(DRAWS[t.fill](self._rng(t.name), t.shape)).reshape(-1).view(np.uint8).data
        elif t.fill == "global_scale":  # gate and up share one, as llm-compressor's oneshot gives them
            octave = self._rng(t.name.replace(".up_proj.", ".gate_proj.")).uniform(-0.5, 0.5)
            yield np.array([t.size * 2**octave], np.float32).view(np.uint8).data
        else:
            yield np.array(t.fill.split()[1:], np.int64).view(np.uint8).data


# --------------------------------------------------------------------------------------------- writer


def split_shards(tensors: list[Tensor], limit: int) -> list[list[Tensor]]:
    """Fill shards in the model's order up to `limit` bytes; sort each as safetensors' writer does."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for t in tensors:
        if shards[-1] and size + t.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(t)
        size += t.nbytes
    return [sorted(s, key=lambda t: (_FILE_ORDER[t.dtype], t.name)) for s in shards]


def write_safetensors(path: Path, tensors: list[Tensor], values: Values) -> None:
    """Stream one shard: 8 bytes of header length, JSON header padded to 8, tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb", buffering=1 << 20) as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors:
            for chunk in values.chunks(t):
                f.write(chunk)
    os.replace(partial, path)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(out: Path, tensors: list[Tensor], seed: int, shard_bytes: int) -> None:
    """All shards, and their index where there are several."""
    shards = split_shards(tensors, shard_bytes)
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    values = Values(seed)
    for name, shard in zip(names, shards, strict=True):
        write_safetensors(out / name, shard, values)
    if len(shards) > 1:
        where = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        total = sum(t.nbytes for t in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_json(out / "model.safetensors.index.json", index)


# ------------------------------------------------------------------------------------------ tokenizer

SPECIALS = [
    *(f"<|{name}|>" for name in (
        "endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start",
        "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad",
    )),
    *(f"<{slash}{name}>" for name in ("image", "ref", "box", "quad", "point", "slice", "image_id", "unit")
      for slash in ("", "/")),
]  # fmt: skip
# added, but kept by skip_special_tokens, as in the Qwen tokenizers
ADDED = [f"<{slash}{name}>" for name in ("tool_call", "tool_response", "think") for slash in ("", "/")]
NAMED = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip

# the pre-tokenizer that llama.cpp knows as qwen35
PRETOKENIZER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# the same for Python's re, near enough to count words with
_WORDS = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

CORPUS = """What is shown in the image? Describe the picture in detail, then answer the question in one sentence.
The image shows a street in the morning: three people are waiting at the corner, and behind them there is a small shop
with a red door. There are some trees on the left, and the light of the sun is reflected in the windows of the houses.
Here is the answer to the question: the people are waiting for the bus, because the sign at the corner shows the time
of the next one. It is not certain where they are going, but they have bags with them and they look in one direction.
A model reads a checkpoint, a converter writes the same weights in another container, and a test compares the two: the
number of the tensors, the shape of each, and every value in it. If something is different, the test says what it is.
def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def main() -> None:
    for name in sorted(names):
        print(name, len(read(name)))
        if not name.endswith(".json"):
            continue


你好，请描述这张图片。图片中有什么？请用一句话回答这个问题。今天天气很好，我们去公园。请描述图片中的天气。
Où est le café, et où sont les élèves ? Größe, Straße und Übung. Привет, мир! こんにちは、世界。이미지를 설명해 주세요.
"""


def byte_alphabet() -> dict[int, str]:
    """Byte -> the visible character that stands for it in a byte-level BPE (GPT-2's table)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def train_merges(count: int) -> list[tuple[str, str]]:
    """Up to `count` BPE merges of CORPUS: the most frequent pair first, ties by spelling."""
    alphabet = byte_alphabet()
    words = Counter(tuple(alphabet[b] for b in w.encode()) for w in _WORDS.findall(CORPUS))
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        words = Counter({_merge(word, best): n for word, n in words.items()})
    return merges


def _merge(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for token in word:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return tuple(out)


def tokenizer_json(bpe_vocab: int) -> tuple[dict[str, Any], dict[str, int]]:
    """tokenizer.json's content, and token -> id with the added tokens."""
    merges = train_merges(bpe_vocab - 256)
    tokens = [*sorted(byte_alphabet().values()), *(a + b for a, b in merges)]
    vocab = {t: i for i, t in enumerate(tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ids = {t: len(tokens) + i for i, t in enumerate([*SPECIALS, *ADDED])}
    added = [{"id": i, "content": t, **flags, "special": t in SPECIALS} for t, i in ids.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZER}, "behavior": "Isolated", "invert": False}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": [list(m) for m in merges],
        },
    }  # fmt: skip
    return content, vocab | ids


CHAT_TEMPLATE = r"""{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type in ['image', 'image_url'] -%}{{- '<|image_pad|>\n' -}}
{%- elif part.type == 'video' -%}{{- '<|video_pad|>\n' -}}
{%- else -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n<think>\n' -}}
{%- if enable_thinking is not defined or not enable_thinking -%}{{- '\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""

# ------------------------------------------------------------------------------------------ JSON files


def config_json(d: Dims, fmt: str, ids: dict[str, int], ignore: list[str]) -> dict[str, Any]:
    """config.json of the model, with quantization_config unless the format is bf16."""
    rotary = d.head_dim // 8
    section = round(rotary * 11 / 32)  # the real model's 11, 11, 10 of 32, scaled
    text = {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "bos_token_id": None,
        "dtype": "bfloat16", "eos_token_id": ids["<|im_end|>"], "full_attention_interval": 4, "head_dim": d.head_dim,
        "hidden_act": "silu", "hidden_size": d.hidden, "initializer_range": 0.02,
        "layer_types": [("full" if (i + 1) % 4 == 0 else "linear") + "_attention" for i in range(d.layers)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": d.lin_head_dim, "linear_num_key_heads": d.lin_k_heads,
        "linear_num_value_heads": d.lin_v_heads, "linear_value_head_dim": d.lin_head_dim,
        "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": d.moe_inter,
        "num_attention_heads": d.heads, "num_experts": d.experts, "num_experts_per_tok": d.top_k,
        "num_hidden_layers": d.layers, "num_key_value_heads": d.kv_heads, "output_router_logits": False,
        "pad_token_id": ids["<|endoftext|>"], "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [section, section, rotary - 2 * section],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": d.shared_inter,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": d.vocab,
    }  # fmt: skip
    vision = {
        "attention_dropout": 0.0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": d.v_hidden,
        "image_size": d.image_size, "insert_layer_id": d.insert_layer, "intermediate_size": d.v_inter,
        "layer_norm_eps": 1e-06, "model_type": "minicpmv4_7_vision", "num_attention_heads": d.v_heads,
        "num_channels": 3, "num_hidden_layers": d.v_layers, "patch_size": 14, "window_kernel_size": [2, 2],
    }  # fmt: skip
    config = {
        "architectures": ["MiniCPMV4_7ForConditionalGeneration"], "downsample_mode": "16x", "dtype": "bfloat16",
        "image_end_id": ids["</image>"], "image_size": 448, "image_start_id": ids["<image>"],
        "image_token_id": ids["<|image_pad|>"], "insert_layer_id": d.insert_layer, "merge_kernel_size": [2, 2],
        "merger_times": 1, "model_type": "minicpmv4_7", "newline_id": ids["Ċ"], "patch_size": 14,
        "slice_end_id": ids["</slice>"], "slice_start_id": ids["<slice>"], "text_config": text,
        "tie_word_embeddings": False, "transformers_version": "5.19.0", "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision,
    }  # fmt: skip
    if GROUPS[fmt]:
        config["quantization_config"] = quantization_config(fmt, ignore)
    return dict(sorted(config.items()))


IMAGE_PROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "downsample_mode": "16x",
    "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "MiniCPMV4_6ImageProcessor", "image_std": [0.5, 0.5, 0.5],
    "max_slice_nums": 9, "patch_size": 14, "resample": 3, "rescale_factor": 1 / 255, "scale_resolution": 448,
    "slice_mode": True, "use_image_id": True,
}  # fmt: skip
VIDEO_PROCESSOR = {k: v for k, v in IMAGE_PROCESSOR.items() if k != "image_processor_type"} | {
    "do_sample_frames": True, "max_num_frames": 128, "return_metadata": False, "stack_frames": 1,
    "video_processor_type": "MiniCPMV4_6VideoProcessor",
}  # fmt: skip


def write_text_files(out: Path, d: Dims, fmt: str, ignore: list[str]) -> None:
    """Tokenizer, processor and generation files; config.json last, so that its presence means complete."""
    tokenizer, ids = tokenizer_json(d.bpe_vocab)
    if len(ids) > d.vocab:
        raise SystemExit(f"--vocab {d.vocab} is less than the tokenizer's {len(ids)} tokens")
    write_json(out / "tokenizer.json", tokenizer)
    config: dict[str, Any] = {
        "backend": "tokenizers", "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
        "extra_special_tokens": [], "model_max_length": 262144, "model_specific_special_tokens": NAMED,
        "pad_token": "<|endoftext|>", "processor_class": "MiniCPMV4_7Processor",
        "tokenizer_class": "TokenizersBackend", "unk_token": None,
    }  # fmt: skip
    write_json(out / "tokenizer_config.json", config | NAMED)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(out / "preprocessor_config.json", IMAGE_PROCESSOR)
    processor = {"image_processor": IMAGE_PROCESSOR, "processor_class": "MiniCPMV4_7Processor"}
    write_json(out / "processor_config.json", processor | {"video_processor": VIDEO_PROCESSOR})
    eos, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    generation = {"do_sample": False, "eos_token_id": [eos, pad], "pad_token_id": pad}
    write_json(out / "generation_config.json", generation | {"transformers_version": "5.19.0"})
    write_json(out / "config.json", config_json(d, fmt, ids, ignore))


# ----------------------------------------------------------------------------------------- entry point


def make_checkpoint(out: Path, d: Dims, fmt: str = "nvfp4", seed: int = 1) -> int:
    """Write a checkpoint into an empty or new directory; returns its bytes of weights."""
    tensors, ignore = plan(d, fmt)
    total = sum(t.nbytes for t in tensors)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise SystemExit(f"{out} is not empty")
    if shutil.disk_usage(out).free < total * 1.01:
        raise SystemExit(f"{out}: {total / 1e9:.1f} GB needed, {shutil.disk_usage(out).free / 1e9:.1f} GB free")
    write_weights(out, tensors, seed, d.shard_mb * 1_000_000)
    write_text_files(out, d, fmt, ignore)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="demo")
    parser.add_argument("--format", choices=GROUPS, default="nvfp4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory to write; must be empty or new")
    parser.add_argument("--list", action="store_true", help="print tensor count and bytes, write nothing")
    sizes = parser.add_argument_group("sizes that override the preset's")
    for field in fields(Dims):
        sizes.add_argument("--" + field.name.replace("_", "-"), type=int, metavar="N")
    args = parser.parse_args()
    given = {f.name: v for f in fields(Dims) if (v := getattr(args, f.name)) is not None}
    dims = replace(PRESETS[args.preset], **given)
    if args.list:
        tensors, _ = plan(dims, args.format)
        by_type: Counter[str] = Counter()
        for t in tensors:
            by_type[t.dtype] += t.nbytes
        total = sum(by_type.values())
        print(f"{len(tensors)} tensors, {total} bytes ({total / 1e9:.2f} GB)")
        print(", ".join(f"{dtype} {n / 1e9:.3f} GB" for dtype, n in by_type.most_common()))
        return
    if not args.out:
        parser.error("--out DIR is needed")
    total = make_checkpoint(args.out, dims, args.format, args.seed)
    print(f"{args.out}: {total / 1e9:.3f} GB of weights, {args.format}")


if __name__ == "__main__":
    main()
