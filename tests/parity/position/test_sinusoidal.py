"""Sinusoidal positions against the three layouts of the field: positional-encodings, Marian, M2M100."""

import pytest
import torch
from positional_encodings.torch_encodings import PositionalEncoding1D
from torch import Tensor, nn
from transformers.models.m2m_100.modeling_m2m_100 import M2M100ScaledWordEmbedding, M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

import anyformer as af

LENGTH = 24


def peer_table(layout: str, dim: int) -> Tensor:
    if layout == "paper":
        return PositionalEncoding1D(dim)(torch.zeros(1, LENGTH, dim))[0]
    if layout == "concat":
        return MarianSinusoidalPositionalEmbedding(LENGTH, dim).create_weight()
    return M2M100SinusoidalPositionalEmbedding.get_embedding(LENGTH, dim)


@pytest.mark.parametrize(
    "layout, dim", [("paper", 16), ("concat", 16), ("concat", 15), ("t2t", 16), ("t2t", 15), ("t2t", 4)]
)
def test_every_entry(layout: str, dim: int) -> None:
    position = af.build_position(f"sinusoidal(layout={layout}, scale_tokens=False)", af.Site(dim, 1))
    ours = position.embed(torch.zeros(1, LENGTH, dim), torch.arange(LENGTH)[None], None)[0]
    torch.testing.assert_close(ours, peer_table(layout, dim), rtol=0, atol=2e-6)


def test_far_positions_equal_a_table_made_in_double_precision() -> None:
    position = af.build_position("sinusoidal(layout=concat, scale_tokens=False)", af.Site(32, 1))
    ours = position.embed(torch.zeros(1, 6000, 32), torch.arange(6000)[None], None)[0]
    torch.testing.assert_close(ours, MarianSinusoidalPositionalEmbedding(6000, 32).create_weight(), rtol=0, atol=2e-7)


def test_scaled_tokens_and_their_gradient() -> None:
    """M2M100 multiplies by sqrt(dim) inside its word embedding, as the paper does."""
    dim = 16
    theirs = M2M100ScaledWordEmbedding(11, dim, None, embed_scale=dim**0.5)
    words = nn.Embedding(11, dim)
    words.load_state_dict(theirs.state_dict())
    tokens, places = torch.randint(11, (2, LENGTH)), torch.arange(LENGTH)[None]
    position = af.build_position("sinusoidal(layout=t2t)", af.Site(dim, 1))
    outputs = position.embed(words(tokens), places, tokens), theirs(tokens) + peer_table("t2t", dim)
    torch.testing.assert_close(*outputs, rtol=2e-6, atol=2e-6)
    for output in outputs:
        output.sin().sum().backward()
    torch.testing.assert_close(words.weight.grad, theirs.weight.grad, rtol=2e-6, atol=2e-6)
