"""A Hugging Face checkpoint directory: safetensors headers, config.json, and tensor bytes as views of a mapped file.

Opening one reads headers only. Everything that can be wrong with the files is found here, once, so that the code
behind this door has nothing left to check. Nothing is unpickled, and no path leaves the directory.

The file format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the
tensors without gaps (https://huggingface.co/docs/safetensors, section Format).
"""

import hashlib
import json
import mmap
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .errors import CheckpointError, UnsupportedFormat

# safetensors dtype -> numpy dtype of the stored bits. Types numpy lacks are seen as unsigned integers of their width.
DTYPES = {
    "BOOL": np.uint8, "U8": np.uint8, "I8": np.int8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
    "I16": np.int16, "U16": np.uint16, "F16": np.float16, "BF16": np.uint16,
    "I32": np.int32, "U32": np.uint32, "F32": np.float32, "I64": np.int64, "U64": np.uint64, "F64": np.float64,
}
MAX_HEADER = 100_000_000  # the limit of the safetensors library
MAX_JSON = 64_000_000
BLOCK = 4 << 20  # bytes of a shard that are dropped from memory together
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one stored tensor is: `offset` counts bytes from the start of the shard `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)} in {self.file.name})"


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint: `tensors` by name in file order, `config` (config.json), and lazily mapped shards."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorRef]
    shards: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    _maps: dict[Path, "_Shard"] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def array(self, ref: TensorRef) -> np.ndarray:
        """The tensor as a read-only view of the mapped file, in the numpy dtype of DTYPES."""
        dtype = np.dtype(DTYPES[ref.dtype])
        return np.frombuffer(self._map(ref.file), dtype, ref.nbytes // dtype.itemsize, ref.offset).reshape(ref.shape)

    def json(self, name: str) -> dict[str, Any] | None:
        """Another JSON file of the directory as an object, or None when it is not there."""
        path = self.path / name
        return read_json(path) if path.is_file() else None

    def prefetch(self, ref: TensorRef, low: int, high: int, rows: int) -> None:
        """Rows low..high of `rows` are needed soon: have the kernel read them meanwhile."""
        memory, page = self._map(ref.file), mmap.PAGESIZE
        start = (ref.offset + ref.nbytes * low // rows) // page * page
        stop = ref.offset + ref.nbytes * high // rows
        if hasattr(memory, "madvise") and stop > start:
            memory.madvise(mmap.MADV_WILLNEED, start, stop - start)

    def release(self, ref: TensorRef, low: int, high: int, rows: int) -> None:
        """Rows low..high of `rows` have been read for the last time.

        Where all of a block of the file has been, its pages are unmapped and dropped from the page cache. Besides
        keeping the machine usable this is faster: the next pages read or written take their place, where fresh memory
        costs more than the transfer on many virtual machines (docs/design.md, Page cache).
        """
        shard = self._maps.get(ref.file)
        if shard is not None and hasattr(os, "posix_fadvise"):
            shard.consume(ref.offset + ref.nbytes * low // rows, ref.offset + ref.nbytes * high // rows)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over config.json and every tensor's name, type, shape and place, not over the data."""
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for ref in self.tensors.values():
            digest.update(f"{ref.name} {ref.dtype} {ref.shape} {ref.file.name} {ref.offset}\n".encode())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(ref.nbytes for ref in self.tensors.values())

    @cached_property
    def architecture(self) -> str:
        """The model class named in config.json."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise CheckpointError(f"{self.path / 'config.json'}: `architectures` should name one model class, "
                                  f"found {names!r}")
        return names[0]

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with self._lock:
                self._maps.setdefault(file, _Shard(file))
        return self._maps[file].memory


class _Shard:
    """A mapped file that counts which of its blocks are used up."""

    def __init__(self, file: Path) -> None:
        self.fd = os.open(file, os.O_RDONLY)
        self.memory = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        self.left = [BLOCK] * (len(self.memory) // BLOCK)  # the last, partial block is left to the kernel
        self.lock = threading.Lock()

    def consume(self, start: int, stop: int) -> None:
        for block in range(start // BLOCK, min(-(-stop // BLOCK), len(self.left))):
            at = block * BLOCK
            with self.lock:
                self.left[block] -= min(stop, at + BLOCK) - max(start, at)
                done = self.left[block] == 0
            if done:
                self.memory.madvise(mmap.MADV_DONTNEED, at, BLOCK)
                os.posix_fadvise(self.fd, at, BLOCK, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        os.close(self.fd)  # the mapping itself lives as long as a view of it


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint directory by its headers.

    Raises CheckpointError for a missing or damaged file and for an index that does not agree with its shards,
    UnsupportedFormat for a tensor type that is not in DTYPES.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a directory; give the folder that holds config.json and the safetensors")
    config = read_json(folder / "config.json")
    tensors: dict[str, TensorRef] = {}
    index = folder / INDEX
    notes: list[str] = []
    if index.is_file():
        weight_map = _weight_map(index)
        shards = tuple(folder / name for name in sorted(set(weight_map.values())))
        extra = sorted(f.name for f in folder.glob("*.safetensors") if f not in shards)
        if extra:
            notes.append(f"{', '.join(extra)}: not named in {INDEX}, not read")
    else:
        weight_map = None
        shards = _shards_without_index(folder)
    for shard in shards:
        for ref in read_header(shard):
            if ref.name in tensors:
                raise CheckpointError(f"{ref.name}: stored twice, in {tensors[ref.name].file.name} and {shard.name}; "
                                      "remove the shard that does not belong, or download the checkpoint again")
            tensors[ref.name] = ref
    if weight_map is not None:
        _check_index(index, weight_map, tensors)
    return Checkpoint(folder, config, tensors, shards, tuple(notes))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; CheckpointError when it is missing, too large or not an object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON:
            raise CheckpointError(f"{path}: {size:,} bytes are too many for a JSON file here (limit {MAX_JSON:,})")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; is {path.parent} a complete checkpoint directory?") from None
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from None
    if raw.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull`")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_header(file: Path) -> Iterator[TensorRef]:
    """The tensors of one safetensors file, in the order of their data, from its fully validated header."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as f:
            head = f.read(8)
            length = int.from_bytes(head, "little")
            if head and b"version ".startswith(head):
                raise CheckpointError(f"{file}: a Git LFS pointer, not the file itself; run `git lfs pull`")
            if len(head) < 8 or length > MAX_HEADER or 8 + length > size:
                raise CheckpointError(f"{file}: truncated or not a safetensors file: its header should take "
                                      f"{length:,} bytes, the file has {size:,}; download it again")
            raw = f.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: shard is missing; download it again") from None
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read: {e.strerror}") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file}: its header is not valid JSON: {e}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: its header should be a JSON object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    refs = [_entry(file, name, entry, 8 + length) for name, entry in header.items()]
    refs.sort(key=lambda ref: (ref.offset, ref.nbytes))
    end = 8 + length
    for ref in refs:
        if ref.offset != end:
            kind = "overlaps the tensor before it" if ref.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{ref}: its data {kind}: starts at byte {ref.offset:,}, expected {end:,}")
        end += ref.nbytes
    if end != size:
        raise CheckpointError(f"{file}: has {size:,} bytes, its header describes {end:,}: "
                              f"{'truncated; download it again' if size < end else 'bytes left over at the end'}")
    yield from refs


def _entry(file: Path, name: str, entry: Any, data: int) -> TensorRef:
    """One header entry, checked: a known dtype, a shape of counts, and offsets that hold just that many bytes."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        counts = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        counts = False
    if not counts or not name or not name.isprintable():
        raise CheckpointError(f"{file}: header entry {name!r} is malformed: {str(entry)[:200]}")
    if dtype not in DTYPES:
        raise UnsupportedFormat(f"{file}: tensor {name} has dtype {dtype!r}; known are {', '.join(DTYPES)}")
    nbytes = np.dtype(DTYPES[dtype]).itemsize
    for n in shape:
        nbytes *= n
    if stop - start != nbytes:
        raise CheckpointError(f"{file}: tensor {name} of {dtype} {list(shape)} needs {nbytes:,} bytes, "
                              f"its data_offsets hold {stop - start:,}")
    return TensorRef(name, dtype, shape, file, data + start, nbytes)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: `weight_map` should map tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {name} is said to be in {file!r}; "
                                  "a shard must be a .safetensors file of the same directory")
    return weight_map


def _shards_without_index(folder: Path) -> tuple[Path, ...]:
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no .safetensors files; mcpq-gguf reads safetensors only")
    for file in files:
        m = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})\.safetensors", file.name)
        for k in range(1, int(m[3]) + 1) if m else ():
            shard = folder / f"{m[1]}{k:05d}-of-{m[3]}.safetensors"  # type: ignore[index]
            if shard not in files:
                raise CheckpointError(f"{shard}: shard is missing; download it again")
    return tuple(files)


def _check_index(index: Path, weight_map: dict[str, str], tensors: Mapping[str, TensorRef]) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{name}: {index.name} says it is in {file}, it is in no shard; "
                                  "the download is incomplete or the index belongs to another checkpoint")
        if tensors[name].file.name != file:
            raise CheckpointError(f"{name}: {index.name} says it is in {file}, found in {tensors[name].file.name}")
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(f"{unlisted[0]}: stored in {tensors[unlisted[0]].file.name}, but {index.name} does not "
                              f"list it ({len(unlisted)} such tensors); the index belongs to another checkpoint")
