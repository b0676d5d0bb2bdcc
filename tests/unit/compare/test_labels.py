"""Names do not cover each other, ticks are round."""

import itertools
import random

import pytest

from anyformer.compare.labels import place, spread, ticks


def boxes(centres, sizes):
    return [(x - w / 2, y - h / 2, x + w / 2, y + h / 2) for (x, y), (w, h) in zip(centres, sizes, strict=True)]


def overlap(a, b) -> bool:
    return min(a[2], b[2]) - max(a[0], b[0]) > 1e-6 and min(a[3], b[3]) - max(a[1], b[1]) > 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_names_stay_apart_and_inside(seed: int) -> None:
    rng = random.Random(seed)
    circles = [(rng.uniform(100, 700), rng.uniform(60, 440), rng.uniform(4, 20)) for _ in range(14)]
    sizes = [(rng.uniform(40, 130), 12.0) for _ in circles]
    taken = [(720.0, 460.0, 800.0, 500.0)]
    found = boxes(place(circles, sizes, (0.0, 0.0, 800.0, 500.0), taken), sizes)
    assert not any(overlap(a, b) for a, b in itertools.combinations([*found, *taken], 2))
    assert all(left >= 0 and bottom >= 0 and right <= 800 and top <= 500 for left, bottom, right, top in found)


def test_names_of_circles_in_one_place_stay_apart() -> None:
    sizes = [(80.0, 12.0)] * 10
    found = boxes(place([(400.0, 250.0, 10.0)] * 10, sizes, (0.0, 0.0, 800.0, 500.0)), sizes)
    assert not any(overlap(a, b) for a, b in itertools.combinations(found, 2))


def test_a_lone_name_stands_right_of_its_circle() -> None:
    assert place([(100.0, 100.0, 10.0)], [(50.0, 12.0)], (0.0, 0.0, 800.0, 500.0)) == [(138.0, 100.0)]
    assert place([], [], (0.0, 0.0, 1.0, 1.0)) == []


def test_spread_keeps_order_gap_and_bounds_and_moves_nothing_without_need() -> None:
    assert spread([1.0, 5.0, 9.0], 2.0, 0.0, 10.0) == [1.0, 5.0, 9.0]
    assert spread([], 1.0, 0.0, 1.0) == []
    moved = spread([5.0, 4.9, 5.1, 99.0], 2.0, 0.0, 10.0)
    assert sorted(range(4), key=moved.__getitem__) == [1, 0, 2, 3]
    ordered = sorted(moved)
    assert all(b - a >= 2.0 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert ordered[0] >= 0
    assert ordered[-1] <= 10
    assert spread([3.0] * 5, 100.0, 0.0, 10.0) == [0.0, 2.5, 5.0, 7.5, 10.0]


@pytest.mark.parametrize("low, high", [(1.0, 1e6), (180_000.0, 320_000.0), (9.0, 11.0), (0.002, 0.9)])
def test_ticks_are_inside_and_several(low: float, high: float) -> None:
    found = ticks(low, high)
    assert all(low <= value <= high for value in found)
    assert 1 <= len(found) <= 14
    assert found == sorted(found)


def test_binary_ticks_are_powers_of_two() -> None:
    assert ticks(5.0, 70.0, binary=True) == [8.0, 16.0, 32.0, 64.0]
    assert len(ticks(2.0**10, 2.0**34, binary=True)) <= 7
