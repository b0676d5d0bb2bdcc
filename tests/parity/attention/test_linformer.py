"""Linformer against the `linformer` package, and against full attention where E = F = I."""

import pytest
import torch
import torch.nn.functional as F
from linformer.linformer import LinformerSelfAttention
from torch import Tensor

from anyformer.attention.linformer import Linformer
from anyformer.context import Context
from anyformer.mixer.base import Mixer
from anyformer.model.build import build_mixer
from anyformer.side import side
from anyformer.site import Site

DIM, HEADS, LENGTH, RANK = 12, 3, 10, 4


def ours(sharing: str, rank: int = RANK) -> Mixer:
    site = Site(DIM, HEADS, max_length=LENGTH)
    return build_mixer(f"linformer(rank={rank}, sharing={sharing})", "none", site).double()


def theirs(mixer: Mixer, sharing: str) -> LinformerSelfAttention:
    """The peer with the weights of `mixer`; it shares one pair of projections among the heads."""
    peer = LinformerSelfAttention(DIM, LENGTH, k=RANK, heads=HEADS).double()
    state = mixer.state_dict()
    for letter in ("q", "k", "v"):
        mixer.get_parameter(f"{letter}.bias").data.zero_()  # the peer has none
        peer.get_parameter(f"to_{letter}.weight").data.copy_(state[f"{letter}.weight"])
    peer.to_out.load_state_dict({name: state[f"o.{name}"] for name in ("weight", "bias")})
    key_mix = state["attention.mixes.0"]
    value_mix = key_mix if sharing in ("kv", "layers") else state["attention.mixes.1"]
    if sharing == "none":  # the same for each head
        key_mix[:], value_mix[:] = key_mix[:1].clone(), value_mix[:1].clone()
        key_mix, value_mix = key_mix[0], value_mix[0]
    peer.proj_k.data.copy_(key_mix)
    peer.proj_v.data.copy_(value_mix)
    return peer


@pytest.mark.parametrize("n", [1, 7, LENGTH])
@pytest.mark.parametrize("sharing", ["none", "heads", "kv", "layers"])
def test_equals_the_package(sharing: str, n: int) -> None:
    mixer = ours(sharing)
    peer = theirs(mixer, sharing)
    x = torch.randn(2, n, DIM, dtype=torch.float64)
    weights = torch.randn(2, n, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = mixer(mine), peer(other)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    close(mixer.get_parameter("k.weight").grad, peer.to_k.weight.grad)
    close(mixer.get_parameter("v.weight").grad, peer.to_v.weight.grad)
    key = mixer.get_parameter("attention.mixes.0").grad
    assert key is not None
    if sharing in ("kv", "layers"):
        close(key, peer.proj_k.grad + peer.proj_v.grad)
    else:
        value = mixer.get_parameter("attention.mixes.1").grad
        assert value is not None
        close(key.sum(dim=0) if sharing == "none" else key, peer.proj_k.grad)
        close(value.sum(dim=0) if sharing == "none" else value, peer.proj_v.grad)


@pytest.mark.parametrize("sharing", ["none", "heads", "kv", "layers"])
def test_with_the_identity_for_both_it_is_full_attention(sharing: str) -> None:
    site = Site(DIM, HEADS, max_length=LENGTH)
    linformer = Linformer(site, rank=LENGTH, sharing=sharing).double()  # type: ignore[arg-type]
    for mix in linformer.parameters():
        mix.data.copy_(torch.eye(LENGTH, dtype=torch.float64).expand_as(mix))
    tokens = side(LENGTH, torch.device("cpu"))
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, 4, dtype=torch.float64).unbind(0)
    mine, other = ([part.clone().requires_grad_() for part in (q, k, v)] for _ in range(2))
    got = linformer(*mine, Context(causal=False, queries=tokens, keys=tokens))
    expected = F.scaled_dot_product_attention(*other)
    got.square().sum().backward()
    expected.square().sum().backward()
    close(got, expected)
    for one, two in zip(mine, other, strict=True):
        close(one.grad, two.grad)


def test_with_as_many_queries_as_tokens_and_the_identity_it_is_the_plain_layer() -> None:
    plain, shortened = (
        build_mixer(f"linformer(rank={RANK}{more})", "rope", Site(DIM, HEADS, max_length=LENGTH)).double()
        for more in ("", f", queries={LENGTH}")
    )
    missing = shortened.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing == ["attention.shortening.scores"]
    scores = shortened.get_parameter("attention.shortening.scores")
    scores.data.fill_(-torch.inf).fill_diagonal_(0.0)
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = shortened(mine), plain(other)
    got.square().sum().backward()
    expected.square().sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)
    close(shortened.get_parameter("k.weight").grad, plain.get_parameter("k.weight").grad)
    assert torch.equal(shortened.shortening(x, None), x)


def test_with_equal_scores_a_query_is_the_mean_of_the_real_ones() -> None:
    site = Site(DIM, HEADS, max_length=LENGTH)
    plain, shortened = (Linformer(site, rank=RANK, queries=queries).double() for queries in (None, 2))
    shortened.load_state_dict(plain.state_dict(), strict=False)
    assert shortened.shortening is not None
    shortened.shortening.scores.data.zero_()
    q, k, v = torch.randn(3, 2, HEADS, 7, 4, dtype=torch.float64).unbind(0)
    keep = torch.arange(7) < torch.tensor([[7], [4]])
    tokens, two = side(7, q.device, keep=keep), side(2, q.device)
    mean = torch.stack([each[:, real].mean(dim=1) for each, real in zip(q, keep, strict=True)])[:, :, None]
    got = shortened(q, k, v, Context(causal=False, queries=tokens, keys=tokens))
    close(got, plain(mean.expand(-1, -1, 2, -1), k, v, Context(causal=False, queries=two, keys=tokens)))


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
