"""taylor against fla's parallel reference, against its quadratic form, and widened queries and keys as exact positions."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.mixer.multihead import MultiHead
from anyformer.ops.feature_maps import taylor2

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def layer(spec: str = "taylor", position: str = "none", **facts: object) -> MultiHead:
    built = af.MultiHead(32, 4, attention=spec, position=position, **facts).double()
    built.o = torch.nn.Identity()  # the attention's own output, heads merged
    return built


def heads(built: MultiHead, x: Tensor) -> list[Tensor]:
    shared = built.site.groups
    q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (built.q, built.k, built.v))
    return [q, k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)]


def agree(out: Tensor, truth: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, truth)), **TIGHT)


@pytest.mark.parametrize("spec", ["taylor", "taylor(width=3)"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_equals_fla(naive: Callable[[str], ModuleType], spec: str, kv_heads: int) -> None:
    built = layer(spec, causal=True, kv_heads=kv_heads)
    x = torch.randn(2, 75, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = heads(built, x)
    if "width" in spec:
        maps = dict(built.attention.named_parameters())
        q, k = q @ maps["query_map"], k @ maps["key_map"].repeat_interleave(4 // kv_heads, 0)
    based = naive("based").naive_parallel_based
    num, den = (based(q, k, values, use_norm=False) for values in (v, torch.ones_like(v)))
    agree(built(x), (num / den).transpose(1, 2).flatten(2), x)
    added = based(q, k, v).transpose(1, 2).flatten(2)  # with 1e-6 on the denominator, which is at least 0.5
    torch.testing.assert_close(built(x), added, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("position", ["none", "rope", "transformer_xl"])
def test_both_directions_equal_the_quadratic_form(position: str) -> None:
    built = layer(position=position)
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = heads(built, x)
    places = torch.arange(20)[None]
    score = q @ k.mT
    if position == "rope":
        q, k = built.position.rotate(q, k, places, places)
        score = q @ k.mT
    elif position == "transformer_xl":
        score = score + built.position.score(q, k, places, places) * 8**0.5
    u = score * 8**-0.5
    weights = 1 + u + u**2 / 2
    agree(built(x), (weights @ v / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2), x)


def test_the_features_give_the_expansion_and_no_pair_twice() -> None:
    x, y = torch.randn(2, 7, 16, dtype=torch.float64)
    u = (x * y).sum(-1)
    torch.testing.assert_close((taylor2(x) * taylor2(y)).sum(-1), 1 + u + u**2 / 2, **TIGHT)
    assert taylor2(x).shape == (7, 153)


def test_narrow_queries_and_keys_lose_the_exact_forms() -> None:
    assert af.check("taylor", "rope", dim=64, heads=4).kind == "ok"
    assert af.check("taylor(width=4)", "rope", dim=64, heads=4).kind == "abs"
    assert af.check("taylor(width=None)", "transformer_xl", dim=64, heads=2).kind == "ok"
