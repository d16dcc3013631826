"""The ladder: which type each role of tensor gets in each file. The tiers are data, in tiers.toml or a user's file.

A tier's policy starts from the native type. A weight that the checkpoint holds quantized in a type that GGML has stays
so, unless the tier says `requantize`; all others get the type of their rule. Nothing is ever made larger than native.
"""

import re
import sys
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from .arch import ALWAYS_F32, ROLES, Need
from .errors import PlanError
from .formats import SourceWeight
from .ggml.quantize import NEEDS_IMPORTANCE, TYPES, bits, fitting_type
from .plan import FLOATS, Entry, FilePlan, Policy, native_policy, reads_scale

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NATIVE = "native"
# Roles that a rule may quantize. The projector has its own option, and llama.cpp multiplies by the tiny alpha and beta
# projections what a recurrent state accumulates: they stay native.
LARGE = ROLES - ALWAYS_F32 - {"vision", "vision_embedding", "linear_alpha_beta"}
GROUPS: dict[str, frozenset[str]] = {
    "large": LARGE,
    "experts": frozenset(r for r in LARGE if r.startswith("expert_")),
    "shared_expert": frozenset(r for r in LARGE if r.startswith("shared_")),
    "attention": frozenset(r for r in LARGE if r.startswith("attn_")),
    "linear_attention": frozenset(r for r in LARGE if r.startswith("linear_")),
    "ffn": frozenset(r for r in LARGE if r.startswith("ffn_")),
}
_TARGETS = TYPES | set(FLOATS) | {NATIVE}
_KEYS = {"name", "description", "suffix", "requantize", "rules", "without_imatrix"}
# Types as file names have them: the Hub knows MXFP4 with _MOE, and these K-types only with a letter.
_NAMES = {"MXFP4": "MXFP4_MOE", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}


@dataclass(frozen=True)
class Tier:
    """One step of the ladder.

    suffix           letters that follow the encoding in file names, "" for the file that is meant without a tag
    requantize       whether weights that are quantized already get their rule's type, too, if it is smaller
    rules            role -> GGML type or `native`, for every role in LARGE
    without_imatrix  the rules for tensors that no importance matrix covers
    """

    name: str
    description: str
    suffix: str
    requantize: bool
    rules: Mapping[str, str]
    without_imatrix: Mapping[str, str]

    def policy(self, covered: Container[str] = (), tied: bool = False) -> Policy:
        """The plan's policy for this tier.

        covered  names of the tensors that an importance matrix has weights for: an Imatrix, or nothing
        tied     the embedding is the output, too, and gets the larger one of both rules
        The policy raises PlanError for a type that needs importance where there is none.
        """

        def choose(need: Need, weights: Sequence[SourceWeight]) -> str:
            has = need.name + need.suffix in covered
            native = native_type(need, weights)
            target = self._target(need.role, has, tied)
            if target == NATIVE or (native not in FLOATS and not self.requantize):
                return native
            kind, _ = fitting_type(target, need.shape[-1])
            if bits(native) <= bits(kind):
                return native
            if kind in NEEDS_IMPORTANCE and not has:
                raise PlanError(f"{need.name}{need.suffix}: tier {self.name} wants {kind}, which needs an importance "
                                "matrix that covers it; give one with --imatrix, or a type in without_imatrix")
            return kind

        return choose

    def _target(self, role: str, covered: bool, tied: bool) -> str:
        rules = self.rules if covered else self.without_imatrix
        target = rules.get(role, NATIVE)
        if role == "embedding" and tied:
            return max(target, rules["output"], key=lambda t: 99.0 if t == NATIVE else bits(t))
        return target


def native_type(need: Need, weights: Sequence[SourceWeight]) -> str:
    """The type that carries a tensor, as the plan will really write it.

    BF16 instead of blocks that do not divide the rows, or that need a `.scale` which llama.cpp does not read there.
    """
    kind = native_policy(need, weights)
    if kind in FLOATS:
        return kind
    carries = [w.carry(kind) for w in weights]
    scaled = any(c is not None and c.factor is not None for c in carries)
    whole = fitting_type(kind, need.shape[-1])[0] == kind
    return kind if whole and (not scaled or reads_scale(need, kind)) else "BF16"


def llama_quantize_command(plan: FilePlan) -> str:
    """The llama-quantize command whose result comes nearest to a planned model, "" for a projector.

    It quantizes decoded weights a second time; that is the difference that a comparison with it shows. NVFP4 is no
    type that it knows: IQ4_NL, which takes as many bits, stands in for it.
    """
    kinds: dict[str, Counter[str]] = {}
    for e in plan.entries:
        if e.kind == "weight" and e.role in ROLES - ALWAYS_F32 and not e.role.startswith("vision"):
            name = re.sub(r"^blk\.\d+\.", "", e.name).removesuffix(".weight")
            kinds.setdefault(name, Counter())[e.type.replace("NVFP4", "IQ4_NL")] += prod(e.shape)
    if not kinds:
        return ""
    main = sum(kinds.values(), Counter()).most_common(1)[0][0]
    args = ["llama-quantize"]
    for name, option in (("token_embd", "--token-embedding-type"), ("output", "--output-tensor-type")):
        if name in kinds:
            args += [option, kinds.pop(name).most_common(1)[0][0].lower()]
    for name, types in kinds.items():
        if (kind := types.most_common(1)[0][0]) != main:
            args += ["--tensor-type", f"'\\.{name}\\.weight$={kind.lower()}'"]
    return " ".join([*args, "BF16.gguf", plan.name, _NAMES.get(main, main)])


def load_tiers(spec: str) -> list[Tier]:
    """The tiers that `all`, `NAME,NAME` or the path of a .toml file mean, in the file's order.

    Raises PlanError for a name that is not known, or a file that is no list of tiers.
    """
    if spec.lower().endswith(".toml"):
        try:
            return parse_tiers(Path(spec).read_text(encoding="utf-8"), spec)
        except OSError as e:
            raise PlanError(f"{spec}: cannot be read: {e.strerror}") from None
        except UnicodeDecodeError:
            raise PlanError(f"{spec}: is no UTF-8 text") from None
    tiers = parse_tiers(resources.files(__package__).joinpath("tiers.toml").read_text(encoding="utf-8"), "tiers.toml")
    if spec.strip().lower() == "all":
        return tiers
    wanted = [n.strip().lower() for n in spec.split(",") if n.strip()]
    unknown = [n for n in wanted if all(t.name != n for t in tiers)]
    if unknown or not wanted:
        raise PlanError(f"tier {(unknown or [spec])[0]!r} is not known; known are {', '.join(t.name for t in tiers)}, "
                        "all, or a .toml file")
    return [t for t in tiers if t.name in wanted]


def parse_tiers(text: str, where: str) -> list[Tier]:
    """Tiers from TOML; `where` is named in errors, which are PlanErrors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise PlanError(f"{where}: is no TOML: {e}") from None
    entries = data.get("tier")
    if set(data) != {"tier"} or not isinstance(entries, list) or not entries:
        raise PlanError(f"{where}: expected a list of [[tier]] and nothing else, found {', '.join(data) or 'nothing'}")
    tiers = [_tier(entry, f"{where}: tier {i + 1}") for i, entry in enumerate(entries)]
    for key in ("name", "suffix"):
        seen = [getattr(t, key).lower() for t in tiers]
        twice = next((v for v in seen if seen.count(v) > 1), None)
        if twice is not None:
            raise PlanError(f"{where}: two tiers have the {key} {twice!r}; their files would be mistaken for another")
    return tiers


def _tier(entry: Any, where: str) -> Tier:
    if not isinstance(entry, dict):
        raise PlanError(f"{where}: expected a table, found {entry!r}")
    where += f" ({entry['name']})" if isinstance(entry.get("name"), str) else ""
    if unknown := set(entry) - _KEYS:
        raise PlanError(f"{where}: {sorted(unknown)[0]!r} is not known; known are {', '.join(sorted(_KEYS))}")
    kinds: tuple[tuple[str, type, Any], ...] = (
        ("name", str, None), ("description", str, ""), ("suffix", str, None), ("requantize", bool, False),
        ("rules", dict, None), ("without_imatrix", dict, {}))
    for key, kind, default in kinds:
        if not isinstance(entry.get(key, default), kind):
            raise PlanError(f"{where}: {key} should be a {kind.__name__}, found {entry.get(key)!r}")
    name, suffix = entry["name"], entry["suffix"]
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) or name == "all":
        raise PlanError(f"{where}: a tier's name has lower-case letters, digits, _ and -, and is not `all`")
    if not re.fullmatch(r"[A-Z]*", suffix):
        raise PlanError(f"{where}: suffix {suffix!r} should be capital letters only, else the Hub cuts the label short")
    rules = _rules(entry["rules"], where, {})
    return Tier(name, entry.get("description", ""), suffix, entry.get("requantize", False), rules,
                _rules(entry.get("without_imatrix", {}), where, rules))


def _rules(given: Mapping[str, Any], where: str, base: Mapping[str, str]) -> dict[str, str]:
    """Rules by role: those of `base`, overridden by `given`, narrow ones last."""
    rules = {role: base.get(role, NATIVE) for role in LARGE}
    for key, target in given.items():
        if key in ROLES and key not in LARGE:
            raise PlanError(f"{where}: {key} cannot be quantized by a tier; it stays as it is, or has its own option")
        if key not in GROUPS and key not in LARGE:
            raise PlanError(f"{where}: role {key!r} is not known; known are {', '.join([*GROUPS, *sorted(LARGE)])}")
        if not isinstance(target, str) or _spelled(target) not in _TARGETS:
            raise PlanError(f"{where}: {key} = {target!r} is no type to quantize to; known are "
                            f"{', '.join(sorted(_TARGETS))}")
    for key in sorted(given, key=lambda k: -len(GROUPS.get(k, (k,)))):
        rules.update(dict.fromkeys(GROUPS.get(key, (key,)), _spelled(given[key])))
    return rules


def _spelled(target: str) -> str:
    return NATIVE if target.lower() == NATIVE else target.upper()


def distinct(ladder: Sequence[tuple[Tier, Sequence[Entry]]]) -> tuple[list[int], list[str]]:
    """Which tiers are worth a file: their indices, and a note for each that comes out as an earlier one."""
    first: dict[tuple[tuple[str, str], ...], str] = {}
    kept, notes = [], []
    for i, (tier, entries) in enumerate(ladder):
        twin = first.setdefault(tuple((e.name, e.type) for e in entries), tier.name)
        if twin == tier.name:
            kept.append(i)
        else:
            notes.append(f"tier {tier.name} would be the same as {twin} for this checkpoint: left out")
    return kept, notes


def encoding(tier: Tier, main: str, source: str) -> str:
    """The last token of a tier's file name: what the Hub, `-hf repo:TAG` and the cache resolve it by.

    main, source  GGML type of most weights in this file, and in the one that carries everything natively
    It is the file's own main type with the tier's letters. Where those weights were quantized for this file, and the
    tier is one that does so on purpose, the type alone says it.
    """
    name = _NAMES.get(main, main)
    if main != source and tier.requantize:
        return name
    base = main if main in ("Q3_K", "Q4_K", "Q5_K") else name
    return f"{base}_{tier.suffix}" if tier.suffix else name


def file_token(tier: Tier, main: str, source: str) -> str:
    """`encoding`, after a word where codes of the checkpoint were quantized a second time.

    The word also keeps such a file behind the exact one in the order of names, of which `-hf repo` takes the first.
    """
    again = tier.requantize and main != source and source not in FLOATS
    return ("Requant-" if again else "") + encoding(tier, main, source)
