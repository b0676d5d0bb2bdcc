"""The page and the terminal's table: complete, escaped, self-contained, the same for the same records."""

import html.parser
import io
import json
import math
import re
from pathlib import Path

import pytest
import synthetic
from rich.console import Console

from anyformer.compare import report, section
from anyformer.compare.record import Quality, Reference, Score, to_line
from anyformer.compare.report import build
from anyformer.compare.store import Store, StoreError

EVIL = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1"> \' " & <b>x</b>'


class Reader(html.parser.HTMLParser):
    """Collects elements, attributes, visible text and the embedded figures of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.figures: dict[str, dict] = {}
        self._script: dict | None = None
        self.feed(page)
        self.words = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._script = dict(attrs) if tag == "script" else {"style": True} if tag == "style" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text.append(data)
        elif self._script.get("type") == "application/json":
            self.figures[self._script["id"]] = json.loads(data)


def shown(records: list) -> str:
    out = io.StringIO()
    Console(file=out, width=160, force_terminal=False).print(build(records).table())
    return out.getvalue()


def test_the_page_has_every_part() -> None:
    page = Reader(build(synthetic.wide_run(), notices=["the last line is torn"]).html())
    for part in (
        "Read this first",
        "3 seeds per method: descriptive, fewer than 5 seeds.",
        "Lines that use no attention still beat every method: xz (1.680).",
        "10 of 37 trials have no result",
        "more than 10 % away from the baseline: softmax + learned (+14%)",
        "the last line is torn",
        "linformer mixes keys before they meet queries: a bias per pair has no place",
        "beyond the learned table of 256 positions",
        "speed and memory at 2048, 4096 tokens",
        "RuntimeError: <shapes> [2, 3] & [4]",
        "Intel Xeon Platinum 8481C",
        "torch 2.13.0",
        "anyformer compare --attention softmax linear --position none rope alibi --task text",
        "fingerprint 9f2c41d07a",
        "xz -9 on the held-out bytes",
        "37 trials",
    ):
        assert part in page.words, part
    assert sorted(page.figures) == [
        f"figure-0-{name}" for name in ("bubbles", "curves", "extrapolation", "memory", "time")
    ]


def test_the_figures_hold_the_numbers() -> None:
    records = synthetic.default_run(seeds=2)
    (panel, _) = build(records).panels
    figures = Reader(build(records).html()).figures
    discs = [trace for trace in figures["figure-0-bubbles"]["data"] if trace["meta"]["role"] == "disc"]
    assert [trace["y"][0] for trace in discs] == pytest.approx([method.mean(256) for method in panel.methods])
    assert [trace["x"][0] for trace in discs] == pytest.approx([method.rate(4096, "step") for method in panel.methods])
    assert discs[0]["meta"]["memory"]["4096"] == panel.methods[0].memory(4096)
    assert "116k parameters" in discs[0]["hovertext"][0]
    assert "2 of 2 seeds" in discs[0]["hovertext"][0]
    means = [trace for trace in figures["figure-0-extrapolation"]["data"] if trace["mode"] == "lines"]
    assert means[1]["y"] == pytest.approx([panel.methods[1].mean(n) for n in (256, 512, 1024, 2048)])
    assert figures["figure-0-bubbles"]["layout"]["meta"]["lines"][0] == {"name": "xz", "value": 1.68}


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = build(synthetic.default_run()).html()
    reader = Reader(page)
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(reader.tags)
    assert not [value for name, value in reader.attributes if name in ("src", "href", "srcset", "action")]
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(value for name, value in reader.attributes if value and "default-src" in value)
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe-inline" not in policy.split("style-src")[0]


def evil_run() -> list:
    quality = Quality(
        metric=EVIL, better="lower", train_length=256, scores=(Score(length=256, value=2.0, items=(2.0,)),)
    )
    broken = Score(length=512, status="unsupported", reason=EVIL)
    data = synthetic.Data(name=EVIL, fingerprint=EVIL, note=EVIL)
    environment = synthetic.environment(
        device=EVIL,
        processor=EVIL,
        platform=EVIL,
        versions={EVIL: EVIL, "torch": EVIL},
        notes={EVIL: EVIL},
        fingerprint=EVIL,
    )
    facts = {
        "task": EVIL,
        "model": EVIL,
        "data": data,
        "environment": environment,
        "attention_family": (EVIL, EVIL),
        "position_family": (EVIL,),
        "command": EVIL,
        "impl": {EVIL: EVIL},
        "finished": EVIL,
    }
    line = Reference(trial=EVIL, key="line", task=EVIL, status="ok", name=EVIL, note=EVIL, data=data, quality=quality)
    partly = quality.model_copy(update={"scores": (*quality.scores, broken)})
    return [
        line,
        synthetic.trial("softmax", "rope", quality=partly, **facts),
        synthetic.trial(EVIL, EVIL, label=EVIL, quality=quality, index=1, **facts),
        synthetic.failed("gru", "none", "error", EVIL, details=EVIL, index=2, **facts),
    ]


def test_no_text_of_a_record_becomes_markup() -> None:
    plain = Reader(build([synthetic.references()[0], *synthetic.wide_run(1)]).html())
    evil = build(evil_run(), notices=[EVIL]).html()
    page = Reader(evil)
    assert set(page.tags) <= set(plain.tags)
    assert {name for name, _ in page.attributes} <= {name for name, _ in plain.attributes}
    assert page.tags.count("script") == 2 + 5
    assert EVIL in page.words, "the text is shown as it was written"
    assert evil.count("window.pwned=1</script>") == 0
    for figure in page.figures.values():
        for text in strings(figure):
            assert "<script" not in text
            assert "<img" not in text


def strings(value) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_embedded_json_cannot_end_its_element() -> None:
    text = json.dumps({"name": "</script><!-- \u2028 &"}, ensure_ascii=False)
    assert not re.search("[<>&\u2028]", section.embedded(text))
    assert json.loads(section.embedded(text)) == json.loads(text)


def test_the_table_of_the_page_sorts_by_numbers_and_keeps_gaps_apart() -> None:
    page = build(synthetic.wide_run(1)).html()
    assert "data-value=''" in page
    values = re.findall(r"<td class='' data-value='([^']+)'", page)
    assert all(math.isfinite(float(value)) for value in values)


@pytest.mark.parametrize(
    "records, expected",
    [
        ([], "No trial has finished yet, so there is nothing to compare."),
        (synthetic.references(), "No trial has finished yet, so there is nothing to compare."),
        ([synthetic.failed("softmax", "rope", "oom", "asked for 9 GiB")], "No trial has finished here"),
        (
            [synthetic.trial("softmax", "rope", costs=(), curve=(), parameters=None, environment=None, data=None)],
            "One seed per method",
        ),
    ],
    ids=["nothing", "references", "failed", "bare"],
)
def test_odd_runs_give_a_page_that_says_so(records: list, expected: str) -> None:
    assert expected in Reader(build(records).html()).words
    assert shown(records).strip()


def test_five_seeds_bring_p_values_and_fewer_none() -> None:
    def items(shift: float, seed: int) -> Quality:
        scores = tuple(2 + shift + 0.01 * ((place * 7 + seed) % 5) for place in range(20))
        return Quality(
            metric="loss", better="lower", train_length=256, scores=(Score(length=256, value=2 + shift, items=scores),)
        )

    def run(seeds: int) -> list:
        return [
            synthetic.trial("softmax", position, seed=seed, index=index, quality=items(0.3 * index, seed))
            for index, position in enumerate(("rope", "none"))
            for seed in range(seeds)
        ]

    five = Reader(build(run(5)).html()).words
    assert "adjusted by Holm" in five
    assert "p = 0.00050" in five
    assert "descriptive" not in five
    four = Reader(build(run(4)).html()).words
    assert "fewer than 5 seeds, so no p values" in four
    assert "p = " not in four


def test_caveats_name_what_weakens_a_number() -> None:
    busy = synthetic.environment(fingerprint="e2", shared=True, calibration=(0.010, 0.031))
    other = synthetic.Data(name="text", fingerprint="other")
    records = [
        synthetic.trial("softmax", "rope"),
        synthetic.trial("softmax", "rope", seed=1),
        synthetic.trial("linear", "rope", index=1, environment=busy),
        synthetic.trial("linear", "none", index=2, data=other),
    ]
    words = Reader(build(records).html()).words
    assert (
        "1 to 2 seeds per method: descriptive, fewer than 5 seeds. Methods do not have the same number of seeds"
        in words
    )
    assert "Trials come from 2 different environments" in words
    assert "Other work ran on the machine while times were taken" in words
    assert "took up to 3.1 times longer" in words
    assert "text: trials read 2 different data sets" in words
    clean = Reader(build([synthetic.trial("softmax", "rope", seed=seed) for seed in range(5)]).html()).words
    assert "Read this first" not in clean


def test_exponents_below_1024_tokens_are_marked() -> None:
    words = Reader(build([synthetic.trial("reformer", "rope")]).html()).words
    assert "Time exponents marked \u2020 come from lengths below 1024 tokens" in words


def test_the_terminal_groups_by_family_and_reads_no_markup() -> None:
    text = shown(
        [*synthetic.wide_run(), synthetic.trial("softmax", "none", label="[bold red]x[/] \x1b[31m", task="[b]t")]
    )
    lines = [line.rstrip() for line in text.splitlines()]
    for family in ("full", "human-made pattern", "clustering", "attention-free", "no attention"):
        assert family in lines
    assert lines.index("full") < next(i for i, line in enumerate(lines) if line.startswith("  softmax + rope"))
    assert "[bold red]x[/] [31m" in text
    assert "\x1b" not in text
    assert re.search(r"softmax \+ rope +2\.\d+ \u00b10\.0\d+ +baseline .* 4\.\d+", text)
    assert "! 3 seeds per method: descriptive, fewer than 5 seeds." in text


def test_write_makes_the_files_again_from_the_lines_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        for record in synthetic.default_run()[:8]:
            store.append(record)
    lines = (tmp_path / "results.jsonl").read_bytes()
    found = report.write(tmp_path)
    assert found.finished == 4
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert sorted(first) == ["chart.png", "chart.svg", "report.html", "results.jsonl"]
    report.write(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in first} == first
    assert (tmp_path / "results.jsonl").read_bytes() == lines
    assert not list(tmp_path.glob(".report*"))


def test_write_reports_a_torn_line_and_refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a run"):
        report.write(tmp_path)
    (tmp_path / "results.jsonl").write_text('{"schema":1,"tri')
    with pytest.raises(
        StoreError, match=r"results\.jsonl holds no whole line, so there is nothing to report; finish a trial"
    ):
        report.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]
    whole = to_line(synthetic.trial("softmax", "rope"))
    (tmp_path / "results.jsonl").write_text(whole + '\n{"schema":1,"tri')
    report.write(tmp_path)
    assert "the last line of results.jsonl is torn" in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.append(synthetic.trial("softmax", "rope"))
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StoreError, match=r"cannot write the report to .*: Is a directory"):
        report.write(tmp_path)
    assert not list(tmp_path.glob(".report*"))


def test_an_unknown_baseline_lists_the_methods() -> None:
    with pytest.raises(ValueError, match=r"no method is named 'x'\. Methods here: softmax \+ rope"):
        build([synthetic.trial("softmax", "rope")], baseline="x")
