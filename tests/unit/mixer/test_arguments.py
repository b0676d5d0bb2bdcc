"""What a layer cannot be given, and what cannot be built, says so."""

import re

import pytest
import torch

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError


@pytest.mark.plain
@pytest.mark.parametrize(
    ("x", "got"),
    [
        (torch.zeros(3, 8), "float32 [3, 8]"),
        (torch.zeros(1, 3, 9), "float32 [1, 3, 9]"),
        (torch.zeros(1, 3, 8, dtype=torch.int64), "int64 [1, 3, 8]"),
    ],
)
def test_vectors_of_another_shape(x: torch.Tensor, got: str) -> None:
    layer = af.MultiHead(8, 2)
    with pytest.raises(ValueError, match=re.escape(f"x: expected floating vectors [batch, tokens, 8], got {got}")):
        layer(x)
    with pytest.raises(ValueError, match=re.escape(f"source: expected floating vectors [batch, tokens, 8], got {got}")):
        layer(torch.zeros(1, 3, 8), source=x)


@pytest.mark.parametrize("attention", ["performer", "rfa", "gated_linear"])
def test_an_encoding_that_widens_what_was_built_for_one_width(attention: str) -> None:
    expected = f"pope widens queries and keys, and {attention} was built for their width; use rope, or linear or delta"
    with pytest.raises(IncompatibleError, match=re.escape(expected)):
        af.MultiHead(8, 2, attention=attention, position="pope")


@pytest.mark.parametrize(
    "pattern, fault",
    [
        ("Block(4)", "Block(4) counts"),
        ("Global([0]) | Local(1)", "Global([0]) counts"),
        ("bigbird(block=4)", "bigbird(block=4, random=3) counts"),
        ("random(2)", "Random(2, seed=0) counts"),
        ("sparse_transformer(length=4, summary=1)", "Block(4) and Columns(4, 1) count"),
        ("complex(attention=softmax(pattern=Block(4)))", "Block(4) counts"),
    ],
)
def test_documents_with_a_pattern_that_counts_places(pattern: str, fault: str) -> None:
    layer = af.build_mixer(pattern, "none", af.Site(8, 2))
    expected = (
        f"cannot keep documents of one row apart, because {fault} places over the whole row; give each document a row"
    )
    with pytest.raises(IncompatibleError, match=re.escape(expected)):
        layer(torch.zeros(1, 9, 8), document_ids=torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("pattern", ["Local(2)", "strided(3)", "dilated(2, 1, 2)", "Local(1) | Flagged()"])
def test_documents_with_a_pattern_of_distances(pattern: str) -> None:
    layer = af.MultiHead(8, 2, attention=pattern).double()
    x = torch.randn(1, 17, 8, dtype=torch.float64)
    ids = (torch.arange(17) > 6).long()[None]
    out = layer(x, document_ids=ids)
    torch.testing.assert_close(out, torch.cat([layer(x[:, :7]), layer(x[:, 7:])], dim=1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", ["peg", "cnn_padding"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_tokens_at_all(position: str, causal: bool) -> None:
    config = af.ModelConfig(vocab=9, dim=8, depth=1, heads=2, position=position, causal=causal, head="lm")
    assert af.Transformer(config)(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 9)


def test_a_step_beyond_reason() -> None:
    with pytest.raises(SpecError, match="step"):
        af.build_position("floater(step=1e300)", af.Site(8, 2))


@pytest.mark.plain
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_positions_that_are_no_whole_numbers(dtype: torch.dtype) -> None:
    x, positions = torch.zeros(1, 3, 8), torch.zeros(1, 3, dtype=dtype)
    expected = (
        f"positions: expected whole numbers, got {str(dtype).removeprefix('torch.')}; round them, or count in finer"
    )
    for encoding in ("rope", "alibi", "none"):
        layer = af.MultiHead(8, 2, position=encoding)
        with pytest.raises(ValueError, match=expected):
            layer(x, positions=positions)
        with pytest.raises(ValueError, match=expected):
            layer(x, source=x, source_positions=positions)
    model = af.Transformer(af.ModelConfig(vocab=9, dim=8, depth=1, heads=2, position="sinusoidal", causal=False))
    with pytest.raises(ValueError, match=expected):
        model(torch.zeros(1, 3, dtype=torch.int64), positions=positions)


@pytest.mark.plain
def test_a_mask_that_is_added_to_scores() -> None:
    hidden = torch.tensor([[0.0, -torch.inf, 0.0]])
    expected = "{}: expected True or 1 for yes, got float32; of a mask that is added to scores write mask == 0"
    layer, x = af.MultiHead(8, 2), torch.zeros(1, 3, 8)
    for name, given in {
        "attention_mask": {"attention_mask": hidden},
        "source_mask": {"source": x, "source_mask": hidden},
    }.items():
        with pytest.raises(ValueError, match=re.escape(expected.format(name))):
            layer(x, **given)
    model = af.Transformer(af.ModelConfig(vocab=9, dim=8, depth=1, heads=2))
    with pytest.raises(ValueError, match=re.escape(expected.format("attention_mask"))):
        model(torch.zeros(1, 3, dtype=torch.long), attention_mask=hidden)
    with pytest.raises(ValueError, match=re.escape(expected.format("attention_mask"))):
        model.generate(torch.zeros(1, 3, dtype=torch.long), max_new_tokens=1, attention_mask=hidden.flip(1) * 0 + 1)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=re.escape(expected.format("attention_mask"))):
        af.attend(q, q, q, attention_mask=hidden)
