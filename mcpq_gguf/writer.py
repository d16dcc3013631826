"""Writing planned files: several workers write at known offsets, one thread hashes in order, the names come last.

A file grows under `NAME.partial` and gets its own name only after every byte is written and fsync'ed, so that a file
called .gguf is complete. An error or Ctrl-C removes what was begun; a run that was killed leaves its journal, and the
next run with the same plan goes on from there.
"""

import hashlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import journal
from .checkpoint import Checkpoint
from .errors import WriteError
from .formats import SourceWeight
from .loss import Loss
from .plan import Exactness, FilePlan
from .transcode import Importance, Result, Step, prefetch, steps, transcode

Progress = Callable[[int], object]
JOURNAL_SECONDS = float(os.environ.get("MCPQ_JOURNAL_SECONDS", 5))  # between two entries of the journal
WINDOW = 32 << 20  # bytes of a file that are written back and dropped from the page cache together
BEHIND = 4         # windows after which a window should be clean


@dataclass(frozen=True)
class Finished:
    """One complete file: `losses` holds the measured loss of each lossy tensor by name."""

    path: Path
    nbytes: int
    sha256: str
    losses: Mapping[str, Loss]


def check_space(paths: Sequence[Path], plans: Sequence[FilePlan]) -> None:
    """WriteError when the file system has less free space than the files need, less what lies there half written."""
    folder = paths[0].parent
    partial = [path.with_name(path.name + ".partial") for path in paths]
    held = sum(p.stat().st_blocks * 512 for p in partial if p.exists())
    need, free = sum(p.nbytes for p in plans) - held, shutil.disk_usage(folder).free
    if free < need:
        raise WriteError(f"{folder}: {need:,} bytes are to be written, {free:,} are free; "
                         "free some space or choose another -o")


def write_files(plans: Sequence[FilePlan], paths: Sequence[Path], weights: Mapping[str, SourceWeight],
                checkpoint: Checkpoint, workers: int, progress: Progress = lambda n: None, *,
                importance: Importance | None = None, key: str = "", resume: bool = True,
                note: Callable[[str], object] = lambda text: None) -> list[Finished]:
    """Write planned files, all into one directory, from one pass over the checkpoint.

    progress  called with the bytes that were just finished, over all files
    key       identifies checkpoint, plan and version: a journal with the same key is continued when `resume` is set
    note      called with what the user should know (continuing, starting anew)
    Raises WriteError when the file system refuses, and passes on the errors of `transcode`. In every case no file of
    a final name is there unless it is complete.
    """
    folder = paths[0].parent
    try:
        with journal.Lock(folder):
            return _Run(plans, paths, key).write(weights, checkpoint, workers, progress, importance, resume, note)
    except OSError as e:
        raise WriteError(f"{e.filename or folder}: cannot be written: {e.strerror or e}; "
                         "no file was finished") from None


class _Output:
    """One file under way: `position` and `digest` cover what was hashed so far."""

    def __init__(self, plan: FilePlan, path: Path) -> None:
        self.plan, self.path, self.partial = plan, path, path.with_name(path.name + ".partial")
        self.fd, self.position, self.digest = -1, 0, hashlib.sha256()

    def open(self) -> None:
        """Start from nothing, with the space for the whole file reserved."""
        self.fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.fd, 0, self.plan.nbytes)
        else:
            os.ftruncate(self.fd, self.plan.nbytes)
        write_at(self.fd, self.plan.header, 0)
        self.digest, self.position = hashlib.sha256(self.plan.header), len(self.plan.header)

    def reopen(self, position: int, digest: str) -> bool:
        """Go on after `position` bytes, if they are there and have that SHA-256."""
        path = self.partial if self.partial.exists() else self.path
        try:
            self.fd = os.open(path, os.O_RDWR)
        except OSError:
            return False
        if os.fstat(self.fd).st_size != self.plan.nbytes:
            return False
        self.digest, self.position = hashlib.sha256(), 0
        while self.position < position:
            data = os.pread(self.fd, min(1 << 22, position - self.position), self.position)
            self.digest.update(data)
            self.position += len(data)
        return self.digest.hexdigest() == digest

    def hash(self, result: Result) -> int:
        """Take a result into the digest, with the zeros that align its tensor; results must come in file order.

        Returns the number of bytes that were hashed.
        """
        before = self.position
        self.digest.update(bytes(result.offset - self.position))
        self.digest.update(result.data.data)
        self.position = result.offset + result.data.nbytes
        for window in range(before // WINDOW, self.position // WINDOW if hasattr(os, "posix_fadvise") else 0):
            # The first call on a window starts its write-back, the second finds it clean and drops it.
            for start in (window * WINDOW, (window - BEHIND) * WINDOW):
                if start >= 0:
                    os.posix_fadvise(self.fd, start, WINDOW, os.POSIX_FADV_DONTNEED)
        return self.position - before

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _Run:
    """One run over all files."""

    def __init__(self, plans: Sequence[FilePlan], paths: Sequence[Path], key: str) -> None:
        self.outputs = [_Output(plan, path) for plan, path in zip(plans, paths)]
        self.folder, self.key, self.done = paths[0].parent, key, 0
        self.losses: list[dict[str, Loss]] = [{} for _ in plans]

    def write(self, weights: Mapping[str, SourceWeight], checkpoint: Checkpoint, workers: int, progress: Progress,
              importance: Importance | None, resume: bool, note: Callable[[str], object]) -> list[Finished]:
        todo = steps([o.plan for o in self.outputs])
        try:
            self.done = self._start(todo, resume, note)
            progress(sum(o.position for o in self.outputs))
            self._steps(todo[self.done:], weights, checkpoint, workers, progress, importance)
            return self._finish()
        except (KeyboardInterrupt, OSError):
            if not self._keep():
                self._discard()
            raise
        except BaseException:
            self._discard()
            raise
        finally:
            for output in self.outputs:
                output.close()

    def _start(self, todo: list[Step], resume: bool, note: Callable[[str], object]) -> int:
        """Open all files; returns the number of steps that an earlier run has done."""
        earlier = journal.load(self.folder)
        if earlier is not None:
            if not resume or not self.key:
                note("an unfinished run was found here: starting anew, as asked")
            elif earlier.key != self.key:
                note("an unfinished run was found here, of another checkpoint, plan or version: starting anew")
            elif len(earlier.positions) == len(self.outputs) and earlier.done <= len(todo) and all(
                    o.reopen(p, d) for o, p, d in zip(self.outputs, earlier.positions, earlier.digests)):
                for name, loss in earlier.losses.items():
                    file, _, tensor = name.partition(":")
                    self.losses[int(file)][tensor] = loss
                note(f"continuing an unfinished run: {earlier.done:,} of {len(todo):,} steps are done")
                return earlier.done
            else:
                note("an unfinished run was found here, but its files are not as it left them: starting anew")
            journal.discard_partial(self.folder, earlier)
        journal.remove(self.folder)
        for output in self.outputs:
            output.close()
            output.open()
        return 0

    def _steps(self, todo: list[Step], weights: Mapping[str, SourceWeight], checkpoint: Checkpoint, workers: int,
               progress: Progress, importance: Importance | None) -> None:
        def job(step: Step) -> list[Result]:
            results = transcode(step, weights, checkpoint, importance)
            for r in results:
                write_at(self.outputs[r.file].fd, r.data, r.offset)
            return results

        def prefetched(step: Step) -> Step:
            prefetch(step, weights, checkpoint)
            return step

        saved = time.monotonic()
        with ThreadPoolExecutor(workers, thread_name_prefix="transcode") as pool:
            ahead = (prefetched(step) for step in todo)
            for results in _in_order(pool, job, ahead, window=2 * workers + 2):
                for r in results:
                    progress(self.outputs[r.file].hash(r))
                    if r.entry.exactness is Exactness.LOSSY:
                        losses = self.losses[r.file]
                        losses[r.entry.name] = losses.get(r.entry.name, Loss()) + r.loss
                self.done += 1
                if self.key and time.monotonic() - saved > JOURNAL_SECONDS:
                    self._save()
                    saved = time.monotonic()

    def _save(self) -> None:
        for output in self.outputs:
            os.fdatasync(output.fd)
        losses = {f"{file}:{name}": loss for file, d in enumerate(self.losses) for name, loss in d.items()}
        journal.save(self.folder, journal.Progress(
            self.key, self.done, tuple(o.position for o in self.outputs),
            tuple(o.digest.hexdigest() for o in self.outputs), losses, tuple(o.path.name for o in self.outputs)))

    def _finish(self) -> list[Finished]:
        for output in self.outputs:
            output.digest.update(bytes(output.plan.nbytes - output.position))
            output.position = output.plan.nbytes
            os.fsync(output.fd)
        if self.key:
            self._save()  # a run that is killed between two renames finds both names
        for output in self.outputs:
            if output.partial.exists():
                os.replace(output.partial, output.path)
        sync_directory(self.folder)
        journal.remove(self.folder)
        return [Finished(o.path, o.plan.nbytes, o.digest.hexdigest(), losses)
                for o, losses in zip(self.outputs, self.losses)]

    def _keep(self) -> bool:
        """Keep what is written for a later run; False when there is no journal to keep it by."""
        if not self.key or not self.done:
            return False
        try:
            self._save()
        except OSError:  # the disk is full or gone: the journal of some seconds ago still holds, if there is one
            return journal.load(self.folder) is not None
        return True

    def _discard(self) -> None:
        for output in self.outputs:
            output.partial.unlink(missing_ok=True)
        journal.remove(self.folder)


def _in_order(pool: ThreadPoolExecutor, job: Callable[[Step], list[Result]], todo: Iterable[Step],
              window: int) -> Iterator[list[Result]]:
    """Results in the order of their steps, with at most `window` steps under way or waiting."""
    pending: deque[Future[list[Result]]] = deque()
    try:
        for step in todo:
            pending.append(pool.submit(job, step))
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
    """Make renames in `folder` durable, where the system lets directories be opened."""
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
