"""Products and sums over listed pairs equal those over all pairs, differentiated once and twice."""

import pytest
import torch
from torch import Tensor

from anyformer.ops import pair_products
from anyformer.ops.pair_products import pair_lists, products, sums, sums_by_key

KEYS = torch.tensor([[0, 4, 4], [8, 1, 0], [2, 2, 2], [7, 8, 6]])  # 3 and 5 are nobody's


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 5), (9, 5), (4, 3)
    q, k, w = (torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes)
    return q, k, w


def test_products_and_sums_equal_those_over_all_pairs() -> None:
    q, k, w = _operands()
    lists = pair_lists(KEYS, 9)
    spread = torch.zeros(4, 9, dtype=torch.float64).scatter_add(1, KEYS, w)
    torch.testing.assert_close(products(q, k, lists), (q @ k.T).gather(1, KEYS), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(sums(w, k, lists), spread @ k, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(sums_by_key(w, q, lists), spread.T @ q, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("numbers", [1, 1 << 20])
def test_products_are_the_same_without_mkl(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(pair_products, "_NUMBERS", numbers)
    q, k, _ = _operands()
    torch.testing.assert_close(products(q, k, pair_lists(KEYS, 9)), (q @ k.T).gather(1, KEYS), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("number", range(3))
def test_gradients_of_both_orders_equal_differences(number: int) -> None:
    q, k, w = _operands()
    function, given = ((products, (q, k)), (sums, (w, k)), (sums_by_key, (w, q)))[number]
    lists = pair_lists(KEYS, 9)
    assert torch.autograd.gradcheck(lambda x, y: function(x, y, lists), given)
    assert torch.autograd.gradgradcheck(lambda x, y: function(x, y, lists), given)


def test_lists_name_the_pairs_of_each_key() -> None:
    lists = pair_lists(KEYS, 9)
    found = [lists.order[low:high].tolist() for low, high in zip(lists.starts, lists.starts[1:], strict=False)]
    assert [sorted(each) for each in found] == [[0, 5], [4], [6, 7, 8], [], [1, 2], [], [11], [9], [3, 10]]
