"""Pairs that may meet are counted exactly, for any numbers of queries and keys."""

import pytest

from anyformer.pattern import pairs
from anyformer.pattern.pairs import count
from anyformer.pattern.read import pattern_of

PATTERNS = [
    "Local(5)",
    "Local(70, 3) | Global([0])",
    "bigbird(block=16, random=2)",
    "Strided(7)",
    "~Local(3)",
    "Random(3, seed=1)",
    "Local(5) | Strided(30) | Global([0, 9]) | Random(3, seed=1)",
    "PerHead((Local(5), 1), (Strided(7), 1))",
    "PerLayer(Local(2), Strided(3))",
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
def test_pairs_are_counted_exactly(text: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = pattern_of(text)
    for most in (2**15, 0):  # beyond so many tiles pair by pair
        monkeypatch.setattr(pairs, "_MOST", most)
        for n, m in ((1, 1), (63, 63), (200, 200), (1, 70), (50, 130), (130, 50)):
            allowed = pattern.dense(n, m, heads=2, causal=causal)
            assert count(pattern, n, m, 2, causal=causal) == int(allowed.sum()) * 2 // len(allowed)
