"""The pairs of one forward: those of short sequences are remembered, and only where nothing else decides."""

from dataclasses import replace

import pytest
import torch

from anyformer.context import Context
from anyformer.pattern import pairs as module
from anyformer.pattern.pairs import pairs
from anyformer.pattern.read import pattern_of
from anyformer.side import side

TEXTS = ["Local(3)", "Strided(4) | Global([0])", "Random(2, seed=1)", "PerHead((Local(2), 1), (Random(3, seed=0), 1))"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_remembered_pairs_are_the_pattern(text: str, causal: bool) -> None:
    pattern, tokens = pattern_of(text), side(19, torch.device("cpu"))
    context = Context(causal=causal, queries=tokens, keys=tokens, pattern=pattern)
    module._remembered.cache_clear()
    for layer in (0, 1, 0):
        found = pairs(replace(context, layer=layer), 2)
        assert found is not None
        facts = module.facts(replace(context, layer=layer))
        expected = pattern.dense(19, heads=2, causal=causal, facts=facts)
        assert torch.equal(found.expand(1, 2, 19, 19)[0], expected)
    assert module._remembered.cache_info().misses == 2


def test_padding_a_cut_and_other_places_are_not_remembered() -> None:
    pattern, tokens = pattern_of("Random(2, seed=1)"), side(19, torch.device("cpu"))
    module._remembered.cache_clear()
    keep = torch.arange(19)[None] < 12
    padded = side(19, torch.device("cpu"), keep=keep)
    late = replace(tokens, places=tokens.places + 4)
    for queries, keys in ((padded, padded), (tokens.part(5, 19), tokens), (late, late)):
        context = Context(causal=True, queries=queries, keys=keys, pattern=pattern)
        found = pairs(context, 1)
        assert found is not None
        batch, head = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        q, k = queries.places[:, None, :, None], keys.places[:, None, None, :]
        expected = pattern.allows(batch, head, q, k, module.facts(context))
        assert torch.equal(found, expected if keys.keep is None else expected & keys.keep[:, None, None])
    assert module._remembered.cache_info().currsize == 0
