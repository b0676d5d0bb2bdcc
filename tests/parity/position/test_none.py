"""No position: nn.MultiheadAttention knows none either, and without a mask the order of tokens carries nothing."""

import torch
from alike import assert_alike
from torch import nn

import anyformer as af


def test_equals_torch_multihead_attention() -> None:
    theirs = nn.MultiheadAttention(32, 4, batch_first=True)
    ours = af.MultiHead(32, 4, position="none")
    with torch.no_grad():
        for layer, weight, bias in zip(
            (ours.q, ours.k, ours.v), theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias.normal_())
        ours.o.load_state_dict(theirs.out_proj.state_dict())
    x, probe = torch.randn(2, 2, 13, 32)
    assert_alike(ours, lambda x: theirs(x, x, x, need_weights=False)[0], x, probe)


def test_permuted_tokens_give_permuted_outputs_and_gradients() -> None:
    layer = af.MultiHead(32, 4, position="none").double()
    x, probe = torch.randn(2, 2, 13, 32, dtype=torch.float64)
    order = torch.randperm(13)
    plain, permuted = x.clone().requires_grad_(), x[:, order].clone().requires_grad_()
    outputs = layer(plain)[:, order], layer(permuted)
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    for output in outputs:
        (output * probe).sum().backward()
    torch.testing.assert_close(plain.grad[:, order], permuted.grad, rtol=0, atol=1e-12)
