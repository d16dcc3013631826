"""Writing planned files: several workers write at known offsets, one thread hashes in order, the name comes last.

A file grows under `NAME.partial` and gets its own name only after everything is written and fsync'ed, so that a file
called .gguf is complete. On any failure the partial file is removed.
"""

import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .checkpoint import Checkpoint
from .errors import WriteError
from .formats import SourceWeight
from .loss import Loss
from .plan import Entry, Exactness, FilePlan
from .transcode import chunks, transcode

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A run of an entry's rows that is written already and waits for its turn to be hashed."""

    entry: Entry
    offset: int
    data: np.ndarray
    loss: Loss


def check_space(folder: Path, nbytes: int) -> None:
    """WriteError when the file system that holds `folder` has less free space than `nbytes`."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise WriteError(f"{folder}: {nbytes:,} bytes are to be written, {free:,} are free; "
                         "free some space or choose another -o")


def write_file(plan: FilePlan, path: Path, weights: Mapping[str, SourceWeight], checkpoint: Checkpoint,
               workers: int, progress: Progress = lambda n: None) -> tuple[str, dict[str, Loss]]:
    """Write a planned file; returns its SHA-256, and the measured loss of each lossy tensor by name.

    `progress` is called with the bytes that were just finished. Raises WriteError when the file system refuses, and
    passes on the errors of `transcode`; in every case no file of the final name is left unless it is complete.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as e:
        raise WriteError(f"{partial}: cannot be created: {e.strerror}") from None
    try:
        try:
            if plan.nbytes:
                os.posix_fallocate(fd, 0, plan.nbytes)
            result = _write(fd, plan, weights, checkpoint, workers, progress)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(partial, path)
        sync_directory(path.parent)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise WriteError(f"{path}: cannot be written: {e.strerror or e}; nothing was kept") from None
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return result


def _write(fd: int, plan: FilePlan, weights: Mapping[str, SourceWeight], checkpoint: Checkpoint, workers: int,
           progress: Progress) -> tuple[str, dict[str, Loss]]:
    write_at(fd, plan.header, 0)
    digest = hashlib.sha256(plan.header)
    position = len(plan.header)

    def job(entry: Entry, start: int, stop: int) -> _Chunk:
        data, loss = transcode(entry, start, stop, weights, checkpoint)
        offset = entry.offset + start * (entry.nbytes // entry.rows)
        write_at(fd, data, offset)
        return _Chunk(entry, offset, data, loss)

    losses: dict[str, Loss] = {}

    with ThreadPoolExecutor(workers, thread_name_prefix="transcode") as pool:
        for chunk in _in_order(pool, job, _jobs(plan), window=2 * workers + 2):
            digest.update(bytes(chunk.offset - position))  # the zeros that align tensors
            digest.update(chunk.data.data)
            position = chunk.offset + chunk.data.nbytes
            progress(chunk.data.nbytes)
            if chunk.entry.exactness is Exactness.LOSSY:
                losses[chunk.entry.name] = losses.get(chunk.entry.name, Loss()) + chunk.loss
    digest.update(bytes(plan.nbytes - position))
    return digest.hexdigest(), losses


def _jobs(plan: FilePlan) -> Iterator[tuple[Entry, int, int]]:
    for entry in plan.entries:
        for start, stop in chunks(entry):
            yield entry, start, stop


def _in_order(pool: ThreadPoolExecutor, job: Callable[[Entry, int, int], _Chunk],
              arguments: Iterator[tuple[Entry, int, int]], window: int) -> Iterator[_Chunk]:
    """Results in the order of their arguments, with at most `window` of them under way or waiting."""
    pending: deque[Future[_Chunk]] = deque()
    try:
        for args in arguments:
            pending.append(pool.submit(job, *args))
            if len(pending) >= window:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def write_at(fd: int, data: bytes | np.ndarray, offset: int) -> None:
    """All of `data` (bytes, or a contiguous uint8 array) at `offset`; pwrite may write less than it was given."""
    view = memoryview(data.reshape(-1).data if isinstance(data, np.ndarray) else data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def sync_directory(folder: Path) -> None:
    """Make a rename in `folder` durable, where the system lets directories be opened."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
