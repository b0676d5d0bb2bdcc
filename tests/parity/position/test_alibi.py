"""ALiBi against x-transformers, BLOOM and MPT, with head counts that are no power of two; its halves against causal attention."""

import warnings

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

import anyformer as af
from anyformer.errors import SpecError

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


@pytest.mark.parametrize("pattern", [None, "local(40)", "local(3) | strided(5)"])
@pytest.mark.parametrize("n", [13, 600])
def test_halves_are_causal_attention_from_either_end(n: int, pattern: str | None) -> None:
    """The slopes of three heads, to earlier keys and, with the sequence turned around, to later ones."""
    q, k, v, probe = torch.randn(4, 1, 6, n, 4, dtype=torch.float64)

    def by_direction(*inputs: Tensor) -> Tensor:
        first, second = zip(*(x.chunk(2, dim=1) for x in inputs), strict=True)
        past = af.attend(*first, pattern=pattern, causal=True, position="alibi")
        future = af.attend(*(x.flip(2) for x in second), pattern=pattern, causal=True, position="alibi")
        return torch.cat([past, future.flip(2)], dim=1)

    results = []
    for ours in (True, False):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = af.attend(*inputs, pattern=pattern, position="alibi(both=halves)") if ours else by_direction(*inputs)
        results.append((out, *torch.autograd.grad((out * probe).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-11)


def test_a_head_with_nothing_in_its_direction_gives_0() -> None:
    """The last of five queries stands at the last of three keys, so that the first two stand before them all."""
    source = torch.randn(1, 5, 8, dtype=torch.float64)
    keep = torch.tensor([[True, True, True, False, False]])
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    for attention in ("softmax", "topk(2)", "entmax", "linear", "aft(variant=simple)"):
        layer = af.MultiHead(8, 2, attention=attention, position="alibi(both=halves)").double()
        layer.o = torch.nn.Identity()
        out = layer(x, source=source, source_mask=keep)
        torch.testing.assert_close(layer(x, source=source[:, :3]), out, rtol=1e-10, atol=1e-12)
        assert not out[0, :2, :4].any(), attention
        assert out[0, :, 4:].all(), attention
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.isfinite().all(), attention


def test_clusters_without_a_key_in_the_direction_of_a_head_give_0() -> None:
    layer = af.MultiHead(16, 4, attention="routing(clusters=4)", position="alibi(both=halves)", max_length=64).double()
    layer.eval().o = torch.nn.Identity()
    x = torch.randn(2, 40, 16, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    assert (out.unflatten(-1, (4, 4)) == 0).all(dim=-1).any()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert grad.isfinite().all()


def test_slopes_of_halves() -> None:
    position = af.build_position("alibi(both=halves)", af.Site(6, 6))
    assert position.rates().tolist() == [2**-4, 2**-8, 2**-2] * 2
    table = position.offsets(-2, 2)
    assert table[0].tolist() == [-(2**-3), -(2**-4), 0.0, -torch.inf, -torch.inf]
    assert table[4].tolist() == [-torch.inf, -torch.inf, 0.0, -(2**-8), -(2**-7)]


def test_refusals() -> None:
    with pytest.raises(
        SpecError, match="alibi: both=halves gives one half of the heads to later keys, and this site is causal"
    ):
        af.MultiHead(8, 2, position="alibi(both=halves)", causal=True)
    with pytest.raises(
        SpecError, match=r"alibi: both=halves .* expected an even number of heads, got 3; use both=symmetric"
    ):
        af.MultiHead(6, 3, position="alibi(both=halves)")
