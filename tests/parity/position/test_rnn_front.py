"""The recurrent front end against the equation of the unit, cell by cell, in both directions, and from a state."""

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.position.base import Position
from anyformer.side import side


def built(causal: bool) -> Position:
    return af.build_position("rnn_front(width=5)", af.Site(6, 2, causal=causal)).double()


def cell(unit: nn.GRU, x: Tensor, h: Tensor) -> Tensor:
    """One step as Cho et al. write it, with the reset gate after the product."""
    from_x = (unit.weight_ih_l0 @ x + unit.bias_ih_l0).chunk(3)
    from_h = (unit.weight_hh_l0 @ h + unit.bias_hh_l0).chunk(3)
    reset, update = ((a + b).sigmoid() for a, b in zip(from_x[:2], from_h[:2], strict=True))
    return update * h + (1 - update) * (from_x[2] + reset * from_h[2]).tanh()


def run(unit: nn.GRU, row: Tensor, h: Tensor | None = None) -> Tensor:
    h = row.new_zeros(5) if h is None else h
    states = []
    for x in row:
        h = cell(unit, x, h)
        states.append(h)
    return torch.stack(states)


def expected(position: Position, row: Tensor) -> Tensor:
    states = run(position.ahead, row)
    if position.back is not None:
        states = torch.cat([states, run(position.back, row.flip(0)).flip(0)], dim=-1)
    return row + states @ position.out.weight.T


@pytest.mark.parametrize("causal", [False, True])
def test_cell_by_cell_and_gradients(causal: bool) -> None:
    position, x, probe = built(causal), *torch.randn(2, 2, 7, 6, dtype=torch.float64)
    x.requires_grad_()
    wanted = [x, *position.parameters()]
    outs = (
        position.read(x, side(7, x.device), None),
        torch.stack([expected(position, row) for row in x]),
    )
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((out * probe).sum(), wanted) for out in outs]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_different_lengths(causal: bool) -> None:
    position, x = built(causal), torch.randn(3, 7, 6, dtype=torch.float64)
    keep = torch.arange(7) < torch.tensor([[7], [4], [1]])
    out = position.read(x, side(7, x.device, keep=keep), None)
    for row in range(3):
        torch.testing.assert_close(out[row, keep[row]], expected(position, x[row, keep[row]]), rtol=0, atol=1e-12)


def test_the_state_goes_on() -> None:
    position, x = built(True), torch.randn(2, 7, 6, dtype=torch.float64)
    state: dict[str, Tensor] = {}
    keep = torch.tensor([[True, True, False], [False, False, False]])
    parts = [position.read(x[:, :4], side(4, x.device), state)]
    parts.append(position.read(x[:, 4:], side(3, x.device, keep=keep), state))
    torch.testing.assert_close(torch.cat(parts, dim=1), position.read(x, side(7, x.device), None), rtol=0, atol=1e-12)
    assert state.keys() == {"hidden"}
    for row, length in enumerate((6, 4)):
        after = run(position.ahead, x[row, :length])[-1]
        torch.testing.assert_close(state["hidden"][row], after, rtol=0, atol=1e-12)


def test_it_starts_as_strong_as_the_token_vectors() -> None:
    position = af.build_position("rnn_front", af.Site(64, 4))
    x = torch.randn(2, 40, 64) / 8
    added = (position.read(x, side(40, x.device), None) - x).detach()
    assert 0.2 < float(added.norm(dim=-1).mean()) < 1.0
