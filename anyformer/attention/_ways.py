"""A record of the ways that softmax attention took, for whoever asks."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch

Way = Literal["fused", "written out", "windows", "block lists", "union", "by head", "flex", "pieces"]
_SEEN: ContextVar[dict[Way, None] | None] = ContextVar("seen", default=None)


@contextmanager
def ways() -> Iterator[dict[Way, None]]:
    """Collect, in order, the ways that are taken inside the `with` block, each once."""
    seen: dict[Way, None] = {}
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def took(way: Way) -> None:
    """Say which way is taken; costs nothing where nobody asks."""
    if torch.compiler.is_compiling():
        return
    seen = _SEEN.get()
    if seen is not None:
        seen[way] = None
