"""softmax against torch's own multi-head attention and its fused kernel, and learned sinks against Hugging Face's GPT-OSS."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

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


@pytest.mark.parametrize("impl", ["reference", "torch", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_learned_sinks_equal_gpt_oss(impl: str, dtype: torch.dtype) -> None:
    shapes = ((2, 4, 30, 8), (2, 2, 30, 8), (2, 2, 30, 8), (4,))
    q, k, v, sink = (torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes)
    pattern = af.Local(7, 0) | af.Global([0, 1])
    hidden = torch.zeros(30, 30, dtype=dtype).masked_fill(~pattern.dense(30, causal=True)[0], -torch.inf)
    peer = SimpleNamespace(sinks=sink, num_key_value_groups=2, training=False)
    theirs = eager_attention_forward(peer, q, k, v, hidden, scaling=0.3)[0].transpose(1, 2)
    ours = af.attend(q, k, v, pattern=pattern, causal=True, scale=0.3, sink=sink, impl=impl)
    near = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(ours, theirs, **near)
    probe = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v, sink), probe) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=near["rtol"], atol=near["atol"] * float(b.abs().max()))


def test_a_softcap_in_closed_form() -> None:
    q, k, v = torch.tensor([[[[2.0]]]]), torch.tensor([[[[1.0], [-3.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    out = af.attend(q, k, v, scale=1.0, softcap=1.5)
    logits = 1.5 * torch.tensor([2.0, -6.0]).div(1.5).tanh()
    torch.testing.assert_close(out[0, 0, 0, 0], logits.softmax(0)[0])
