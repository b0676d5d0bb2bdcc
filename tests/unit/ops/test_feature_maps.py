import torch

from anyformer.ops.draws import generator, normal, orthogonal
from anyformer.ops.feature_maps import elu1, positive_keys, positive_queries, waves


def test_elu1_is_x_plus_one_above_zero_and_exp_below():
    x = torch.linspace(-30, 5, 71, dtype=torch.float64)
    torch.testing.assert_close(elu1(x), torch.where(x > 0, x + 1, x.exp()), rtol=0, atol=1e-15)


def test_elu1_is_never_negative_and_half_precision_keeps_its_digits():
    x = torch.linspace(-12, 12, 97, dtype=torch.bfloat16)
    truth = torch.where(x > 0, x.double() + 1, x.double().exp())
    assert elu1(x).dtype == torch.bfloat16
    assert bool((elu1(torch.full((3,), -1e4)) >= 0).all())
    torch.testing.assert_close(elu1(x).double(), truth, rtol=2**-8, atol=1e-7)


def test_the_gradient_of_elu1_is_its_slope():
    x = torch.linspace(-5, 5, 40, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(elu1, (x,))


def test_positive_features_give_the_exponential_in_the_mean_and_keys_stay_below_one():
    rows = normal(200_000, 3, generator(0, "mean"))[None]
    x, y = torch.randn(2, 1, 1, 4, 3, dtype=torch.float64) * 0.25
    queries, keys = positive_queries(x, rows), positive_keys(y, rows)
    largest = (x @ rows.mT + rows.square().sum(-1)[:, None] / 2).amax(-1, keepdim=True)
    mean = (queries @ keys.mT) * (largest - x.square().sum(-1, keepdim=True) / 2).exp() / 200_000
    torch.testing.assert_close(mean, (x @ y.mT).exp(), rtol=0.02, atol=0)
    assert float(positive_keys(100 * y, rows).max()) <= 1.0


def test_waves_have_unit_length_and_depend_on_differences():
    rows = normal(7, 3, generator(0, "waves"))[None]
    x, y = torch.randn(2, 1, 1, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(waves(x, rows).norm(dim=-1), torch.ones(1, 1, 4, dtype=torch.float64))
    between = torch.cos((x - y) @ rows.mT).mean(-1)
    torch.testing.assert_close((waves(x, rows) * waves(y, rows)).sum(-1), between)


def test_structure_draws_depend_on_seed_and_role_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first = orthogonal(5, 3, generator(1, "a", 0))
    assert torch.equal(first, orthogonal(5, 3, generator(1, "a", 0)))
    others = [orthogonal(5, 3, generator(*role)) for role in ((1, "a", 1), (1, "b", 0), (2, "a", 0))]
    assert not any(torch.equal(first, other) for other in others)
    assert torch.equal(torch.get_rng_state(), before)
