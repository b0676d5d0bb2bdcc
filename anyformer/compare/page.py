"""The self-contained HTML page: no request leaves it, and no text of a record can become markup or script in it.

All text is escaped. Beyond that a content security policy admits exactly the two scripts of this page, by their hashes,
and no network: markup that slipped through could not run.
"""

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources

from plotly.offline import get_plotlyjs

from anyformer.compare.caveats import environments, run_caveats
from anyformer.compare.failures import Failure, failures
from anyformer.compare.figures import escaped
from anyformer.compare.panel import Numbers, Panel
from anyformer.compare.record import Environment
from anyformer.compare.section import badge, cell, notes, section, table
from anyformer.compare.style import Style
from anyformer.compare.text import count, duration, number, plain, size


def page(
    panels: Sequence[Panel],
    style: Style,
    numbers: Numbers,
    title: str,
    subtitle: str,
    notices: Sequence[str],
) -> str:
    """The whole page as text."""
    library, script = get_plotlyjs().replace("</script", "<\\/script"), _resource("page.js")
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    sections = "\n".join(section(panel, place, style, numbers) for place, panel in enumerate(panels))
    nothing = (
        "" if panels else "<div class='card'><p>No trial has finished yet, so there is nothing to compare.</p></div>"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escaped(title)}</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<main>
<h1>{escaped(title)}</h1>
<p class="faint">{escaped(subtitle)}</p>
<noscript><p>The charts need JavaScript; chart.png beside this page shows the main one.</p></noscript>
{notes(run_caveats(panels, notices))}
{nothing}
{sections}
{_failures(panels)}
{_references(panels)}
{_environment(panels)}
{_reading()}
</main>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""


def _resource(name: str) -> str:
    return resources.files("anyformer.compare").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _failures(panels: Sequence[Panel]) -> str:
    heads = [("method", "text"), ("task", "text"), ("seeds", ""), ("what", "text"), ("status", "text"), ("why", "text")]
    rows = [_failure(failure) for failure in failures(panels)]
    return f"<h2>What did not run</h2><div class='card'>{table(heads, rows)}</div>" if rows else ""


def _failure(failure: Failure) -> str:
    seeds = ", ".join(map(str, failure.seeds))
    lengths = f" at {', '.join(map(str, failure.lengths))} tokens" if failure.lengths else ""
    # details keep their lines, so they are escaped without being put on one line
    last = (
        f"<details><summary>last lines</summary><pre>{html.escape(failure.details)}</pre></details>"
        if failure.details.strip()
        else ""
    )
    cells = [
        cell(escaped(failure.method), failure.method, kind="text name"),
        cell(escaped(failure.task), failure.task, kind="text"),
        cell(seeds, seeds),
        cell(failure.what + lengths, failure.what, kind="text"),
        cell(badge(failure.status), failure.status, kind="text"),
        cell(escaped(failure.reason) + last, failure.reason, kind="text"),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _references(panels: Sequence[Panel]) -> str:
    rows = []
    for panel in panels:
        for line in panel.references:
            value = panel.reference_value(line)
            cells = [
                cell(escaped(line.name), plain(line.name), kind="text name"),
                cell(escaped(panel.task), panel.task, kind="text"),
            ]
            cells += [
                cell(number(value), value, small=escaped(panel.metric)),
                cell(escaped(line.note), plain(line.note), kind="text"),
            ]
            rows.append(f"<tr>{''.join(cells)}</tr>")
    if not rows:
        return ""
    heads = [("line", "text"), ("task", "text"), ("value", ""), ("what it is", "text")]
    return f"<h2>Reference lines without attention</h2><div class='card'>{table(heads, rows)}</div>"


def _environment(panels: Sequence[Panel]) -> str:
    cards = "".join(f"<div class='card'><dl>{_facts(environment)}</dl></div>" for environment in environments(panels))
    trials = [trial for panel in panels for method in panel.methods for trial in method.trials]
    commands = dict.fromkeys(trial.command for trial in trials if trial.command)
    shown = "".join(f"<pre>{html.escape(command)}</pre>" for command in commands)
    total = sum(trial.seconds or 0.0 for trial in trials)
    spent = f"<p class='faint'>{len(trials)} trials, {duration(total)} of wall time in all.</p>" if trials else ""
    again = f"<div class='card'><h3>Made by</h3>{shown}{spent}</div>" if shown or spent else ""
    return f"<h2>Environment</h2>{cards}{again}" if cards or again else ""


def _facts(environment: Environment) -> str:
    facts = {
        "device": environment.device,
        "processor": environment.processor,
        "cores": environment.cores and count(environment.cores),
        "threads used": environment.threads and count(environment.threads),
        "memory": environment.memory and size(environment.memory),
        "system": environment.platform,
        "versions": ", ".join(f"{name} {version}" for name, version in environment.versions.items()),
        **environment.notes,
        "load before": "" if environment.load is None else number(environment.load, 2),
        "fingerprint": environment.fingerprint,
    }
    return "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(str(fact))}</dd>" for name, fact in facts.items() if fact)


def _reading() -> str:
    return """<h2>How to read this</h2>
<div class='card'>
<p>Every method was trained by the same recipe: same width and depth, same data in the same order, same initial weights
where shapes agree, same number of steps. Quality is scored on the same held-out items for all. No composite score is
made of quality, speed and memory: which matters is yours to say.</p>
<p>Time is the median over rounds interleaved between the methods. Memory is what one training step needs beyond the
weights and the optimiser's state, at the batch that was used. The exponent is the slope of log time on log length over
the largest three doublings from 1024 tokens on; † marks a fit below that, where overhead hides the slope.</p>
<p>Intervals come from a bootstrap over seeds and items. An interval from one seed says how sure the score of that one
model is, not how the method would do again.</p>
</div>"""
