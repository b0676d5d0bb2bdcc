"""Encodings that read neighbours, at the embedding: padding, documents, and their state in the cache."""

import pytest
import torch
from tiny_models import ids, mask, model, same

from anyformer.errors import IncompatibleError


def test_documents_beside_an_encoding_that_reads_neighbours_are_refused():
    with pytest.raises(
        IncompatibleError, match="rnn_front reads neighbours and cannot keep documents of one row apart"
    ):
        model(position="rnn_front")(ids(1, 4), document_ids=torch.tensor([[0, 0, 1, 1]]))


def test_each_of_several_encodings_has_a_state_of_its_own():
    built, tokens = model(position=("rnn_front", "rnn_front(width=3)")), ids(2, 9)
    cache = built.new_cache(2)
    parts = [built(part, cache=cache) for part in tokens.split([4, 1, 4], dim=1)]
    same(torch.cat(parts, dim=1), built(tokens))
    assert sorted(part.shape[1] for part in cache.tokens.state.values()) == [3, 16]
    assert cache.nbytes == sum(
        each.nbytes
        for layer in (cache.tokens, *cache.layers)
        for part in (layer.slots, layer.state)
        for each in part.values()
    )


@pytest.mark.parametrize("pad", ["left", "right"])
def test_padding_is_passed_over_while_decoding(pad):
    built, tokens, keep = model(position="rnn_front"), ids(3, 9), mask([9, 5, 1], 9, pad)
    cache = built.new_cache(3)
    built(tokens, attention_mask=keep, cache=cache)
    more = ids(3, 2, seed=1)
    out = built(more, attention_mask=torch.cat([keep, torch.ones_like(more, dtype=torch.bool)], dim=1), cache=cache)
    for row in range(3):
        same(out[row], built(torch.cat([tokens[row, keep[row]], more[row]])[None])[0, -2:])


def test_a_call_that_raises_leaves_the_state_alone():
    built, tokens = model(position=("rnn_front", "learned")), ids(1, 30)
    cache = built.new_cache(1)
    built(tokens, cache=cache)
    before = [each.clone() for each in cache.tokens.state.values()]
    with pytest.raises(ValueError, match="needs a table of at least 33 rows"):
        built(ids(1, 3), cache=cache)
    assert all(torch.equal(*pair) for pair in zip(before, cache.tokens.state.values(), strict=True))
