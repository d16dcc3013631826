"""Importance matrices: mean squared activations by column, which tell a quantizer where errors hurt.

Two file formats, both written by llama-imatrix (tools/imatrix/imatrix.cpp) and read as llama-quantize reads them
(common/imatrix-loader.cpp, tools/quantize/quantize.cpp): GGUF with `NAME.in_sum2` and `NAME.counts`, or the older .dat.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PureWindowsPath

import numpy as np
from gguf import GGUFReader

from .errors import PlanError
from .ggml.metadata import Metadata, string, u32
from .verify.engine import find_binary, run

_SUMS, _COUNTS = ".in_sum2", ".counts"
_NAME_LIMIT = 1 << 12  # bytes of a tensor's name in a .dat file; more means that it is no such file


@dataclass(frozen=True, eq=False)
class Imatrix:
    """Weights by tensor name, float32 and flat: of a stacked tensor the experts' one after the other.

    file      base name of the file it was read from
    datasets  names of the texts it was computed on
    chunks    how many chunks of text, 0 when the file does not say
    unused    (tensor, expert) pairs that the text never reached; their weights are all 1, as llama-quantize has it
    """

    file: str
    values: Mapping[str, np.ndarray]
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    unused: tuple[tuple[str, int], ...] = ()

    def __contains__(self, tensor: object) -> bool:
        return tensor in self.values

    def importance(self, tensor: str, expert: int | None, columns: int) -> np.ndarray | None:
        """Weights of a tensor's columns, float32 (columns,); of expert `expert` where the tensor is stacked.

        None for a tensor that it does not have: llama-imatrix does not look at the embedding, and at the output only if
        told to. Raises PlanError when the size does not fit, except for the token embedding.
        """
        values = self.values.get(tensor)
        if values is None:
            return None
        start = (expert or 0) * columns
        if (expert is None and len(values) != columns) or len(values) % columns or start + columns > len(values):
            if tensor == "token_embd.weight":
                return None
            of = "" if expert is None else f" of expert {expert}"
            raise PlanError(f"{self.file}: {tensor} has {len(values)} weights, which do not fit rows of {columns} "
                            f"columns{of}; the imatrix belongs to another model")
        return values[start:start + columns]

    def check(self, tensor: str, shape: tuple[int, ...]) -> None:
        """Raise PlanError when it is of a tensor with another shape; (rows, columns) or (experts, rows, columns)."""
        values = self.values.get(tensor)
        want = shape[-1] * (shape[0] if len(shape) == 3 else 1)
        if values is not None and len(values) != want and tensor != "token_embd.weight":
            raise PlanError(f"{self.file}: {tensor} has {len(values)} weights, the tensor of shape {list(shape)} needs "
                            f"{want}; the imatrix belongs to another model")

    def metadata(self) -> Metadata:
        """The `quantize.imatrix.*` keys that llama-quantize writes.

        Paths are cut to base names: a file should not say on whose disk it was made, nor change with it.
        """
        keys: Metadata = {"quantize.imatrix.file": string(self.file)}
        if self.datasets:
            keys["quantize.imatrix.dataset"] = string(_base(self.datasets[0]))
        keys["quantize.imatrix.entries_count"] = u32(len(self.values))
        if self.chunks > 0:
            keys["quantize.imatrix.chunks_count"] = u32(self.chunks)
        return keys


def load_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix. Raises PlanError when the file cannot be read, or holds no such thing."""
    try:
        with open(path, "rb") as f:
            magic = f.read(4)
        imatrix = _read_gguf(path) if magic == b"GGUF" else _read_dat(path)
    except OSError as e:
        raise PlanError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, IndexError, OverflowError, struct.error) as e:
        raise PlanError(f"{path}: is no importance matrix, or a damaged one: {e}") from None
    if not imatrix.values:
        raise PlanError(f"{path}: holds no importance matrix entries")
    for name, values in imatrix.values.items():
        if not (np.isfinite(values) & (values >= 0)).all():
            raise PlanError(f"{path}: {name} has a weight that is negative or not finite; compute the imatrix again")
    return imatrix


def run_imatrix(model: Path, text: Path, out: Path, llama_bin: Path | None = None, *, chunks: int | None = None,
                context: int = 512, threads: int | None = None, gpu_layers: int | None = None,
                timeout: float = 7 * 86400) -> Imatrix:
    """Compute an importance matrix with llama-imatrix and read it; `out` ends in .gguf, or .dat for the older format.

    chunks   how many chunks of `context` tokens of the text, None for all of it
    timeout  in seconds
    Raises EngineError when llama-imatrix is not found or fails, PlanError when what it wrote cannot be read.
    """
    binary = find_binary("llama-imatrix", llama_bin)
    args = ["-m", str(model), "-f", str(text), "-o", str(out), "-c", str(context), "--no-ppl",
            "--output-format", "dat" if out.suffix == ".dat" else "gguf"]
    for option, value in (("--chunks", chunks), ("-t", threads), ("-ngl", gpu_layers)):
        if value is not None:
            args += [option, str(value)]
    out.unlink(missing_ok=True)
    run(binary, args, timeout=timeout)
    return load_imatrix(out)


def _base(path: str) -> str:
    return PureWindowsPath(path).name if "\\" in path else PurePath(path).name


def _read_gguf(path: Path) -> Imatrix:
    reader = GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    names = [n.removesuffix(_SUMS) for n in tensors if n.endswith(_SUMS)]
    if not names:
        raise ValueError("it has no tensors named .in_sum2")
    values, unused = {}, []
    for name in names:
        if name + _COUNTS not in tensors:
            raise ValueError(f"{name} has sums and no counts")
        pair = tensors[name + _SUMS], tensors[name + _COUNTS]
        if any(t.tensor_type.name != "F32" for t in pair):
            raise ValueError(f"sums and counts of {name} should be F32")
        sums, counts = (np.array(t.data, np.float32).reshape(-1) for t in pair)
        if not counts.size or sums.size % counts.size:
            raise ValueError(f"{name} has {sums.size} sums for {counts.size} counts")
        if not np.isfinite(counts).all():
            raise ValueError(f"{name} has a count that is not finite")
        counts = np.rint(counts)
        used = counts > 0
        mean = np.ones((counts.size, sums.size // counts.size), np.float32)
        mean[used] = sums.reshape(mean.shape)[used] / counts[used, None]
        values[name] = mean.reshape(-1)
        unused += [(name, int(i)) for i in np.flatnonzero(~used)]
    datasets = reader.get_field("imatrix.datasets")
    chunks = reader.get_field("imatrix.chunk_count")
    return Imatrix(path.name, values, tuple(map(str, datasets.contents())) if datasets else (),
                   int(chunks.contents()) if chunks else 0, tuple(unused))


def _read_dat(path: Path) -> Imatrix:
    """int32 count; each entry int32 length, name, int32 calls, int32 n, n float32; int32 chunks, int32 length, text."""
    raw = path.read_bytes()
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if size < 0 or at + size > len(raw):
            raise ValueError(f"it ends at byte {len(raw)}, in the middle of an entry")
        at += size
        return raw[at - size:at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    values = {}
    for _ in range(number()):
        length = number()
        if not 0 < length <= _NAME_LIMIT:
            raise ValueError(f"a tensor name of {length} bytes at byte {at}")
        name = take(length).decode()
        calls, n = number(), number()
        if n < 1:
            raise ValueError(f"{name} has {n} weights")
        sums = np.frombuffer(take(4 * n), "<f4").astype(np.float32)
        values[name] = sums / np.float32(calls) if calls > 0 else sums
    chunks = number() if len(raw) - at >= 4 else 0
    text = take(number()).decode(errors="replace") if len(raw) - at >= 4 else ""
    return Imatrix(path.name, values, (text,) if text else (), chunks)
