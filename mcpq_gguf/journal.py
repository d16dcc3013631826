"""The journal of a run: how far its files are complete, so that a run that was killed can go on where it was.

It lies beside the outputs and is replaced atomically. It also is the lock that keeps a second run out of the directory.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .errors import WriteError
from .loss import Loss

NAME = ".mcpq-journal.json"
LOCK = ".mcpq-lock"


@dataclass(frozen=True)
class Progress:
    """A point that all files have reached: steps done in order, and of each file the bytes and their SHA-256.

    files   names of the outputs
    key     identifies checkpoint, plan and program version; another key's progress is of no use
    digests SHA-256 of each file's first `positions` bytes, by which its partial file is recognised
    """

    key: str
    done: int = 0
    positions: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    losses: Mapping[str, Loss] = field(default_factory=dict)
    files: tuple[str, ...] = ()


class Lock:
    """Holds a directory for one run; the kernel drops it when the process ends, however that happens."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.fd)
            raise WriteError(f"{folder}: another conversion is writing here; wait for it, or "
                             "choose another -o") from None

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *exc: object) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.fd)


def load(folder: Path) -> Progress | None:
    """The progress of an earlier run, None when there is none that can be read."""
    try:
        d = json.loads((folder / NAME).read_text())
        losses = {str(name): Loss(**value) for name, value in d["losses"].items()}
        return Progress(str(d["key"]), int(d["done"]), tuple(map(int, d["positions"])), tuple(map(str, d["digests"])),
                        losses, tuple(map(str, d["files"])))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def save(folder: Path, progress: Progress) -> None:
    """Replace the journal."""
    temporary = folder / (NAME + ".new")
    data = {"key": progress.key, "done": progress.done, "positions": progress.positions, "digests": progress.digests,
            "files": progress.files, "losses": {name: asdict(loss) for name, loss in progress.losses.items()}}
    with open(temporary, "w") as f:
        json.dump(data, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, folder / NAME)


def discard_partial(folder: Path, progress: Progress) -> None:
    """Remove the half-written files of a run that will not be continued."""
    for name in progress.files:
        if Path(name).name == name:
            (folder / (name + ".partial")).unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """The run is complete, or was given up."""
    (folder / NAME).unlink(missing_ok=True)
    (folder / (NAME + ".new")).unlink(missing_ok=True)
