"""Configs of GPTQ and AWQ checkpoints (`quant_method` gptq, awq): one scheme for all modules, apart from exceptions.

GPTQ: `bits`, `group_size`, `desc_act`, `sym`, `checkpoint_format` (gptq, where stored zero points are one too small,
or gptq_v2), `dynamic` (GPTQModel's patterns: "-:" leaves modules out, "+:" or nothing gives them other settings).
AWQ: `bits` or `w_bit`, `group_size` or `q_group_size`, `zero_point`, `version` (gemm), `modules_to_not_convert`, of
which each entry leaves out every module that has it in its name (vllm, quantization/awq.py).

Both tools write many keys that say how a scale was found, and invent new ones; only those that change the meaning of
what is stored are looked at.
"""

import re
from typing import Any

from .errors import SchemeError, UnsupportedFormat
from .schemes import QuantArgs, Scheme, Schemes, _Group, _Matcher, _pattern, _strings

GPTQ_BITS = (2, 3, 4, 8)
_WHERE = "quantization_config"


def parse_gptq(config: dict[str, Any]) -> Schemes:
    """Schemes of a GPTQ config.

    Raises SchemeError when it is malformed, UnsupportedFormat for a storage or a model change that is not carried.
    """
    stored = config.get("checkpoint_format") or config.get("format") or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        raise UnsupportedFormat(f"{_WHERE}.checkpoint_format is {stored!r}; known are gptq and gptq_v2")
    if config.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise UnsupportedFormat(f"{_WHERE}.pack_dtype is {config['pack_dtype']!r}, expected int32")
    for key, what in (("rotation", "rotations"), ("adapter", "an adapter")):
        if config.get(key):
            raise UnsupportedFormat(f"{_WHERE}.{key} is {str(config[key])[:80]!r}: the model needs {what} at run time "
                                    "that llama.cpp does not apply")
    groups, ignore = [], list(_substrings(config))
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise SchemeError(f"{_WHERE}.dynamic: expected an object of patterns, found {str(dynamic)[:80]}")
    for key, changes in dynamic.items():
        pattern = "re:" + key.removeprefix("+:").removeprefix("-:")
        _pattern(pattern)
        if key.startswith("-:"):
            ignore.append(pattern)
        elif isinstance(changes, dict):
            groups.append(_Group(Scheme(key, stored, _gptq_args(config | changes, f"{_WHERE}.dynamic[{key!r}]")),
                                 (pattern,)))
        else:
            raise SchemeError(f"{_WHERE}.dynamic[{key!r}]: expected an object, found {str(changes)[:80]}")
    groups.append(_Group(Scheme("gptq", stored, _gptq_args(config, _WHERE)), ("Linear",)))
    return Schemes(tuple(groups), tuple(ignore), (), _Matcher(tuple(ignore)))


def parse_awq(config: dict[str, Any]) -> Schemes:
    """Schemes of an AWQ config. Raises as `parse_gptq`."""
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedFormat(f"{_WHERE}.version is {version!r}: only AWQ's gemm layout is carried; most checkpoints "
                                "are published in it")
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise UnsupportedFormat(f"{_WHERE}.bits is {bits!r}; AWQ's gemm layout has 4")
    args = _args(4, config.get("group_size", config.get("q_group_size", 128)), not config.get("zero_point", True),
                 False, _WHERE)
    ignore = _substrings(config)
    return Schemes((_Group(Scheme("awq", "awq", args), ("Linear",)),), ignore, (), _Matcher(ignore))


def _gptq_args(config: dict[str, Any], where: str) -> QuantArgs:
    bits = config.get("bits")
    if bits not in GPTQ_BITS:
        raise UnsupportedFormat(f"{where}.bits is {bits!r}; GPTQ stores {', '.join(map(str, GPTQ_BITS))}")
    return _args(bits, config.get("group_size", 128), config.get("sym", True) is True, bool(config.get("desc_act")),
                 where)


def _args(bits: int, size: Any, symmetric: bool, ordered: bool, where: str) -> QuantArgs:
    if type(size) is not int or size < -1 or size == 0:
        raise SchemeError(f"{where}: group_size should be a positive number or -1, found {size!r}")
    return QuantArgs(bits, "int", "group" if size > 0 else "channel", size if size > 0 else None, symmetric,
                     actorder="group" if ordered else None)


def _substrings(config: dict[str, Any]) -> tuple[str, ...]:
    """`modules_to_not_convert` as patterns."""
    names = _strings(config.get("modules_to_not_convert") or [], f"{_WHERE}.modules_to_not_convert")
    return tuple(f"re:.*{re.escape(name)}" for name in names)
