"""The lines that text is compared with: tables of the bytes before, and a compressor."""

import lzma
import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from texts import document

from anyformer.task import text as text_module
from anyformer.task._corpus import user_files
from anyformer.task._ngram import compressed_bits, table_bits
from anyformer.task.base import generator
from anyformer.task.text import Text

torch.set_num_threads(1)


def witten_bell(train, row, place, context, symbol, tables):
    """The recursion by hand: dictionaries, one byte at a time."""
    if not tables:
        return 1 / 256
    *lower, offsets = tables
    fallback = witten_bell(train, row, place, context, symbol, lower)
    wanted = tuple(row[place + each] if 0 <= place + each < len(row) else 256 for each in offsets)
    reach = context
    following = [
        train[at] for at in range(reach, len(train) - reach) if tuple(train[at + each] for each in offsets) == wanted
    ]
    count, kinds = len(following), len(set(following))
    return (following.count(symbol) + kinds * fallback) / (count + kinds) if count else fallback


def test_tables_equal_the_recursion_by_hand():
    draws = generator("tables").random((2, 300))
    train, held = ((each**3 * 6).astype(np.uint8) for each in draws)
    rows = held.reshape(6, 50).astype(np.int64)
    truth = rows.copy()
    rows[:, 7::9] = 256
    line, column = np.nonzero(rows == 256)
    tables = [(), (1,), (-1,), (-1, 1), (-2, -1, 1, 2)]
    got = table_bits(train, rows, (line, column), truth[line, column], tables)
    for depth in range(1, len(tables) + 1):
        probabilities = [
            witten_bell(train.tolist(), rows[i].tolist(), j, 2, truth[i, j], tables[:depth])
            for i, j in zip(line, column, strict=True)
        ]
        assert got[depth - 1] == pytest.approx(-np.log2(probabilities).mean(), rel=1e-12)


def test_next_byte_tables_look_at_the_bytes_before_the_target(folder):
    text = Text(data=folder, length=64, score=32)
    train = user_files([folder]).streams()["train"].tolist()
    pairs = defaultdict(Counter)
    for before, after in pairwise(train):
        pairs[before][after] += 1
    singles = Counter(train)
    batch = text.batch("test", 0, size=10)
    total = 0.0
    for before, after in zip(batch.tokens[batch.keep].tolist(), batch.targets[batch.keep].tolist(), strict=True):
        unigram = (singles[after] + len(singles) / 256) / (len(train) + len(singles))
        seen = pairs[before]
        total -= math.log2((seen[after] + len(seen) * unigram) / (seen.total() + len(seen)))
    lines = {each.name: each.value for each in text.reference_lines(items=10)}
    # the tables stay away from the few bytes at the ends of the training text
    assert lines["bigram"] == pytest.approx(total / batch.keep.sum().item(), rel=1e-3)


def test_library_lines_fall_from_table_to_table(library, monkeypatch):
    monkeypatch.setattr(text_module, "_COUNTED", 2 << 20)
    lines = {each.name: each.value for each in library.reference_lines(items=100)}
    assert list(lines) == ["unigram", "bigram", "trigram", "4-gram", "5-gram", "xz"]
    assert 8 > lines["unigram"] > lines["bigram"] > lines["trigram"] > lines["4-gram"] > lines["5-gram"] > 1
    assert 4.0 < lines["unigram"] < 5.2
    assert 1 < lines["xz"] < 2.4


def test_masked_lines_use_both_sides(monkeypatch):
    monkeypatch.setattr(text_module, "_COUNTED", 2 << 20)
    lines = {each.name: each.value for each in Text(objective="mlm").reference_lines(items=100)}
    assert 5.2 > lines["unigram"] > lines["right neighbour"] > lines["both neighbours"]
    assert lines["left neighbour"] > lines["both neighbours"] > lines["two on each side"] > 1
    assert "xz" not in lines


def test_the_compressor_reads_training_text_first():
    train, test = (np.frombuffer(document(number, 4000).encode(), dtype=np.uint8) for number in (1, 2))
    bits, note = compressed_bits(train, test)
    alone = len(lzma.compress(test.tobytes())) * 8 / len(test)
    again, _ = compressed_bits(test, test)
    assert again < 0.1 < bits < alone + 0.1
    assert note == f"xz -6 on the first {len(test)} bytes of the test split after {len(train)} of training text"
