"""Comparisons that take seconds: a tiny model on a text of a few thousand bytes."""

import random
from dataclasses import replace
from pathlib import Path

from anyformer.compare.trial import Plan, Sizes, build_task, grid

MODEL = "model(dim=16, depth=1, heads=2, tokens=64)"
SIZES = Sizes(dim=16, depth=1, heads=2, tokens=64)


def write_text(path: Path, seed: int = 0) -> Path:
    """A text of 4000 words."""
    words = random.Random(seed)
    path.write_text(" ".join(words.choice(("alpha", "beta", "gamma", "delta")) for _ in range(4000)))
    return path


def text_task(path: Path) -> str:
    """The canonical spec of next-byte prediction on windows of 16 bytes, the last 8 scored."""
    return grid([f"text(data={str(path)!r}, length=16, score=8)"], "task")[0]


def plan_on(task: str, **changes: object) -> Plan:
    """Plain softmax for two steps."""
    plan = Plan(
        attention="softmax", position="none", task=task, sizes=SIZES, lengths=(16, 32), steps=2, items=4, fingerprint=""
    )
    return replace(plan, fingerprint=build_task(task).fingerprint, **changes)
