"""Lines of JSON that grow one by one, so that what was stopped goes on where it was."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def read(file: Path) -> list[dict[str, Any]]:
    """The lines that there are."""
    return [json.loads(text) for text in file.read_text().splitlines()] if file.is_file() else []


def appended(file: Path, found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is found, each line written before it is handed on."""
    for line in found:
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")
        yield line
