"""What a trained model cannot be taken to, and what to use instead."""

import pytest
from tiny_models import model

from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.extend import carried, extend

REFUSED = [
    (
        "rope",
        "yarn",
        32,
        SpecError,
        "expected `to` as a whole number of tokens above the model's max_length=32, got 32",
    ),
    ("rope", "yarn", 64.0, SpecError, "got 64.0"),
    ("rope", "yarm", 64, SpecError, "there is no method 'yarm'; did you mean 'yarn'? there are: plain, random_rows"),
    ("rope", "yarn(16)", 64, SpecError, "expected the knobs of yarn by name, as in"),
    ("rope", "yarn(factr=3)", 64, SpecError, "unknown knob 'factr'; did you mean 'factor'?"),
    ("rope", "yarn(factor=0.5)", 64, SpecError, "factor=0.5: expected greater than or equal to 1"),
    ("rope", "longrope", 64, SpecError, "expected one short factor for each of the 2 rotated pairs"),
    ("rope", "plain(factor=2)", 64, SpecError, "plain has no knobs, got factor; write 'plain'"),
    ("learned", "hierarchical(rows=9)", 64, SpecError, "hierarchical has one knob here, alpha, got rows"),
    ("learned", "hierarchical(alpha=0.5)", 64, SpecError, "with alpha=0.5 positions"),
    (
        "learned",
        "hierarchical",
        1025,
        SpecError,
        "hierarchical has 1024 positions here, got to=1025; use to=1024 or less",
    ),
    (
        "randomized",
        "plain",
        129,
        SpecError,
        "draws from 128 positions, so that 129 tokens have none of their own; use to=128",
    ),
    (
        "learned",
        "yarn",
        64,
        IncompatibleError,
        "yarn does not fit learned; learned takes random_rows, stretch, hierarchical",
    ),
    ("learned", "plain", 64, IncompatibleError, "plain does not fit learned"),
    (
        "rope",
        "stretch",
        64,
        IncompatibleError,
        "rope takes plain, interpolate, ntk, dynamic_ntk, yarn, longrope, llama3",
    ),
    ("rope(scaling=ntk)", "yarn", 64, IncompatibleError, "rope(scaling=ntk) takes plain"),
    ("t5", "yarn", 64, IncompatibleError, "yarn does not fit t5; t5 takes plain"),
    (
        ("rope", "learned"),
        "yarn",
        64,
        IncompatibleError,
        "yarn does not fit learned, which takes random_rows, stretch, hierarchical, and a model is extended in one way",
    ),
]


@pytest.mark.plain
@pytest.mark.parametrize(("position", "method", "to", "error", "message"), REFUSED, ids=str)
def test_what_cannot_be_extended_is_refused_with_what_can(position, method, to, error, message):
    with pytest.raises(error) as caught:
        extend(model(position=position), to=to, method=method)
    assert str(caught.value).removeprefix("extend: ").find(message) >= 0


@pytest.mark.plain
def test_only_models_are_extended():
    with pytest.raises(SpecError, match="expected a Transformer, got str; load one with from_pretrained"):
        extend("folder", to=64, method="yarn")
    with pytest.raises(
        SpecError, match="carried: expected before to be a Transformer, got str; give the model that was"
    ):
        carried("folder", model())
    with pytest.raises(
        SpecError, match="carried: expected after to be a Transformer, got dict; give the model that was"
    ):
        carried(model(), {})


def test_projections_sized_by_the_length_are_refused_by_name():
    built = model(attention="linformer(rank=4)", position="none", head="mlm", kv_heads=None)
    with pytest.raises(
        IncompatibleError, match=r"linformer holds numbers sized by max_length .*train it with max_length=128, or"
    ):
        extend(built, to=128, method="plain")
    with pytest.raises(
        IncompatibleError, match="cosformer measures distances by max_length, so that its outputs would change"
    ):
        extend(model(attention="cosformer", position="none"), to=128, method="plain")
