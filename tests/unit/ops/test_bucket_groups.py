"""Clusters gathered, weighed and put back a few at a time, and found so: against all at once, as operators of their own."""

import pytest
import torch
from torch import Tensor

from anyformer.ops import bucket_groups, bucket_nearest
from anyformer.ops.bucket_groups import composite, groups_forward
from anyformer.ops.bucket_nearest import most_near, nearest_own, nearest_slots, units

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
SCALE = 0.4


def drawn(heads: int = 4) -> list[Tensor]:
    """Queries of 4 heads, keys of 2 and values of `heads`."""
    sizes = ((4, 19, 6), (2, 13, 6), (heads, 13, 5))
    return [torch.randn(2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]


def slots() -> tuple[Tensor, Tensor]:
    """5 queries and 4 keys for each of 7 clusters, none of them twice in one."""
    return tuple(torch.rand(2, 4, 7, n).argsort(-1)[..., :most] for n, most in ((19, 5), (13, 4)))  # type: ignore[return-value]


@pytest.mark.parametrize("counts", [None, [[5, 4], [3, 2]], [[5, 4], [0, 4]], [[5, 0], [2, 1]]])
@pytest.mark.parametrize("at_once", [2, 7])
def test_equals_all_at_once(counts: list[list[int]] | None, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_groups, "tiles_at_once", lambda scores, threads: at_once)
    inputs, held = drawn(), slots()
    count = None if counts is None else torch.tensor(counts)
    out, truth = groups_forward(*inputs, *held, count, SCALE), composite(*inputs, *held, count, SCALE)
    torch.testing.assert_close(out, truth, **TIGHT)
    upstream = torch.randn_like(truth)
    for one, other in zip(*(torch.autograd.grad(y, inputs, upstream) for y in (out, truth)), strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_clusters_worked_out_one_by_one() -> None:
    (q, k, v), (q_slots, k_slots) = drawn(), slots()
    rows: dict[tuple[int, int, int], list[Tensor]] = {}
    for b in range(2):
        for h in range(4):
            for c in range(7):
                keys = k_slots[b, h, c]
                for i in q_slots[b, h, c].tolist():
                    weights = torch.softmax(SCALE * k[b, h // 2, keys] @ q[b, h, i], dim=0)
                    rows.setdefault((b, h, i), []).append(weights @ v[b, h, keys])
    expected = torch.zeros(2, 4, 19, 5, dtype=torch.float64)
    for at, found in rows.items():
        expected[at] = torch.stack(found).mean(dim=0)
    torch.testing.assert_close(groups_forward(q, k, v, q_slots, k_slots, None, SCALE), expected, **TIGHT)


def test_is_a_proper_operator() -> None:
    inputs = [x.detach().float().requires_grad_() for x in drawn()]
    torch.library.opcheck(groups_forward, (*inputs, *slots(), torch.tensor([[5, 4], [3, 2]]), SCALE))
    x, centroids = inputs[1].detach(), torch.randn(4, 7, 6)
    torch.library.opcheck(nearest_slots, (x, centroids, torch.arange(13) < torch.tensor([[13], [9]]), 4))
    torch.library.opcheck(nearest_own, (x, centroids, True))


@pytest.mark.parametrize("counts", [None, [[5, 4], [3, 2]]])
def test_can_be_differentiated_twice(counts: list[list[int]] | None) -> None:
    held, count = slots(), None if counts is None else torch.tensor(counts)

    def function(*inputs: Tensor) -> Tensor:
        return groups_forward(*inputs, *held, count, SCALE)

    assert torch.autograd.gradgradcheck(function, drawn(), fast_mode=True)


def test_keeps_the_precision_of_its_dtype() -> None:
    inputs, held, upstream = drawn(), slots(), torch.randn(2, 4, 19, 5, dtype=torch.float64)

    def results(dtype: torch.dtype, more: torch.dtype) -> list[Tensor]:
        given = [x.detach().to(dtype).to(more).requires_grad_() for x in inputs]
        out = groups_forward(*given, *held, None, SCALE)
        return [out.detach(), *torch.autograd.grad((out * upstream).sum(), given)]

    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        for one, other in zip(results(dtype, dtype), results(dtype, torch.float64), strict=True):
            assert float((one.double() - other).abs().max() / other.abs().max()) < most


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("at_once", [1, 3, 99])
def test_the_nearest_found_a_few_at_a_time(padded: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_nearest, "tiles_at_once", lambda scores, threads: at_once)
    monkeypatch.setattr(bucket_nearest, "_FEWEST", 1)
    x, centroids = torch.randn(2, 2, 13, 6, dtype=torch.float64), torch.randn(4, 7, 6, dtype=torch.float64)
    x[:, :, 3] = x[:, :, 8]  # a tie
    x[:, :, 5] = 0.0
    keep = torch.arange(13) < torch.tensor([[13], [9]]) if padded else None
    cosines = units(x).repeat_interleave(2, dim=1) @ units(centroids).mT
    expected = most_near(cosines.mT, None if keep is None else keep[:, None, None], 4)
    assert torch.equal(nearest_slots(x, centroids, keep, 4), expected)
    for row in expected.flatten(0, 2).tolist():
        assert 8 not in row or 3 in row[: row.index(8)]
    own, sums, tokens = nearest_own(x, centroids, True)
    assert torch.equal(own, cosines.argmax(-1))
    member = torch.nn.functional.one_hot(own, 7).double()
    torch.testing.assert_close(sums, (member.mT @ units(x).repeat_interleave(2, dim=1)).sum(0), **TIGHT)
    assert tokens.tolist() == [24] * 4
    assert not nearest_own(x, centroids, False)[1].any()


def test_ranks_of_long_rows_are_wider() -> None:
    cosines = torch.zeros(40_000).index_fill(0, torch.tensor([39_999]), 1.0)
    assert most_near(cosines, None, 3).tolist() == [39_999, 0, 1]
