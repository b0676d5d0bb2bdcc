"""What a model says it looked at is what it computed with."""

import re

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError

KEEP = torch.ones(2, 13, dtype=torch.bool)
KEEP[0, :4] = False
KEEP[1, 5] = False
ROWS = [12, 4, 7]


def build(attention: str, position: str, causal: bool = True, **sizes: object) -> af.Transformer:
    config = {"vocab": 20, "dim": 32, "depth": 2, "heads": 4, "kv_heads": 2, "max_length": 16, **sizes}
    model = af.Transformer(af.ModelConfig(attention=attention, position=position, causal=causal, **config))
    for name, parameter in model.named_parameters():
        if "position" in name:
            torch.nn.init.normal_(parameter)
    return model.double()


def tokens() -> Tensor:
    return torch.randint(0, 20, (2, 13))


def test_the_mask_decoder_has_a_layer_for_each_pass() -> None:
    model, ids = build("softmax", "alibi", False, head="enhanced_mlm(passes=3)"), tokens()
    weights, terms = model.explain(ids, ROWS), model.explain_terms(ids, ROWS)
    assert len(weights) == len(terms) == 2 - 1 + 3
    assert all(each.shape == (2, 4, 3, 13) for each in weights)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "position", ["none", "rope", "alibi", "t5", "shaw", "transformer_xl", "deberta", "tupe", "rope_value"]
)
def test_the_weights_are_the_softmax_of_the_sum_of_the_terms(position: str, causal: bool) -> None:
    model, ids = build("softmax", position, causal), tokens()
    for weights, terms in zip(
        model.explain(ids, ROWS, attention_mask=KEEP),
        model.explain_terms(ids, ROWS, attention_mask=KEEP),
        strict=True,
    ):
        allowed = KEEP[:, None, None].expand(2, 1, 3, 13)
        if causal:
            allowed = allowed & (torch.arange(13) <= torch.tensor(ROWS)[:, None])
        logits = sum(terms.values()).masked_fill(~allowed, -torch.inf)
        expected = torch.softmax(logits, dim=-1) * KEEP[:, None, ROWS, None]
        torch.testing.assert_close(weights, expected.nan_to_num(), rtol=1e-9, atol=1e-12)
        assert set(terms) <= {"content", "rotation", "bias"}
        assert ("rotation" in terms) == (position == "rope")


def test_rows_by_terms_with_keys_between() -> None:
    model, ids = build("softmax", "cope"), tokens()
    weights, terms = model.explain(ids, [9])[0], model.explain_terms(ids, [9])[0]
    seen = sum(terms.values())[..., :10]
    torch.testing.assert_close(weights[..., :10], torch.softmax(seen, dim=-1), rtol=1e-9, atol=1e-12)


def test_chosen_heads_are_a_part_of_all() -> None:
    model, ids = build("softmax", "alibi"), tokens()
    for whole, part in zip(model.explain(ids, ROWS), model.explain(ids, ROWS, [3, 0]), strict=True):
        torch.testing.assert_close(part, whole[:, [3, 0]], rtol=0, atol=0)
    for whole, part in zip(model.explain_terms(ids, ROWS), model.explain_terms(ids, ROWS, [3]), strict=True):
        assert all(torch.equal(part[name], whole[name][:, [3]]) for name in whole)


def test_implied_weights_of_linear_attention() -> None:
    """phi(q_i) . phi(k_j) over its sum, written out."""
    model, ids = build("linear", "none", depth=1), tokens()
    handed = []
    hook = model.blocks[0].mixer.attention.register_forward_pre_hook(lambda module, given: handed.append(given))
    model(ids)
    hook.remove()
    q, k = (torch.nn.functional.elu(x) + 1 for x in handed[0][:2])
    pairs = (q @ k.repeat_interleave(2, 1).mT).tril()
    expected = (pairs / pairs.sum(-1, keepdim=True))[:, :, ROWS]
    torch.testing.assert_close(model.explain(ids, ROWS)[0], expected, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_vectors_added_to_values_are_no_part_of_implied_weights() -> None:
    model, ids, places = build("linear", "irpe(on=['v'], ratio=0.5)", depth=1, dim=8), tokens(), af.grid(1, 13)
    weights = model.explain(ids, ROWS, positions=places)[0]
    model.blocks[0].mixer.position.entries["v"].zero_()
    torch.testing.assert_close(weights, model.explain(ids, ROWS, positions=places)[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


@pytest.mark.parametrize(("attention", "position"), [("local(2)", "rope"), ("conv(width=3)", "sinusoidal")])
def test_nothing_is_taken_from_beyond_the_reach(attention: str, position: str) -> None:
    model = build(attention, position, depth=1)
    weights = model.explain(tokens(), [8])[0]
    assert bool((weights[..., 6:9] > 0).all())
    assert not weights[..., :6].any()
    assert not weights[..., 9:].any()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_influence_where_channels_are_weighted_differently() -> None:
    weights = build("aft", "none", depth=1).explain(tokens(), [8], attention_mask=KEEP)[0]
    assert weights.shape == (2, 1, 1, 13)
    assert not weights[1, 0, 0, 5]
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_a_model_is_as_before() -> None:
    model, ids = build("softmax", "rope", dropout=0.5), tokens()
    state, before = {name: each.clone() for name, each in model.state_dict().items()}, torch.get_rng_state()
    model.explain(ids, [3])
    model.explain_terms(ids, [3])
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


def test_no_rows_give_nothing() -> None:
    assert build("softmax", "rope").explain(tokens(), [])[0].shape == (2, 4, 0, 13)


def test_what_cannot_be_explained() -> None:
    model = build("softmax", "rope")
    with pytest.raises(SpecError, match=re.escape("explain: expected rows from 0 to 12, got 13, -1")):
        model.explain(tokens(), [13, 2, -1])
    with pytest.raises(SpecError, match=re.escape("explain: expected heads from 0 to 3, got 4")):
        model.explain_terms(tokens(), [1], [4])
    with pytest.raises(IncompatibleError, match="linear scores no pairs of query and key; explain\\(\\) shows"):
        build("linear", "rope").explain_terms(tokens(), [1])
