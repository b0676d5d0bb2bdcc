"""Rotated values against RoFormer, which never turns back, and against the equation with the inverse."""

import pytest
import torch
from alike import assert_alike
from torch import Tensor
from transformers import RoFormerConfig
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention, RoFormerSinusoidalPositionalEmbedding

import anyformer as af
from anyformer.errors import SpecError

N = 11


def test_a_layer_and_its_gradients() -> None:
    config = RoFormerConfig(
        hidden_size=32, num_attention_heads=4, rotary_value=True, attention_probs_dropout_prob=0.0, vocab_size=4
    )
    theirs = RoFormerSelfAttention(config).eval()
    table = RoFormerSinusoidalPositionalEmbedding(N, 8).create_weight()[None, None]
    ours = af.MultiHead(32, 4, position="rope_value(scores=True, pairing=interleaved)")
    for name, peer in zip("qkv", (theirs.query, theirs.key, theirs.value), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())
    ours.o.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
    x, probe = torch.randn(2, 2, N, 32)
    assert_alike(ours, lambda x: theirs(x, sinusoidal_pos=table)[0], x, probe)
    torch.testing.assert_close(ours.v.weight.grad, theirs.value.weight.grad, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_outputs_and_gradients_are_the_equation(pairing: str, inverse: bool, scores: bool) -> None:
    """In complex numbers, one a pair of channels."""
    position = af.build_position(
        f"rope_value(inverse={inverse}, scores={scores}, pairing={pairing}, base=100)", af.Site(12, 2)
    )
    q_pos, k_pos = torch.tensor([[7, 0, 3]]), torch.tensor([[1, 0, 9, 4], [5, 2, 8, 100_000]])
    waves = 100.0 ** -(torch.arange(0, 6, 2).double() / 6)
    inputs = [torch.randn(2, 2, size, 6, dtype=torch.float64, requires_grad=True) for size in (3, 4, 4)]

    def pairs(x: Tensor) -> Tensor:
        return torch.complex(x[..., :3], x[..., 3:]) if pairing == "half" else torch.complex(x[..., ::2], x[..., 1::2])

    def turn(positions: Tensor) -> Tensor:
        return torch.exp(1j * positions[..., None] * waves)

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offset = turn(k_pos[:, None, :] - q_pos[:, :, None])[:, None]  # [b 1 n m p]
        met = (pairs(q).conj()[:, :, :, None] * pairs(k)[:, :, None] * (offset if scores else 1)).sum(-1).real
        weights = (met / 6**0.5).softmax(-1)[..., None]
        turned = pairs(v)[:, :, None] * (offset if inverse else turn(k_pos)[:, None, None])
        out = (weights * turned).sum(3)
        return (
            torch.cat([out.real, out.imag], -1)
            if pairing == "half"
            else torch.stack([out.real, out.imag], -1).flatten(-2)
        )

    outs = af.attend(*inputs, position=position, q_positions=q_pos, k_positions=k_pos), written_out(*inputs)
    probe = torch.randn(2, 2, 3, 6, dtype=torch.float64)
    results = [(out, *torch.autograd.grad((out * probe).sum(), inputs)) for out in outs]
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize(
    "attention, causal", [("softmax", False), ("local(3)", True), ("linear", True), ("linear", False)]
)
def test_only_the_inverse_makes_it_relative(attention: str, causal: bool) -> None:
    x, places = torch.randn(2, N, 32, dtype=torch.float64), torch.arange(N)[None]
    for inverse in (True, False):
        layer = af.MultiHead(
            32, 4, attention=attention, position=f"rope_value(inverse={inverse})", causal=causal
        ).double()
        moved = float((layer(x, positions=places + 1_000_000) - layer(x, positions=places)).abs().max())
        assert layer.position.relative == inverse
        assert moved < 1e-9 if inverse else moved > 0.01


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_far_out(dtype: torch.dtype) -> None:
    layer = af.MultiHead(32, 4, position="rope_value(inverse=True)").to(dtype)
    exact = af.MultiHead(32, 4, position="rope_value(inverse=True)").double()
    exact.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    x, places = torch.randn(1, 16, 32).to(dtype), torch.arange(16)[None] + 131_072
    assert float((layer(x, positions=places).double() - exact(x.double(), positions=places)).abs().max()) < 1e-2


@torch.no_grad()
def test_compressed_values_lose_the_offset() -> None:
    assert af.check("linformer(rank=4)", "rope_value(inverse=True)").kind == "abs"
    layer = af.MultiHead(32, 4, attention="linformer(rank=4)", position="rope_value(inverse=True)").double()
    x, places = torch.randn(2, N, 32, dtype=torch.float64), torch.arange(N)[None]
    turned = layer(x, positions=places)
    layer.position.turn_back = lambda out, positions: out  # it acts on both sides
    assert float((turned - layer(x, positions=places)).abs().max()) > 1e-3


def test_refusal_at_build() -> None:
    with pytest.raises(SpecError, match="rope_value: channels turn in pairs, expected an even head_dim, got 7"):
        af.build_position("rope_value", af.Site(7, 1))
