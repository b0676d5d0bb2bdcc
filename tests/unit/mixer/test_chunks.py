"""A padded sequence that comes in chunks, empty ones among them, equals the same in one pass; nothing in, nothing out."""

from itertools import pairwise

import pytest
import torch

import anyformer as af
from anyformer.model.build import verdict
from anyformer.registry import names
from anyformer.site import Site

PATTERNS = ["Local(3)", "Local(2) | Global([0])", "bigbird(block=2)"]


def _pairs(positions: tuple[str, ...], *, causal: bool) -> list[tuple[str, str]]:
    site = Site(16, 4, causal=causal, max_length=16)
    pairs = [(attention, position) for attention in (*names("attention"), *PATTERNS) for position in positions]
    return [pair for pair in pairs if verdict(*pair, site).runs]


CHUNKS = [(0, 1, 8), (0, 9), (4, 0, 5), (5, 4)]


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize(("attention", "position"), _pairs(("none", "alibi", "fox"), causal=True))
def test_chunks_equal_one_pass(attention: str, position: str, chunks: tuple[int, ...]) -> None:
    layer = af.MultiHead(16, 4, attention=attention, position=position, causal=True, max_length=16).double().eval()
    x, keep = torch.randn(2, 9, 16, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    keep[1, 3] = False
    cache, ends = layer.new_cache(2), [sum(chunks[:i]) for i in range(len(chunks) + 1)]
    parts = [layer(x[:, start:stop], cache=cache, attention_mask=keep[:, :stop]) for start, stop in pairwise(ends)]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x, attention_mask=keep), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("b", "n"), [(0, 0), (0, 5), (2, 0)])
@pytest.mark.parametrize(("attention", "position"), _pairs(("none", "alibi", "transformer_xl"), causal=False))
def test_nothing_in_nothing_out(attention: str, position: str, b: int, n: int) -> None:
    layer = af.MultiHead(16, 4, attention=attention, position=position, max_length=16)
    x, keep = torch.randn(b, n, 16, requires_grad=True), torch.ones(b, n, dtype=torch.bool)
    facts = {"document_ids": torch.zeros(b, n, dtype=torch.int64)} if layer.documents else {}
    places = torch.arange(n)[None]
    for given in (facts, {**facts, "attention_mask": keep}, {"attention_mask": keep, "positions": places}):
        out = layer(x, **given)
        assert out.shape == x.shape
        out.sum().backward()
