"""The table at every width: numbers are never cut, columns go whole and are named, long names fold."""

import re

import pytest
import synthetic
from rich.console import Console

from anyformer.compare import report
from anyformer.compare.record import Record


def shown(records: list[Record], width: int) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(report.build(records).table())
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("records", [synthetic.default_run(), synthetic.wide_run(), synthetic.default_run(3)])
def test_numbers_are_whole_at_every_width(records: list[Record], width: int) -> None:
    lines = shown(records, width)
    assert "…" not in "".join(lines)
    assert max(map(len, lines)) <= width
    rope = next(line for line in lines if line.startswith("  softmax + rope"))
    assert re.search(r" 2\.\d{3}\b", rope)


def test_what_finds_no_room_is_named() -> None:
    records = synthetic.default_run()
    narrow, wide = shown(records, 80), shown(records, 140)
    head, below = narrow[2:4], [line for line in narrow if line.startswith("no room here for: ")]
    assert "bits per byte ↓" in head[0]
    assert re.split(r"\s{2,}", head[1]) == ["method", "at 256", "baseline", "at 2048", "at 4096", "at 4096"]
    assert below == [
        "no room here for: quality at 512, quality at 1024, parameters, status",
        "no room here for: quality at 128, parameters, status",
    ]
    assert not any(line.startswith("no room") for line in wide)
    assert re.split(r"\s{2,}", wide[3]) == [
        "method",
        *("at 256", "baseline", "at 512", "at 1024", "at 2048", "at 4096", "at 4096", "parameters", "status"),
    ]


def test_long_names_go_on_in_the_next_line() -> None:
    name = "Local(64) | Global([0, 1]) | Strided(16) + rope(base=100.0)"
    lines = shown([*synthetic.default_run(), synthetic.trial("softmax", "rope", index=20, label=name)], 80)
    start = next(i for i, line in enumerate(lines) if line.startswith("  Local(64) |"))
    folded = [re.split(r"\s{3,}", lines[start].strip())[0], *(line.strip() for line in lines[start + 1 : start + 3])]
    assert " ".join(folded).startswith(name)
    assert all(line.startswith("    ") for line in lines[start + 1 : start + 3])


def test_a_method_without_a_result_says_why_in_place_of_its_quality() -> None:
    lines = shown(synthetic.wide_run(), 80)
    found = {line[:31].strip(): line[31:].split() for line in lines}
    assert found["linear + t5"] == ["refused", "–", "–", "–"]
    assert found["strided(32) + none"][0] == "timeout"


def test_some_failed_seeds_are_counted() -> None:
    failed = synthetic.failed("softmax", "rope", "oom", "no memory", seed=1, index=1)
    lines = shown([*synthetic.default_run(), failed], 120)
    assert any("softmax + rope (1 of 2 seeds)" in line for line in lines)


def test_a_spread_has_the_decimals_of_its_mean() -> None:
    lines = shown(synthetic.default_run(3), 140)
    spreads = re.findall(r"(\d+)\.(\d+) ±(\d+)\.(\d+)", "\n".join(lines))
    assert len(spreads) > 20
    assert all(len(mean) == len(spread) <= 4 for _, mean, _, spread in spreads)
