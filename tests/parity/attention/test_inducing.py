"""Inducing points against Perceiver's cross-attention in `transformers`, against torch's attention, and two identities."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.perceiver.modeling_perceiver import PerceiverConfig, PerceiverSelfAttention

from anyformer.attention.inducing import Inducing
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, check
from anyformer.side import side
from anyformer.site import Site

HEADS, WIDTH, POINTS = 4, 3, 5


def built(kv_heads: int = HEADS, points: int = POINTS) -> Inducing:
    inducing = build_attention(f"inducing(points={points})", Site(HEADS * WIDTH, HEADS, kv_heads=kv_heads)).double()
    assert isinstance(inducing, Inducing)
    return inducing


def facts(n: int, m: int, keep: Tensor | None = None) -> Context:
    queries, keys = side(n, torch.device("cpu")), side(m, torch.device("cpu"), keep=keep)
    return Context(causal=False, queries=queries, keys=keys)


def test_what_a_point_finds_equals_perceiver() -> None:
    """Where there is one point, its finding is every query's output; the point is the projected latent of the peer."""
    inducing, width = built(points=1), HEADS * WIDTH
    peer = PerceiverSelfAttention(
        PerceiverConfig(),
        is_cross_attention=True,
        qk_channels=width,
        v_channels=width,
        num_heads=HEADS,
        q_dim=width,
        kv_dim=width,
    )
    peer = peer.double().eval()
    latent, inputs = torch.randn(1, 1, width).double(), torch.randn(2, 7, width).double()
    inducing.points.data.copy_(split(peer.query(peer.layernorm1(latent)))[0])
    mine, other = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    expected = peer(latent.expand(2, -1, -1), inputs=other)[0].expand(-1, 6, -1)
    k, v = (split(each(peer.layernorm2(mine))) for each in (peer.key, peer.value))
    got = inducing(torch.randn(2, HEADS, 6, WIDTH).double(), k, v, facts(6, 7)).transpose(1, 2).flatten(2)
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_equals_two_attentions_of_torch_forward_and_backward(kv_heads: int) -> None:
    inducing = built(kv_heads)
    keep = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0]]).bool()
    q = torch.randn(2, HEADS, 6, WIDTH, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 7, WIDTH, dtype=torch.float64)
    mine, other = ([part.clone().requires_grad_() for part in (q, k, v)] for _ in range(2))
    points = inducing.points.detach().clone().requires_grad_()
    mask, latents = keep[:, None, None, :], points.expand(2, -1, -1, -1)
    keys, values = (F.scaled_dot_product_attention(latents, other[1], part, attn_mask=mask) for part in other[1:])
    expected = F.scaled_dot_product_attention(other[0], keys, values, enable_gqa=True)
    got = inducing(mine[0], mine[1], mine[2], facts(6, 7, keep))
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    for one, two in zip((*mine, inducing.points), (*other, points), strict=True):
        close(one.grad, two.grad)


def test_points_that_each_find_one_key_make_it_full_attention() -> None:
    inducing = built(points=7)
    q = torch.randn(1, HEADS, 6, WIDTH, dtype=torch.float64)
    k, v = torch.randn(2, 1, HEADS, 7, WIDTH, dtype=torch.float64)
    k = F.normalize(k, dim=-1)  # on a sphere, a key's own direction finds that key
    inducing.points.data.copy_(1e5 * k[0])
    close(inducing(q, k, v, facts(6, 7)), F.scaled_dot_product_attention(q, k, v))


def test_the_order_of_the_points_and_of_the_keys_does_not_matter() -> None:
    inducing = built()
    q = torch.randn(1, HEADS, 6, WIDTH, dtype=torch.float64)
    k, v = torch.randn(2, 1, HEADS, 7, WIDTH, dtype=torch.float64)
    out = inducing(q, k, v, facts(6, 7))
    close(inducing(q, k.flip(2), v.flip(2), facts(6, 7)), out)
    inducing.points.data.copy_(inducing.points.data.flip(1))
    close(inducing(q, k, v, facts(6, 7)), out)


def test_points_compare_keys_before_they_are_rotated() -> None:
    mixer = build_mixer("inducing(points=5)", "rope", Site(16, 4)).double().eval()
    x, gaps = torch.randn(1, 7, 16, dtype=torch.float64), torch.tensor([[0, 1, 2, 5, 6, 9, 11]])
    assert not torch.allclose(mixer(x), mixer(x, positions=gaps), atol=1e-3)
    close(mixer(x, positions=gaps), mixer(x, positions=gaps + 4))


def test_what_it_refuses() -> None:
    with pytest.raises(IncompatibleError, match=r"inducing cannot be causal: its points read every place.*use linear"):
        build_attention("inducing", Site(12, 4, causal=True))
    with pytest.raises(SpecError, match="points=0: expected"):
        build_attention("inducing(points=0)", Site(12, 4))
    with pytest.raises(IncompatibleError, match="its points mix all keys, so no score belongs to one pair"):
        check("inducing", "t5")


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
