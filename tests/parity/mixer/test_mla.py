"""MLA against DeepSeek-V3's attention in `transformers`, and the absorbed form against the explicit one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.mla import MLA
from anyformer.model.build import build_mixer, check
from anyformer.position.bind import bind
from anyformer.side import side
from anyformer.site import Site

DIM, HEADS, ROTATED, CONTENT, LATENT = 16, 4, 4, 6, 10


def built(position: str, *, causal: bool, q_latent: int | None = None, bias: bool = True) -> MLA:
    site = Site(DIM, HEADS, causal=causal, head_dim=ROTATED)
    spec = f"mla(latent={LATENT}, content={CONTENT}, q_latent={q_latent})"
    mixer = build_mixer(spec, position, site, bias=bias).double().eval()
    assert isinstance(mixer, MLA)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return mixer


def theirs(mixer: MLA, q_latent: int | None) -> DeepseekV3Attention:
    config = DeepseekV3Config(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=q_latent,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=CONTENT,
        v_head_dim=CONTENT,
        attention_bias=False,
    )
    config._attn_implementation = "sdpa"  # "eager" takes the softmax in single precision
    peer = DeepseekV3Attention(config, 0).double().eval()
    for name, size in (("kv_a_layernorm", LATENT), ("q_a_layernorm", q_latent)):
        if size is not None:  # its own norms run in single precision
            setattr(peer, name, nn.RMSNorm(size, eps=getattr(peer, name).variance_epsilon).double())
    if q_latent is None:
        peer.q_proj.weight.data.copy_(mixer.q.weight)
    else:
        peer.q_a_proj.weight.data.copy_(mixer.q_down.weight)
        peer.q_a_layernorm.weight.data.copy_(mixer.q_norm.weight)
        peer.q_b_proj.weight.data.copy_(mixer.q.weight)
    peer.kv_a_proj_with_mqa.weight.data.copy_(mixer.down.weight)
    peer.kv_a_layernorm.weight.data.copy_(mixer.norm.weight)
    peer.kv_b_proj.weight.data.copy_(mixer.up.weight)
    peer.o_proj.weight.data.copy_(mixer.o.weight)
    return peer


def angles(n: int) -> tuple[Tensor, Tensor]:
    """cos and sin as the peer wants them, in double precision."""
    rates = 10000.0 ** (-torch.arange(0, ROTATED, 2, dtype=torch.float64) / ROTATED)
    turns = torch.arange(n)[:, None] * rates
    turns = torch.cat([turns, turns], dim=-1)[None]
    return turns.cos(), turns.sin()


@pytest.mark.parametrize("q_latent", [None, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_deepseek(causal: bool, q_latent: int | None) -> None:
    mixer = built("rope(pairing=interleaved)", causal=causal, q_latent=q_latent, bias=False)
    peer = theirs(mixer, q_latent)
    x, weights = torch.randn(2, 2, 9, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    mask = torch.zeros(1, 1, 9, 9, dtype=torch.float64)  # none at all would be causal there
    if causal:
        mask = mask.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    got, expected = mixer(mine), peer(other, angles(9), mask)[0]
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    close(mixer.up.weight.grad, peer.kv_b_proj.weight.grad)
    close(mixer.down.weight.grad, peer.kv_a_proj_with_mqa.weight.grad)


@pytest.mark.parametrize("position", ["none", "rope", "alibi", "t5"])
def test_the_absorbed_form_equals_the_explicit_one(position: str) -> None:
    mixer = built(position, causal=True)
    tokens = side(9, torch.device("cpu"))
    encoding = bind(mixer.position, mixer.verdict.forms, tokens, tokens)
    context = replace(Context(causal=True, queries=tokens, keys=tokens), encoding=encoding)
    shapes = ((HEADS, 9, CONTENT), (HEADS, 9, ROTATED), (9, LATENT), (9, ROTATED))
    parts = [torch.randn(2, *shape, dtype=torch.float64) for shape in shapes]
    results = []
    for read in (mixer._explicit, mixer._absorbed):
        mixer.zero_grad()
        leaves = [part.clone().requires_grad_() for part in parts]
        out = read(*leaves, context)
        out.square().sum().backward()
        results.append([out, mixer.up.weight.grad, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        close(one, other)


def test_a_cache_keeps_only_the_short_vectors() -> None:
    mixer, x = built("rope", causal=True), torch.randn(2, 9, DIM, dtype=torch.float64)
    cache = mixer.new_cache(2)
    out = torch.cat([mixer(part, cache=cache) for part in x.split([4, 1, 3, 1], dim=1)], dim=1)
    close(out, mixer(x))
    assert {name: tuple(part.shape) for name, part in cache.slots.items()} == {
        "latents": (2, 9, LATENT),
        "shared": (2, 9, ROTATED),
    }


def test_the_usual_scale_is_that_of_the_whole_width_and_t5_s_stays_unscaled() -> None:
    """t5 multiplies by 1 where others multiply by head_dim ** -0.5; the ratio holds for the wider heads too."""
    plain, t5 = (built(name, causal=False) for name in ("none", "t5"))
    t5.load_state_dict(plain.state_dict(), strict=False)
    for weight in t5.position.parameters():
        weight.data.zero_()
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    for weight in plain.q.parameters():
        weight.data.mul_(ROTATED**0.5)
    close(t5(x), plain(x))


def test_it_reads_a_source_and_documents() -> None:
    mixer, x = built("rope", causal=False), torch.randn(1, 8, DIM, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    apart = torch.cat([mixer(x[:, :3]), mixer(x[:, 3:])], dim=1)
    close(mixer(x, document_ids=documents), apart)
    close(mixer(x, source=x), mixer(x))


def test_default_sizes() -> None:
    mixer = build_mixer("mla", "none", Site(32, 4))
    assert isinstance(mixer, MLA)
    assert (mixer.latent, mixer.content, mixer.q.in_features) == (32, 8, 32)


def test_what_it_refuses() -> None:
    for knob in ("latent=0", "content=0", "q_latent=0"):
        with pytest.raises(SpecError, match="expected"):
            build_mixer(f"mla({knob})", "none", Site(DIM, HEADS))
    for name in ("shaw", "transformer_xl"):
        with pytest.raises(IncompatibleError, match="a cached token has no key or value of its own"):
            check("mla", name)
        with pytest.raises(IncompatibleError, match="mla cannot use"):
            build_mixer("mla", name, Site(DIM, HEADS))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
