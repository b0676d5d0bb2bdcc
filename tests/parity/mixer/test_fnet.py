"""FNet against Hugging Face's transform, and against two identities of the discrete Fourier transform."""

import math

import pytest
import torch
from torch import Tensor
from transformers import FNetConfig
from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

from anyformer.model.build import build_mixer
from anyformer.site import Site

SIZES = [(1, 6), (2, 6), (7, 6), (8, 5), (13, 1)]


def waves(size: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine matrices of 2 pi i j / size."""
    turns = torch.outer(torch.arange(size), torch.arange(size)).double() / size * 2 * math.pi
    return turns.cos(), turns.sin()


def mixed(x: Tensor) -> Tensor:
    return build_mixer("fnet", "none", Site(x.shape[2], 1))(x)


@pytest.mark.parametrize(("n", "channels"), SIZES)
def test_equals_hugging_face(n: int, channels: int) -> None:
    peer = FNetBasicFourierTransform(FNetConfig(hidden_size=channels))
    x, weights = torch.randn(2, 3, n, channels, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = mixed(mine), peer(other)[0]
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    close(mine.grad, other.grad)


@pytest.mark.parametrize(("n", "channels"), SIZES)
def test_equals_cosine_and_sine_matrices(n: int, channels: int) -> None:
    (cos_n, sin_n), (cos_c, sin_c) = waves(n), waves(channels)
    x, weights = torch.randn(2, 3, n, channels, dtype=torch.float64)
    mine = x.clone().requires_grad_()
    got = mixed(mine)
    (got * weights).sum().backward()
    close(got, cos_n @ x @ cos_c - sin_n @ x @ sin_c)
    close(mine.grad, cos_n @ weights @ cos_c - sin_n @ weights @ sin_c)  # both matrices are symmetric


@pytest.mark.parametrize(("n", "channels"), SIZES)
def test_twice_is_the_sum_with_the_reversed_sequence(n: int, channels: int) -> None:
    x = torch.randn(3, n, channels, dtype=torch.float64)
    reversed_x = x[:, -torch.arange(n) % n][:, :, -torch.arange(channels) % channels]
    close(mixed(mixed(x)), n * channels * (x + reversed_x) / 2)


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10 * max(1.0, float(expected.detach().abs().max())))
