"""T5's bias against T5Attention and LongT5's windows, and its buckets against T5 and MPNet at every offset up to 100,000."""

import pytest
import torch
from alike import assert_alike
from torch import nn
from transformers import LongT5Config, T5Config
from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention, _get_local_attention_mask
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder
from transformers.models.t5.modeling_t5 import T5Attention

import anyformer as af

N = 40


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_and_its_gradients(causal: bool) -> None:
    config = T5Config(
        d_model=32, d_kv=6, num_heads=4, is_decoder=causal, dropout_rate=0.0, relative_attention_max_distance=24,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=causal).eval()
    nn.init.normal_(theirs.relative_attention_bias.weight)
    ours = af.MultiHead(32, 4, head_dim=6, position="t5(max_distance=24)", causal=causal, bias=False)
    for name in "qkvo":
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    ours.position.load_state_dict({"table": theirs.relative_attention_bias.weight})
    hidden = torch.full((1, 1, N, N), -torch.inf).triu(1) if causal else None
    x, probe = 0.5 * torch.randn(2, 2, N, 32)
    bias = theirs.compute_bias(N, N)
    if hidden is not None:
        bias = bias + hidden
    assert_alike(ours, lambda x: theirs(x, position_bias=bias)[0], x, probe)
    torch.testing.assert_close(
        ours.position.table.grad, theirs.relative_attention_bias.weight.grad, rtol=2e-6, atol=2e-6
    )


def test_windows_of_a_layer_and_their_gradients() -> None:
    """LongT5 cuts the sequence into blocks of one token more than its radius, each of which reads three."""
    config = LongT5Config(d_model=32, d_kv=6, num_heads=4, local_radius=7, dropout_rate=0.0)
    theirs = LongT5LocalAttention(config, has_relative_attention_bias=True).eval()
    nn.init.normal_(theirs.relative_attention_bias.weight)
    ours = af.MultiHead(32, 4, head_dim=6, attention="local(7)", position="t5", bias=False)
    for name in "qkvo":
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    ours.position.load_state_dict({"table": theirs.relative_attention_bias.weight})
    x, probe = 0.5 * torch.randn(2, 2, N, 32)
    near = _get_local_attention_mask(torch.ones(2, N), config.local_radius + 1, x.device)
    assert_alike(ours, lambda x: theirs(x, mask=near)[0], x, probe)
    torch.testing.assert_close(
        ours.position.table.grad, theirs.relative_attention_bias.weight.grad, rtol=2e-6, atol=4e-6
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (64, 256), (8, 20)])
def test_buckets(causal: bool, buckets: int, max_distance: int) -> None:
    offsets = torch.arange(-100_000, 100_001)
    position = af.build_position(f"t5(buckets={buckets}, max_distance={max_distance})", af.Site(8, 2, causal=causal))
    theirs = T5Attention._relative_position_bucket(offsets, not causal, buckets, max_distance)
    assert torch.equal(position.bucket(offsets), theirs)


def test_bidirectional_buckets_are_mpnets() -> None:
    offsets = torch.arange(-1000, 1001)
    position = af.build_position("t5", af.Site(8, 2))
    assert torch.equal(position.bucket(offsets), MPNetEncoder.relative_position_bucket(offsets))


@pytest.mark.parametrize("causal", [False, True])
def test_hand_worked_buckets(causal: bool) -> None:
    position = af.build_position("t5", af.Site(8, 2, causal=causal))
    known = (
        {0: 0, 1: 0, 9: 0, -15: 15, -16: 16, -17: 16, -112: 30, -113: 31, -(10**6): 31}
        if causal
        else {-1: 1, 0: 0, 1: 17, -8: 8, 8: 24, -127: 15, 127: 31, 10**6: 31, -(10**6): 15}
    )
    assert position.bucket(torch.tensor(list(known))).tolist() == list(known.values())
