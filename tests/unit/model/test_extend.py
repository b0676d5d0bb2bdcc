"""A trained model taken to longer inputs: what it promises about short ones, and where its weights come from."""

import math

import pytest
import torch
from tiny_models import config, ids, model, same

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.extend import METHODS, carried, extend
from anyformer.model.transformer import Transformer
from anyformer.position.base import Position
from anyformer.registry import names

TRAINED, TO = 32, 128
RATIO = TO / TRAINED
PAIRS = "longrope(short=[1.0, 1.0], long=[1.0, 4.0])"


def logits(built: Transformer, tokens: torch.Tensor, **facts: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return built(tokens, **facts)


def encoding(built: Transformer) -> Position:
    return next(part for part in built.modules() if isinstance(part, Position) and part.forms)


UNCHANGED = [
    ("learned", "random_rows"),
    ("learned(offset=2)", "random_rows"),
    ("learned", "hierarchical"),
    ("learned(offset=2)", "hierarchical(alpha=0.3)"),
    ("multiplicative", "random_rows"),
    ("concatenated(width=6)", "hierarchical"),
    ("tupe(cls=False)", "random_rows"),
    ("tupe", "random_rows"),
    ("rope", "plain"),
    ("rope(scaling=yarn(factor=2))", "plain"),
    ("rope(scaling=llama3(factor=2))", "plain"),
    ("rope(frequencies=learned)", "plain"),
    ("rnn(drive=none)", "plain"),
    ("t5", "plain"),
    ("alibi", "plain"),
    ("none", "plain"),
    (("learned", "none"), "random_rows"),
]


@pytest.mark.parametrize(("position", "method"), UNCHANGED, ids=str)
@pytest.mark.parametrize("head", ["lm", "mlm"])
def test_short_inputs_stay_bit_for_bit_where_that_is_promised(position, method, head):
    before = model(position=position, head=head)
    after = extend(before, to=TO, method=method)
    tokens = ids(2, TRAINED)
    assert torch.equal(logits(after, tokens), logits(before, tokens))
    assert logits(after, ids(2, TO)).isfinite().all()
    assert after.config.max_length == TO


CAUSAL_ONLY = {"cope", "fox", "path", "xpos"}
TABLES = {"concatenated", "learned", "multiplicative", "rnn", "tupe", "vit_learned"}


@pytest.mark.parametrize(
    ("head", "position"),
    [
        *(("lm", position) for position in sorted({*names("position")} - {"randomized"})),
        *(("mlm", position) for position in sorted({*names("position")} - {"randomized"} - CAUSAL_ONLY)),
    ],
)
def test_plain_means_the_same_model_for_every_encoding_that_takes_it(position, head):
    before = model(position=position, head=head)
    if position in TABLES:
        with pytest.raises(IncompatibleError, match="plain does not fit"):
            extend(before, to=TO, method="plain")
        return
    facts = {"positions": af.grid(4, 8)} if encoding_axes(before) == 2 else {}
    tokens = ids(2, TRAINED)
    after = extend(before, to=TO, method="plain")
    assert torch.equal(logits(after, tokens, **facts), logits(before, tokens, **facts))


def encoding_axes(built: Transformer) -> int:
    return max(part.axes for part in built.modules() if isinstance(part, Position))


BOTH_WAYS = {"fnet", "inducing", "linformer", "nystrom"}
SIZED = {"aft", "amlp", "gmlp", "linformer", "mlp_mixer", "reformer", "routing", "sinkhorn", "synthesizer"}
SPANS = {"cosformer", "routing"}  # when causal


@pytest.mark.parametrize(
    ("head", "attention"),
    [
        *(("mlm", attention) for attention in sorted({*names("attention"), *names("mixer")})),
        *(("lm", attention) for attention in sorted({*names("attention"), *names("mixer")} - BOTH_WAYS)),
    ],
)
def test_an_attention_stays_what_it_was_or_is_refused(attention, head):
    before = model(attention=attention, position="none", head=head, kv_heads=None)
    if attention in SIZED | (SPANS if head == "lm" else set()):
        with pytest.raises(IncompatibleError, match=f"extend: {attention} .* train it with max_length={TO}, or use"):
            extend(before, to=TO, method="plain")
        return
    after, tokens = extend(before, to=TO, method="plain"), ids(2, TRAINED)
    assert torch.equal(logits(after, tokens), logits(before, tokens))


def test_dynamic_ntk_changes_short_inputs_by_rounding_alone():
    before = model(position="rope").double()
    after = extend(before, to=TO, method="dynamic_ntk")
    same(logits(after, ids(2, TRAINED)), logits(before, ids(2, TRAINED)), atol=1e-12)
    longer = ids(2, TO)
    assert (logits(after, longer) - logits(before, longer)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("method", "scaling"),
    [
        ("interpolate", "linear(factor=4)"),
        ("ntk", "ntk(factor=4)"),
        ("dynamic_ntk", "dynamic_ntk(factor=1, original=32)"),
        ("dynamic_ntk(factor=2)", "dynamic_ntk(factor=2, original=32)"),
        ("yarn", "yarn(factor=4, original=32)"),
        ("yarn(factor=8, beta_fast=16)", "yarn(factor=8, original=32, beta_fast=16)"),
        (PAIRS, "longrope(factor=4, original=32, short=[1.0, 1.0], long=[1.0, 4.0])"),
        ("llama3", "llama3(factor=4, original=32)"),
    ],
)
def test_a_scaling_equals_a_fresh_model_with_that_spec_and_these_weights(method, scaling):
    before = model(position="rope(base=500)")
    after = extend(before, to=TO, method=method)
    fresh = Transformer(config(position=f"rope(base=500, scaling={scaling})", max_length=TO)).eval()
    fresh.load_state_dict(before.state_dict())
    assert after.config == fresh.config
    assert torch.equal(logits(after, ids(2, TO)), logits(fresh, ids(2, TO)))


def test_interpolated_angles_are_those_of_the_trained_range():
    before = model(position="rope")
    after = extend(before, to=TO, method="interpolate")
    tokens = ids(1, TRAINED)
    spread = 4 * torch.arange(TRAINED)[None]
    same(logits(after, tokens, positions=spread), logits(before, tokens))


def test_hierarchical_rows_are_the_two_digit_formula():
    before = model(position="learned")
    after = extend(before, to=TRAINED**2, method="hierarchical(alpha=0.3)")
    table = encoding(before).state_dict()["table.weight"]
    basis = (table - 0.3 * table[:1]) / 0.7
    places = torch.arange(TRAINED**2)
    expected = 0.3 * basis[places // TRAINED] + 0.7 * basis[places % TRAINED]
    same(encoding(after).code(places[None])[0], expected, atol=2e-6)
    assert torch.equal(encoding(after).code(places[None])[0, :TRAINED], table)


def test_stretched_rows_lie_between_the_trained_ones():
    before = model(position="learned(offset=2)")
    after = extend(before, to=TO, method="stretch")
    old, new = (encoding(each).state_dict()["table.weight"] for each in (before, after))
    assert torch.equal(new[:2], old[:2])
    old, new = old[2:], new[2:]
    for place in (0, 1, 50, 126, 127):
        at = place * (TRAINED - 1) / (TO - 1)
        low = min(math.floor(at), TRAINED - 2)
        same(new[place], old[low] + (at - low) * (old[low + 1] - old[low]))


def test_rows_of_a_class_token_are_not_stretched():
    before = model(position="tupe")
    after = extend(before, to=TO, method="stretch")
    old, new = (encoding(each).state_dict()["table"] for each in (before, after))
    assert len(new) == TO + 1
    assert torch.equal(new[[0, 1, 2, -1]], old[[0, 1, 2, -1]])


def test_new_rows_are_drawn_as_at_the_start_and_the_same_each_time():
    before = Transformer(config(position="learned(std=0.5)", dim=64, seed=3))
    state = torch.get_rng_state()
    once, again = (encoding(extend(before, to=1024, method="random_rows")).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(once["table.weight"], again["table.weight"])
    new = once["table.weight"][TRAINED:]
    assert abs(float(new.std()) - 0.5) < 0.01
    assert abs(float(new.mean())) < 0.01


@pytest.mark.parametrize("position", ["vit_learned(rows=4, columns=8)", "decomposed_rel(rows=4, columns=8)"])
def test_a_grid_is_resampled_to_a_larger_one_of_its_shape(position):
    before = model(position=position, head="mlm")
    after = extend(before, to=128, method="stretch")
    assert after.config.position == position[:-1] + ", to_rows=8, to_columns=16)"
    assert logits(after, ids(1, 128), positions=af.grid(8, 16)).isfinite().all()
    with pytest.raises(SpecError, match="no grid of that shape has 100 places; use to=128"):
        extend(before, to=100, method="stretch")


def test_a_clock_is_slowed_down():
    before = model(position="rnn")
    after = extend(before, to=TO, method="stretch")
    assert encoding(after).site.max_length == TO
    assert all(torch.equal(after.state_dict()[name], each) for name, each in before.state_dict().items())


def test_more_positions_of_a_draw_are_read():
    before = model(position="randomized(longest=200)")
    after = extend(before, to=TO, method="plain")
    places = encoding(after).state_dict()["places"]
    fresh = model(position="randomized(longest=200)", max_length=TO)
    assert torch.equal(places, encoding(fresh).state_dict()["places"])


def test_a_scaling_keeps_the_length_it_was_trained_for():
    before = model(position="rope(scaling=yarn(factor=4))")
    assert extend(before, to=TO, method="plain").config.position == "rope(scaling=yarn(factor=4.0, original=8))"


def test_a_loaded_model_is_extended_and_saved(tmp_path):
    model(position="learned").save_pretrained(tmp_path / "short")
    before = Transformer.from_pretrained(tmp_path / "short")
    after = extend(before, to=TO, method="hierarchical")
    after.save_pretrained(tmp_path / "long")
    again = Transformer.from_pretrained(tmp_path / "long")
    assert again.config == after.config
    assert torch.equal(logits(again, ids(2, TO)), logits(after, ids(2, TO)))


@pytest.mark.parametrize("method", ["random_rows", "stretch", "hierarchical"])
def test_the_given_model_is_untouched_and_shares_nothing(method):
    before = model(position="learned").to(torch.bfloat16)
    kept = {name: each.clone() for name, each in before.state_dict().items()}
    after = extend(before, to=TO, method=method)
    assert {each.dtype for each in after.parameters()} == {torch.bfloat16}
    assert not after.training
    assert extend(before.train(), to=TO, method=method).training
    with torch.no_grad():
        for each in after.parameters():
            each.zero_()
    assert all(torch.equal(kept[name], each) for name, each in before.state_dict().items())
    assert all(each.requires_grad for each in after.parameters())


def test_an_extended_model_trains_and_generates():
    after = extend(model(position="learned"), to=TO, method="hierarchical").train()
    after(ids(1, TO)).square().mean().backward()
    assert all(each.grad is not None for each in after.parameters())
    assert after.generate(ids(1, TRAINED), max_new_tokens=40).shape == (1, TRAINED + 40)


def test_what_became_of_every_weight_is_told():
    before = model(position="learned(offset=2)")
    total = len(before.state_dict())
    name = "embedding.encodings.0.table"
    told = {
        method: str(carried(before, extend(before, to=TO, method=method))).splitlines()
        for method in ("random_rows", "stretch", "hierarchical")
    }
    for lines in told.values():
        assert lines[0] == f"{total - 1} of {total} tensors kept bit for bit"
    assert told["random_rows"][1:] == [f"{name}.weight: kept with 96 more rows"]
    assert told["stretch"][1:] == [f"{name}.weight: other values, [34, 16] -> [130, 16]"]
    unread = "but for the first 2 rows, which no position read"
    assert told["hierarchical"][1:] == [f"{name}.weight: kept as {name} {unread}"]
    other = carried(before, model(position="rope"))
    assert other.fates[f"{name}.weight"] == "gone"
    assert carried(model(position="rope"), before).fates[f"{name}.weight"] == "new"


def test_every_method_is_offered_by_an_encoding():
    offered = {each for name in ("none", "learned", "rope") for each in encoding_ways(name)}
    assert offered == set(METHODS)


def encoding_ways(name: str) -> tuple[str, ...]:
    return af.build_position(name, af.Site(16, 4)).extensions
