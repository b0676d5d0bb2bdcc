import torch

from anyformer.ops.feature_maps import elu1, elu1_slope


def test_elu1_is_x_plus_one_above_zero_and_exp_below():
    x = torch.linspace(-30, 5, 71, dtype=torch.float64)
    torch.testing.assert_close(elu1(x), torch.where(x > 0, x + 1, x.exp()), rtol=0, atol=1e-15)


def test_elu1_is_never_negative_and_half_precision_keeps_its_digits():
    x = torch.linspace(-12, 12, 97, dtype=torch.bfloat16)
    truth = torch.where(x > 0, x.double() + 1, x.double().exp())
    assert elu1(x).dtype == torch.bfloat16
    assert bool((elu1(torch.full((3,), -1e4)) >= 0).all())
    torch.testing.assert_close(elu1(x).double(), truth, rtol=2**-8, atol=1e-7)


def test_elu1_slope_is_the_derivative():
    x = torch.linspace(-5, 5, 40, dtype=torch.float64, requires_grad=True)
    y = elu1(x)
    torch.testing.assert_close(elu1_slope(y.detach()), torch.autograd.grad(y.sum(), x)[0])
    assert torch.autograd.gradcheck(elu1, (x,))
