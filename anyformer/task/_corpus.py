"""Text as bytes: the standard library's sources or the user's files, split into train, valid and test."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anyformer.errors import TaskError
from anyformer.task.base import SPLITS, Split, split_of

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
_GENERATED = ("_sysconfigdata", "sitecustomize", "usercustomize")  # differ from machine to machine
_FEWEST_NAMES = 100  # documents; with fewer, splits by name could leave test empty
_END = b"\0"  # after every document; files that hold it are binary and refused
_USE_DATA = "; to use files of your own type --data PATH, in Python text(data=PATH)"


@dataclass(frozen=True)
class Document:
    """A file: its path from the given folder, with slashes, and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """The documents that are used.

    Args:
        source: where they come from, for people.
        documents: by name, no two with the same bytes, none empty.
        skipped: files found in folders and left out, each with the reason.
    """

    source: str
    documents: tuple[Document, ...]
    skipped: tuple[str, ...] = ()

    @property
    def by_name(self) -> bool:
        """Whether documents are split whole, by the hash of their names, so that one more document moves no other."""
        return len(self.documents) >= _FEWEST_NAMES

    @property
    def rule(self) -> str:
        """How documents are split, for people."""
        return "by hash of the file name" if self.by_name else "inside each file: first 14/16, next 1/16, last 1/16"

    def streams(self) -> dict[Split, np.ndarray]:
        """The bytes UInt8[bytes] of each split, every document followed by a zero byte."""
        parts: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
        for each in self.documents:
            if self.by_name:
                parts[split_of(each.name.encode())].append(each.content + _END)
                continue
            first, second = (len(each.content) * part // 16 for part in (14, 15))
            bounds = (0, first, second, len(each.content))
            for split, start, stop in zip(SPLITS, bounds, bounds[1:], strict=False):
                parts[split].append(each.content[start:stop] + _END)
        return {split: np.frombuffer(b"".join(contents), dtype=np.uint8) for split, contents in parts.items()}

    def fingerprint(self) -> str:
        """SHA-256 in hex over names and contents; the place of the files on this machine does not enter."""
        total = hashlib.sha256()
        for each in self.documents:
            total.update(hashlib.sha256(each.name.encode()).digest() + hashlib.sha256(each.content).digest())
        return total.hexdigest()


def standard_library() -> Corpus:
    """The sources of the running interpreter's standard library, read in place.

    Tests, encodings, topics of the help system and installed packages are left out.

    Raises:
        TaskError: the interpreter came without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [
        Document(name, content)
        for path, name in _files(root, skip=_LEFT_OUT)
        if path.suffix == ".py"
        and not path.name.startswith(_GENERATED)
        and (content := path.read_bytes())
        and _END not in content
    ]
    if not found:
        raise TaskError(f"text: expected the standard library's .py sources in {root}, found none{_USE_DATA}")
    return Corpus(f"standard library of Python {platform.python_version()}", _distinct(found))


def user_files(paths: Sequence[str]) -> Corpus:
    """Files as they are given, and all text files of folders, hidden ones left out.

    Raises:
        TaskError: no path, a path that does not exist or cannot be read, a given file that is empty or binary, a folder
            without text.
    """
    if not paths:
        raise TaskError(f"text: expected at least one path, got an empty list of data{_USE_DATA}")
    found: list[Document] = []
    skipped: list[str] = []
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            found += _folder(path, skipped)
        elif path.is_file():
            found.append(_file(path))
        else:
            kind = "it is neither a file nor a folder" if path.exists() else "there is no such file or folder"
            raise TaskError(
                f"text: expected a file or folder of text, got {str(path)!r}: {kind}; check the path given to --data"
            )
    return Corpus(", ".join(str(text) for text in paths), _distinct(found), tuple(skipped))


def _file(path: Path) -> Document:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TaskError(
            f"text: expected a readable file, got {str(path)!r}: {error.strerror}; check its permissions"
        ) from error
    if not content:
        raise TaskError(f"text: expected a file of text, got {str(path)!r}, which is empty{_USE_DATA}")
    if _END in content:
        raise TaskError(
            f"text: expected a file of text, got {str(path)!r}, which is binary (it holds a zero byte); convert it to "
            f"text first; UTF-16 text must be saved as UTF-8"
        )
    return Document(path.name, content)


def _folder(root: Path, skipped: list[str]) -> list[Document]:
    found: list[Document] = []
    reasons: list[str] = []
    for path, name in _files(root):
        try:
            content = path.read_bytes()
        except OSError as error:
            reasons.append(f"{name}: {error.strerror}")
            continue
        if not content or _END in content:
            reasons.append(f"{name}: {'binary' if content else 'empty'}")
        else:
            found.append(Document(name, content))
    if not found:
        seen = f"{len(reasons)} files, all binary, empty or unreadable" if reasons else "no files"
        raise TaskError(f"text: expected a folder with text files, got {str(root)!r}: it holds {seen}{_USE_DATA}")
    skipped += reasons
    return found


def _files(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[tuple[Path, str]]:
    """Regular files below a folder and their names from it; hidden ones and links to folders are not followed."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in skip)
        for each in sorted(files):
            path = Path(folder, each)
            if not each.startswith(".") and path.is_file():
                yield path, path.relative_to(root).as_posix()


def _distinct(documents: list[Document]) -> tuple[Document, ...]:
    kept: dict[bytes, Document] = {}
    for each in sorted(documents, key=lambda each: (each.name, each.content)):
        kept.setdefault(each.content, each)
    return tuple(kept.values())
