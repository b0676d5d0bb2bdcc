"""KERPLE against the equation number by number, ALiBi as its power 1, and its bounds."""

import math

import pytest
import torch
from torch import nn

import anyformer as af
from anyformer.position.base import Position


def built(kind: str, heads: int = 3) -> Position:
    return af.build_position(f"kerple(kind={kind})", af.Site(4 * heads, heads)).double()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["log", "power"])
def test_bias_number_by_number(kind: str) -> None:
    position = built(kind)
    for head, (r1, r2) in enumerate(zip(position.r1.tolist(), position.r2.tolist(), strict=True)):
        assert 0.01 <= r1 <= 2.0
        for query, key in ((0, 0), (5, 2), (2, 5), (0, 10**6)):
            found = position.bias(torch.tensor(head), torch.tensor(query), torch.tensor(key))
            distance = abs(query - key)
            expected = -r1 * (math.log(1 + r2 * distance) if kind == "log" else float(distance) ** r2)
            assert abs(float(found) - expected) <= 1e-12 * max(1.0, abs(expected))


@pytest.mark.parametrize("heads", [4, 6])
def test_power_one_is_alibi(heads: int) -> None:
    alibi, kerple = af.build_position("alibi", af.Site(4 * heads, heads)), built("power", heads)
    with torch.no_grad():
        kerple.r1.copy_(alibi.rates())
        kerple.r2.fill_(1.0)
        rates = alibi.rates().clamp(min=0.01)  # the steepest heads of KERPLE are ALiBi's; its flattest are bounded
        assert torch.equal(
            kerple.offsets(-300, 300), alibi.offsets(-300, 300) / alibi.rates()[:, None] * rates[:, None]
        )
    inputs = [part.requires_grad_() for part in torch.randn(3, 2, heads, 9, 4, dtype=torch.float64)]
    steep = rates == alibi.rates()
    outs = [af.attend(*inputs, position=position)[:, steep] for position in (kerple, alibi)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out.sin().sum(), inputs) for out in outs]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_gradients_are_the_slopes(kind: str) -> None:
    position = built(kind)
    heads, queries, keys = torch.arange(3)[:, None, None], torch.tensor([0, 9, 3])[:, None], torch.tensor([4, 3, 10**6])

    def bias(r1: torch.Tensor, r2: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(
            Biased(position), {"position.r1": r1, "position.r2": r2}, (heads, queries, keys)
        )

    numbers = [
        torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in ([0.3, 1.0, 0.02], [0.5, 0.1, 0.3])
    ]
    assert torch.autograd.gradcheck(bias, numbers)


class Biased(nn.Module):
    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def forward(self, *places: torch.Tensor) -> torch.Tensor:
        return self.position.bias(*places)


@pytest.mark.parametrize("kind", ["log", "power"])
def test_numbers_beyond_their_bounds_act_as_the_bound_and_can_come_back(kind: str) -> None:
    position = built(kind)
    with torch.no_grad():
        position.r1.copy_(torch.tensor([-1.0, 0.0, 5.0]))
        position.r2.copy_(torch.tensor([3.0, -2.0, 0.5]))
    table = position.offsets(0, 2)
    r1, r2 = (0.01, 0.01, 5.0), (3.0 if kind == "log" else 2.0, 0.01, 0.5)
    for head in range(3):
        expected = -r1[head] * (math.log(1 + 2 * r2[head]) if kind == "log" else 2 ** r2[head])
        assert abs(float(table[head, 2].detach()) - expected) < 1e-12
    table.sum().backward()
    assert bool((position.r1.grad != 0).all())
    assert bool((position.r2.grad != 0).all())


def test_one_module_serves_all_layers_from_the_authors_ranges() -> None:
    position = built("power", heads=64)
    assert position.scope == "model"
    assert float(position.r1.detach().max()) <= 1.0 < float(position.r2.detach().max()) <= 2.0
