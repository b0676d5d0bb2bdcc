"""Hierarchical positions against the two-digit code written out, and the author's three identities."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position


def built(rows: int = 5, alpha: float = 0.4) -> Position:
    return af.build_position(f"hierarchical(rows={rows}, alpha={alpha})", af.Site(6, 2)).double()


def code(table: Tensor, position: int, alpha: float) -> Tensor:
    high, low = divmod(position, len(table))
    basis = [(row - alpha * table[0]) / (1 - alpha) for row in table]
    return alpha * basis[high] + (1 - alpha) * basis[low]


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.9])
def test_two_digits_and_their_gradients(alpha: float) -> None:
    position = built(alpha=alpha)
    places = torch.tensor([[0, 1, 4, 5, 6, 23, 24], [24, 20, 9, 0, 0, 3, 12]])
    x, probe = torch.randn(2, 2, 7, 6, dtype=torch.float64)
    outs = (
        position.embed(x, places, None),
        x + torch.stack([torch.stack([code(position.table, int(p), alpha) for p in row]) for row in places]),
    )
    torch.testing.assert_close(*outs, rtol=0, atol=1e-13)
    gradients = [torch.autograd.grad((out * probe).sum(), position.table)[0] for out in outs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-13)


def test_short_inputs_see_the_rows_themselves() -> None:
    position = built(rows=9)
    places = torch.arange(9)[None]
    torch.testing.assert_close(position.code(places)[0], position.table, rtol=0, atol=1e-13)
    learned = af.build_position("learned", af.Site(6, 2, max_length=9)).double()
    learned.load_state_dict({"table.weight": position.table.detach()})
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(position.embed(x, places, None), learned.embed(x, places, None), rtol=0, atol=1e-13)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.4, 0.6, 0.9])
def test_every_position_has_a_code_of_its_own(alpha: float) -> None:
    codes = built(rows=8, alpha=alpha).code(torch.arange(64)[None])[0].detach()
    distances = torch.cdist(codes, codes) + torch.eye(64)
    assert float(distances.min()) > 1e-3


@pytest.mark.parametrize(
    ("alpha", "message"),
    [
        (
            0.5,
            r"hierarchical: with alpha=0.5 positions i r \+ j and j r \+ i have the same code; expected another number",
        ),
        (1.0, "hierarchical: expected an alpha between 0 and 1, got 1.0; 0.4 is the author's"),
    ],
)
def test_shares_that_lose_positions_are_refused(alpha: float, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        built(alpha=alpha)


def test_positions_beyond_all_pairs_of_digits_are_refused() -> None:
    x = torch.zeros(1, 1, 6, dtype=torch.float64)
    built().embed(x, torch.tensor([[24]]), None)
    with pytest.raises(
        SpecError, match=r"position 25 needs a table of at least 6 rows, this one has 5; build with rows=6"
    ):
        built().embed(x, torch.tensor([[25]]), None)
    with pytest.raises(SpecError, match="expected positions from 0, got -1"):
        built().embed(x, torch.tensor([[-1]]), None)
