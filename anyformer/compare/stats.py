"""The statistics of a comparison: paired differences with intervals, Holm's correction, scaling exponents."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000
# below this length fixed overhead hides the slope: even dense attention then looks nearly linear
SHORTEST = 1024


@dataclass(frozen=True)
class Interval:
    """A mean, its percentile interval, the standard deviation of the resampled means, and a two-sided p value."""

    mean: float
    low: float
    high: float
    error: float
    p: float


@dataclass(frozen=True)
class Difference:
    """Method minus baseline over the seeds both have, on the same items.

    ``detectable`` is the smallest true difference such a run would find in four of five repetitions (2.8 standard
    errors). With fewer than 5 seeds the interval speaks of these trained models, not of the methods: ``descriptive``.
    """

    interval: Interval
    seeds: int
    items: int

    @property
    def detectable(self) -> float:
        return 2.8 * self.interval.error

    @property
    def descriptive(self) -> bool:
        return self.seeds < 5


@dataclass(frozen=True)
class Exponent:
    """``t ~ L^slope`` over ``lengths``; ``local`` slopes are between neighbours; ``short``: fitted below 1024."""

    slope: float
    local: tuple[float, ...]
    lengths: tuple[int, ...]
    short: bool


def bootstrap(
    scores: np.ndarray, *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Interval of the mean of ``scores[seed, item]``, resampling seeds and items.

    All seeds are scored on the same items, so one draw of items serves every seed of a replicate: drawing them anew
    for each seed would average away noise that the seeds share. With one seed this is the plain bootstrap over items.
    """
    table = np.asarray(scores, dtype=float)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"expected scores[seed, item] with at least one of each, got shape {table.shape}")
    rng = np.random.default_rng(seed)
    rows, columns = table.shape
    seeds = rng.multinomial(rows, np.full(rows, 1 / rows), size=resamples) / rows  # [r s]
    items = rng.multinomial(columns, np.full(columns, 1 / columns), size=resamples) / columns  # [r i]
    means = ((seeds @ table) * items).sum(1)  # [r]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    tail = min((means <= 0).sum(), (means >= 0).sum())
    p = min(1.0, 2 * (1 + tail) / (1 + resamples))
    return Interval(float(table.mean()), float(low), float(high), float(means.std(ddof=1)), float(p))


def paired(method: Mapping[int, Sequence[float]], baseline: Mapping[int, Sequence[float]]) -> Difference | None:
    """Method minus baseline from each seed's item scores; None if they share no seed with the same finite items."""
    rows = []
    for seed in sorted(method.keys() & baseline.keys()):
        ours, theirs = np.asarray(method[seed], float), np.asarray(baseline[seed], float)
        if ours.shape == theirs.shape and ours.size and np.isfinite(ours).all() and np.isfinite(theirs).all():
            rows.append(ours - theirs)
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    return Difference(bootstrap(np.stack(rows)), seeds=len(rows), items=len(rows[0]))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given: the i-th smallest of m is multiplied by m - i, kept monotone."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def exponent(lengths: Sequence[int], values: Sequence[float | None]) -> Exponent | None:
    """Slope of log value on log length over the largest three doublings, from 1024 on.

    With fewer than two lengths from 1024 on, all lengths within the largest three doublings are used and the result is
    marked ``short``. None if fewer than two usable points are left.
    """
    points = sorted(
        (n, v) for n, v in zip(lengths, values, strict=True) if v is not None and math.isfinite(v) and v > 0
    )
    if len(points) < 2:
        return None
    reach = [point for point in points if point[0] * 8 >= points[-1][0]]
    long = [point for point in reach if point[0] >= SHORTEST]
    used = long if len(long) >= 2 else reach
    if len(used) < 2:
        return None
    x, y = np.log([n for n, _ in used]), np.log([v for _, v in used])
    slope = float(np.polyfit(x, y, 1)[0])
    local = tuple(float(step) for step in np.diff(y) / np.diff(x))
    return Exponent(slope, local, tuple(n for n, _ in used), short=used is not long)


def crossover(lengths: Sequence[int], method: Sequence[float | None], baseline: Sequence[float | None]) -> float | None:
    """The length from which the method stays below the baseline, interpolated on log axes.

    None if it is not below it at the longest length both were measured at; the shortest length if it is below
    everywhere.
    """
    shared = [
        (math.log(n), math.log(b / m))
        for n, m, b in sorted(zip(lengths, method, baseline, strict=True), key=lambda row: row[0])
        if m is not None and b is not None and min(m, b) > 0 and math.isfinite(m) and math.isfinite(b)
    ]
    if not shared or shared[-1][1] <= 0:
        return None
    later = shared[-1]
    for earlier in reversed(shared[:-1]):
        if earlier[1] <= 0:
            weight = -earlier[1] / (later[1] - earlier[1])
            return math.exp(earlier[0] + weight * (later[0] - earlier[0]))
        later = earlier
    return math.exp(later[0])
