"""Source formats: how a module's stored tensors become a weight. One module a format, looked up in a registry.

A format is recognised by the tensors that are there (suffixes, dtypes), never by the config alone. Where the config
says otherwise the tensors decide, if it has just one scheme that fits them, and the user is told; else it is an error.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..checkpoint import Checkpoint, TensorRef
from ..errors import CheckpointError, PlanError, SchemeError, UnsupportedFormat
from ..schemes import Scheme
from .codes import Codes, bf16_to_f32
from .unused import is_kv_cache_scale

Rows = np.ndarray | slice


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What the user may choose where a format has more than one good target.

    asymmetric  for integers with zero points: "exact" the smallest type that loses nothing, "q8_0" the same without
                Q5_0, "q4_1" the smallest type even if its minimum is rounded to FP16
    """

    asymmetric: str = "exact"

    def __post_init__(self) -> None:
        if self.asymmetric not in ("exact", "q8_0", "q4_1"):
            raise PlanError(f"asymmetric {self.asymmetric!r} is not known; known are exact, q8_0, q4_1")


DEFAULTS = FormatOptions()


@dataclass(frozen=True, slots=True)
class Carry:
    """One way to carry a weight over: the GGML type, and what becomes of the numbers.

    exact   every code and block scale survives bit for bit
    factor  float32 that the whole tensor is to be multiplied by at run time (GGUF's `.scale`), None for no factor
    why     the reason when it is not exact, or not the type one would expect
    """

    type: str
    exact: bool = True
    factor: np.float32 | None = None
    why: str = ""


@dataclass(frozen=True, eq=False)
class SourceWeight:
    """One logical weight of the checkpoint, not read yet.

    module   its name; for a stacked parameter without `.weight` the parameter's own name
    format   name of the source format, `dense` for plain numbers
    shape    logical shape, (rows, columns) for everything quantized
    refs     the stored tensors that make it up
    read     rows -> Codes; fancy or slice index into the first dimension
    carries  the GGML types that hold its codes, the preferred one first; where exactness depends on the scales'
             values the first call reads them, so it is made once, in a worker
    input_scale  float32 1 / input_global_scale for weights whose activations are to be FP4, else None
    scheme   what the config says of it
    notes    what the user should know of its stored tensors (activation scales that llama.cpp does not use)
    """

    module: str
    format: str
    shape: tuple[int, ...]
    refs: tuple[TensorRef, ...]
    read: Callable[[Rows], Codes]
    carries: Callable[[], tuple[Carry, ...]]
    input_scale: np.float32 | None = None
    scheme: Scheme | None = None
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all its stored tensors."""
        return sum(ref.nbytes for ref in self.refs)

    def carry(self, kind: str) -> Carry | None:
        """How it is carried over to the GGML type `kind`, None when its codes do not fit there."""
        return next((c for c in self.carries() if c.type == kind), None)


def stored_row(rows: Rows, at: int) -> int:
    """Which stored row is number `at` of the rows that `rows` selects, for messages."""
    return int(rows[at]) if isinstance(rows, np.ndarray) else int(at) + (rows.start or 0)


def always(*carries: Carry) -> Callable[[], tuple[Carry, ...]]:
    """`carries` for a format whose answer needs no look at the values."""
    return lambda: carries


@dataclass(frozen=True)
class Module:
    """The stored tensors of one module by suffix (`weight`, `weight_packed`, ...), and the scheme config gives it."""

    name: str
    params: Mapping[str, TensorRef]
    scheme: Scheme | None
    checkpoint: Checkpoint
    options: FormatOptions = DEFAULTS
    groups: tuple[Scheme, ...] = ()

    def array(self, suffix: str) -> np.ndarray:
        """A stored tensor as a view."""
        return self.checkpoint.array(self.params[suffix])

    def need(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> TensorRef:
        """A stored tensor with its dtype and shape checked.

        Raises CheckpointError when it is missing or has another shape, UnsupportedFormat for another dtype.
        """
        ref = self.params.get(suffix)
        if ref is None:
            raise CheckpointError(f"{self.name}.{suffix}: missing, though the module has "
                                  f"{', '.join(sorted(self.params))} in {next(iter(self.params.values())).file.name}")
        if ref.dtype not in dtypes:
            raise UnsupportedFormat(f"{ref}: expected dtype {' or '.join(dtypes)}")
        if shape is not None and ref.shape != shape:
            raise CheckpointError(f"{ref}: expected shape {list(shape)}")
        return ref

    def scalar(self, suffix: str) -> np.float32:
        """A stored single float32 as 1 / value, checked to be finite and positive before and after."""
        ref = self.need(suffix, ("F32", "BF16", "F16"))
        if int(np.prod(ref.shape)) != 1:
            raise CheckpointError(f"{ref}: expected a single value")
        raw = self.array(suffix).reshape(-1)
        value = np.float32((bf16_to_f32(raw) if ref.dtype == "BF16" else raw)[0])
        with np.errstate(divide="ignore", over="ignore"):
            inverse: np.float32 = np.float32(1) / value
        if not (np.isfinite(value) and np.isfinite(inverse) and value > 0 and inverse > 0):
            raise CheckpointError(f"{ref}: a global scale should be a positive finite number, found {value}")
        return inverse


@dataclass(frozen=True)
class Format:
    """A registry entry. `matches` looks at a module's stored tensors, `open` makes the weight of a match."""

    name: str
    suffixes: frozenset[str]
    matches: Callable[[Mapping[str, TensorRef]], bool]
    open: Callable[[Module], SourceWeight]


def registry() -> tuple[Format, ...]:
    """All formats, the most specific first."""
    # The format modules import this one.
    from . import awq, dense, fp8, gptq, int_quantized, modelopt, mxfp4, nvfp4, packed
    return (nvfp4.FORMAT, mxfp4.MXFP4, modelopt.FORMAT, mxfp4.MXFP8, fp8.FORMAT, packed.FORMAT, int_quantized.FORMAT,
            awq.FORMAT, gptq.FORMAT, dense.FORMAT)


def open_weights(checkpoint: Checkpoint, resolve: Callable[[str], Scheme | None],
                 options: FormatOptions = DEFAULTS, groups: tuple[Scheme, ...] = ()) -> dict[str, SourceWeight]:
    """Every logical weight of the checkpoint by module name.

    resolve  the scheme that the config gives a module
    groups   the schemes of all groups: a module that is stored quantized though the config leaves it out takes the one
             that its storage fits; `disagreements` tells of it

    Parameters that belong to no module with a `weight` (A_log, stacked experts) go by their full name; so do biases.
    Scales of a quantized KV cache are left out (see unused.py).
    Raises UnsupportedFormat for a set of tensors that no format knows, SchemeError where config and storage disagree.
    """
    formats = registry()
    suffixes = frozenset().union(*(f.suffixes for f in formats))
    modules: dict[str, dict[str, TensorRef]] = {}
    for name, ref in checkpoint.tensors.items():
        if is_kv_cache_scale(name):
            continue
        module, _, suffix = name.rpartition(".")
        if suffix in suffixes and module:
            modules.setdefault(module, {})[suffix] = ref
        else:
            modules[name] = {"": ref}
    weights = {}
    for name, params in modules.items():
        opened = Module(name, params, None if "" in params else resolve(name), checkpoint, options, groups)
        fmt = next((f for f in formats if f.matches(params)), None)
        if fmt is None:
            raise UnsupportedFormat(f"{name}: no format stores a weight as "
                                    f"{', '.join(f'{s} {r.dtype} {list(r.shape)}' for s, r in sorted(params.items()))}")
        weights[name] = fmt.open(opened)
    return weights


def require_scheme(module: Module, storage: str, formats: tuple[str, ...]) -> Scheme:
    """The scheme of a module that is stored in one of `formats`.

    Where the config gives it none, or one of another format, the tensors decide: it is the only scheme of the config
    that fits. SchemeError when there is no such scheme, or more than one.
    """
    scheme = module.scheme
    if scheme is not None and scheme.format in formats:
        return scheme
    fitting = {(s.format, s.weights, s.inputs): s for s in module.groups if s.format in formats}
    if len(fitting) == 1:
        return next(iter(fitting.values()))
    ref = next(iter(module.params.values()))
    says = "no group or ignores it" if scheme is None else f"group {scheme.group}, which says {scheme.format}"
    raise SchemeError(f"{module.name}: stored as {storage} in {ref.file.name}, but quantization_config gives it "
                      f"{says}, and {len(fitting)} of its groups fit the tensors; config.json does not belong to them")


# Modules with a two-dimensional weight that are no Linear layers, whatever a target `Linear` says.
_NOT_LINEAR = re.compile(r"(.*\.)?(embed_tokens|wte|position_embedding|mlp\.gate|router|.*norm|conv1d)")


def disagreements(weights: Mapping[str, SourceWeight], resolve: Callable[[str], Scheme | None],
                  unmatched_ignores: Sequence[str]) -> tuple[str, ...]:
    """What the config says of the modules and the tensors do not bear out, a note for each kind.

    The tensors decided in every case. Ignore entries that match nothing are counted only under the modules' own names,
    since names of another engine do protect the modules there, but not in every program.
    """
    plain, quantized = [], []
    for name, weight in weights.items():
        matrix = weight.refs[0].name == name + ".weight" and len(weight.refs[0].shape) == 2
        if weight.format != "dense" and (scheme := resolve(name)) != weight.scheme:
            quantized.append(f"{name} ({weight.format}, config says {scheme.format if scheme else 'not quantized'})")
        elif weight.format == "dense" and weight.scheme is not None and matrix and not _NOT_LINEAR.fullmatch(name):
            plain.append(name)
    notes = []
    for text, found in (("modules are stored quantized against the config, taken as stored", quantized),
                        ("modules are not quantized though the config targets them, taken as stored", plain),
                        ("entries of the ignore list match no module under its own name", unmatched_ignores)):
        if found:
            notes.append(f"{len(found)} {text}: {found[0]}{', ...' if len(found) > 1 else ''}")
    return tuple(notes)
