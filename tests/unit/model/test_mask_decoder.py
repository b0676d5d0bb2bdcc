"""The Enhanced Mask Decoder: against its formulas, against DeBERTa's layer, and with everything a model may be given."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import VOCAB, config, ids, mask, model, same
from torch import Tensor
from transformers import DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.transformer import Transformer
from anyformer.registry import names

torch.set_num_threads(1)

TABLE = "head.decoder.position.table.weight"
REFUSED = {
    "reformer": "its keys are its queries",
    **dict.fromkeys(("amlp", "conv", "fnet", "gmlp", "gru", "mlp_mixer", "synthesizer"), "it has no queries"),
}


def decoder(**changes: object) -> Transformer:
    return model(**{"head": "enhanced_mlm", "position": "alibi", **changes}).double()


def without_table(built: Transformer) -> Transformer:
    with torch.no_grad():
        built.get_parameter(TABLE).zero_()
    return built


def test_one_pass_and_no_absolute_positions_are_the_ordinary_last_layer():
    plain = decoder(head="mlm")
    enhanced = without_table(decoder(head="enhanced_mlm(passes=1)"))
    report = af.warm_start(enhanced, plain)
    assert report.fresh == (TABLE,)
    keep = mask([7, 4], 7, "left")
    same(enhanced(ids(2, 7), attention_mask=keep), plain(ids(2, 7), attention_mask=keep), atol=1e-12)


def attended(weights: dict[str, Tensor], prefix: str, z: Tensor, h: Tensor) -> Tensor:
    """Softmax over all pairs with ALiBi; four query heads of two key heads, head by head and row by row."""
    q, k, v = (stream @ weights[f"{prefix}.{name}.weight"].T for name, stream in (("q", z), ("k", h), ("v", h)))
    heads = []
    for head in range(4):
        columns, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        rows = []
        for i in range(len(z)):
            logits = [q[i, columns] @ k[j, shared] / 2 - 2.0 ** (-2 * (head + 1)) * abs(i - j) for j in range(len(h))]
            rows.append(torch.stack(logits).softmax(0) @ v[:, shared])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ weights[f"{prefix}.o.weight"].T


def block(weights: dict[str, Tensor], prefix: str, z: Tensor, h: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{prefix}.{name}.weight"]

    u = z + attended(weights, f"{prefix}.mixer", norm(z, "mixer_norm"), norm(h, "mixer_norm"))
    x = norm(u, "feed_forward_norm")
    gate, up, down = (weights[f"{prefix}.feed_forward.{name}.weight"] for name in ("gate", "up", "down"))
    return u + (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def by_formula(weights: dict[str, Tensor], tokens: Tensor, passes: int) -> Tensor:
    """The whole model on one row: one relative layer, then the last one `passes` times with positions in its queries."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[name]

    x = weights["embedding.tokens.weight"][tokens]
    h = block(weights, "blocks.0", x, x)
    z = h + weights[TABLE][: len(tokens)]
    for _ in range(passes):
        z = block(weights, "blocks.1", z, h)
    y = norm(z, "norm.weight") @ weights["head.hidden.weight"].T + weights["head.hidden.bias"]
    y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    return norm(y, "head.norm.weight") @ weights["head.out.weight"].T + weights["head.out.bias"]


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_the_whole_model_is_its_formulas(passes):
    built = decoder(head=f"enhanced_mlm(passes={passes})")
    tokens = ids(1, 6)
    logits = built(tokens)
    weights = {name: each.detach().clone().requires_grad_() for name, each in built.named_parameters()}
    expected = by_formula(weights, tokens[0], passes)
    same(logits[0], expected, atol=1e-11)
    probe = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (logits[0] * probe).sum().backward()
    (expected * probe).sum().backward()
    for name, each in built.named_parameters():
        same(each.grad, weights[name].grad, atol=1e-10)
        assert each.grad.abs().max() > 0, name


def test_a_layer_with_queries_of_its_own_is_that_of_deberta():
    config = DebertaV2Config(
        hidden_size=32, num_attention_heads=4, relative_attention=True, pos_att_type=["c2p", "p2c"], share_att_key=False,
        position_buckets=8, max_relative_positions=14, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = v2.DisentangledSelfAttention(config).eval()
    generator = torch.Generator().manual_seed(0)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    table = 0.3 * torch.randn(16, 32, generator=generator)
    ours = af.MultiHead(32, 4, position="deberta(span=14, buckets=8)")
    with torch.no_grad():
        ours.o.weight.copy_(torch.eye(32))
        ours.o.bias.zero_()
        ours.position.table.copy_(table)
    for name, peer in (("key", theirs.pos_key_proj), ("query", theirs.pos_query_proj)):
        weight = {"weight": peer.weight, "bias": torch.zeros(32) if peer.bias is None else peer.bias}
        getattr(ours.position, name).load_state_dict(weight)
    for name, peer in zip("qkv", (theirs.query_proj, theirs.key_proj, theirs.value_proj), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())
    z, h, probe = torch.randn(3, 2, 19, 32, generator=generator)
    mine, other = [(each.clone().requires_grad_(), h.clone().requires_grad_()) for each in (z, z)]
    out = ours(mine[0], content=mine[1])
    expected = theirs(other[1], torch.ones(2, 1, 19, 19), query_states=other[0], rel_embeddings=table)[0]
    same(out, expected, atol=2e-6 * float(expected.detach().abs().max()))
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    for left, right in zip(mine, other, strict=True):
        same(left.grad, right.grad, atol=4e-6 * float(right.grad.abs().max()))


@pytest.mark.parametrize("position", ["deberta(span=8)", "shaw", "rope", "t5"])
def test_absolute_positions_enter_by_the_table_alone(position):
    built, tokens = decoder(position=position), ids(2, 6)
    here, later = torch.arange(6)[None], torch.arange(5, 11)[None]
    assert not torch.allclose(built(tokens, positions=here), built(tokens, positions=later), rtol=0, atol=1e-3)
    without_table(built)
    same(built(tokens, positions=here), built(tokens, positions=later), atol=1e-9)


@pytest.mark.parametrize(
    "attention", ["softmax", "local(3)", "linformer(rank=4)", "linear", "aft", "routing", "longformer"]
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_equals_the_row_alone(attention, side):
    built = decoder(position="sinusoidal", attention=attention)
    lengths, tokens = [4, 7, 1], ids(3, 7)
    keep = mask(lengths, 7, side)
    logits = built(tokens, attention_mask=keep)
    for row, real in enumerate(keep):
        same(logits[row, real], built(tokens[row, real][None])[0], atol=1e-9)


def test_packed_documents_equal_rows_of_their_own():
    built, tokens = decoder(position="deberta(span=8)"), ids(1, 9)
    packed = built(tokens, document_ids=torch.tensor([[3, 3, 3, 3, 7, 7, 7, 5, 5]]))
    same(packed, torch.cat([built(part) for part in tokens.split((4, 3, 2), dim=1)], dim=1), atol=1e-9)


def test_tokens_without_a_position_get_no_vector():
    built, tokens = decoder(position="none"), ids(1, 5)
    first = torch.tensor([[True, False, False, False, False]])
    told = [built(tokens, positions=torch.tensor([[at, 1, 2, 3, 4]]), no_position=first) for at in (0, 9)]
    same(*told, atol=0)
    assert not torch.equal(told[0], built(tokens))


def test_both_passes_are_computed_again_in_the_backward():
    found = []
    for checkpointing in (False, True):
        built = Transformer(
            config(head="enhanced_mlm", position="deberta(span=8)", checkpointing=checkpointing)
        ).double()
        loss = built(ids(2, 7)).square().mean()
        loss.backward()
        found.append([loss, *(each.grad for each in built.parameters())])
    for plain, again in zip(*found, strict=True):
        same(plain, again, atol=1e-12)


def test_a_model_is_exact_after_reload_and_deterministic_in_eval(tmp_path):
    built = model(head="enhanced_mlm(passes=3, position=sinusoidal)", position="t5", dropout=0.3)
    tokens = ids(2, 6)
    built.save_pretrained(tmp_path)
    loaded = Transformer.from_pretrained(tmp_path)
    assert loaded.config.head == "enhanced_mlm(passes=3, position=sinusoidal)"
    assert torch.equal(loaded(tokens), built(tokens))
    assert not torch.equal(built.train()(tokens), built(tokens))


def test_every_pass_is_explained():
    built = decoder(depth=3)
    found = built.explain(ids(2, 6), rows=[0, 5])
    assert [each.shape for each in found] == [(2, 4, 2, 6)] * 4
    for each in found:
        same(each.sum(-1), torch.ones_like(each.sum(-1)), atol=1e-9)
    assert not torch.allclose(found[2], found[3])
    influence = decoder(attention="aft", position="none").explain(ids(1, 5), rows=[1])
    assert all(torch.isfinite(each).all() and each.sum() > 0 for each in influence)


@pytest.mark.parametrize("attention", [*names("attention"), *names("mixer"), "local(4)", "bigbird(block=2)"])
def test_it_needs_queries_apart_from_keys(attention):
    wanted = config(head="enhanced_mlm", attention=attention, position="none", kv_heads=None)
    if attention in REFUSED:
        message = f'which {attention} cannot: {REFUSED[attention]}; use softmax.*one a block.*head="mlm"'
        with pytest.raises(IncompatibleError, match=message):
            Transformer(wanted)
        Transformer(replace(wanted, attention=(attention, "softmax")))
    else:
        built = model(head="enhanced_mlm", attention=attention, position="none", kv_heads=None)
        logits = built(ids(2, 6))
        assert logits.shape == (2, 6, VOCAB)
        logits.sum().backward()
        assert built.get_parameter(TABLE).grad.abs().max() > 0


@pytest.mark.parametrize("attention", [each for each in names("attention") if each not in REFUSED])
def test_content_that_is_x_changes_nothing_and_other_content_does(attention):
    layer = af.MultiHead(16, 4, attention=attention, max_length=16)
    x, other = torch.randn(2, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    for keep in (None, mask([7, 4], 7, "left")):
        same(layer.eval()(x, content=x, attention_mask=keep), layer(x, attention_mask=keep), atol=1e-6)
    assert not torch.allclose(layer(x, content=other), layer(x), atol=1e-3)
    assert not torch.allclose(layer(x, content=other), layer(other), atol=1e-3)


def test_what_cannot_be_is_refused():
    with pytest.raises(SpecError, match=r"adds one vector a position, such as learned.*got rope"):
        Transformer(config(head="enhanced_mlm(position=rope)"))
    with pytest.raises(
        SpecError, match="head: there is no head named 'emd'; there are: lm, mlm, classifier, enhanced_mlm"
    ):
        config(head="emd")
    with pytest.raises(SpecError, match=r"enhanced_mlm\(passes=0\): passes=0: expected greater than or equal to 1"):
        config(head="enhanced_mlm(passes=0)")
    with pytest.raises(SpecError, match=r"mlm\(3\): takes at most 0 knobs"):
        config(head="mlm(3)")
    with pytest.raises(SpecError, match="position 32 needs a table of at least 33 rows, this one has 32"):
        decoder(position="rope")(ids(1, 33))
    with pytest.raises(IncompatibleError, match=r"enhanced_mlm runs the last block several times.*without one"):
        decoder(causal=True).new_cache(1)
    layer, x = af.MultiHead(16, 4), torch.randn(1, 5, 16)
    with pytest.raises(IncompatibleError, match="leave out source and cache"):
        layer(x, content=x, source=x)
    with pytest.raises(IncompatibleError, match="gru takes no content beside x: it has no queries"):
        af.build_mixer("gru", "none", af.Site(16, 4))(x, content=x)


@pytest.mark.plain
def test_content_of_another_shape_is_refused():
    layer, x = af.MultiHead(16, 4), torch.randn(1, 5, 16)
    with pytest.raises(ValueError, match=r"content: expected the shape of x, \[1, 5, 16\], got \[1, 4, 16\]"):
        layer(x, content=x[:, :4])
