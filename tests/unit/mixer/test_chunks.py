"""A padded sequence that comes in chunks, empty ones among them, equals the same in one pass; nothing in, nothing out."""

from itertools import pairwise

import pytest
import torch

import anyformer as af
from anyformer.registry import names

CHUNKS = [(0, 1, 8), (0, 9), (4, 0, 5), (5, 4)]
PATTERNS = ["Local(3)", "Local(2) | Global([0])", "bigbird(block=2)"]
ATTENTIONS = [*names("attention"), *PATTERNS]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("position", ["none", "alibi", "fox"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_chunks_equal_one_pass(attention: str, position: str, chunks: tuple[int, ...]) -> None:
    try:
        layer = af.MultiHead(16, 4, attention=attention, position=position, causal=True, max_length=16).double().eval()
        layer.new_cache(1)
    except af.IncompatibleError:
        return
    x, keep = torch.randn(2, 9, 16, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    keep[1, 3] = False
    cache, ends = layer.new_cache(2), [sum(chunks[:i]) for i in range(len(chunks) + 1)]
    parts = [layer(x[:, start:stop], cache=cache, attention_mask=keep[:, :stop]) for start, stop in pairwise(ends)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x, attention_mask=keep), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("b", "n"), [(0, 0), (0, 5), (2, 0)])
@pytest.mark.parametrize("position", ["none", "alibi", "transformer_xl"])
@pytest.mark.parametrize("attention", [*names("attention"), *PATTERNS])
def test_nothing_in_nothing_out(attention: str, position: str, b: int, n: int) -> None:
    try:
        layer = af.MultiHead(16, 4, attention=attention, position=position, max_length=16)
    except af.IncompatibleError:
        return
    x, keep = torch.randn(b, n, 16, requires_grad=True), torch.ones(b, n, dtype=torch.bool)
    facts = {"document_ids": torch.zeros(b, n, dtype=torch.int64)} if layer.documents else {}
    places = torch.arange(n)[None]
    for given in (facts, {**facts, "attention_mask": keep}, {"attention_mask": keep, "positions": places}):
        out = layer(x, **given)
        assert out.shape == x.shape
        out.sum().backward()
