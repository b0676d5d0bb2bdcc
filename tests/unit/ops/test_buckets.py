"""The pass over buckets as an operator of its own: against all pairs, twice differentiable, in half precision."""

import pytest
import torch
from torch import Tensor

from anyformer.attention._chunks import cut
from anyformer.ops import bucket_node, bucket_pairs, bucket_pass
from anyformer.ops.bucket_node import bucket_forward, pass_composite

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
SCALE = 0.4


def made(n: int, size: int, padded: bool, buckets: int = 5) -> tuple[list[Tensor], Tensor, Tensor]:
    q, k, v = (torch.randn(2, 2, n, width, dtype=torch.float64, requires_grad=True) for width in (6, 6, 5))
    keep = torch.arange(n) < torch.tensor([n, n - n // 3])[:, None] if padded else None
    order, chunk = cut(torch.randint(0, buckets, (2, 2, 3, n)), keep, size)
    return [q, k, v], order, chunk


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("n", "size", "padded"), [(37, 4, True), (32, 8, False), (5, 8, True), (20, 3, False)])
@pytest.mark.parametrize("few", [0, 2**13])
@pytest.mark.parametrize(("in_tiles", "least"), [(True, 16), (True, 2), (False, 16)])
def test_equals_all_pairs(
    causal: bool, n: int, size: int, padded: bool, few: int, in_tiles: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_node, "pairs_are_fewer", lambda order, causal, size: not in_tiles)
    monkeypatch.setattr(bucket_pass, "_LEAST", least)
    for module in (bucket_pass, bucket_pairs):
        monkeypatch.setattr(module, "_FEW", few)
        monkeypatch.setattr(module, "tiles_at_once", lambda scores, threads: 3)
    inputs, order, chunk = made(
        n, size, padded, buckets=2 if least == 2 else 2 * n // size
    )  # long ones need all of a window
    out = bucket_forward(*inputs, order, chunk, causal, SCALE, size)[0]
    truth = pass_composite(*inputs, chunk, causal, SCALE)
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (out, truth)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_is_a_proper_operator() -> None:
    inputs, order, chunk = made(19, 4, padded=True)
    given = [x.detach().float().requires_grad_() for x in inputs]
    torch.library.opcheck(bucket_forward, (*given, order, chunk, True, SCALE, 4))


def test_can_be_differentiated_twice() -> None:
    inputs, order, chunk = made(19, 4, padded=True)

    def function(*inputs: Tensor) -> Tensor:
        return bucket_forward(*inputs, order, chunk, False, SCALE, 4)[0]

    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_keeps_the_precision_of_its_dtype() -> None:
    inputs, order, chunk = made(150, 8, padded=False)
    upstream = torch.randn(2, 2, 150, 5, dtype=torch.float64)

    def results(dtype: torch.dtype, more: torch.dtype) -> list[Tensor]:
        given = [x.detach().to(dtype).to(more).requires_grad_() for x in inputs]
        out = bucket_forward(*given, order, chunk, True, SCALE, 8)[0]
        return [out.detach(), *torch.autograd.grad((out * upstream).sum(), given)]

    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        for one, other in zip(results(dtype, dtype), results(dtype, torch.float64), strict=True):
            assert float((one.double() - other).abs().max() / other.abs().max()) < most


@pytest.mark.parametrize(
    ("n", "causal", "fewer"), [(48, False, True), (49, False, False), (36, True, True), (37, True, False)]
)
def test_short_rows_are_read_pair_by_pair(n: int, causal: bool, fewer: bool) -> None:
    _, order, _ = made(n, 4, padded=False)  # windows of 16 keys, or 12 when causal, in each of 3 rounds
    assert bucket_node.pairs_are_fewer(order, causal, 4) == fewer
