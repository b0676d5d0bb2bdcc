"""FIRE against the equation number by number, KERPLE as its linear case, and where it is a function of the offset."""

import math

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.position.base import Position
from anyformer.position.fire import of_heads

HEADS = torch.arange(3)[:, None, None]


def built(knobs: str = "width=4, threshold=20") -> Position:
    return af.build_position(f"fire({knobs})", af.Site(12, 3, causal=True)).double()


def written(position: Position, head: int, query: int, key: int) -> Tensor:
    """The term of one pair, from tensors of one number each."""
    rate, distance = position.rate.abs(), abs(query - key)
    most = torch.maximum((position.stretch * position.threshold).abs(), torch.tensor(float(max(query, distance))))
    part = torch.log(rate * distance + 1) / (torch.log(rate * most + 1) + 1e-6)
    hidden = [
        (part * w + b).clamp(min=0) for w, b in zip(position.inner.weight[:, 0], position.inner.bias, strict=True)
    ]
    return sum(h * w for h, w in zip(hidden, position.outer.weight[head], strict=True)) + position.outer.bias[head]


PAIRS = [(0, 0), (5, 2), (19, 0), (20, 3), (21, 21), (300, 7), (2, 90), (100, 300)]


def test_number_by_number_and_gradients() -> None:
    position = built()
    with torch.no_grad():
        position.stretch.fill_(-1.1)
    queries, keys = (torch.tensor([pair[at] for pair in PAIRS]) for at in (0, 1))
    ours = position.bias(torch.arange(3)[:, None], queries, keys)
    theirs = torch.stack([torch.stack([written(position, head, *pair) for pair in PAIRS]) for head in range(3)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
    probe = torch.randn_like(ours)
    gradients = [torch.autograd.grad((each * probe).sum(), list(position.parameters())) for each in (ours, theirs)]
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_linear_network_is_kerple_up_to_the_threshold() -> None:
    position, kerple = built("width=2, threshold=64"), af.build_position("kerple", af.Site(12, 3)).double()
    kerple.r2.fill_(0.3)
    kerple.r1.copy_(torch.tensor([0.5, 1.0, 2.0]))
    position.rate.fill_(0.3)
    nn.init.ones_(position.inner.weight)
    nn.init.zeros_(position.inner.bias)
    nn.init.zeros_(position.outer.bias)
    position.outer.weight.copy_(-kerple.r1[:, None].expand(3, 2) / 2 * (math.log(1 + 0.3 * 64) + 1e-6))
    places = torch.arange(65)
    pairs = HEADS, places[:, None], places[None]
    torch.testing.assert_close(position.bias(*pairs), kerple.bias(*pairs), rtol=0, atol=1e-12)


@torch.no_grad()
def test_it_sees_offsets_up_to_the_threshold_and_fractions_beyond() -> None:
    position = built()
    offsets = [position.bias(HEADS, torch.tensor([[[at]]]), torch.tensor([[[at - 4]]])) for at in (4, 9, 20, 21, 200)]
    assert torch.equal(offsets[0], offsets[1])
    torch.testing.assert_close(offsets[1], offsets[2], rtol=0, atol=1e-14)
    assert float((offsets[3] - offsets[2]).abs().max()) > 1e-6 < float((offsets[4] - offsets[3]).abs().max())
    far = torch.tensor([[[10**6]]])
    torch.testing.assert_close(  # the first key is always at the fraction 1
        position.bias(HEADS, far, far * 0), position.bias(HEADS, far // 7, far * 0), rtol=0, atol=1e-6
    )


def test_heads_are_picked_alike_on_every_path() -> None:
    values, head = torch.randn(2, 1, 4, 5, 3), torch.tensor([2, 0, 1])
    expected = torch.stack([values[:, 0, :, :, at] for at in (2, 0, 1)], dim=1)
    assert torch.equal(of_heads(values, head[:, None, None]), expected)
    assert torch.equal(of_heads(values[1, 0], head[:, None, None]), expected[1])
    assert torch.equal(of_heads(values, head[:, None, None].expand(3, 4, 5)), expected)
    assert torch.equal(of_heads(values[:, 0], torch.tensor(0)), expected[:, 1])


@pytest.mark.parametrize("attention", ["linear", "linformer(rank=8)", "gru"])
def test_where_pairs_are_not_seen_it_is_refused(attention: str) -> None:
    with pytest.raises(af.IncompatibleError, match="cannot use fire"):
        af.check(attention, "fire")
