"""Growth and break-even on numbers made up for them, and which lengths dense attention is timed at."""

import math

import pytest
from benches import cell, made_up, own

from anyformer.compare.bench import anchor, predicted
from anyformer.compare.bench_summary import break_even, growth


@pytest.mark.parametrize(
    ("ratios", "verdict", "length", "text"),
    [
        ([0.5, 2.0], "between", math.sqrt(1024 * 2048), "1448"),
        ([0.25, 0.5, 4.0], "between", 2048 * 2 ** (1 / 3), "2580"),
        ([1.1, 3.0], "first", 1024, "faster from the first (1024)"),
        ([0.2, 0.9], "never", 2048, "slower at all measured lengths"),
        ([1.5, 0.9], "lost", 2048, "slower again at 2048"),
        ([1.5, 0.5, 2.0], "between", 2048 * math.sqrt(2), "2896"),
        ([1.0], "never", 1024, "slower at all measured lengths"),
        ([2.0], "first", 1024, "faster from the first (1024)"),
        ([], "unknown", None, "unknown"),
    ],
)
def test_break_even(ratios: list[float], verdict: str, length: float | None, text: str) -> None:
    cells = [cell(own("local(8)"), 1024 * 2**place, 1.0, ratio) for place, ratio in enumerate(ratios)]
    found = break_even(cells[::-1], "forward")
    assert found.verdict == verdict
    assert found.length == (None if length is None else pytest.approx(length))
    assert str(found) == text
    assert not found.extrapolated


def test_a_break_even_that_leans_on_extrapolated_seconds_is_marked() -> None:
    cells = [cell(own("local(8)"), n, 1.0, n / 3000, 1024 if n > 2048 else None) for n in (1024, 2048, 4096, 8192)]
    found = break_even(cells, "forward_backward")
    assert found.extrapolated
    assert str(found) == "≈3000"
    assert not break_even(cells[:2], "forward").extrapolated


def test_growth_is_fitted_over_the_largest_doublings() -> None:
    curve = [(n, 5.0 + (n / 1024) ** 2) for n in (512, 16384, 32768, 65536, 131072)]
    found = growth(curve)
    assert found is not None
    assert found.slope == pytest.approx(2, abs=0.03)
    assert found.lengths == (16384, 32768, 65536, 131072)
    assert str(found) == f"{found.slope:.2f}"
    assert growth([(1024, 1.0)]) is None
    short = growth([(64, 1.0), (128, 2.0)])
    assert short is not None
    assert str(short) == "1.00†"


def test_extrapolated_seconds_of_dense_attention_are_no_points_of_its_growth() -> None:
    dense = made_up().summaries[0].forward
    assert dense.time is not None
    assert dense.time.lengths == (1024, 2048)
    assert dense.time.slope == pytest.approx(2)
    assert dense.break_even.verdict == "unknown"


def test_dense_attention_is_timed_where_it_fits() -> None:
    assert anchor(4096, 1024, 0.1, 10.0) == 4096  # 4 calls of 1.6 s
    assert anchor(8192, 1024, 0.1, 10.0) == 4096
    assert anchor(65536, 1024, 0.1, 10.0) == 4096
    assert anchor(65536, 1024, 100.0, 10.0) == 1024  # never from less
    assert anchor(100, 100, 100.0, 10.0) == 100


def test_seconds_are_predicted_from_shorter_lengths() -> None:
    assert predicted([], 4096) == 0
    assert predicted([(1024, 0.5)], 4096) == pytest.approx(2)
    assert predicted([(512, 0.1), (1024, 0.4)], 2048) == pytest.approx(1.6)
    assert predicted([(512, 0.4), (1024, 0.1)], 2048) == pytest.approx(0.2)  # never less than in proportion
