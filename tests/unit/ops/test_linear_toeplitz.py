"""Linear attention with a factor by offset, against the quadratic form, in pairs and through transforms."""

import pytest
import torch

from anyformer.ops.linear_toeplitz import toeplitz_dense, toeplitz_sums


def made(n: int, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and a curve."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 3, n, 4), (2, 3, n, 4), (2, 3, n, 5), (3, 2 * n - 1)
    q, k, v, curve = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q, k, v, curve.exp()]


def worst(ours: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    gaps = (
        (a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1) for a, b in zip(ours, right, strict=True)
    )
    return max(float(gap) for gap in gaps)


@pytest.mark.parametrize("chunk", [1, 3, 4, 64, None])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5, 13, 40])
def test_equals_the_quadratic_form_to_the_second_derivative(n: int, causal: bool, chunk: int | None) -> None:
    results = []
    weight = torch.randn(2, 3, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for dense in (False, True):
        given = [x.requires_grad_() for x in made(n)]
        out = toeplitz_dense(*given, causal=causal) if dense else toeplitz_sums(*given, causal=causal, chunk=chunk)
        grads = torch.autograd.grad((out * weight).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), given)
        results.append([out, *grads, *second])
    assert worst(*results) < 1e-12


@pytest.mark.parametrize("chunk", [2, 64])
def test_nothing_flows_from_the_future(chunk: int) -> None:
    given = [x.requires_grad_() for x in made(23)]
    out = toeplitz_sums(*given, causal=True, chunk=chunk)
    for grad in torch.autograd.grad(out[:, :, 9].sum(), given[:3]):
        assert not grad[:, :, 10:].any()
    (grad,) = torch.autograd.grad(toeplitz_sums(*given, causal=True, chunk=chunk).sum(), given[3:])
    assert not grad[:, 23:].any()


@pytest.mark.parametrize("causal", [False, True])
def test_single_precision_and_a_steep_curve(causal: bool) -> None:
    q, k, v, _ = (x.abs().float() for x in made(300))
    curve = (-0.2 * torch.arange(-299, 300).abs()).exp().expand(3, -1)
    wide = (x.double() for x in (q, k, v, curve))
    right = toeplitz_dense(*wide, causal=causal)
    ours = toeplitz_sums(q, k, v, curve.contiguous(), causal=causal, chunk=16)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), right, rtol=2e-6, atol=2e-6)


def test_no_token_and_a_wrong_curve() -> None:
    assert toeplitz_sums(*(x[:, :, :0] for x in made(1)[:3]), torch.zeros(3, 0), causal=True).shape == (2, 3, 0, 5)
    with pytest.raises(ValueError, match="curve: expected a factor for each of 9 offsets, got 7"):
        toeplitz_sums(*made(5)[:3], torch.zeros(3, 7, dtype=torch.float64), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_length_only(causal: bool) -> None:
    """No tensor with a number for each pair: 8192 tokens would need 512 MiB for one head."""
    n, made_of = 8192, []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made_of.extend(
                x.untyped_storage().nbytes()
                for x in (out if isinstance(out, tuple) else (out,))
                if isinstance(x, torch.Tensor)
            )
            return out

    given = [torch.rand(1, 1, n, 2), torch.rand(1, 1, n, 2), torch.rand(1, 1, n, 2), torch.rand(1, 2 * n - 1)]
    with Largest():
        toeplitz_sums(*given, causal=causal, chunk=256 if causal else None)
    assert max(made_of) <= 40 * 2**20
