"""softmax against torch's own multi-head attention and its fused kernel, and learned sinks of weights against a closed form."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import anyformer as af
from anyformer.ops.softmax import dense


def _copied(layer: af.MultiHead, peer: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([each.weight for each in (layer.q, layer.k, layer.v)]))
        peer.in_proj_bias.copy_(torch.cat([each.bias for each in (layer.q, layer.k, layer.v)]))
        peer.out_proj.weight.copy_(layer.o.weight)
        peer.out_proj.bias.copy_(layer.o.bias)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_multihead_attention(causal: bool) -> None:
    layer = af.MultiHead(32, 4, causal=causal).double()
    peer = nn.MultiheadAttention(32, 4, batch_first=True).double()
    _copied(layer, peer)
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, 6:] = False
    x = torch.randn(3, 9, 32, dtype=torch.float64, requires_grad=True)
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) if causal else None
    theirs = peer(x, x, x, key_padding_mask=~keep, attn_mask=hidden, need_weights=False)[0] * keep[..., None]
    ours = layer(x, attention_mask=keep)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(each.square().sum(), x)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_grouped_heads_equal_torch() -> None:
    q = torch.randn(2, 8, 5, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = dense(q, k, v, scale=0.5)[0]
    theirs = F.scaled_dot_product_attention(q, k, v, scale=0.5, enable_gqa=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(each.square().sum(), (q, k, v)) for each in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_softcap_in_closed_form() -> None:
    q, k, v = torch.tensor([[[[2.0]]]]), torch.tensor([[[[1.0], [-3.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    out = af.attend(q, k, v, scale=1.0, softcap=1.5)
    logits = 1.5 * torch.tensor([2.0, -6.0]).div(1.5).tanh()
    torch.testing.assert_close(out[0, 0, 0, 0], logits.softmax(0)[0])
