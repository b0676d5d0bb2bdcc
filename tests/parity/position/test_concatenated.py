"""Concatenated positions against two products summed, over every source."""

import pytest
import torch
from torch import nn

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position

SOURCES = ["learned", "sinusoidal", "hierarchical(rows=4)", "rnn"]


def built(source: str, width: int = 4) -> Position:
    return af.build_position(f"concatenated(source={source}, width={width})", af.Site(6, 2, max_length=16)).double()


@pytest.mark.parametrize("source", SOURCES)
def test_two_products_summed_and_gradients(source: str) -> None:
    position = built(source)
    alone = af.build_position(source, af.Site(4, 1, max_length=16)).double()
    alone.load_state_dict(position.source.state_dict())
    tokens, codes = nn.Linear(6, 6, bias=False).double(), nn.Linear(4, 6, bias=False).double()
    nn.init.normal_(position.weight)
    with torch.no_grad():
        tokens.weight.copy_(position.weight[:, :6])
        codes.weight.copy_(position.weight[:, 6:])
    places = torch.tensor([[0, 1, 2, 3, 4], [15, 3, 3, 9, 0]])
    x, y, probe = torch.randn(3, 2, 5, 6, dtype=torch.float64)
    y.copy_(x)
    outs = (
        position.embed(x.requires_grad_(), places, None),
        tokens(y.requires_grad_()) + codes(alone.embed(x.new_zeros(2, 5, 4), places, None)),
    )
    torch.testing.assert_close(*outs, rtol=0, atol=1e-13)
    for out in outs:
        (out * probe).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-12)
    both = torch.cat([tokens.weight.grad, codes.weight.grad], dim=1)
    torch.testing.assert_close(position.weight.grad, both, rtol=0, atol=1e-12)
    for ours, theirs in zip(position.source.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("source", SOURCES)
def test_it_starts_by_adding_a_vector_as_long_as_a_token(source: str) -> None:
    position = af.build_position(f"concatenated(source={source}, width=32)", af.Site(64, 4, max_length=16))
    x = torch.randn(1, 16, 64)
    added = position.embed(x, torch.arange(16)[None], None) - x
    assert 0.3 < float(added.norm(dim=-1).mean()) < 2.0


def test_a_source_without_vectors_is_refused() -> None:
    with pytest.raises(SpecError, match=r"concatenated: expected a source that adds one vector a position.*got alibi"):
        built("alibi")
