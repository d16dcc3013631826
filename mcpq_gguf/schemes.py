"""`quantization_config` of compressed-tensors -> the Scheme of each module.

Matching follows compressed-tensors' `utils/match.py`: a target or ignore entry is a module name, `re:` and a pattern
that must match from the start of the name, or a class name. A checkpoint has no classes, so a class name such as
`Linear` stands for any module; whether a module is quantized at all is decided by its tensors (see formats/).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from .errors import SchemeError, UnsupportedFormat

FORMATS = ("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized", "mxfp8-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_CLASS_NAMES = {"Linear", "LinearBase", "Conv2d", "Embedding"}
# Keys of QuantizationArgs; the second half says how a scale was found and changes nothing that is stored.
_ARG_KEYS = {"num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder",
             "scale_dtype", "zp_dtype", "observer", "observer_kwargs"}
_CONFIG_KEYS = {"config_groups", "format", "ignore", "quant_method", "kv_cache_scheme", "quantization_status",
                "global_compression_ratio", "sparsity_config", "transform_config", "version", "moe_sparsity_config"}
_GROUP_KEYS = {"weights", "input_activations", "output_activations", "targets", "format"}

# Names under which other engines know fused modules: suffix in a checkpoint -> suffix of the fused module.
_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj", "in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_a": "in_proj_ba",
    "in_proj_b": "in_proj_ba",
}
# Prefixes under which other engines know the parts of a multimodal model: prefix in a checkpoint -> theirs.
_PREFIXES = {
    "model.language_model.": ("language_model.model.", "language_model.", "llm.model.", "llm.", "model."),
    "lm_head": ("language_model.lm_head", "llm.lm_head"),
    "model.vision_tower.vit_merger.": ("vit_merger.", "vpm.vit_merger.", "vision_tower.vit_merger."),
    "model.vision_tower.": ("vpm.", "vision_tower.", "visual."),
    "model.merger.": ("merger.", "resampler."),
    "model.visual.": ("visual.",),
}


@dataclass(frozen=True, slots=True)
class QuantArgs:
    """How one kind of value is quantized (compressed-tensors' QuantizationArgs). `block` is (rows, columns)."""

    num_bits: int
    type: str
    strategy: str
    group_size: int | None = None
    symmetric: bool = True
    dynamic: bool = False
    actorder: str | None = None
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        size = "x".join(map(str, self.block)) if self.block else self.group_size or ""
        return f"{self.type}{self.num_bits} {self.strategy}{size}{'' if self.symmetric else ' asymmetric'}"


@dataclass(frozen=True, slots=True)
class Scheme:
    """What config.json says of a module: the format of its weight, and how its activations are to be rounded."""

    group: str
    format: str
    weights: QuantArgs
    inputs: QuantArgs | None = None


@dataclass(frozen=True)
class _Group:
    scheme: Scheme
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Schemes:
    """All schemes of a checkpoint: `resolve` gives a module's, `notes` what the user should know of the config."""

    groups: tuple[_Group, ...] = ()
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _matcher: "_Matcher" = field(default_factory=lambda: _Matcher(()), repr=False)

    @property
    def all(self) -> tuple[Scheme, ...]:
        """The schemes of all groups."""
        return tuple(g.scheme for g in self.groups)

    def resolve(self, module: str) -> Scheme | None:
        """The scheme that targets `module`, or None when it is ignored or not targeted.

        As in compressed-tensors an ignore entry wins over any target, and a name wins over a pattern, a pattern over
        a class name. Names of other engines count where the module's own name matches nothing.
        """
        for name in (module, *aliases(module)):
            if self._matcher.matches(name, self.ignore):
                return None
        for name in (module, *aliases(module)):
            for rank in ("name", "re", "class"):
                for group in self.groups:
                    if any(_rank(t) == rank and _match(name, t) for t in group.targets):
                        return group.scheme
        return None

    def unmatched_ignores(self, modules: Mapping[str, Any]) -> Iterator[str]:
        """Ignore entries that match none of the checkpoint's modules under their own names."""
        for entry in self.ignore:
            if _rank(entry) == "class":
                continue
            if entry.startswith("re:"):
                if not any(_match(m, entry) for m in modules):
                    yield entry
            elif entry not in modules:
                yield entry


class _Matcher:
    """Answers `does any entry match this name` fast when most of thousands of entries are plain names."""

    def __init__(self, entries: tuple[str, ...]) -> None:
        self.names = {e for e in entries if not e.startswith("re:")} - _CLASS_NAMES
        self.patterns = [e for e in entries if e.startswith("re:")]

    def matches(self, name: str, entries: tuple[str, ...]) -> bool:
        return name in self.names or any(_match(name, p) for p in self.patterns)


def parse_schemes(config: dict[str, Any] | None) -> Schemes:
    """Schemes of `quantization_config` (None or empty: an unquantized checkpoint).

    Raises SchemeError for a malformed config, UnsupportedFormat for sparse or transformed checkpoints and for a
    quantization method that is not compressed-tensors.
    """
    if not config:
        return Schemes()
    method = config.get("quant_method", "compressed-tensors")
    if method in ("gptq", "awq"):
        from .gptq_schemes import parse_awq, parse_gptq  # it imports this module
        return parse_gptq(config) if method == "gptq" else parse_awq(config)
    from . import modelopt_schemes  # it imports this module
    if method in modelopt_schemes.MODELOPT:
        return modelopt_schemes.parse_modelopt(config)
    if method == "fp8":
        return modelopt_schemes.parse_fp8(config)
    if method != "compressed-tensors":
        raise UnsupportedFormat(f"quantization_config.quant_method is {method!r}; mcpq-gguf reads compressed-tensors")
    _refuse_unknown(config, _CONFIG_KEYS, "quantization_config")
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedFormat(f"sparsity_config.format is {sparsity['format']!r}: sparse storage has no GGML type; "
                                "save the checkpoint without sparse compression")
    if config.get("transform_config"):
        raise UnsupportedFormat("transform_config is set: the model needs rotations (Hadamard transforms) at run time "
                                "that llama.cpp does not apply, so its weights would be wrong there")
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UnsupportedFormat(f"quantization_status is {status!r}, expected 'compressed': "
                                "save the model with compression first")
    if config.get("format") not in (*FORMATS, "mixed-precision", None):
        raise UnsupportedFormat(f"quantization_config.format is {config['format']!r}; known are {', '.join(FORMATS)}")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise SchemeError("quantization_config.config_groups should hold at least one group")
    notes = []
    if config.get("kv_cache_scheme"):
        notes.append("kv_cache_scheme is set: GGUF has no place for it; choose the KV cache type when you run "
                     "llama.cpp (-ctk, -ctv)")
    ignore = tuple(_strings(config.get("ignore") or [], "ignore"))
    parsed = tuple(_group(name, g, config.get("format")) for name, g in groups.items())
    return Schemes(parsed, ignore, tuple(notes), _Matcher(ignore))


def aliases(module: str) -> tuple[str, ...]:
    """Names that other engines give to the module, or to the fused module that it is a part of."""
    out = []
    head, _, leaf = module.rpartition(".")
    if leaf in _FUSED:
        out.append(f"{head}.{_FUSED[leaf]}")
    if m := re.match(r"(.*\.experts)\.\d+\.", module):
        out.append(m[1])
    for own, theirs in _PREFIXES.items():
        if module.startswith(own):
            out += [t + name[len(own):] for name in (module, *out) if name.startswith(own) for t in theirs]
            break
    return tuple(out)


def _group(name: str, group: Any, default: str | None) -> _Group:
    where = f"quantization_config.config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise SchemeError(f"{where}: expected an object with `weights` and `targets`, found {str(group)[:100]}")
    _refuse_unknown(group, _GROUP_KEYS, where)
    fmt = group.get("format") or default
    if fmt not in FORMATS:
        raise UnsupportedFormat(f"{where}: format {fmt!r} is not known; known are {', '.join(FORMATS)}")
    inputs = group.get("input_activations")
    targets = tuple(_strings(group.get("targets") or [], f"{where}.targets"))
    return _Group(Scheme(name, fmt, _args(group["weights"], where + ".weights"),
                         _args(inputs, where + ".input_activations") if inputs else None), targets)


def _args(d: dict[str, Any], where: str) -> QuantArgs:
    _refuse_unknown(d, _ARG_KEYS, where)
    bits, kind, size, strategy = d.get("num_bits", 8), d.get("type", "int"), d.get("group_size"), d.get("strategy")
    if kind not in ("int", "float") or type(bits) is not int or not 1 <= bits <= 16:
        raise SchemeError(f"{where}: expected type int or float with 1 to 16 bits, found {kind!r} with {bits!r}")
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        raise SchemeError(f"{where}: group_size should be a positive number or -1, found {size!r}")
    if strategy is None:  # the defaults of QuantizationArgs
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        raise SchemeError(f"{where}: strategy {strategy!r} is not known; known are {', '.join(_STRATEGIES)}")
    block = d.get("block_structure")
    if strategy == "block" and (not isinstance(block, list) or len(block) != 2):
        raise SchemeError(f"{where}: strategy block needs block_structure [rows, columns], found {block!r}")
    return QuantArgs(bits, kind, strategy, size if size and size > 0 else None, d.get("symmetric", True) is True,
                     d.get("dynamic", False) not in (False, None), d.get("actorder") or None,
                     (int(block[0]), int(block[1])) if strategy == "block" and block else None)


def _refuse_unknown(d: dict[str, Any], known: set[str], where: str) -> None:
    unknown = sorted(k for k, v in d.items() if k not in known and v not in (None, {}, []))
    if unknown:
        raise SchemeError(f"{where}: unknown key {unknown[0]!r} = {str(d[unknown[0]])[:80]!r}; it may change the "
                          "numbers, so it is not skipped")


def _strings(values: Any, where: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise SchemeError(f"{where}: expected a list of names, found {str(values)[:100]}")
    for v in values:
        if v.startswith("re:"):
            _pattern(v)
    return values


def _rank(target: str) -> str:
    return "re" if target.startswith("re:") else "class" if target in _CLASS_NAMES else "name"


def _match(name: str, target: str) -> bool:
    rank = _rank(target)
    return rank == "class" or (target == name if rank == "name" else _pattern(target).match(name) is not None)


@cache
def _pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:"))
    except re.error as e:
        raise SchemeError(f"quantization_config: {target!r} is not a valid regular expression: {e}") from None
