"""Only what may be compared meets in a panel; nothing failed or infinite enters a mean."""

import math

import pytest
import synthetic

from anyformer.compare.failures import failures
from anyformer.compare.group import panels
from anyformer.compare.record import Cost, Data, Quality, Score


def names(panel) -> list[str]:
    return [method.name for method in panel.methods]


def test_one_panel_a_task_with_methods_in_the_order_asked_for() -> None:
    records = synthetic.default_run(seeds=3)
    found = panels(reversed(records))
    assert [panel.task for panel in found] == ["text", "mqar"]
    assert names(found[0]) == [f"{attention} + {position}" for attention, position in synthetic.DEFAULT]
    assert found[0].seeds == (0, 1, 2)
    assert [name for name, _ in found[0].lines()] == ["xz", "trigram", "bigram", "unigram", "chance"]
    assert [name for name, _ in found[1].lines()] == ["chance"]


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 800},
        {"model": "dim128"},
        {"data": Data(name="text", fingerprint="other")},
        {"environment": synthetic.environment(device="cuda")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_budget_model_data_or_device_is_another_panel(change: dict) -> None:
    found = panels([synthetic.trial("softmax", "none"), synthetic.trial("linear", "rope", **change)])
    assert [names(panel) for panel in found] == [["softmax + none"], ["linear + rope"]]


def test_a_refused_trial_joins_the_panel_of_its_task() -> None:
    refused = synthetic.failed("linear", "t5", "refused", "no form", index=0)
    found = panels([synthetic.trial("softmax", "none", index=1), refused])
    assert [names(panel) for panel in found] == [["linear + t5", "softmax + none"]]
    assert [method.name for method in found[0].ranked()] == ["softmax + none", "linear + t5"]
    assert [panel.finished for panel in panels([refused])] == [()]


def test_the_baseline_is_softmax_with_rope_then_softmax_then_the_first() -> None:
    base = [panel.baseline.name for panel in panels(synthetic.default_run())]
    assert base == ["softmax + rope", "softmax + rope"]
    assert (
        panels([synthetic.trial("linear", "rope"), synthetic.trial("softmax", "none")])[0].baseline.name
        == "softmax + none"
    )
    assert (
        panels([synthetic.trial("linear", "rope"), synthetic.trial("gru", "none")])[0].baseline.name == "linear + rope"
    )
    asked = panels(synthetic.default_run(), baseline="linear + rope")
    assert {panel.baseline.name for panel in asked} == {"linear + rope"}
    with pytest.raises(
        ValueError, match=r"no method is named 'lstm'\. Methods here: linear \+ rope, local\(64\) \+ rope"
    ):
        panels(synthetic.default_run(), baseline="lstm")


def test_a_failed_seed_is_left_out_and_told() -> None:
    failed = synthetic.failed("softmax", "rope", "oom", "asked for 9 GiB", seed=2)
    panel = panels([synthetic.trial("softmax", "rope", seed=seed) for seed in (0, 1)] + [failed])[0]
    (method,) = panel.methods
    assert method.status == "ok"
    assert set(method.values(256)) == {0, 1}
    assert method.mean(256) == pytest.approx(sum(method.values(256).values()) / 2)
    (failure,) = failures([panel])
    assert (failure.status, failure.reason, failure.seeds, failure.lengths) == ("oom", "asked for 9 GiB", (2,), ())


def test_failures_over_seeds_and_lengths_are_told_once() -> None:
    (panel,) = panels([synthetic.trial("softmax", "learned", seed=seed) for seed in range(3)])
    (failure,) = failures([panel])
    assert (failure.what, failure.status) == ("quality", "unsupported")
    assert (failure.seeds, failure.lengths) == ((0, 1, 2), (512, 1024, 2048))
    assert panel.methods[0].mean(512) is None
    assert panel.methods[0].missing(512) == "unsupported: beyond the learned table of 256 positions"
    assert panel.methods[0].missing(77) == "not scored at this length"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_quality_that_is_not_finite_enters_no_mean_and_no_difference(value: float) -> None:
    quality = Quality(
        metric="bits per byte",
        better="lower",
        train_length=256,
        scores=(Score(length=256, value=value, items=(1.0,) * 60),),
    )
    broken = synthetic.trial("linear", "rope", index=1, quality=quality)
    (panel,) = panels([synthetic.trial("softmax", "rope"), broken])
    assert panel.methods[1].mean(256) is None
    assert panel.methods[1].missing(256) == f"the score is {value}"
    assert panel.differences(256) == {}
    assert [method.name for method in panel.ranked()] == ["softmax + rope", "linear + rope"]


def test_higher_is_better_ranks_the_other_way_round() -> None:
    _, recall = panels(synthetic.default_run())
    means = [method.mean(recall.home) for method in recall.ranked()]
    assert means == sorted(means, reverse=True)


def test_differences_are_to_the_baseline_with_holm_over_the_methods() -> None:
    panel = panels(synthetic.default_run(seeds=2))[0]
    found = panel.differences(panel.home)
    assert set(found) == {method.key for method in panel.finished} - {panel.baseline.key}
    difference, p = found["softmax", "none"]
    expected = panel.methods[0].mean(256) - panel.baseline.mean(256)
    assert difference.interval.mean == pytest.approx(expected)
    assert (difference.seeds, difference.items) == (2, 60)
    assert p == pytest.approx(4 * difference.interval.p), "the smallest of four"


def test_speed_and_memory_are_read_at_the_longest_length_all_methods_reached() -> None:
    assert panels(synthetic.default_run())[0].cost_home == 4096
    (panel,) = panels([synthetic.trial("softmax", "rope"), synthetic.trial("reformer", "rope", index=1)])
    assert panel.cost_home == 1024
    reformer = panel.methods[1]
    assert reformer.unmeasured(2048) == "oom: asked for 9.1 GiB of 8 GiB"
    assert reformer.unmeasured(1024) == ""
    cost = next(cost for cost in reformer.trials[0].costs if cost.length == 1024)
    assert reformer.rate(1024, "step") == pytest.approx(4 * 1024 / cost.step.median)
    assert reformer.memory(1024) == cost.memory
    assert reformer.rate(2048, "step") is None
    untimed = panels([synthetic.trial("softmax", "rope", costs=())])[0]
    assert (untimed.cost_home, untimed.cost_lengths) == (256, ())


def test_seeds_give_the_median_time() -> None:
    def timed(seed: int, seconds: float):
        step = synthetic.Timing(median=seconds, low=seconds, high=seconds, min=seconds, rounds=3)
        return synthetic.trial("softmax", "rope", seed=seed, costs=(Cost(length=512, batch=2, step=step),))

    (panel,) = panels([timed(0, 1.0), timed(1, 2.0), timed(2, 50.0)])
    assert panel.methods[0].seconds(512, "step") == 2.0
    assert panel.methods[0].rate(512, "step") == 512.0
    assert panel.methods[0].memory(512) is None


def test_noise_is_no_crossover() -> None:
    def timed(attention: str, factor: float, index: int):
        costs = tuple(
            Cost(
                length=n,
                step=synthetic.Timing(
                    median=factor * n, low=0.9 * factor * n, high=1.1 * factor * n, min=factor * n, rounds=3
                ),
            )
            for n in (1024, 2048)
        )
        return synthetic.trial(attention, "rope", index=index, costs=costs)

    (panel,) = panels([timed("softmax", 1.0, 0), timed("linear", 0.97, 1), timed("gru", 0.5, 2)])
    assert [panel.crossover(method) for method in panel.methods] == [None, None, pytest.approx(1024)]


def test_exponents_separate_quadratic_from_linear() -> None:
    panel = panels(synthetic.default_run())[0]
    softmax, linear = (
        next(m for m in panel.methods if m.key == key) for key in (("softmax", "rope"), ("linear", "rope"))
    )
    assert panel.exponent(softmax).slope > 1.25 > panel.exponent(linear).slope
    assert panel.exponent(softmax, "memory").slope > panel.exponent(linear, "memory").slope


def test_a_seed_counts_once_and_the_latest_run_of_it_holds() -> None:
    first = synthetic.trial("softmax", "rope", finished="2025-11-30T09:00:00+00:00", index=3)
    second = first.model_copy(update={"key": "other lengths", "finished": "2025-11-30T10:00:00+00:00", "index": 0})
    for records in ([first, second], [second, first]):
        method = panels(records)[0].methods[0]
        assert [trial.key for trial in method.trials] == ["other lengths"]


def test_a_line_without_attention_counts_once() -> None:
    once = synthetic.references()
    again = [line.model_copy(update={"key": f"{line.key} of more items"}) for line in once]
    panel = panels([*once, *again, synthetic.trial("softmax", "rope")])[0]
    assert [line.name for line in panel.references] == [line.name for line in once]
    assert {line.key for line in panel.references} == {line.key for line in again}
