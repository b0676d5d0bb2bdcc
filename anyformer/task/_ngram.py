"""Count tables and a compressor: what text scores without attention."""

import lzma
from collections.abc import Sequence

import numpy as np

_UNKNOWN = 256  # a masked byte, or one outside the window
_BASE = 257
_PREFIX, _SCORED = 2 << 20, 1 << 20  # bytes the compressor reads before the test text, and of it


def table_bits(
    train: np.ndarray,
    rows: np.ndarray,
    places: tuple[np.ndarray, np.ndarray],
    truth: np.ndarray,
    contexts: Sequence[tuple[int, ...]],
) -> list[float]:
    """Bits a byte of one count table after another, each falling back on the one before it (Witten and Bell 1991):

        p_i(s | c) = (count(c, s) + kinds(c) p_{i-1}(s)) / (count(c) + kinds(c)),    p_0 = 1/256

    where kinds(c) is the number of different bytes seen in context c.

    Args:
        train: UInt8[bytes], what is counted.
        rows: Int[b n], the bytes a model sees, 256 where it sees none.
        places: rows and columns of the bytes to predict.
        truth: Int[scored], those bytes.
        contexts: for each table the offsets of the bytes it looks at; () is the unigram table.
    """
    reach = max((abs(offset) for context in contexts for offset in context), default=0)
    seen = np.pad(rows, ((0, 0), (reach, reach)), constant_values=_UNKNOWN)
    line, column = places
    probability, bits = np.full(len(truth), 1 / 256), []
    for context in contexts:
        asked = _code([seen[line, column + reach + offset] for offset in context], len(truth))
        stop = len(train) - reach
        known = _code([train[reach + offset : stop + offset] for offset in context], stop - reach)
        probability = _mixed(known, train[reach:stop], asked, truth, probability)
        bits.append(float(-np.log2(probability).mean()))
    return bits


def compressed_bits(train: np.ndarray, test: np.ndarray) -> tuple[float, str]:
    """Bits a byte that xz needs for the test text after it has read training text, and a note on how much of each."""
    prefix, scored = train[-_PREFIX:].tobytes(), test[:_SCORED].tobytes()
    needed = len(lzma.compress(prefix + scored)) - len(lzma.compress(prefix))
    return needed * 8 / len(
        scored
    ), f"xz -6 on the first {len(scored)} bytes of the test split after {len(prefix)} of training text"


def _code(symbols: Sequence[np.ndarray], size: int) -> np.ndarray:
    code = np.zeros(size, dtype=np.int64)
    for each in symbols:
        code = code * _BASE + each
    return code


def _mixed(
    known: np.ndarray, following: np.ndarray, asked: np.ndarray, truth: np.ndarray, fallback: np.ndarray
) -> np.ndarray:
    pairs = np.sort(known * _BASE + following)
    kinds = pairs[np.flatnonzero(np.diff(pairs, prepend=-1))]
    low, exact, high = asked * _BASE, asked * _BASE + truth, (asked + 1) * _BASE
    count = np.searchsorted(pairs, high) - np.searchsorted(pairs, low)
    both = np.searchsorted(pairs, exact, side="right") - np.searchsorted(pairs, exact)
    different = np.searchsorted(kinds, high) - np.searchsorted(kinds, low)
    return np.where(count > 0, (both + different * fallback) / np.maximum(count + different, 1), fallback)
