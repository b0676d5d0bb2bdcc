"""Rotary positions against rotary-embedding-torch, RoFormer, Llama, GPT-NeoX and GPT-J."""

from collections.abc import Callable

import pytest
import torch
from alike import assert_alike
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor
from transformers import GPTJConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox as neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.roformer import modeling_roformer as roformer

import anyformer as af

HEADS, DIM, LENGTH = 2, 16, 12
Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def rotary_embedding_torch(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    peer = RotaryEmbedding(DIM)
    return peer.rotate_queries_or_keys(q), peer.rotate_queries_or_keys(k)


def roformer_peer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    table = roformer.RoFormerSinusoidalPositionalEmbedding(LENGTH, DIM).create_weight()
    return roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(table[None, None], q, k)


def waves(width: int) -> tuple[Tensor, Tensor]:
    config = LlamaConfig(hidden_size=width, num_attention_heads=1)
    return llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(LENGTH)[None])


def llama_peer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return llama.apply_rotary_pos_emb(q, k, *waves(DIM))


def neox_peer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return neox.apply_rotary_pos_emb(q, k, *waves(6))


def gptj_peer(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    sin, cos = gptj.create_sinusoidal_positions(LENGTH, 6)[None].chunk(2, dim=-1)

    def turned(x: Tensor) -> Tensor:  # tokens before heads
        x = x.transpose(1, 2)
        first = gptj.apply_rotary_pos_emb(x[..., :6], sin, cos)
        return torch.cat([first, x[..., 6:]], dim=-1).transpose(1, 2)

    return turned(q), turned(k)


PEERS = [
    ("rope(pairing=interleaved)", rotary_embedding_torch),
    ("rope(pairing=interleaved)", roformer_peer),
    ("rope", llama_peer),
    ("rope(partial=0.375)", neox_peer),
    ("rope(partial=0.375, pairing=interleaved)", gptj_peer),
]


@pytest.mark.parametrize("spec, peer", PEERS)
def test_queries_keys_and_their_gradients(spec: str, peer: Turn) -> None:
    position = af.build_position(spec, af.Site(HEADS * DIM, HEADS))
    q, k, q_probe, k_probe = torch.randn(4, 2, HEADS, LENGTH, DIM)
    places = torch.arange(LENGTH)[None]
    gradients = []
    results = []
    for turn in (lambda q, k: position.rotate(q, k, places, places), peer):
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
        turned = turn(*inputs)
        results.append(turned)
        gradients.append(torch.autograd.grad((turned[0] * q_probe).sum() + (turned[1] * k_probe).sum(), inputs))
    torch.testing.assert_close(*results, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(*gradients, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("spec, peer", [PEERS[0], PEERS[2], PEERS[3]])
def test_float32_angles_equal_bit_for_bit(spec: str, peer: Turn) -> None:
    spec = spec.removesuffix(")") + (", " if "(" in spec else "(") + "angle_dtype=float32)"
    position = af.build_position(spec, af.Site(HEADS * DIM, HEADS))
    q, k = torch.randn(2, 2, HEADS, LENGTH, DIM)
    places = torch.arange(LENGTH)[None]
    for ours, theirs in zip(position.rotate(q, k, places, places), peer(q, k), strict=True):
        assert torch.equal(ours, theirs)


def test_the_newest_queries_against_all_keys() -> None:
    q, k = torch.randn(2, HEADS, 5, DIM), torch.randn(2, HEADS, LENGTH, DIM)
    position = af.build_position("rope(pairing=interleaved)", af.Site(HEADS * DIM, HEADS))
    places = torch.arange(LENGTH)[None]
    ours = position.rotate(q, k, places[:, -5:], places)
    torch.testing.assert_close(ours, RotaryEmbedding(DIM).rotate_queries_with_cached_keys(q, k), rtol=2e-6, atol=2e-6)


def test_a_causal_layer_with_shared_key_heads_equals_llama() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    theirs = llama.LlamaAttention(config, layer_idx=0).eval()
    ours = af.MultiHead(32, 4, kv_heads=2, position="rope", causal=True, bias=False)
    for name in "qkvo":
        getattr(ours, name).load_state_dict(getattr(theirs, f"{name}_proj").state_dict())
    places = torch.arange(11)[None]
    waves = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), places)
    hidden = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    x, probe = torch.randn(2, 2, 11, 32)
    assert_alike(ours, lambda x: theirs(x, waves, hidden)[0], x, probe)
    torch.testing.assert_close(ours.q.weight.grad, theirs.q_proj.weight.grad, rtol=2e-6, atol=2e-6)


def test_a_causal_layer_that_turns_some_channels_equals_gptj() -> None:
    config = GPTJConfig(
        n_embd=32, n_head=4, rotary_dim=4, n_positions=32, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager"
    )
    theirs = gptj.GPTJAttention(config, layer_idx=0).eval()
    ours = af.MultiHead(32, 4, position="rope(partial=0.5, pairing=interleaved)", causal=True, bias=False)
    for name, peer in zip("qkvo", ("q_proj", "k_proj", "v_proj", "out_proj"), strict=True):
        getattr(ours, name).load_state_dict(getattr(theirs, peer).state_dict())
    waves = gptj.GPTJRotaryEmbedding(config)(torch.zeros(1), torch.arange(11)[None])
    hidden = torch.full((11, 11), -torch.inf).triu(1)[None, None]
    x, probe = torch.randn(2, 2, 11, 32)
    assert_alike(ours, lambda x: theirs(x, waves, hidden)[0], x, probe)
    torch.testing.assert_close(ours.k.weight.grad, theirs.k_proj.weight.grad, rtol=2e-6, atol=2e-6)
