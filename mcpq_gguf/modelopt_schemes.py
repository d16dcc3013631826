"""Configs of FP8 and NVFP4 checkpoints that are not compressed-tensors': NVIDIA ModelOpt, and DeepSeek-style `fp8`.

ModelOpt writes `hf_quant_config.json` ({"producer", "quantization": {"quant_algo", "exclude_modules", ...}}) and newer
versions the same facts into config.json's `quantization_config` (`ignore` there). Names to leave out are shell
patterns, `*` for anything (vllm, quantization/modelopt.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .checkpoint import Checkpoint
from .errors import SchemeError, UnsupportedFormat
from .schemes import QuantArgs, Scheme, Schemes, _Group, _Matcher, _refuse_unknown, _strings, aliases

MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
SIDE_FILE = "hf_quant_config.json"

_FP4, _FP8 = QuantArgs(4, "float", "tensor_group", 16), QuantArgs(8, "float", "tensor")
# quant_algo -> format, weights, activations.
_ALGORITHMS: dict[str, tuple[str, QuantArgs, QuantArgs | None]] = {
    "NVFP4": ("modelopt-nvfp4", _FP4, _FP4),
    "W4A16_NVFP4": ("modelopt-nvfp4", _FP4, None),
    "FP8": ("modelopt-fp8", _FP8, _FP8),
    "FP8_PER_CHANNEL_PER_TOKEN": ("modelopt-fp8", QuantArgs(8, "float", "channel"),
                                  QuantArgs(8, "float", "token", dynamic=True)),
    "MXFP8": ("modelopt-mxfp8", QuantArgs(8, "float", "group", 32), QuantArgs(8, "float", "group", 32, dynamic=True)),
    "FP8_PB_WO": ("modelopt-fp8", QuantArgs(8, "float", "block", block=(128, 128)), None),
}
_MODELOPT_KEYS = {"quant_method", "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "producer",
                  "exclude_modules", "ignore", "quantized_layers", "config_groups", "quantization",
                  "has_zero_point", "pre_quant_scale"}  # the last two of AWQ, which is refused by its quant_algo
_FP8_KEYS = {"quant_method", "activation_scheme", "fmt", "weight_block_size", "modules_to_not_convert",
             "ignored_layers", "scale_fmt", "kv_cache_scheme"}


@dataclass(frozen=True)
class LayerSchemes(Schemes):
    """Schemes where the config names each quantized layer; a layer's scheme holds for everything below it."""

    layers: Mapping[str, Scheme] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Scheme, ...]:
        return (*(g.scheme for g in self.groups), *self.layers.values())

    def resolve(self, module: str) -> Scheme | None:
        names = (module, *aliases(module))
        if any(self._matcher.matches(name, self.ignore) for name in names):
            return None
        for name in names:
            while name:
                if name in self.layers:
                    return self.layers[name]
                name = name.rpartition(".")[0]
        return self.groups[0].scheme if self.groups else None


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """config.json's `quantization_config`, completed from ModelOpt's hf_quant_config.json; None for neither."""
    config = checkpoint.config.get("quantization_config") or None
    if config is not None and not isinstance(config, dict):
        raise SchemeError(f"{checkpoint.path / 'config.json'}: quantization_config should be an object, "
                          f"found {type(config).__name__}")
    side = checkpoint.json(SIDE_FILE)
    if side is None or (config and config.get("quant_method") not in (None, *MODELOPT)):
        return config
    inner = side.get("quantization")
    if not isinstance(inner, dict):
        raise SchemeError(f"{checkpoint.path / SIDE_FILE}: expected an object `quantization`, found {str(inner)[:80]}")
    for key in ("quant_algo", "group_size"):
        if config and key in config and key in inner and config[key] != inner[key]:
            raise SchemeError(f"{checkpoint.path / SIDE_FILE}: {key} is {inner[key]!r}, config.json says "
                              f"{config[key]!r}; one of them belongs to another checkpoint")
    return {"quant_method": "modelopt"} | inner | (config or {})


def parse_modelopt(config: dict[str, Any]) -> Schemes:
    """Schemes of a ModelOpt config; SchemeError when it is malformed, UnsupportedFormat for other algorithms."""
    _refuse_unknown(config, _MODELOPT_KEYS, "quantization_config (modelopt)")
    if isinstance(config.get("quantization"), dict):
        config = config["quantization"] | {k: v for k, v in config.items() if k != "quantization"}
    algorithm, layers = config.get("quant_algo"), config.get("quantized_layers") or {}
    if not isinstance(layers, dict) or not all(isinstance(v, dict) for v in layers.values()):
        raise SchemeError(f"quantization_config.quantized_layers: expected an object of objects, found "
                          f"{str(layers)[:100]}")
    by_name = {name: _scheme(layer.get("quant_algo"), name, layer.get("group_size", config.get("group_size")))
               for name, layer in layers.items()}
    groups: tuple[_Group, ...] = ()
    if not (by_name and algorithm in (None, "MIXED_PRECISION")):
        groups = (_Group(_scheme(algorithm, "quant_algo", config.get("group_size")), ("Linear",)),)
    patterns = [*_strings(config.get("exclude_modules") or [], "exclude_modules"),
                *_strings(config.get("ignore") or [], "ignore")]
    ignore = tuple(dict.fromkeys(_shell_pattern(p) for p in patterns))
    notes = []
    if config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        kind = config.get("kv_cache_quant_algo") or "kv_cache_scheme"
        notes.append(f"the config quantizes the KV cache ({kind}): GGUF has no place for that; choose the KV cache "
                     "type when you run llama.cpp (-ctk, -ctv)")
    return LayerSchemes(groups, ignore, tuple(notes), _Matcher(ignore), by_name)


def parse_fp8(config: dict[str, Any]) -> Schemes:
    """Schemes of `quant_method: fp8`; with `weight_block_size` the scales are by block, else one a weight."""
    _refuse_unknown(config, _FP8_KEYS, "quantization_config (fp8)")
    if config.get("fmt") not in (None, "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
        raise UnsupportedFormat(f"quantization_config.fmt is {config['fmt']!r}; known are e4m3 and e5m2")
    block = config.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2
                                  and all(type(n) is int and n > 0 for n in block)):
        raise SchemeError(f"quantization_config.weight_block_size should be [rows, columns], found {block!r}")
    weights = QuantArgs(8, "float", "block", block=(block[0], block[1])) if block else _FP8
    dynamic = config.get("activation_scheme", "dynamic") == "dynamic"
    inputs = QuantArgs(8, "float", "token" if dynamic else "tensor", dynamic=dynamic)
    ignore = tuple(s for key in ("modules_to_not_convert", "ignored_layers")
                   for s in _strings(config.get(key) or [], key) if not s.startswith("re:"))
    return LayerSchemes((_Group(Scheme("fp8", "fp8", weights, inputs), ("Linear",)),), ignore, (), _Matcher(ignore))


def _scheme(algorithm: Any, where: str, group_size: Any) -> Scheme:
    found = str(algorithm).upper()  # some versions write FP8_PB_WO in lower case
    if found not in _ALGORITHMS:
        hint = ("; AWQ's pre_quant_scale multiplies the activations, which llama.cpp does not do"
                if "AWQ" in found else "")
        raise UnsupportedFormat(f"quantization_config: {where} has quant_algo {algorithm!r}; known are "
                                f"{', '.join(_ALGORITHMS)}{hint}")
    fmt, weights, inputs = _ALGORITHMS[found]
    if weights.group_size and group_size not in (None, weights.group_size):
        raise SchemeError(f"quantization_config: {where} has group_size {group_size!r}; {algorithm} has "
                          f"{weights.group_size}")
    return Scheme(where, fmt, weights, inputs)


def _shell_pattern(pattern: str) -> str:
    """A name as it is, a pattern with `*` or `?` in the notation of compressed-tensors."""
    if not set(pattern) & set("*?"):
        return pattern
    return "re:" + re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") + "$"
