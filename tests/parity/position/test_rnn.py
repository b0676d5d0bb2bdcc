"""Recursive positions against a loop of cells, the turning of a sinusoid as a recurrence, and what is lost without time."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position


def built(drive: str = "time", max_length: int = 20) -> Position:
    return af.build_position(f"rnn(drive={drive})", af.Site(6, 2, max_length=max_length)).double()


def loop(position: Position, count: int, drive: str) -> Tensor:
    codes = [position.start[None]]
    for k in range(1, count):
        drive_k = torch.full((1, 1), k / position.site.max_length if drive == "time" else 0.0, dtype=torch.float64)
        codes.append(position.unit(drive_k, codes[-1]))
    return torch.cat(codes) * position.factor


@pytest.mark.parametrize("drive", ["time", "none"])
def test_step_by_step_and_gradients(drive: str) -> None:
    position = built(drive)
    places = torch.tensor([[0, 1, 2, 3, 4, 5], [24, 7, 7, 0, 13, 1]])
    x, probe = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    outs = position.embed(x, places, None), x + loop(position, 25, drive)[places]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-13)
    gradients = [torch.autograd.grad((out * probe).sum(), list(position.parameters())) for out in outs]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_a_code_does_not_depend_on_the_others_of_the_call() -> None:
    position = built()
    whole = position.code(torch.arange(30)[None])[0]
    assert torch.equal(position.code(torch.tensor([[17, 3]]))[0], whole[[17, 3]])
    assert position.code(torch.zeros(1, 0, dtype=torch.int64)).shape == (1, 0, 6)
    torch.testing.assert_close(
        position.code(torch.zeros(1, 1, dtype=torch.int64))[0, 0], position.start * position.factor
    )


@torch.no_grad()
def test_without_time_far_positions_become_alike() -> None:
    far = torch.tensor([[5000, 5001]])
    steps = {}
    for drive in ("time", "none"):
        position = built(drive, max_length=10000)
        position.unit.weight_hh.mul_(0.2)  # a contraction: it has one resting point
        first, second = position.code(far)[0]
        steps[drive] = float((second - first).norm() / first.norm())
    assert steps["none"] < 1e-12 < 1e-6 < steps["time"]


def test_codes_start_as_long_as_token_vectors() -> None:
    lengths = af.build_position("rnn", af.Site(64, 4)).code(torch.arange(100)[None]).detach().norm(dim=-1)
    assert 0.2 < float(lengths.min()) <= float(lengths.max()) < 2.5


def test_negative_positions_are_refused() -> None:
    with pytest.raises(SpecError, match="rnn: expected positions from 0, got -1"):
        built().code(torch.tensor([[2, -1]]))
