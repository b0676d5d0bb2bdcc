"""cosformer against its quadratic form, the cosine written out, and with what the length of the input may not change."""

import math

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import SpecError
from anyformer.mixer.multihead import MultiHead

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def layer(position: str = "none", **facts: object) -> MultiHead:
    built = af.MultiHead(32, 4, attention="cosformer", position=position, **facts).double()
    built.o = torch.nn.Identity()  # the attention's own output, heads merged
    return built


def quadratic(built: MultiHead, x: Tensor, reach: int, rotate: bool = False) -> Tensor:
    q, k, v = (
        each(x).unflatten(-1, (-1, 8)).transpose(1, 2).repeat_interleave(4 // heads, 1)
        for each, heads in ((built.q, 4), (built.k, built.site.kv_heads), (built.v, built.site.kv_heads))
    )
    n, q, k = x.shape[1], q.relu(), k.relu()
    places = torch.arange(n, dtype=torch.float64)
    cosine = torch.cos(math.pi / 2 * (places[:, None] - places) / reach)
    weights = (q @ k.mT) * cosine
    if rotate:
        angle = places[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.complex(each[..., :4], each[..., 4:]) * turn for each in (q, k))
        rotated = torch.einsum("bhnd,bhmd->bhnm", q, k.conj()).real * cosine
    else:
        rotated = weights
    if built.site.causal:
        weights, rotated = weights.tril(), rotated.tril()
    return (rotated @ v / weights.sum(-1, keepdim=True).clamp_min(1e-6)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["none", "rope"])
def test_equals_the_quadratic_form(position: str, causal: bool, kv_heads: int) -> None:
    built = layer(position, causal=causal, max_length=90, kv_heads=kv_heads)
    x = torch.randn(2, 75, 32, dtype=torch.float64, requires_grad=True)
    out, truth = built(x), quadratic(built, x, 90 if causal else 75, position == "rope")
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, truth)), **TIGHT)


def test_the_cosine_reaches_as_far_as_each_sample_is_long() -> None:
    built, x = layer(), torch.randn(2, 9, 32, dtype=torch.float64)
    keep = torch.arange(9) < torch.tensor([[9], [4]])
    out = built(x, attention_mask=keep)
    torch.testing.assert_close(out[1:, :4], quadratic(built, x[1:, :4], 4), **TIGHT)
    few = built(x[:, :3], source=x)  # the last query sees the last key, so these are the queries of places 6 to 8
    wide = built(torch.cat([x[:, 3:], x[:, :3]], dim=1), source=x)
    torch.testing.assert_close(few, wide[:, 6:], **TIGHT)


def test_a_causal_output_does_not_depend_on_the_length() -> None:
    built, x = layer(causal=True, max_length=30), torch.randn(1, 30, 32, dtype=torch.float64)
    torch.testing.assert_close(built(x[:, :11]), built(x)[:, :11], **TIGHT)


def test_documents_of_one_row_do_not_meet() -> None:
    built, x = layer(causal=True), torch.randn(1, 12, 32, dtype=torch.float64)
    out = built(x, document_ids=torch.tensor([[3] * 5 + [1] * 7]))
    torch.testing.assert_close(out, torch.cat([built(x[:, :5]), built(x[:, 5:])], dim=1), **TIGHT)
    assert not layer().documents


def test_a_causal_layer_refuses_more_tokens_than_it_was_built_for() -> None:
    built = layer(causal=True, max_length=6)
    cache = built.new_cache(1)
    built(torch.randn(1, 6, 32, dtype=torch.float64), cache=cache)
    with pytest.raises(SpecError, match=r"less than 6 tokens, got 7 tokens; build with max_length=7"):
        built(torch.randn(1, 1, 32, dtype=torch.float64), cache=cache)
