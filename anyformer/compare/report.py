"""The report: a pure function of the records. The same lines give the same bytes."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType

from anyformer.compare import chart
from anyformer.compare.caveats import panel_caveats
from anyformer.compare.group import panels
from anyformer.compare.page import page
from anyformer.compare.panel import Method, Numbers, Panel
from anyformer.compare.record import Record
from anyformer.compare.store import RESULTS, StoreError, read
from anyformer.compare.style import Style, style
from anyformer.compare.terminal import tables
from anyformer.compare.text import TIMES, listing

TITLE = "Attention and position encodings compared"


@dataclass(frozen=True)
class Report:
    """What there is to show: the panels, the number and look of each method, and what the run folder had to say."""

    panels: tuple[Panel, ...]
    style: Style
    numbers: Numbers
    subtitle: str
    notices: tuple[str, ...] = ()

    @property
    def finished(self) -> int:
        """Trials with a result."""
        return sum(len(method.ok) for panel in self.panels for method in panel.methods)

    def html(self) -> str:
        """The self-contained page."""
        return page(self.panels, self.style, self.numbers, TITLE, self.subtitle, self.notices)

    def table(self) -> RenderableType:
        """The terminal's table, for ``rich``."""
        return tables(self.panels, self.notices)


def build(records: Iterable[Record], *, baseline: str | None = None, notices: Sequence[str] = ()) -> Report:
    """Gathers records into a report.

    ``baseline`` names the method all others are compared with, as written in the table; by default softmax with rope,
    else the first softmax, else the first method that finished. Raises SpecError if no method has that name.
    """
    found = panels(records, baseline=baseline)
    methods = [method for panel in found for method in panel.methods]
    looks = style([method.attention_family for method in methods], [method.position_family for method in methods])
    numbers = {key: place for place, key in enumerate(dict.fromkeys(method.key for method in methods), 1)}
    return Report(found, looks, numbers, _subtitle(found, methods), tuple(notices))


def write(folder: str | os.PathLike, *, baseline: str | None = None) -> Report:
    """Reads ``results.jsonl`` and writes ``report.html``, ``chart.png`` and ``chart.svg`` beside it, each in one step.

    Raises StoreError if the folder is no run, holds no line, or cannot be written to.
    """
    path = Path(folder)
    run = read(path)
    if not run.records:
        raise StoreError(
            f"{path / RESULTS} holds no whole line, so there is nothing to report; "
            "finish a trial with 'anyformer compare --out' first"
        )
    report = build(run.records, baseline=baseline, notices=run.notices)
    figure = chart.draw(report.panels, report.style, report.numbers, TITLE, report.subtitle, _foot(report.panels))
    try:
        _replace(path / "report.html", report.html().encode())
        for kind in ("png", "svg"):
            _replace(path / f"chart.{kind}", chart.render(figure, kind))
    except OSError as error:
        raise StoreError(f"cannot write the report to {path}: {error.strerror}") from None
    return report


def _replace(path: Path, content: bytes) -> None:
    # a reader of the old file never sees half of the new one
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _subtitle(found: Sequence[Panel], methods: Sequence[Method]) -> str:
    trials = [trial for method in methods for trial in method.trials]
    days = sorted({trial.finished[:10] for trial in trials if trial.finished})
    versions = {t.environment.versions.get("torch") for t in trials if t.environment} - {None}
    attentions = {trial.attention for trial in trials}
    positions = {trial.position for trial in trials}
    parts = [
        f"{_many(len(attentions), 'attention')} {TIMES} {_many(len(positions), 'position encoding')}"
        f" on {listing([panel.task for panel in found], 3)}",
        " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        ", ".join(f"torch {version}" for version in sorted(filter(None, versions))),
        ", ".join(dict.fromkeys(panel.device for panel in found if panel.device)),
    ]
    return " · ".join(part for part in parts if part) if trials else "no trial yet"


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _foot(found: Sequence[Panel]) -> str:
    first = [caveats[0] for panel in found if (caveats := panel_caveats(panel))]
    return first[0].split(". ")[0].rstrip(".") + "." if first else ""
