"""Where to write names and ticks: no name covers another name or another circle, ticks are round numbers."""

import math
from collections.abc import Sequence

import numpy as np

Circle = tuple[float, float, float]  # x, y, radius
Size = tuple[float, float]  # width, height
Box = tuple[float, float, float, float]  # left, bottom, right, top

ANGLES = tuple(math.radians(degrees) for degrees in (0, 180, 90, 270, 35, 325, 145, 215, 60, 120, 240, 300))
STEPS = (0.0, 6.0, 14.0, 26.0, 42.0, 62.0, 86.0)
ROUNDS = 3
# among equally near places the one named first in ANGLES, so that names line up on the right where they can
PREFERENCE = np.tile(np.arange(len(ANGLES)) * 0.4, len(STEPS))


def place(
    circles: Sequence[Circle], sizes: Sequence[Size], bounds: Box, taken: Sequence[Box] = (), gap: float = 3.0
) -> list[tuple[float, float]]:
    """Centres of the labels, all in one unit (pixels), ``sizes[i]`` belonging to ``circles[i]``.

    Each label tries places around its circle, nearest first, and takes the cheapest: covering a label or a ``taken``
    box, or leaving ``bounds``, costs far more than covering a circle, which costs more than distance. Later rounds
    move early labels again.
    """
    order = sorted(range(len(circles)), key=lambda i: _nearest(circles, i))
    discs = np.array([(x - r, y - r, x + r, y + r) for x, y, r in circles], float).reshape(-1, 4)
    blocked = np.array(taken, float).reshape(-1, 4)
    boxes = np.full((len(circles), 4), np.nan)
    for _ in range(ROUNDS):
        for i in order:
            candidates = _candidates(circles[i], sizes[i], gap)
            others = np.delete(boxes, i, axis=0)
            labels = np.concatenate([others[~np.isnan(others[:, 0])], blocked])
            cost = (
                100 * _overlap(candidates, labels)
                + 100 * _outside(candidates, bounds)
                + 8 * _overlap(candidates, discs)
                + (_distance(candidates, circles[i]) + PREFERENCE) * sizes[i][1]
            )
            boxes[i] = candidates[int(cost.argmin())]
    return [((left + right) / 2, (bottom + top) / 2) for left, bottom, right, top in boxes.tolist()]


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves places on a line as little as needed to lie ``gap`` apart between ``low`` and ``high``, in the same order.

    Where they cannot all fit, they share the line evenly.
    """
    if not places:
        return []
    gap = min(gap, (high - low) / max(len(places) - 1, 1))
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = [min(max(places[i], low), high) for i in order]
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    moved[-1] = min(moved[-1], high)
    for i in range(len(moved) - 2, -1, -1):
        moved[i] = min(moved[i], moved[i + 1] - gap)
    result = [0.0] * len(places)
    for i, place_ in zip(order, moved, strict=True):
        result[i] = place_
    return result


def ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Round numbers on a log axis: as few kinds of digits as give at least four; powers of two if ``binary``."""
    found: list[float] = []
    if binary:
        every = 2.0 ** np.arange(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        return every[:: max(1, math.ceil(len(every) / 6))].tolist()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)):
        found = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if len(found) >= 4:
            break
    return found


def _nearest(circles: Sequence[Circle], i: int) -> float:
    x, y, _ = circles[i]
    return min((math.hypot(x - u, y - v) for j, (u, v, _) in enumerate(circles) if j != i), default=math.inf)


def _candidates(circle: Circle, size: Size, gap: float) -> np.ndarray:
    x, y, radius = circle
    half_width, half_height = size[0] / 2, size[1] / 2
    found = []
    for step in STEPS:
        for angle in ANGLES:
            # the box touches the circle's rim (plus gap) with its nearest edge
            u = x + math.cos(angle) * (radius + gap + step) + _sign(math.cos(angle)) * half_width
            v = y + math.sin(angle) * (radius + gap + step) + _sign(math.sin(angle)) * half_height
            found.append((u - half_width, v - half_height, u + half_width, v + half_height))
    return np.array(found)


def _sign(value: float) -> float:
    return 0.0 if abs(value) < 1e-9 else math.copysign(1.0, value)


def _overlap(candidates: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    width = np.minimum(candidates[:, None, 2], boxes[None, :, 2]) - np.maximum(
        candidates[:, None, 0], boxes[None, :, 0]
    )
    height = np.minimum(candidates[:, None, 3], boxes[None, :, 3]) - np.maximum(
        candidates[:, None, 1], boxes[None, :, 1]
    )
    return (width.clip(0) * height.clip(0)).sum(1)


def _outside(candidates: np.ndarray, bounds: Box) -> np.ndarray:
    left, bottom, right, top = bounds
    area = (candidates[:, 2] - candidates[:, 0]) * (candidates[:, 3] - candidates[:, 1])
    width = np.minimum(candidates[:, 2], right) - np.maximum(candidates[:, 0], left)
    height = np.minimum(candidates[:, 3], top) - np.maximum(candidates[:, 1], bottom)
    return area - width.clip(0) * height.clip(0)


def _distance(candidates: np.ndarray, circle: Circle) -> np.ndarray:
    x = np.clip(circle[0], candidates[:, 0], candidates[:, 2]) - circle[0]
    y = np.clip(circle[1], candidates[:, 1], candidates[:, 3]) - circle[1]
    return np.hypot(x, y) - circle[2]
