"""The picture: every method in it, no name over another, the same bytes for the same records."""

import io
import itertools
import math

import numpy as np
import pytest
import synthetic
from matplotlib import image
from matplotlib.backends.backend_agg import FigureCanvasAgg

from anyformer.compare import chart
from anyformer.compare.record import Quality, Score
from anyformer.compare.report import Report, build


def drawn(report: Report):
    figure = chart.draw(report.panels, report.style, report.numbers, "title", report.subtitle, "foot")
    figure.draw_without_rendering()
    return figure, FigureCanvasAgg(figure).get_renderer()


def words(axes, gid: str) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_gid() == gid]


def overlap(a, b) -> bool:
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return width > 0.5 and height > 0.5


@pytest.mark.parametrize("records", [synthetic.default_run(), synthetic.wide_run()], ids=["default", "wide"])
def test_every_method_is_named_and_no_name_covers_another(records: list) -> None:
    report = build(records)
    figure, renderer = drawn(report)
    for axes, panel in zip(figure.axes, report.panels, strict=False):
        assert sorted(words(axes, "name")) == sorted(method.name for method in panel.finished)
        texts = [text for text in axes.texts if text.get_gid() == "name"]
        extents = [text.get_bbox_patch().get_window_extent(renderer) for text in texts]
        assert not any(overlap(a, b) for a, b in itertools.combinations(extents, 2))
        frame = axes.bbox
        assert all(
            e.x0 > frame.x0 - 4 and e.x1 < frame.x1 + 4 and e.y0 > frame.y0 - 4 and e.y1 < frame.y1 + 4 for e in extents
        )


def test_forty_methods_are_numbered_apart_and_named_beside_the_chart() -> None:
    report = build(synthetic.crowd(40))
    figure, renderer = drawn(report)
    axes = figure.axes[0]
    assert sorted(map(int, words(axes, "name"))) == list(range(1, 41))
    extents = [t.get_bbox_patch().get_window_extent(renderer) for t in axes.texts if t.get_gid() == "name"]
    assert not any(overlap(a, b) for a, b in itertools.combinations(extents, 2))
    listed = {text.get_text() for text in figure.texts}
    assert "softmax + rope" in listed
    assert {str(place) for place in range(1, 41)} <= listed
    assert all(text.get_window_extent(renderer).x1 <= figure.bbox.x1 for text in figure.texts)


def test_up_is_better_and_far_reference_lines_are_named_at_the_edge() -> None:
    report = build(synthetic.default_run())
    figure, _ = drawn(report)
    text, recall = figure.axes[:2]
    assert text.yaxis.get_inverted()
    assert not recall.yaxis.get_inverted()
    assert words(text, "reference") == ["xz 1.68", "trigram 2.47", "bigram 3.36", "unigram 4.44", "chance 8.00 \u2193"]
    assert words(recall, "reference") == ["chance 0.125"]


def test_names_of_lines_stay_between_the_axes_and_on_the_paper() -> None:
    records = synthetic.default_run()
    recall = next(record for record in records if record.task == "mqar").quality
    for task, metric in (("text", "bits per byte"), ("mqar", recall.metric)):
        value = Score(length=64 if task == "mqar" else 256, value=0.125 if task == "mqar" else 3.0)
        quality = Quality(metric=metric, better=recall.better if task == "mqar" else "lower", scores=(value,))
        line = synthetic.references()[0].model_copy(
            update={"task": task, "name": "any value that is present", "key": task}
        )
        records.append(line.model_copy(update={"quality": quality, "data": None}))
    figure, renderer = drawn(build(records))
    text, mqar = figure.axes[:2]
    limits = (mqar.yaxis.label.get_window_extent(renderer).x0, figure.bbox.x1)
    for axes, limit in zip((text, mqar), limits, strict=True):
        ends = [each.get_window_extent(renderer).x1 for each in axes.texts if each.get_gid() == "reference"]
        assert len(ends) > 1
        assert max(ends) < limit


def test_area_is_in_proportion_to_memory() -> None:
    report = build(synthetic.default_run()[:9])
    figure, _ = drawn(report)
    (panel,) = report.panels
    memories = sorted(method.memory(panel.cost_home) for method in panel.finished)
    areas = sorted(
        float(circle.get_sizes()[0]) for circle in figure.axes[0].collections if len(circle.get_offsets()) == 1
    )
    assert np.array(areas) / areas[-1] == pytest.approx(np.array(memories) / memories[-1], rel=1e-6)


def test_the_png_is_large_and_reproducible() -> None:
    def render(kind) -> bytes:
        report = build(synthetic.default_run()[:7])
        return chart.render(drawn(report)[0], kind)

    png = render("png")
    assert png == render("png")
    assert render("svg") == render("svg")
    pixels = image.imread(io.BytesIO(png))
    assert pixels.shape[:2] == (1200, 1800)
    assert pixels[..., :3].std() > 0.05


def only(value: float, **changes):
    quality = Quality(metric="loss", better="lower", train_length=256, scores=(Score(length=256, value=value),))
    return synthetic.trial("softmax", "rope", quality=quality, **changes)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [synthetic.failed("softmax", "rope", "oom", "9 GiB")],
        [only(0.0)],
        [only(math.nan)],
        [only(-3.0), only(-3.0, key="b", seed=1)],
        [only(1.0, costs=())],
        [only(1.0, label="$\\frac{$ " + "x" * 300)],
        [only(1.0, label="\u6ce8\u610f\u529b + \u4f4d\u7f6e")],
        [only(1.0, task=f"task {place}", key=str(place)) for place in range(5)],
    ],
    ids=["none", "failed", "zero", "nan", "two seeds", "no speed", "long", "chinese", "five tasks"],
)
def test_odd_runs_are_drawn_without_a_warning(records: list) -> None:
    figure, _ = drawn(build(records))
    assert b"<svg" in chart.render(figure, "svg")


def test_without_a_finished_trial_the_picture_says_so() -> None:
    figure, _ = drawn(build([synthetic.failed("softmax", "rope", "oom", "9 GiB")]))
    assert "No trial has finished: nothing to draw." in [text.get_text() for text in figure.texts]


def test_what_cannot_be_placed_is_named_in_a_note() -> None:
    (axes, *_), _ = drawn(build([only(1.0), synthetic.trial("linear", "rope", index=1, costs=())]))[0].axes, None
    assert any("not drawn, no speed or no finite quality: linear + rope" in text.get_text() for text in axes.texts)
