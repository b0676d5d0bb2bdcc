"""The run folder: ``results.jsonl``, one line a record, written by one driver that may be killed at any moment.

A line is one ``write`` of text and line end, followed by ``fsync``: what ``append`` returned from is on disk, and the
worst a kill can leave is one torn last line. Opening the store for writing moves such a line to
``results.jsonl.torn``, says so in ``notices`` and goes on; no complete line is ever rewritten. ``read`` changes
nothing.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from anyformer.compare.record import LineError, Record, from_line, to_line
from anyformer.errors import StoreError as StoreError

RESULTS = "results.jsonl"
TORN = "results.jsonl.torn"
LOCK = ".lock"
_OPENING = b'{"schema":'

# a later attempt cannot end otherwise, so a retry leaves these alone
SETTLED = frozenset({"ok", "refused", "unsupported"})


@dataclass(frozen=True)
class Run:
    """What a run folder holds: the last record of each key, in order of first appearance, and what had to be said."""

    records: tuple[Record, ...]
    notices: tuple[str, ...] = ()


def read(folder: str | os.PathLike) -> Run:
    """Reads a run folder without changing it.

    Raises StoreError if the folder is missing, is no run, or holds no line this version can read.
    """
    path = Path(folder)
    if not path.exists():
        raise StoreError(f"no such folder: {path}. Expected a folder written by 'anyformer compare --out {path}'")
    _require_folder(path)
    if not (path / RESULTS).is_file():
        raise StoreError(
            f"{path} is not a run: it has no {RESULTS}. Name a folder written by 'anyformer compare --out'"
        )
    records, notices, tail = _parse(path)
    if tail.torn:
        notices.append(f"the last line of {RESULTS} is torn (the writer was killed) and was left out")
    return Run(_last_of_each(records), tuple(notices))


class Store:
    """A run folder open for writing. Use ``Store.open``; a second writer is refused while this one lives."""

    def __init__(self, folder: Path, handle: int, lock: int, run: Run):
        self.folder = folder
        self.notices = run.notices
        self._handle = handle
        self._lock = lock
        self._records = {record.key: record for record in run.records}

    @classmethod
    def open(cls, folder: str | os.PathLike) -> "Store":
        """Opens or creates a run folder; nothing that exists is overwritten.

        Raises StoreError if the path is a file, a folder that holds other things than a run, a folder that cannot be
        written to, a results file that this version cannot read, or a run that another process is writing.
        """
        path = Path(folder)
        lock = handle = -1
        try:
            _require_run_or_empty(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            _take(lock, path)
            handle = os.open(path / RESULTS, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            _sync_folder(path)
            return cls(path, handle, lock, _recover(path, handle))
        except OSError as error:
            _close(handle, lock)
            raise StoreError(
                f"cannot write to {path}: {error.strerror}. Give --out a folder you may write to"
            ) from None
        except StoreError:
            _close(handle, lock)
            raise

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def records(self) -> tuple[Record, ...]:
        """The last record of each key, in the order of first appearance."""
        return tuple(self._records.values())

    def done(self, *, retry_failed: bool = False) -> frozenset[str]:
        """Keys that need no run; ``retry_failed`` leaves out what ran out of memory or time, diverged or broke."""
        return frozenset(key for key, record in self._records.items() if not retry_failed or record.status in SETTLED)

    def expect_data(self, task: str, fingerprint: str, *, force: bool = False) -> None:
        """Refuses to mix trials of one task on different data, unless forced. Call it before training.

        Raises StoreError if a record of ``task`` has another data fingerprint.
        """
        others = {r.data.fingerprint for r in self._records.values() if r.task == task and r.data is not None} - {
            fingerprint
        }
        if others and not force:
            raise StoreError(
                f"{self.folder} holds {task!r} on other data (fingerprint {', '.join(sorted(others))}, now "
                f"{fingerprint}): such numbers cannot be compared. Use a new --out folder, the same data, or --force "
                "to keep both side by side"
            )

    def append(self, record: Record) -> None:
        """Adds a record; when this returns, the line is on disk. Raises StoreError if the disk refuses it."""
        line = to_line(record).encode() + b"\n"
        size = os.fstat(self._handle).st_size
        try:
            _write_all(self._handle, line)
            os.fsync(self._handle)
        except OSError as error:
            # a full disk may have taken half the line: the next record must not be glued to it
            os.ftruncate(self._handle, size)
            raise StoreError(f"cannot write to {self.folder / RESULTS}: {error.strerror}") from None
        self._records[record.key] = record

    def close(self) -> None:
        """Lets another process write. Safe to call twice."""
        _close(self._handle, self._lock)
        self._handle = self._lock = -1


@dataclass(frozen=True)
class _Tail:
    """What follows the last line end: where it starts, and whether it is torn (not a whole record)."""

    start: int
    data: bytes
    torn: bool


def _parse(path: Path) -> tuple[list[Record], list[str], _Tail]:
    content = _bytes_of(path)
    start = content.rfind(b"\n") + 1
    records, notices = [], []
    for number, line in enumerate(content[:start].split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            records.append(from_line(line))
        except LineError as error:
            notices.append(f"line {number} of {RESULTS} could not be read and was left out: {error}")
    tail = content[start:]
    try:
        records.extend([from_line(tail)] if tail else [])
        torn, foreign = False, ""
    except LineError as error:
        torn, foreign = True, "" if _ours(tail) else f"its only line: {error}"
    if not records and (notices or foreign):
        reason = notices[0] if notices else foreign
        raise StoreError(f"{path / RESULTS} holds no record this version can read ({reason}). Use another folder")
    return records, notices, _Tail(start, tail, torn)


def _ours(tail: bytes) -> bool:
    """Whether a torn line is the start of a record; a power cut may leave zeros where a line was to be."""
    return tail.startswith(_OPENING) or _OPENING.startswith(tail) or not tail.strip(b"\0")


def _recover(path: Path, handle: int) -> Run:
    records, notices, tail = _parse(path)
    if tail.torn:
        aside = os.open(path / TORN, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            _write_all(aside, tail.data + b"\n")
            os.fsync(aside)
        finally:
            os.close(aside)
        # only once the copy is on disk; a kill between the two leaves it in both places, never in none
        os.ftruncate(handle, tail.start)
        notices.append(f"the last line of {RESULTS} was torn (the writer was killed); it was moved to {TORN}")
    elif tail.data:
        _write_all(handle, b"\n")
    os.fsync(handle)
    return Run(_last_of_each(records), tuple(notices))


def _last_of_each(records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple({record.key: record for record in records}.values())


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise StoreError(f"{path} is a file. Expected a folder")


def _require_run_or_empty(path: Path) -> None:
    if not path.exists():
        return
    _require_folder(path)
    if (path / RESULTS).is_dir():
        raise StoreError(f"{path / RESULTS} is a folder. Expected a file; use another --out folder")
    others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if others and RESULTS not in others:
        shown = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise StoreError(f"{path} is not a run: it holds {shown} but no {RESULTS}. Give --out a new or an empty folder")


def _bytes_of(path: Path) -> bytes:
    try:
        return (path / RESULTS).read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path / RESULTS}: {error.strerror}") from None


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _take(lock: int, path: Path) -> None:
    # the system drops the lock when its holder dies, however it dies: no stale lock to clean up
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise StoreError(f"another process is writing to {path}. Wait for it, or use another --out folder") from None


def _sync_folder(path: Path) -> None:
    if sys.platform == "win32":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _close(*handles: int) -> None:
    for handle in handles:
        if handle >= 0:
            os.close(handle)
