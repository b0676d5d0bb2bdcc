"""Statistics against scipy and closed forms."""

import math

import numpy as np
import pytest
import scipy.stats

from anyformer.compare.stats import bootstrap, crossover, exponent, holm, paired


def test_with_one_seed_the_interval_is_scipys_bootstrap_over_items() -> None:
    items = np.random.default_rng(1).gamma(2.0, size=80)
    ours = bootstrap(items[None], resamples=20_000)
    theirs = scipy.stats.bootstrap((items,), np.mean, n_resamples=20_000, method="percentile", random_state=2)
    assert ours.mean == pytest.approx(items.mean())
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)
    assert ours.error == pytest.approx(theirs.standard_error, rel=0.03)


def test_the_error_of_crossed_scores_holds_the_variance_of_seeds_and_of_items() -> None:
    rng = np.random.default_rng(0)
    seeds, items = rng.normal(size=40), rng.normal(size=50)
    error = bootstrap(seeds[:, None] + items[None]).error
    # every seed meets the same items: the items' variance is not divided by the number of seeds
    assert error == pytest.approx(math.sqrt(seeds.var() / 40 + items.var() / 50), rel=0.05)


def test_the_same_scores_give_the_same_interval() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 20))
    assert bootstrap(scores) == bootstrap(scores)


def test_p_values_tell_a_shift_from_none() -> None:
    noise = np.random.default_rng(0).normal(size=(5, 100))
    assert bootstrap(noise + 1).p < 1e-3
    assert bootstrap(noise - noise.mean()).p > 0.5
    assert bootstrap(np.zeros((2, 3))).p == 1.0


@pytest.mark.parametrize("scores", [np.zeros(3), np.zeros((0, 3)), np.zeros((3, 0))])
def test_scores_need_seeds_and_items(scores: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected scores\[seed, item\] with at least one of each, got shape"):
        bootstrap(scores)


def test_differences_are_paired_by_seed_and_item() -> None:
    base = {0: (1.0, 2.0, 3.0), 1: (4.0, 5.0, 6.0), 2: (0.0, 0.0, 0.0)}
    better = {0: (0.5, 1.5, 2.5), 1: (3.5, 4.5, 5.5), 7: (9.0, 9.0, 9.0)}
    found = paired(better, base)
    assert found is not None
    assert (found.seeds, found.items, found.descriptive) == (2, 3, True)
    assert found.interval.mean == found.interval.low == found.interval.high == -0.5
    assert found.detectable == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    "other",
    [{1: (1.0, 2.0)}, {0: (1.0,)}, {0: (1.0, math.nan)}, {0: ()}, {}],
    ids=["seed", "items", "nan", "empty", "none"],
)
def test_what_cannot_be_paired_gives_no_difference(other: dict) -> None:
    assert paired({0: (1.0, 2.0)}, other) is None


def test_five_seeds_are_no_longer_descriptive_and_detectable_is_2_8_errors() -> None:
    rng = np.random.default_rng(0)
    base = {seed: rng.normal(size=30).tolist() for seed in range(5)}
    found = paired({seed: rng.normal(size=30).tolist() for seed in base}, base)
    assert found is not None
    assert not found.descriptive
    assert found.detectable == 2.8 * found.interval.error


def test_holm_by_hand() -> None:
    # sorted: .01*4, .02*3 -> .06, .03*2 -> .06, .04 -> .06 by monotony
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_exponent_of_a_power_law_is_its_power() -> None:
    lengths = [1024, 2048, 4096, 8192]
    found = exponent(lengths, [3e-9 * n**1.7 for n in lengths])
    assert found is not None
    assert found.slope == pytest.approx(1.7, abs=1e-10)
    assert found.local == pytest.approx((1.7, 1.7, 1.7), abs=1e-10)
    assert not found.short


def test_the_exponent_uses_the_largest_three_doublings_from_1024_on() -> None:
    lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
    times = [1.0] * 3 + [float(n) ** 2 for n in lengths[3:]]
    found = exponent(lengths, times)
    assert found is not None
    assert found.lengths == (2048, 4096, 8192, 16384)
    assert found.slope == pytest.approx(2.0)
    shorter = exponent(lengths[:4], times[:4])
    assert shorter is not None
    assert (shorter.lengths, shorter.short) == ((1024, 2048), False)


def test_a_fit_below_1024_is_marked() -> None:
    found = exponent([256, 512, 1024], [1.0, 2.0, 4.0])
    assert found is not None
    assert (found.short, found.lengths) == (True, (256, 512, 1024))


@pytest.mark.parametrize("values", [[None, None, 1.0], [math.nan, 1.0, math.inf], [0.0, 1.0, -1.0]])
def test_no_exponent_from_less_than_two_points(values: list) -> None:
    assert exponent([1024, 2048, 4096], values) is None
    assert exponent([64, 4096, 8192], [1.0, None, 2.0]) is None, "two points further apart than three doublings"


def test_the_crossover_of_two_power_laws_is_where_they_meet() -> None:
    lengths = [256, 512, 1024, 2048, 4096]
    linear, quadratic = [1000.0 * n for n in lengths], [float(n) ** 2 for n in lengths]
    assert crossover(lengths, linear, quadratic) == pytest.approx(1000.0, rel=1e-9)
    assert crossover(lengths, quadratic, linear) is None
    assert crossover(lengths, [1.0] * 5, quadratic) == pytest.approx(256)
    assert crossover(lengths, [1.0, None, 2000.0, 3000.0, 1.0], [2.0, 1.0, 1000.0, None, 2.0]) == pytest.approx(2048)
    assert crossover([], [], []) is None
