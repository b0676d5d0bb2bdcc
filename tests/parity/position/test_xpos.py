"""xPos against rotary-embedding-torch, and its products against the equation."""

import re

import pytest
import torch
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.position.base import Position

H, D, N = 2, 8, 24


def built(**knobs: object) -> Position:
    text = ", ".join(f"{name}={value}" for name, value in knobs.items())
    return af.build_position(f"xpos({text})", af.Site(H * D, H, causal=True))


@pytest.mark.parametrize("scale_base", [512, 16])
def test_attention_and_its_gradients(scale_base: int) -> None:
    """The peer counts powers from the middle of the sequence, on both sides alike: products are the same."""
    peer = RotaryEmbedding(D, use_xpos=True, xpos_scale_base=scale_base)
    hidden = torch.full((N, N), -torch.inf).triu(1)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = peer.rotate_queries_and_keys(q, k)
        return (q @ k.mT / D**0.5 + hidden).softmax(-1) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return af.attend(q, k, v, causal=True, position=built(scale_base=scale_base, pairing="interleaved"))

    parts, probe = torch.randn(3, 2, H, N, D), torch.randn(2, H, N, D)
    results = []
    for attention in (ours, theirs):
        inputs = [part.clone().requires_grad_() for part in parts]
        out = attention(*inputs)
        results.append((out, *torch.autograd.grad((out * probe).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("shift", [0, 1, 10_000])
def test_products_pair_by_pair(pairing: str, shift: int) -> None:
    """The equation in complex numbers, one a pair of channels; it depends on the offset only."""
    q, k = torch.randn(2, 1, H, N, D, dtype=torch.float64)
    places = torch.arange(N)[None] + shift
    turned_q, turned_k = built(scale_base=32, pairing=pairing).rotate(q, k, places, places)

    def pairs(x: Tensor) -> Tensor:
        if pairing == "half":
            return torch.complex(x[..., : D // 2], x[..., D // 2 :])
        return torch.complex(x[..., ::2], x[..., 1::2])

    level = torch.arange(0, D, 2).double() / D
    fade, wave = (level + 0.4) / 1.4, 10000.0**-level
    ahead = (torch.arange(N)[:, None] - torch.arange(N))[..., None]
    turn = fade ** (ahead / 32) * torch.exp(1j * ahead * wave)
    expected = torch.einsum("bhnp,bhmp,nmp->bhnm", pairs(q), pairs(k).conj(), turn).real
    seen = torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close((turned_q @ turned_k.mT)[..., seen], expected[..., seen], rtol=0, atol=1e-10)


def test_a_cache_keeps_the_same_factors() -> None:
    layer = af.MultiHead(16, 2, position="xpos(scale_base=8)", causal=True).double()
    x, cache = torch.randn(2, N, 16, dtype=torch.float64), layer.new_cache(2)
    chunks = torch.cat([layer(part, cache=cache) for part in x.split([9, 1, 14], dim=1)], dim=1)
    torch.testing.assert_close(chunks, layer(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_to_the_last_position(dtype: torch.dtype) -> None:
    position = built()
    q, k = torch.randn(2, 1, H, 8, D).to(dtype)
    near = torch.arange(8)[None]
    products = []
    for places in (near, near + position.reach(dtype) - 8):
        turned_q, turned_k = position.rotate(q, k, places, places)
        assert turned_q.dtype == dtype
        assert bool(torch.isfinite(turned_k).all())
        products.append((turned_q.double() @ turned_k.double().mT).tril())
    size = q.double().norm(dim=-1)[..., None] * k.double().norm(dim=-1)[..., None, :]
    least = 1e-4 if dtype == torch.float32 else 0.02
    assert float(((products[0] - products[1]) / size).abs().max()) < least


def test_positions_beyond_the_dtype_are_refused() -> None:
    position, x = built(), torch.randn(1, H, 1, D)
    assert {dtype: position.reach(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)} == {
        torch.float32: 33195, torch.bfloat16: 33195, torch.float16: 3688,
    }  # fmt: skip
    last = torch.tensor([[33195]])
    position.rotate(x, x, last, last)
    message = "xpos: position 33196 scales by more than float32 holds; with scale_base=512.0 positions go to 33195; build with a"
    with pytest.raises(SpecError, match=re.escape(message)):
        position.rotate(x, x, last + 1, last)
    with pytest.raises(SpecError, match="xpos: position -33196 scales by more than float32 holds"):
        position.rotate(x, x, last, -last - 1)
    wide = built(scale_base=4096)
    wide.rotate(x, x, last + 100_000, last)


def test_refusals_at_build() -> None:
    with pytest.raises(SpecError, match="xpos: channels turn in pairs, expected an even head_dim, got 7"):
        af.build_position("xpos", af.Site(7, 1, causal=True))
    with pytest.raises(
        IncompatibleError, match=r"xpos is defined for causal attention only.*use causal=True, or an encoding"
    ):
        af.check("softmax", "xpos")
