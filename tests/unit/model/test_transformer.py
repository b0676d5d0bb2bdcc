import copy
import pickle
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB, config, ids, mask, model, rough, same

from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.head import mean
from anyformer.model.transformer import Transformer

POSITIONS = ("none", "rope", "alibi", "sinusoidal", "learned", "t5", "shaw", "transformer_xl")


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (2, 7, VOCAB)),
        ({"head": "mlm"}, (2, 7, VOCAB)),
        ({"head": "mlm", "outputs": 5}, (2, 7, 5)),
        ({"head": "lm", "outputs": 5}, (2, 7, 5)),
        ({"head": "classifier", "outputs": 3}, (2, 3)),
    ],
)
def test_logits_have_the_width_of_the_head(changes, shape):
    assert model(**changes)(ids(2, 7)).shape == shape


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("head", ["lm", "mlm", "classifier"])
def test_any_length_works(n, head):
    logits = model(head=head, outputs=4)(ids(2, n))
    assert logits.shape == ((2, 4) if head == "classifier" else (2, n, 4))
    assert logits.isfinite().all()


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("head", ["lm", "mlm", "classifier"])
def test_a_padded_row_equals_the_row_alone(position, side, head):
    built = model(position=position, head=head, outputs=VOCAB)
    lengths = [4, 7, 1]
    keep = mask(lengths, 7, side)
    tokens = ids(3, 7)
    logits = built(tokens, attention_mask=keep)
    for row, real in enumerate(keep):
        alone = built(tokens[row, real][None])[0]
        same(logits[row] if head == "classifier" else logits[row, real], alone)


def test_ids_of_padding_are_not_looked_at():
    built, keep, tokens = model(), mask([4, 7], 7, "left"), ids(2, 7)
    wild = tokens.masked_fill(~keep, -100)
    assert torch.equal(built(tokens, attention_mask=keep)[keep], built(wild, attention_mask=keep.long())[keep])


@pytest.mark.parametrize("position", POSITIONS)
def test_packed_documents_equal_rows_of_their_own(position):
    built, tokens = model(position=position), ids(1, 12)
    documents = torch.tensor([[3, 3, 3, 3, 7, 7, 7, 7, 7, 5, 5, 5]])
    packed = built(tokens, document_ids=documents)
    alone = [built(part) for part in tokens.split((4, 5, 3), dim=1)]
    same(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal", "t5"])
def test_given_positions_win(position):
    built, tokens = model(position=position), ids(2, 6)
    places = torch.arange(6)[None]
    same(built(tokens), built(tokens, positions=places))
    assert not torch.allclose(built(tokens), built(tokens, positions=2 * places))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, 6)
    restarted = torch.tensor([[0, 1, 2, 0, 1, 2]])
    same(built(tokens, document_ids=documents), built(tokens, document_ids=documents, positions=restarted))


def test_an_encoding_of_the_embedding_is_applied_once_whatever_the_depth():
    built = model(position=("learned", "rope"), depth=3)
    assert len(built.embedding.encodings) == 1
    tokens = ids(2, 5)
    x = built.embedding.tokens(tokens) + built.embedding.encodings[0].table(torch.arange(5))
    for block in built.blocks:
        x = block(x, tokens=tokens)
    same(built(tokens), built.head.out(built.norm(x)))
    assert [block.mixer.position.name for block in built.blocks] == ["none", "rope", "none"]


def test_blocks_share_an_encoding_whose_scope_is_the_model():
    built = model(position=("t5", "rope"), depth=4)
    first, second, third, fourth = (block.mixer.position for block in built.blocks)
    assert first is third
    assert second is fourth
    assert first is not second
    separate = model(position="shaw")
    assert separate.blocks[0].mixer.position is not separate.blocks[1].mixer.position
    assert model(position=("t5", "t5(buckets=16)")).blocks[1].mixer.position.table.shape[0] == 16


def test_a_block_is_two_branches_before_norms():
    built, tokens = model(position="none", norm="layer", feed_forward="gelu", depth=1), ids(2, 5)
    block, x = built.blocks[0], built.embedding.tokens(tokens)
    x = x + block.mixer(block.mixer_norm(x))
    forward, normed = block.feed_forward, block.feed_forward_norm(x)
    x = x + forward.down(torch.nn.functional.gelu(forward.up(normed)))
    same(built(tokens), built.head.out(built.norm(x)))


def test_a_masked_lm_head_transforms_first():
    built, x = model(head="mlm"), torch.randn(2, 3, 16)
    head = built.head
    expected = head.out(head.norm(torch.nn.functional.gelu(head.hidden(x))))
    assert torch.equal(head(x, None), expected)


def test_the_mean_leaves_padding_out_even_where_it_is_not_finite():
    x, keep = torch.randn(3, 4, 5), mask([2, 4, 0], 4, "right")
    expected = torch.stack([x[0, :2].mean(dim=0), x[1].mean(dim=0), torch.zeros(5)])
    same(mean(x.masked_fill(~keep[:, :, None], torch.nan), keep), expected, atol=1e-6)
    same(mean(x, None), x.mean(dim=1), atol=1e-6)


def test_both_feed_forwards_have_the_same_number_of_weights():
    swiglu, gelu = (Transformer(config(dim=48, feed_forward=kind)) for kind in ("swiglu", "gelu"))
    assert swiglu.count_parameters() == gelu.count_parameters()


def test_parameters_are_counted_once():
    built = Transformer(config(position=("t5", "learned"), depth=4))
    table = built.blocks[0].mixer.position.table.numel()
    counts = built.count_parameters()
    assert counts["embedding"] == VOCAB * 16
    assert counts["position"] == table + 32 * 16
    assert counts["total"] == sum(weight.numel() for weight in set(built.parameters()))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_gives_equal_outputs_and_gradients(dropout):
    tokens, results = ids(2, 6), []
    for checkpointing in (False, True):
        built = rough(Transformer(config(position="t5", dropout=dropout, checkpointing=checkpointing)))
        torch.manual_seed(3)
        loss = built(tokens).square().mean()
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in built.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


def test_checkpointing_computes_every_block_again():
    built, calls = rough(Transformer(config(checkpointing=True))), []
    built.blocks[0].mixer.register_forward_pre_hook(lambda *_: calls.append(1))
    built(ids(1, 4)).sum().backward()
    assert len(calls) == 2


def test_dropout_acts_in_training_only():
    tokens, plain = ids(2, 6), model()
    dropping = Transformer(replace(plain.config, dropout=0.5))
    dropping.load_state_dict(plain.state_dict())
    torch.manual_seed(1)
    assert not torch.equal(dropping.train()(tokens), dropping(tokens))
    before = torch.get_rng_state()
    assert torch.equal(dropping.eval()(tokens), plain(tokens))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_future_is_not_seen():
    built, tokens = model(position="learned"), ids(1, 9)
    other = torch.cat([tokens[:, :5], ids(1, 4, seed=4)], dim=1)
    same(built(tokens)[:, :5], built(other)[:, :5], atol=1e-6)
    assert not torch.allclose(built(tokens)[:, 5:], built(other)[:, 5:])


def test_flags_reach_only_the_blocks_that_read_them():
    built = model(attention=("local(1) | Flagged()", "softmax"), causal=False, position="none")
    tokens, flags = ids(2, 8), torch.zeros(2, 8, dtype=torch.bool)
    flags[:, 0] = True
    assert not torch.allclose(built(tokens, global_mask=flags), built(tokens))
    same(built(tokens, global_mask=flags.long()), built(tokens, global_mask=flags), atol=0)


def test_a_copy_and_a_pickle_give_the_same_numbers():
    built, tokens = model(position=("t5", "learned")), ids(2, 6)
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert torch.equal(other(tokens), built(tokens))
        assert other.config == built.config


def test_a_state_dict_loads_strictly_and_keeps_shared_weights_shared():
    built, other = model(position="t5"), Transformer(config(position="t5", seed=9))
    other.load_state_dict(built.state_dict())
    assert torch.equal(other.eval()(ids(2, 5)), built(ids(2, 5)))
    assert other.blocks[0].mixer.position is other.blocks[1].mixer.position


@pytest.mark.parametrize("position", POSITIONS)
def test_a_model_from_the_meta_device_is_exact_once_loaded(position):
    built = model(position=position)
    with torch.device("meta"):
        other = Transformer(built.config)
    other.to_empty(device="cpu")
    other.load_state_dict(built.state_dict())
    assert torch.equal(other.eval()(ids(2, 5)), built(ids(2, 5)))


def test_earlier_calls_leave_no_trace():
    built, tokens = model(position="rope", attention="local(4)"), ids(2, 9)
    first, state = built(tokens), copy.deepcopy(built.state_dict())
    built(ids(1, 3))
    built.double()(tokens)
    built.float()
    with pytest.raises(SpecError):
        built(tokens + VOCAB)
    assert torch.equal(built(tokens), first)
    assert all(torch.equal(state[name], each) for name, each in built.state_dict().items())


def test_the_representation_names_what_is_not_the_default():
    text = repr(Transformer(config(attention="local(4)", depth=3)))
    assert "attention='softmax(pattern=Local(4))'" in text
    assert "(0-2): 3 x Block(" in text


def test_encode_gives_what_the_head_reads():
    built, tokens = model(), ids(2, 5)
    assert torch.equal(built.head(built.encode(tokens), None), built(tokens))


def test_half_precision_runs():
    built = model(norm="rms", qk_norm=True)
    exact = built(ids(2, 6))
    half = built.bfloat16()(ids(2, 6))
    assert half.dtype == torch.bfloat16
    assert (half - exact).abs().max() <= 0.1 * exact.abs().max()


@pytest.mark.plain
def test_it_compiles_to_the_same_numbers():
    built = model(position=("learned", "rope"))
    tokens, keep = ids(2, 6), mask([4, 6], 6, "left")
    compiled = torch.compile(built, backend="eager", fullgraph=True)
    same(compiled(tokens, attention_mask=keep), built(tokens, attention_mask=keep), atol=1e-6)


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_ids_out_of_the_vocabulary_are_refused(wrong):
    tokens = ids(2, 4)
    tokens[1, 2] = wrong
    with pytest.raises(SpecError, match=rf"tokens: expected ids from 0 to 22 \(vocab=23\), got {wrong}"):
        model()(tokens)


def test_a_sequence_beyond_a_learned_table_is_refused_by_the_table():
    with pytest.raises(SpecError, match="learned: position 32 needs a table of at least 33 rows"):
        model(position="learned")(ids(1, 33))
    assert model(position="rope")(ids(1, 40)).isfinite().all()


@pytest.mark.plain
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"positions": torch.zeros(2, 3, dtype=torch.long)},
            ValueError,
            r"positions: expected shape \[2, 4\] or \[1, 4\]",
        ),
        ({"positions": torch.zeros(3, 4, dtype=torch.long)}, ValueError, r"positions: .*, got \[3, 4\]"),
        (
            {"attention_mask": torch.ones(2, 3).long()},
            ValueError,
            r"attention_mask: expected shape \[2, 4\], got \[2, 3\]",
        ),
        ({"document_ids": torch.ones(2, 5).long()}, ValueError, r"document_ids: expected shape \[2, 4\], got \[2, 5\]"),
        ({"global_mask": torch.ones(2, 4).bool()}, IncompatibleError, "no attention here reads global_mask"),
        ({"global_mask": torch.ones(2, 5).bool()}, ValueError, r"global_mask: expected shape \[2, 4\], got \[2, 5\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        model()(ids(2, 4), **arguments)


@pytest.mark.plain
def test_tokens_that_are_no_ids_are_refused():
    with pytest.raises(
        ValueError, match=r"tokens: expected shape \[b, n\], got \[4\]; tokens\[None\] adds a batch axis"
    ):
        model()(ids(4))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match=f"tokens: expected whole numbers, got {dtype}"):
            model()(torch.ones(1, 4, dtype=dtype))
    with pytest.raises(
        SpecError, match=r"Transformer: expected a ModelConfig, got 'rope'; write Transformer\(ModelConfig"
    ):
        Transformer("rope")


def test_a_method_that_cannot_leave_padding_out_refuses_the_mask():
    built = model(attention="fnet", position="learned", head="mlm")
    built(ids(2, 4))
    with pytest.raises(IncompatibleError, match="fnet cannot leave padding out"):
        built(ids(2, 4), attention_mask=mask([2, 4], 4, "left"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "fnet", "head": "lm"}, "fnet cannot be causal"),
        ({"attention": "fnet", "head": "mlm", "position": "rope"}, "fnet cannot use rope"),
    ],
)
def test_pairs_that_cannot_compose_are_refused_when_built(changes, message):
    with pytest.raises(IncompatibleError, match=message):
        Transformer(config(**changes))
