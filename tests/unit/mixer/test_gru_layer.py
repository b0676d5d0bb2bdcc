"""GRU: what its equation says beyond the parity test."""

import pytest
import torch

from anyformer.errors import SpecError
from anyformer.mixer.gru import GRU
from anyformer.model.build import build_mixer
from anyformer.ops.recurrent import backwards, last
from anyformer.site import Site


def test_real_tokens_are_reversed_and_padding_stays() -> None:
    keep = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    order = backwards(torch.zeros(3, 4, 1), keep)
    assert order.tolist() == [[2, 1, 0, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert backwards(torch.zeros(1, 4, 1), None).tolist() == [[3, 2, 1, 0]]


def test_the_state_is_that_after_the_last_real_token() -> None:
    hidden, start = torch.arange(6.0).reshape(2, 3, 1), torch.tensor([[10.0], [20.0]])
    keep = torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()
    assert last(hidden, keep, start).tolist() == [[1.0], [20.0]]
    assert last(hidden, keep, None).tolist() == [[1.0], [0.0]]
    assert last(hidden, None, start).tolist() == [[2.0], [5.0]]


def test_each_direction_sees_its_own_side() -> None:
    mixer = build_mixer("gru(width=5)", "none", Site(8, 2)).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64, requires_grad=True)
    mixer(x)[:, 3].square().sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).any(dim=-1).all()


def test_width_sets_the_state() -> None:
    wide, plain = build_mixer("gru(width=5)", "none", Site(8, 2, causal=True)), build_mixer("gru", "none", Site(8, 2))
    assert isinstance(wide, GRU)
    assert isinstance(plain, GRU)
    assert wide.back is None
    assert wide.o.weight.shape == (8, 5)
    assert plain.o.weight.shape == (8, 16)
    with pytest.raises(SpecError, match="width=0"):
        build_mixer("gru(width=0)", "none", Site(8, 2))
