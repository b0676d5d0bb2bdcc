"""performer against the `performer_pytorch` package, its quadratic form, and the statistics that the paper proves."""

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.attention.performer import Performer
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.ops.draws import generator, orthogonal
from anyformer.side import side

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # the package asks distutils for torch's version
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def built(spec: str, *, causal: bool = False, groups: int = 4) -> Performer:
    attention = af.build_attention(spec, af.Site(32, 4, causal=causal, kv_heads=groups)).double()
    assert isinstance(attention, Performer)
    return attention


def run(attention: Performer, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None) -> Tensor:
    queries, keys = side(q.shape[2], q.device), side(k.shape[2], k.device, keep=keep)
    return attention(q, k, v, Context(causal=attention.site.causal, queries=queries, keys=keys))


def made(n: int, m: int, groups: int = 4, size: float = 1.0) -> list[Tensor]:
    shapes = (2, 4, n, 8), (2, groups, m, 8), (2, groups, m, 5)
    return [(size * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]


def agree(out: Tensor, truth: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (out, truth)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_equals_the_package_where_it_adds_nothing() -> None:
    attention, (q, k, v) = built("performer(features=24)"), made(11, 13)
    attention.rows[:] = attention.rows[:1].clone()  # the package has one matrix for all heads
    theirs_q, theirs_k = (
        softmax_kernel(x, projection_matrix=attention.rows[0], is_query=query, eps=0.0)
        for x, query in ((q, True), (k, False))
    )
    agree(run(attention, q, k, v), linear_attention(theirs_q, theirs_k, v), [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kernel", ["softmax", "hyperbolic", "relu"])
def test_equals_the_quadratic_form(kernel: str, groups: int, causal: bool) -> None:
    attention = built(f"performer(features=10, kernel={kernel})", causal=causal, groups=groups)
    q, k, v = made(75, 75, groups)
    keep = torch.rand(2, 75) > 0.3
    keep[:, 0] = True
    rows = attention.rows if kernel != "hyperbolic" else torch.cat([attention.rows, -attention.rows], 1)
    rows, keys, values = (x.repeat_interleave(4 // groups, -3) for x in (rows, k, v))

    def phi(x: Tensor) -> Tensor:
        x = x * 8**-0.25
        products = torch.einsum("bhnd,hfd->bhnf", x, rows)
        return products.relu() + 1e-3 if kernel == "relu" else torch.exp(products - x.square().sum(-1, True) / 2)

    weights = (phi(q) @ phi(keys).mT) * keep[:, None, None]
    weights = weights.tril() if causal else weights
    agree(run(attention, q, k, v, keep), weights @ values / weights.sum(-1, keepdim=True), [q, k, v])


def test_estimates_softmax_with_the_published_rate() -> None:
    q, k, v = (x.detach() for x in made(30, 30, size=0.5))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    errors = [
        float((run(built(f"performer(features={f})"), q, k, v) - truth).norm() / truth.norm())
        for f in (64, 1024, 16384)
    ]
    slopes = [math.log(later / earlier) / math.log(16) for earlier, later in itertools.pairwise(errors)]
    assert errors[-1] < 0.02
    assert all(-0.7 < slope < -0.3 for slope in slopes), (errors, slopes)


def test_rows_are_orthogonal_and_estimate_without_bias() -> None:
    rows = orthogonal(19, 8, generator(0, "test"))
    for block in rows.split(8):
        products = block @ block.mT
        torch.testing.assert_close(products, products.diagonal().diag(), rtol=0, atol=1e-12)
    draws = torch.stack([orthogonal(8, 8, generator(seed, "bias")) for seed in range(4000)])
    assert float(draws.mean(0).abs().max()) < 5 / 4000**0.5  # uniform over rotations, the diagonal too
    x, y = (0.3 * torch.randn(8, generator=generator(seed), dtype=torch.float64) for seed in (1, 2))
    truth, square = torch.exp(x @ y), (x + y).square().sum()
    estimates = torch.exp(draws @ (x + y) - (x.square().sum() + y.square().sum()) / 2).mean(1)
    assert float((estimates.mean() - truth).abs()) < 4 * float(estimates.std()) / 4000**0.5
    assert 0.6 < float(estimates.var() / truth**2 / ((square.exp() - 1) / 8)) < 0.95  # independent rows: 1


def test_the_rows_are_a_function_of_seed_layer_and_head() -> None:
    rows = {
        (seed, layer): Performer(af.Site(32, 4, seed=seed, layer=layer, depth=2), features=5).rows
        for seed in (0, 1)
        for layer in (0, 1)
    }
    assert torch.equal(rows[0, 0], Performer(af.Site(32, 4), features=5).rows)
    drawn = torch.cat(list(rows.values()))
    assert len({tuple(head.flatten().tolist()) for head in drawn}) == 16


def test_redraw_changes_the_rows_only_when_it_is_called() -> None:
    attention, (q, k, v) = built("performer(features=6)").train(), made(5, 5)
    first = run(attention, q, k, v)
    assert torch.equal(run(attention, q, k, v), first)
    attention.redraw()
    assert not torch.allclose(run(attention, q, k, v), first)
    assert attention.rows.dtype == torch.float64


def test_large_keys_move_nothing_before_them_and_none_underflows() -> None:
    q, k, v = (x.detach().float() for x in made(40, 40))
    attention = built("performer(features=32)", causal=True).float()
    out = run(attention, q, k, v)
    k[:, :, 20:] *= 30
    assert torch.equal(run(attention, q, k, v)[:, :, :20], out[:, :, :20])
    wide = Performer(af.Site(256, 2), features=64)
    q, k, v = (torch.randn(1, 2, 9, 128) for _ in range(3))
    exact = run(wide.double(), q.double(), k.double(), v.double())
    torch.testing.assert_close(run(wide.float(), q, k, v).double(), exact, rtol=1e-4, atol=1e-4)


def test_hyperbolic_features_come_in_pairs() -> None:
    with pytest.raises(SpecError, match="expected an even number, got 7"):
        built("performer(features=7, kernel=hyperbolic)")
