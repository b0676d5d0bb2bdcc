"""Sandwich against attention-gym, and its forms against one another."""

import pytest
import torch
from attn_gym.mods.sandwich import generate_sandwich_bias

import anyformer as af

N = 40


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("width", [2, 128])
def test_the_bias_equals_attention_gym(heads: int, width: int) -> None:
    """It rounds the angles to float32, at most 40 radians here, and its bias is not 0 at distance 0."""
    score = generate_sandwich_bias(heads, N, d_bar=width)
    head, query, key = torch.arange(heads)[:, None, None], torch.arange(N)[:, None], torch.arange(N)
    theirs = score(torch.zeros(()), torch.tensor(0), head, query, key)
    theirs = theirs - theirs[:, :1, :1]
    position = af.build_position(f"sandwich(width={width})", af.Site(4 * heads, heads))
    torch.testing.assert_close(
        position.bias(head, query, key).float(), theirs, rtol=0, atol=2e-6 * float(theirs.abs().max())
    )


@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients(causal: bool) -> None:
    score = generate_sandwich_bias(3, N)
    head, query, key = torch.arange(3)[:, None, None], torch.arange(N)[:, None], torch.arange(N)
    term = score(torch.zeros(()), torch.tensor(0), head, query, key)
    if causal:
        term = term + torch.full((N, N), -torch.inf).triu(1)
    inputs = [part.requires_grad_() for part in torch.randn(3, 2, 3, N, 4)]
    outs = (
        af.attend(*inputs, causal=causal, position="sandwich"),
        (inputs[0] @ inputs[1].mT / 2 + term).softmax(-1) @ inputs[2],
    )
    results = [(out, *torch.autograd.grad(out.sin().sum(), inputs)) for out in outs]
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_columns_and_offsets_are_the_bias(kv_heads: int) -> None:
    position = af.build_position("sandwich(width=6, base=100)", af.Site(12, 3, kv_heads=kv_heads))
    q, k = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(2, kv_heads, 7, 4, dtype=torch.float64)
    q_pos, k_pos = torch.randint(0, 10**6, (2, 5)), torch.randint(0, 10**6, (1, 7))
    head = torch.arange(3)[:, None, None]
    bias = position.bias(head, q_pos[:, None, :, None], k_pos[:, None, None, :])
    wide_q, wide_k = position.augment(q, k, q_pos, k_pos)
    product = (wide_q @ wide_k.mT - q @ k.mT) / 2
    torch.testing.assert_close(product, bias, rtol=0, atol=1e-9)
    expected = position.bias(head[..., 0], torch.tensor(90), 90 + torch.arange(-8, 6))
    torch.testing.assert_close(position.offsets(-8, 5), expected, rtol=0, atol=0)


def test_a_bias_looked_up_is_the_bias_computed() -> None:
    position = af.build_position("sandwich", af.Site(4, 1))
    offset = torch.randint(-30, 30, (40, 40))
    assert torch.equal(position._by_offset(offset), position._summed(offset))
    assert float(position._summed(torch.tensor(0))) == 0.0
