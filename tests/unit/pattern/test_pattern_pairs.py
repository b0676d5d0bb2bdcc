"""The pairs of one forward: those of short sequences are remembered, and only where nothing else decides."""

from dataclasses import replace

import pytest
import torch

from anyformer.context import Context
from anyformer.pattern import pairs as module
from anyformer.pattern.pairs import pairs, remembered_bias
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", ["Local(3)", "Causal()", "Random(2, seed=0) | Global([0])"])
def test_the_remembered_bias_is_the_pairs(text: str, causal: bool) -> None:
    tokens = side(70, torch.device("cpu"))
    context = Context(causal, tokens, tokens, pattern=pattern_of(text))
    bias, allowed = remembered_bias(context, 2), pairs(context, 2)
    assert bias is not None
    assert allowed is not None
    assert torch.equal(bias == 0, allowed)
    assert torch.equal(bias == -torch.inf, ~allowed)


def test_a_bias_is_remembered_only_where_the_pattern_alone_decides_and_it_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = side(70, torch.device("cpu"))
    context = Context(False, tokens, tokens, pattern=pattern_of("Local(3)"))
    keep = torch.ones(1, 70, dtype=torch.bool)
    padded = side(70, torch.device("cpu"), keep=keep)
    documents = replace(tokens, documents=torch.zeros(1, 70, dtype=torch.int64))
    for other in (
        replace(context, pattern=None),
        replace(context, mask=keep[:, None, None]),
        replace(context, queries=padded, keys=padded),
        replace(context, queries=documents, keys=documents),
    ):
        assert remembered_bias(other, 2) is None
    module._remembered_bias.cache_clear()
    monkeypatch.setattr(module, "_MOST_REMEMBERED", 70 * 70 - 1)
    assert remembered_bias(context, 2) is None
    module._remembered_bias.cache_clear()
