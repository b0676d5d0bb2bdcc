"""Multiplicative positions against the product written out, over every source, and the sources that are refused."""

import pytest
import torch

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position

SOURCES = ["learned", "sinusoidal", "sinusoidal(layout='concat')", "hierarchical(rows=4)", "rnn"]


def built(source: str) -> Position:
    return af.build_position(f"multiplicative(source={source})", af.Site(6, 2, max_length=16)).double()


@pytest.mark.parametrize("source", SOURCES)
def test_times_one_plus_the_code_and_gradients(source: str) -> None:
    position, alone = built(source), af.build_position(source, af.Site(6, 2, max_length=16)).double()
    alone.load_state_dict(position.source.state_dict())
    places = torch.tensor([[0, 1, 2, 3, 4], [15, 3, 3, 9, 0]])
    x, probe = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    x.requires_grad_()
    code = alone.embed(torch.zeros_like(x), places, None)
    outs = position.embed(x, places, None), x + x * code
    torch.testing.assert_close(*outs, rtol=0, atol=1e-13)
    for module, out in zip((position, alone), outs, strict=True):
        (out * probe).sum().backward(inputs=[x, *module.parameters()])
    pairs = zip(position.source.parameters(), alone.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    (slope,) = torch.autograd.grad((position.embed(x, places, None) * probe).sum(), x)
    torch.testing.assert_close(slope, probe * (1 + code), rtol=0, atol=1e-13)


def test_a_code_of_zero_changes_nothing() -> None:
    position = built("learned")
    torch.nn.init.zeros_(position.source.table.weight)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    assert torch.equal(position.embed(x, torch.arange(5)[None], None), x)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("alibi", r"multiplicative: expected a source that adds one vector a position, such as learned.*got alibi"),
        ("rop", "there is no position named 'rop'; did you mean 'rope'"),
        ("learned(ofset=2)", r"unknown knob 'ofset'; did you mean 'offset'"),
        ("3", r"expected an encoding such as learned or rope\(base=1e5\), got 3"),
    ],
)
def test_other_sources_are_refused(source: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        built(source)


def test_positions_that_the_source_lacks_are_refused() -> None:
    model = af.Transformer(af.ModelConfig(vocab=5, dim=8, depth=1, heads=2, position="multiplicative", max_length=6))
    with pytest.raises(SpecError, match="position 6 needs a table of at least 7 rows, this one has 6"):
        model(torch.zeros(1, 7, dtype=torch.int64))
    tables = af.build_position("multiplicative(source=hierarchical(rows=2))", af.Site(6, 2))
    with pytest.raises(
        SpecError, match="position 4 needs a table of at least 3 rows, this one has 2; build with rows=3"
    ):
        tables.admit(torch.tensor([[4]]))


def test_the_source_is_written_the_one_way() -> None:
    config = af.ModelConfig(position="multiplicative(source=sinusoidal(layout='paper', base=500))")
    assert config.position == "multiplicative(source=sinusoidal(base=500.0))"
    assert af.ModelConfig.from_json(config.to_json()) == config
    assert af.ModelConfig(position="multiplicative(source=learned())").position == "multiplicative"


@pytest.mark.parametrize("source", ["sinusoidal_2d", "vit_learned(rows=3, columns=4)"])
def test_sources_on_a_grid(source: str) -> None:
    site = af.Site(8, 2, max_length=16)
    positions = torch.tensor([[[0, 0], [2, 3], [1, 0]]])
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    for spec in (f"multiplicative(source={source})", f"concatenated(source={source})"):
        position = af.build_position(spec, site).double()
        assert position.axes == 2
        code = position.source.embed(torch.zeros_like(x), positions, None)
        both = x + x * code if "mul" in spec else torch.cat([x, code], dim=-1) @ position.weight.T
        torch.testing.assert_close(position.embed(x, positions, None), both, rtol=0, atol=1e-13)
        with pytest.raises(SpecError, match="reads a row and a column for each token"):
            position.admit(torch.tensor([[0, 1]]))
