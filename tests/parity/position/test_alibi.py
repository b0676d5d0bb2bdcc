"""ALiBi against x-transformers, BLOOM and MPT, with head counts that are no power of two."""

import warnings

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import anyformer as af

with warnings.catch_warnings():  # it uses torch.jit.script, which torch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.x_transformers import AlibiPositionalBias

N = 13


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 20])
def test_the_symmetric_bias_equals_x_transformers(heads: int) -> None:
    position = af.build_position("alibi", af.Site(heads, heads))
    head, queries, keys = torch.arange(heads)[:, None, None], torch.arange(N - 5, N)[:, None], torch.arange(N)
    torch.testing.assert_close(
        position.bias(head, queries, keys).float(), AlibiPositionalBias(heads)(5, N), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("heads", [6, 8, 12])
@pytest.mark.parametrize("peer", ["bloom", "mpt"])
def test_causal_attention_equals_the_key_only_form(heads: int, peer: str) -> None:
    """BLOOM and MPT add slope * (key - last key), which differs by a constant a row: softmax does not see it."""
    if peer == "bloom":
        term = build_alibi_tensor(torch.ones(1, N), heads, torch.float32).view(heads, 1, N)
    else:
        term = build_mpt_alibi_tensor(heads, N)
    hidden = torch.full((N, N), -torch.inf).triu(1)
    q, k, v, probe = torch.randn(4, 2, heads, N, 4)
    results = []
    for ours in (True, False):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        if ours:
            out = af.attend(*inputs, causal=True, position="alibi")
        else:
            logits = inputs[0] @ inputs[1].mT / 4**0.5 + term + hidden
            out = logits.softmax(-1) @ inputs[2]
        results.append((out, *torch.autograd.grad((out * probe).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
