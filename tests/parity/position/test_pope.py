"""PoPE against x-transformers and against its sum over channels."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import IncompatibleError

with warnings.catch_warnings():  # it uses torch.jit.script, which torch deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from x_transformers.x_transformers import PolarEmbedding, apply_polar_pos_emb


def built(spec: str = "pope", *, heads: int = 3, width: int = 5, kv_heads: int | None = None) -> nn.Module:
    return af.build_position(spec, af.Site(heads * width, heads, kv_heads=kv_heads, head_dim=width))


def test_outputs_and_gradients_of_x_transformers() -> None:
    """Bounds included: a delta outside of them acts as the bound and has no gradient."""
    theirs, ours = PolarEmbedding(5, 3), built()
    nn.init.uniform_(theirs.learned_bias, -8.0, 1.0)
    ours.delta.data.copy_(theirs.learned_bias.detach()[:, 0])
    q, k, v = (torch.randn(2, 3, 9, 5, requires_grad=True) for _ in range(3))
    probe = torch.randn(2, 3, 9, 5)
    freqs, bias = theirs(torch.arange(9))
    polar_q, polar_k = apply_polar_pos_emb(q, freqs), apply_polar_pos_emb(k, freqs + bias)
    expected = F.scaled_dot_product_attention(polar_q, polar_k, v, scale=5**-0.5)
    results = []
    for out, weight in ((af.attend(q, k, v, position=ours), ours.delta), (expected, theirs.learned_bias)):
        results.append((out, *(each.flatten() for each in torch.autograd.grad((out * probe).sum(), (q, k, v, weight)))))
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


def test_the_sum_over_channels() -> None:
    position = built("pope(base=100)", heads=2, kv_heads=1).double()
    nn.init.uniform_(position.delta, -6.0, 0.0)
    q, k = torch.randn(1, 2, 4, 5, dtype=torch.float64), torch.randn(1, 1, 4, 5, dtype=torch.float64)
    q_pos, k_pos = torch.tensor([[0, 3, 50, 7]]), torch.tensor([[1, 0, 100_000, 9]])
    placed_q, placed_k = position.rotate(q, k, q_pos, k_pos)
    found = placed_q @ placed_k.mT
    for head in range(2):
        for i in range(4):
            for j in range(4):
                offset = int(k_pos[0, j] - q_pos[0, i])
                expected = sum(
                    math.log1p(math.exp(q[0, head, i, c]))
                    * math.log1p(math.exp(k[0, 0, j, c]))
                    * math.cos(offset * 100 ** (-c / 5) + float(position.delta.detach()[0, c]))
                    for c in range(5)
                )
                assert float(found[0, head, i, j].detach()) == pytest.approx(expected, abs=1e-9)


def test_the_scale_is_that_of_the_width_before() -> None:
    assert built(width=16).scale(16) == 0.25
    layer = af.MultiHead(32, 2, position="pope")
    x = torch.randn(1, 6, 32)
    q, k, v = (each(x).unflatten(-1, (2, 16)).transpose(1, 2) for each in (layer.q, layer.k, layer.v))
    wide = layer.position.rotate(q, k, *[torch.arange(6)[None]] * 2)
    expected = layer.o(F.scaled_dot_product_attention(*wide, v, scale=0.25).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-6)


def test_gradients() -> None:
    position = built(heads=2).double()
    q, k = (torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    places = torch.tensor([[0, 4, 9]])

    def scores(q: Tensor, k: Tensor, delta: Tensor) -> Tensor:
        return torch.func.functional_call(Scores(position), {"position.delta": delta}, (q, k, places))

    delta = (-torch.rand(2, 5, dtype=torch.float64) * 6 - 0.1).requires_grad_()
    assert torch.autograd.gradcheck(scores, (q, k, delta))


class Scores(nn.Module):
    def __init__(self, position: nn.Module) -> None:
        super().__init__()
        self.position = position

    def forward(self, q: Tensor, k: Tensor, places: Tensor) -> Tensor:
        q, k = self.position.rotate(q, k, places, places)
        return q @ k.mT


def test_delta_starts_at_zero_or_spread() -> None:
    assert not bool(built().delta.any())
    spread = built("pope(spread=True)").delta
    assert float(spread.detach().min()) < -4
    assert float(spread.detach().max()) < 0


def test_every_token_needs_a_position() -> None:
    layer, without = af.MultiHead(32, 2, position="pope"), torch.tensor([[True, False, False]])
    with pytest.raises(IncompatibleError, match="pope widens queries and keys here, so every token needs a position"):
        layer(torch.randn(1, 3, 32), no_position=without)
