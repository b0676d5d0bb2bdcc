import pytest
import torch
from tiny_models import VOCAB, ids, mask, model, same

from anyformer.errors import IncompatibleError, SpecError

POSITIONS = ("none", "rope", "alibi", "sinusoidal", "learned", "t5", "shaw", "transformer_xl")
PAIRS = [*(("softmax", position) for position in POSITIONS), ("local(4)", "rope"), ("gru", "learned"), ("conv", "none")]
CHUNKS = [(12, 1, 3, 5), (0, 1, 20)]
PADDING = {
    "none": None,
    "left": mask([21, 13, 4], 21, "left"),
    "right": mask([21, 13, 4], 21, "right"),
    "holes": torch.rand(3, 21, generator=torch.Generator().manual_seed(1)) < 0.7,
}


def in_chunks(built, tokens, keep, chunks, cache, **arguments):
    """The outputs of the tokens fed piece by piece, from where the cache is."""
    outputs = []
    for n in chunks:
        start = cache.length
        seen = None if keep is None else keep[:, : start + n]
        outputs.append(built(tokens[:, start : start + n], attention_mask=seen, cache=cache, **arguments))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("padding", PADDING)
def test_piece_by_piece_equals_all_at_once(pair, padding):
    built, tokens, keep = model(attention=pair[0], position=pair[1]), ids(3, 21), PADDING[padding]
    whole = built(tokens, attention_mask=keep)
    for chunks in CHUNKS:
        pieces = in_chunks(built, tokens, keep, chunks, built.new_cache(3))
        real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
        same(pieces[real], whole[real])


@pytest.mark.parametrize("position", ["learned", "rope", "t5"])
def test_documents_continue_from_the_cache(position):
    built, tokens = model(position=position), ids(2, 10)
    documents = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 8, 8, 8]])
    cache, outputs = built.new_cache(2), []
    for stop in (3, 6, 7, 10):
        outputs.append(built(tokens[:, cache.length : stop], document_ids=documents[:, :stop], cache=cache))
    same(torch.cat(outputs, dim=1), built(tokens, document_ids=documents))


def test_given_positions_win_and_later_ones_are_places_again():
    built, tokens = model(position="learned"), ids(1, 6)
    cache, positions = built.new_cache(1), torch.tensor([[9, 8, 7]])
    pieces = [built(tokens[:, :3], positions=positions, cache=cache), built(tokens[:, 3:], cache=cache)]
    whole = built(tokens, positions=torch.tensor([[9, 8, 7, 3, 4, 5]]))
    same(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("pair", [("softmax", "learned"), ("local(4)", "rope"), ("gru", "sinusoidal")], ids=str)
def test_a_copy_continues_on_its_own(pair):
    built, tokens = model(attention=pair[0], position=pair[1]), ids(2, 10)
    cache = built.new_cache(2)
    built(tokens[:, :6], cache=cache)
    twice = [built(tokens[:, 6:], cache=cache.copy()) for _ in range(2)]
    assert torch.equal(*twice)
    assert cache.length == 6
    assert torch.equal(built(tokens[:, 6:], cache=cache), twice[0])


@pytest.mark.parametrize("pair", [("softmax", "learned"), ("softmax", "shaw"), ("local(40)", "t5")], ids=str)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("length", [0, 2, 9])
def test_a_cropped_cache_goes_on_from_there(pair, padding, length):
    built, tokens, keep = model(attention=pair[0], position=pair[1]), ids(3, 21), PADDING[padding]
    cache = built.new_cache(3)
    in_chunks(built, ids(3, 12, seed=5) if length < 2 else tokens, keep, (4, 8), cache)
    cache.crop(length)
    assert cache.length == length
    rest = in_chunks(built, tokens, keep, (21 - length,), cache)
    real = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    same(rest[real[:, length:]], built(tokens, attention_mask=keep)[:, length:][real[:, length:]])


def test_crop_refuses_where_it_cannot_go_back_and_changes_nothing():
    built, tokens = model(attention=("softmax", "gru"), position="none"), ids(2, 8)
    cache = built.new_cache(2)
    built(tokens[:, :6], cache=cache)
    expected = built(tokens[:, 6:], cache=cache.copy())
    with pytest.raises(ValueError, match=r"crop: a running state \(hidden\) cannot go back to 3 tokens; copy\(\)"):
        cache.crop(3)
    with pytest.raises(ValueError, match="crop: expected a length from 0 to the 6 tokens seen, got 7"):
        cache.crop(7)
    cache.crop(6)
    assert torch.equal(built(tokens[:, 6:], cache=cache), expected)
    near = model(attention="local(2)", position="none")
    cache = near.new_cache(2)
    near(tokens, cache=cache)
    with pytest.raises(
        ValueError, match=r"crop: only the last \d of 8 tokens are remembered; copy\(\) the cache instead"
    ):
        cache.crop(3)


@pytest.mark.parametrize("pair", [("softmax", "learned"), ("gru", "none")], ids=str)
def test_selected_rows_go_on_in_their_order(pair):
    built, tokens, keep = model(attention=pair[0], position=pair[1]), ids(3, 9), mask([9, 5, 4], 9, "left")
    whole = built(tokens, attention_mask=keep)
    rows = torch.tensor([2, 0, 2, 1])
    for chosen in (rows, rows.tolist()):
        cache = built.new_cache(3)
        built(tokens[:, :6], attention_mask=keep[:, :6], cache=cache)
        selected = cache.select(chosen)
        assert selected.batch_size == 4
        same(built(tokens[rows, 6:], attention_mask=keep[rows], cache=selected), whole[rows, 6:])


def test_select_refuses_rows_that_do_not_exist():
    with pytest.raises(ValueError, match=r"select: expected rows from 0 to 1, got \[0, 2\]"):
        model().new_cache(2).select([0, 2])


@pytest.mark.plain
def test_select_refuses_a_mask():
    cache = model().new_cache(2)
    with pytest.raises(ValueError, match=r"select: expected the numbers of rows, got a tensor of torch.bool"):
        cache.select(torch.tensor([True, False]))


def test_a_detached_cache_ends_the_graph():
    built, tokens = model(position="rope"), ids(1, 8)
    cache = built.new_cache(1)
    built(tokens[:, :4], cache=cache)
    assert cache.layers[0].slots["k"].requires_grad
    segment = cache.detach()
    assert not any(part.requires_grad for layer in segment.layers for part in layer.slots.values())
    built(tokens[:, 4:], cache=segment).sum().backward()
    assert built.blocks[0].mixer.k.weight.grad.isfinite().all()


def test_training_through_a_cache_gives_the_gradients_of_the_whole():
    built, tokens, gradients = model(position="learned", checkpointing=True), ids(2, 8), []
    for chunks in ((8,), (3, 5)):
        built.zero_grad()
        in_chunks(built, tokens, None, chunks, built.new_cache(2)).square().mean().backward()
        gradients.append([weight.grad.clone() for weight in built.parameters()])
    for whole, pieces in zip(*gradients, strict=True):
        same(pieces, whole)


def test_a_call_that_raises_leaves_the_cache_as_it_was():
    built, tokens = model(position="learned", attention=("softmax", "gru")), ids(1, 32)
    cache = built.new_cache(1)
    built(tokens[:, :30], cache=cache)
    expected = built(tokens[:, 30:], cache=cache.copy())
    with pytest.raises(SpecError, match="position 33 needs a table"):
        built(tokens[:, :4], cache=cache)
    blocked = built.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        built(tokens[:, 30:], cache=cache)
    blocked.remove()
    assert cache.length == 30
    assert torch.equal(built(tokens[:, 30:], cache=cache), expected)


def test_a_state_does_not_grow_and_keys_do():
    for attention, grows in (("gru", False), ("conv", False), ("local(3)", False), ("softmax", True)):
        built, cache, sizes = model(attention=attention, position="none"), None, []
        cache = built.new_cache(2)
        for _ in range(4):
            built(ids(2, 5), cache=cache)
            sizes.append(cache.nbytes)
        assert (sizes[-1] > sizes[0]) is grows, attention


def test_a_cache_tells_its_size():
    built = model(position="none")
    cache = built.new_cache(2)
    assert (cache.length, cache.nbytes) == (0, 0)
    built(ids(2, 5), cache=cache)
    assert cache.nbytes == 2 * 2 * 2 * 5 * 2 * 4 * 4  # layers, keys and values, rows, tokens, key heads, width, bytes
    assert repr(cache) == "Cache(batch_size=2, length=5, layers=2)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "mlm"}, "softmax cannot continue a sequence from a cache: it is not causal"),
        ({"attention": "fnet", "head": "mlm", "position": "none"}, "fnet cannot continue a sequence from a cache"),
        ({"head": "classifier", "outputs": 2, "causal": True}, "a classifier pools over the whole sequence"),
    ],
)
def test_models_that_cannot_continue_say_why(changes, message):
    with pytest.raises(IncompatibleError, match=message):
        model(**changes).new_cache(1)


@pytest.mark.parametrize("size", [0, -1, True])
def test_a_batch_size_below_one_is_refused(size):
    with pytest.raises(SpecError, match=f"new_cache: expected a batch size of at least 1, got {size}"):
        model().new_cache(size)


def test_a_cache_of_another_batch_or_model_is_refused():
    with pytest.raises(ValueError, match=r"the cache has 3 rows, tokens 2; use new_cache\(2\) or select\(rows\)"):
        model()(ids(2, 4), cache=model().new_cache(3))
    with pytest.raises(ValueError, match=r"the cache has 3 layers, the model 2; use the model's new_cache\(2\)"):
        model()(ids(2, 4), cache=model(depth=3).new_cache(2))
    cache = model().new_cache(2)
    model()(ids(2, 4), cache=cache)
    with pytest.raises(
        ValueError, match=r"attention_mask: expected shape \[2, 7\] \(4 tokens in the cache and 3 new\)"
    ):
        model()(ids(2, 3), attention_mask=mask([3, 3], 3, "left"), cache=cache)


def test_a_masked_lm_that_is_causal_continues():
    built = model(head="mlm", causal=True, outputs=VOCAB)
    same(in_chunks(built, ids(1, 8), None, (3, 5), built.new_cache(1)), built(ids(1, 8)))
