"""Transformer-XL against a stored layer with memory (causal) and Wav2Vec2-Conformer (bidirectional)."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
    Wav2Vec2ConformerRelPositionalEmbedding,
    Wav2Vec2ConformerSelfAttention,
)

import anyformer as af

GOLDEN = Path(__file__).parents[2] / "golden"


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * max(1.0, float(theirs.detach().abs().max())))


def test_a_causal_layer_with_memory() -> None:
    stored = load_file(GOLDEN / "transformer_xl.safetensors")
    weights = {name.removeprefix("weight."): tensor for name, tensor in stored.items() if name.startswith("weight.")}
    layer = af.MultiHead(32, 4, position="transformer_xl", causal=True, bias=False)
    for name, weight in zip("qkv", weights["qkv_net.weight"].chunk(3), strict=True):
        getattr(layer, name).load_state_dict({"weight": weight})
    layer.o.load_state_dict({"weight": weights["o_net.weight"]})
    layer.position.load_state_dict(
        {"u": weights["r_w_bias"], "v": weights["r_r_bias"], "w.weight": weights["r_net.weight"]}
    )
    x, memory = stored["input"].transpose(0, 1), stored["memory"].transpose(0, 1)
    source = torch.cat([memory, x], dim=1)
    out = layer(x, source=source, positions=torch.arange(5, 16)[None])
    normed = F.layer_norm(x + out, (32,), weights["layer_norm.weight"], weights["layer_norm.bias"])
    agree(normed, stored["output"].transpose(0, 1))


def test_a_bidirectional_layer_and_its_gradients() -> None:
    """Conformer interleaves sines and cosines; the columns of its projection are put into our order."""
    config = Wav2Vec2ConformerConfig(
        hidden_size=32, num_attention_heads=4, position_embeddings_type="relative", attention_dropout=0.0,
        max_source_positions=64, attn_implementation="eager",
    )  # fmt: skip
    theirs = Wav2Vec2ConformerSelfAttention(config).eval()
    for bias in (theirs.pos_bias_u, theirs.pos_bias_v):
        nn.init.normal_(bias)
    ours = af.MultiHead(32, 4, position="transformer_xl")
    for name, peer in zip("qkvo", (theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())
    order = torch.cat([torch.arange(0, 32, 2), torch.arange(1, 32, 2)])
    ours.position.load_state_dict(
        {"u": theirs.pos_bias_u, "v": theirs.pos_bias_v, "w.weight": theirs.linear_pos.weight[:, order]}
    )
    x, probe = torch.randn(2, 2, 13, 32)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    table = Wav2Vec2ConformerRelPositionalEmbedding(config)(x)
    outputs = ours(inputs[0]), theirs(inputs[1], relative_position_embeddings=table)[0]
    agree(*outputs)
    for output in outputs:
        (output * probe).sum().backward()
    agree(inputs[0].grad, inputs[1].grad)
    agree(ours.position.u.grad, theirs.pos_bias_u.grad)
    agree(ours.position.v.grad, theirs.pos_bias_v.grad)
    agree(ours.position.w.weight.grad, theirs.linear_pos.weight.grad[:, order])
