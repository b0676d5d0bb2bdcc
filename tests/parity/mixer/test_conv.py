"""Conv against numpy's direct correlation, and its gradient against the filter as a matrix."""

import numpy as np
import pytest
import torch
from scipy.signal import correlate
from torch import Tensor

from anyformer.mixer.conv import Conv
from anyformer.model.build import build_mixer
from anyformer.site import Site

SHAPES = [(causal, width, n) for causal in (False, True) for width in (1, 2, 5) for n in (1, 4, 9)]


def built(causal: bool, width: int) -> Conv:
    mixer = build_mixer(f"conv(width={width})", "none", Site(6, 1, causal=causal)).double()
    assert isinstance(mixer, Conv)
    return mixer


def before(causal: bool, width: int) -> int:
    return width - 1 if causal else width // 2


@pytest.mark.parametrize(("causal", "width", "n"), SHAPES)
def test_equals_a_direct_correlation(causal: bool, width: int, n: int) -> None:
    mixer = built(causal, width)
    w = {name: part.numpy() for name, part in mixer.state_dict().items()}
    x = torch.randn(2, n, 6, dtype=torch.float64)
    mixed = x.numpy() @ w["i.weight"].T + w["i.bias"]
    u, gate = mixed[..., :6], mixed[..., 6:]
    left = before(causal, width)
    u = np.pad(u, ((0, 0), (left, width - 1 - left), (0, 0)))
    summed = np.stack(
        [
            [correlate(u[b, :, c], w["filter.weight"][c, 0], mode="valid", method="direct") for c in range(6)]
            for b in range(2)
        ]
    ).transpose(0, 2, 1)
    gated = gate / (1 + np.exp(-gate)) * (summed + w["filter.bias"])
    close(mixer(x), torch.from_numpy(gated @ w["o.weight"].T + w["o.bias"]))


@pytest.mark.parametrize(("causal", "width", "n"), SHAPES)
def test_gradients_equal_those_of_the_filter_as_a_matrix(causal: bool, width: int, n: int) -> None:
    mixer, weights = built(causal, width), torch.randn(2, n, 6, dtype=torch.float64)
    mine = torch.randn(2, n, 6, dtype=torch.float64, requires_grad=True)
    (mixer(mine) * weights).sum().backward()
    twin = {name: part.detach().clone().requires_grad_() for name, part in mixer.named_parameters()}
    other = mine.detach().clone().requires_grad_()
    u, gate = (other @ twin["i.weight"].T + twin["i.bias"]).chunk(2, dim=-1)
    offset = torch.arange(n) - torch.arange(n)[:, None] + before(causal, width)  # [i, j]: the tap that reads token j
    taps = twin["filter.weight"][:, 0, offset.clamp(0, width - 1)]  # [c, i, j]
    matrix = torch.where((offset >= 0) & (offset < width), taps, 0.0)
    summed = torch.einsum("cij,bjc->bic", matrix, u) + twin["filter.bias"]
    out = (gate * torch.sigmoid(gate) * summed) @ twin["o.weight"].T + twin["o.bias"]
    (out * weights).sum().backward()
    close(mine.grad, other.grad)
    for name, weight in mixer.named_parameters():
        close(weight.grad, twin[name].grad)


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
