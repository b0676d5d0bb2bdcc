"""linear against fla's step by step reference, against its quadratic form, and rotary positions in the numerator only."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import anyformer as af
from anyformer.mixer.multihead import MultiHead


def _layer(position: str = "none", **facts: object) -> tuple[MultiHead, torch.Tensor]:
    layer = af.MultiHead(32, 4, attention="linear", position=position, **facts).double()
    layer.o = torch.nn.Identity()  # the attention's own output, heads merged
    return layer, torch.randn(2, 11, 32, dtype=torch.float64, requires_grad=True)


def _heads(layer: MultiHead, x: torch.Tensor) -> list[torch.Tensor]:
    return [each(x).unflatten(-1, (4, 8)).transpose(1, 2) for each in (layer.q, layer.k, layer.v)]


def test_causal_equals_fla(naive: Callable[[str], ModuleType]) -> None:
    layer, x = _layer(causal=True)
    q, k, v = (each.transpose(1, 2) for each in _heads(layer, x))  # [b n h d]
    theirs = naive("linear_attn").naive_recurrent_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, normalize=True)[0]
    ours = layer(x)
    torch.testing.assert_close(ours.float(), theirs.flatten(2).float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["none", "rope"])
def test_equals_the_quadratic_form(causal: bool, position: str) -> None:
    layer, x = _layer(position, causal=causal)
    q, k, v = _heads(layer, x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = q @ k.mT
    rotated = weights
    if position == "rope":
        angle = torch.arange(11.0, dtype=torch.float64)[:, None] * 10000.0 ** (
            -torch.arange(4, dtype=torch.float64) / 4
        )
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (torch.complex(each[..., :4], each[..., 4:]) * turn for each in (q, k))
        rotated = torch.einsum("bhnd,bhmd->bhnm", q, k.conj()).real
    if causal:
        weights, rotated = weights.tril(), rotated.tril()
    right = (rotated @ v / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)
    ours = layer(x)
    torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-11)
    grads = [torch.autograd.grad(each.square().sum(), x, retain_graph=True)[0] for each in (ours, right)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)
