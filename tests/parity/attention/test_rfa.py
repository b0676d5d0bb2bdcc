"""rfa against its quadratic form, its recurrence, and the statistics of its kernel."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.mixer.multihead import MultiHead
from anyformer.ops.draws import generator, normal
from anyformer.ops.feature_maps import waves
from anyformer.side import side

TIGHT = {"rtol": 1e-10, "atol": 1e-11}


def layer(spec: str, **facts: object) -> MultiHead:
    built = af.MultiHead(32, 4, attention=spec, **facts).double()
    built.o = torch.nn.Identity()  # the attention's own output, heads merged
    return built


def parts(built: MultiHead, x: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel [b h n m], from cosines of differences, and the values."""
    groups, attention = built.site.groups, built.attention
    q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (built.q, built.k, built.v))
    q, k = (each / each.norm(dim=-1, keepdim=True) for each in (q, k.repeat_interleave(groups, 1)))
    rows = attention.get_buffer("rows").repeat_interleave(groups, 0)
    angles = torch.einsum("hrd,bhnmd->bhnmr", rows, q[:, :, :, None] - k[:, :, None])
    return angles.cos().mean(-1), v.repeat_interleave(groups, 1)


def agree(out: Tensor, truth: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, upstream)[0] for y in (out, truth)), **TIGHT)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_equals_the_quadratic_form(gate: bool, causal: bool, kv_heads: int) -> None:
    built = layer(f"rfa(features=40, gate={gate})", causal=causal, kv_heads=kv_heads)
    x = torch.randn(2, 70, 32, dtype=torch.float64, requires_grad=True)
    weights, v = parts(built, x)
    if gate:
        g = torch.sigmoid(built.attention.get_submodule("gate")(x)).mT  # [b h n]
        place = g.log().cumsum(-1)
        weights = weights * (1 - g)[:, :, None] * torch.exp(-(place[..., :, None] - place[..., None, :]).abs())
    weights = weights.tril() if causal else weights
    den = weights.sum(-1, keepdim=True)
    truth = weights @ v / torch.where(den < 0, den.clamp_max(-1e-3), den.clamp_min(1e-3))
    agree(built(x), truth.transpose(1, 2).flatten(2), x)


def test_the_gate_is_the_published_recurrence() -> None:
    built = layer("rfa(features=6, gate=True)", causal=True)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (built.q, built.k, built.v))
    rows = built.attention.get_buffer("rows")
    q, k = (waves(F.normalize(each, dim=-1), rows) for each in (q, k))
    gates = torch.sigmoid(built.attention.get_submodule("gate")(x))
    s, z, outs = torch.zeros(1, 4, 12, 8, dtype=torch.float64), torch.zeros(1, 4, 12, dtype=torch.float64), []
    for t in range(9):
        g = gates[:, t, :, None]
        s = g[..., None] * s + (1 - g)[..., None] * k[:, :, t, :, None] * v[:, :, t, None]
        z = g * z + (1 - g) * k[:, :, t]
        outs.append((q[:, :, t, None] @ s).squeeze(2) / (q[:, :, t] * z).sum(-1, keepdim=True))
    torch.testing.assert_close(built(x), torch.stack(outs, 1).flatten(2), **TIGHT)


def test_the_kernel_is_gaussian_with_the_published_variance() -> None:
    tau, count = 1.3, 16
    x, y = (F.normalize(torch.randn(8, generator=generator(seed), dtype=torch.float64), dim=0) for seed in (1, 2))
    rows = normal(4000 * count, 8, generator(0, "kernel")).view(4000, count, 8) / tau
    pair = torch.stack([x, y]).expand(1, 4000, 2, 8)
    features = waves(pair, rows)[0]
    estimates = (features[:, 0] * features[:, 1]).sum(-1) * math.exp(1 / tau**2)
    truth = float(torch.exp(x @ y / tau**2))
    assert abs(float(estimates.mean()) - truth) < 4 * float(estimates.std()) / 4000**0.5
    apart = float((x - y).square().sum()) / tau**2
    variance = math.exp(2 / tau**2) * (1 - math.exp(-apart)) ** 2 / (2 * count)
    assert 0.9 < float(estimates.var()) / variance < 1.1


def test_redraw_changes_the_rows_and_building_does_not() -> None:
    one, two = layer("rfa(features=6)"), layer("rfa(features=6)")
    assert torch.equal(one.attention.get_buffer("rows"), two.attention.get_buffer("rows"))
    before = two.attention.get_buffer("rows").clone()
    two.attention.redraw()  # type: ignore[operator]
    assert not torch.equal(two.attention.get_buffer("rows"), before)


def test_a_gate_needs_the_tokens() -> None:
    attention = af.build_attention("rfa(gate=True)", af.Site(32, 4, causal=True))
    q, tokens = torch.randn(1, 4, 5, 8), side(5, torch.device("cpu"))
    with pytest.raises(SpecError, match=r"rfa reads its gates from the tokens, expected context.x \[b m c\], got None"):
        attention(q, q, q, Context(causal=True, queries=tokens, keys=tokens))


def test_documents_of_one_row_do_not_meet() -> None:
    built, x = layer("rfa(gate=True)"), torch.randn(1, 12, 32, dtype=torch.float64)
    out = built(x, document_ids=torch.tensor([[3] * 5 + [1] * 7]))
    torch.testing.assert_close(out, torch.cat([built(x[:, :5]), built(x[:, 5:])], dim=1), **TIGHT)
