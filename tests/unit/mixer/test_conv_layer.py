"""Conv: what its equation says beyond the parity test."""

import pytest
import torch

from anyformer.errors import SpecError
from anyformer.model.build import build_mixer
from anyformer.ops.left import newest
from anyformer.site import Site


def reach(width: int, *, causal: bool) -> tuple[int, int]:
    """How many tokens before and after it one output reads."""
    mixer = build_mixer(f"conv(width={width})", "none", Site(8, 2, causal=causal)).double()
    x = torch.randn(1, 21, 8, dtype=torch.float64, requires_grad=True)
    mixer(x)[:, 10].square().sum().backward()
    assert x.grad is not None
    read = (x.grad[0] != 0).any(dim=-1).nonzero()[:, 0]
    assert len(read) == width
    return 10 - int(read[0]), int(read[-1]) - 10


def test_the_window_counts_the_token_itself() -> None:
    assert [reach(width, causal=True) for width in (1, 2, 7)] == [(0, 0), (1, 0), (6, 0)]
    assert [reach(width, causal=False) for width in (1, 2, 3, 6, 7)] == [(0, 0), (1, 0), (1, 1), (3, 2), (3, 3)]


def test_the_tail_holds_the_newest_real_tokens() -> None:
    u = torch.arange(1.0, 6.0).reshape(1, 5, 1).expand(3, 5, 1)  # two earlier tokens, three new slots
    keep = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    assert newest(u, 2, keep)[:, :, 0].tolist() == [[4, 5], [2, 3], [1, 2]]
    assert newest(u, 2, None)[:, :, 0].tolist() == [[4, 5]] * 3
    assert newest(u, 0, keep).shape == (3, 0, 1)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(SpecError, match="width=0"):
        build_mixer("conv(width=0)", "none", Site(8, 2))
