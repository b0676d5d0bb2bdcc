"""One panel of the page: headline tiles, charts, table. Every text from a record passes ``escaped``."""

import math

from anyformer.compare import figures
from anyformer.compare.caveats import panel_caveats
from anyformer.compare.figures import escaped
from anyformer.compare.panel import MEASURES, Key, Method, Numbers, Panel
from anyformer.compare.stats import Difference
from anyformer.compare.style import SVG, Style, branches
from anyformer.compare.text import DASH, count, duration, listing, number, shorten, signed, size

CARDS = (
    (
        "extrapolation",
        "Beyond the trained length",
        "Quality on the same targets while the context grows. Points are seeds.",
    ),
    ("curves", "Training", "Loss while training, every seed a line."),
    ("time", "Time over length", "Median time of a training step for one sequence; both axes logarithmic."),
    (
        "memory",
        "Memory over length",
        "What a training step needs beyond the weights, for one sequence; both axes logarithmic.",
    ),
)


def section(panel: Panel, place: int, style: Style, numbers: Numbers) -> str:
    """The panel as HTML; its figures are JSON in script elements that the page's own script draws."""
    head = f"<h2>{escaped(panel.task)}</h2>\n<p class='faint'>{_setting(panel)}</p>\n{notes(panel_caveats(panel))}"
    if not panel.finished:
        return f"<section class='panel'>{head}{_table(panel, numbers)}</section>"
    plots = {
        "bubbles": figures.bubbles(panel, style, numbers),
        "extrapolation": figures.extrapolation(panel, style, numbers),
        "time": figures.over_length(panel, style, numbers, "step"),
        "memory": figures.over_length(panel, style, numbers, "memory"),
        "curves": figures.curves(panel, style, numbers),
    }
    keys = {name: f"figure-{place}-{name}" for name in plots}
    scripts = [
        f"<script type='application/json' id='{keys[name]}'>{embedded(str(figure.to_json()))}</script>"
        for name, figure in plots.items()
    ]
    cards = "".join(_card(title, note, keys[name]) for name, title, note in CARDS)
    return f"""<section class='panel'>
{head}
<div class='tiles'>{_tiles(panel)}</div>
<div class='card'>
<h3>Quality over speed</h3>
<p class='faint'>One circle a method; its area is the memory that a training step needs beyond the weights.
Up and to the right is better. Dashed lines use no attention.</p>
<div class='controls'>{_selectors(panel)}</div>
<div class='plot' data-figure='{keys["bubbles"]}'></div>
<div class='legend'>{_legend(panel, style)}</div>
<div class='chips'>{_chips(panel, style, numbers)}</div>
</div>
<div class='pair'>
{cards}
</div>
{_table(panel, numbers)}
{"".join(scripts)}
</section>"""


def embedded(json: str) -> str:
    """JSON that cannot end the script element it stands in."""
    return (
        json.replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("&", "\\u0026")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _card(title: str, note: str, key: str) -> str:
    head = f"<h3>{title}</h3><p class='faint'>{note}</p>"
    return f"<div class='card'>{head}<div class='plot' data-figure='{key}'></div></div>"


def notes(sentences: tuple[str, ...]) -> str:
    items = "".join(f"<li>{escaped(sentence)}</li>" for sentence in sentences)
    return f"<div class='card caveats'><h3>Read this first</h3><ul>{items}</ul></div>" if items else ""


def cell(shown: str, value: float | str | None = None, *, kind: str = "", small: str = "", title: str = "") -> str:
    """A table cell with the value it sorts by; ``shown``, ``small`` and ``title`` are already escaped."""
    key = "" if value is None or (isinstance(value, float) and not math.isfinite(value)) else escaped(str(value))
    below = f"<small{' class=wrap' if len(small) > 24 else ''}>{small}</small>" if small else ""
    hover = f" title='{title}'" if title else ""
    return f"<td class='{kind}' data-value='{key}'{hover}>{shown}{below}</td>"


def badge(status: str) -> str:
    kind = status if status in ("ok", "refused") else "failed"
    return f"<span class='badge {kind}'>{escaped(status)}</span>"


def table(heads: list[tuple[str, str]], rows: list[str]) -> str:
    """A table sortable by every column; ``heads`` are (escaped text, class)."""
    row = "".join(f"<th class='{kind}' scope='col'><button type='button'>{text}</button></th>" for text, kind in heads)
    body = f"<thead><tr>{row}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"<div class='scroll'><table class='sortable'>{body}</table></div>"


def _setting(panel: Panel) -> str:
    parts = [
        panel.model,
        panel.steps is not None and f"{panel.steps} training steps for every method",
        panel.train_length and f"trained at {panel.train_length} tokens",
        f"seeds {', '.join(map(str, panel.seeds))}" if panel.seeds else "",
        panel.device and f"on {panel.device}",
        panel.data and f"data: {panel.data.note or panel.data.name} (fingerprint {panel.data.fingerprint[:12]})",
    ]
    return escaped("; ".join(part for part in parts if part))


def _tiles(panel: Panel) -> str:
    n, far, cost = panel.home, panel.lengths[-1] if panel.lengths else panel.home, panel.cost_home
    sign = 1 if panel.better == "lower" else -1
    metric = escaped(panel.metric)
    quality = [(sign * value, m, value) for m in panel.finished if (value := m.mean(n)) is not None]
    speed = [(-value, m, value) for m in panel.finished if (value := m.rate(cost, "step")) is not None]
    memory = [(value, m, value) for m in panel.finished if (value := m.memory(cost)) is not None]
    beyond = [(sign * value, m, value) for m in panel.finished if (value := m.mean(far)) is not None]
    tiles = [
        _tile("best quality", quality, lambda value: f"{number(value)} {metric} at {n} tokens"),
        _tile("best beyond the trained length", beyond, lambda value: f"{number(value)} {metric} at {far} tokens")
        if far > n
        else "",
        _tile("fastest training step", speed, lambda value: f"{count(value)} tokens/s at {cost} tokens"),
        _tile("least memory", memory, lambda value: f"{size(value)} at {cost} tokens"),
    ]
    return "".join(tiles)


def _tile(title: str, ranked: list[tuple[float, Method, float]], tell) -> str:
    if not ranked:
        return ""
    _, method, value = min(ranked, key=lambda entry: entry[0])
    name = escaped(shorten(method.name, 48))
    return f"<div class='tile'><span>{title}</span><b>{name}</b><span>{tell(value)}</span></div>"


def _selectors(panel: Panel) -> str:
    cells = [(method, n) for method in panel.finished for n in panel.cost_lengths]
    measured = [(m, name) for m, name in MEASURES.items() if any(method.rate(n, m) for method, n in cells)]
    lengths = [(str(n), f"{n} tokens") for n in panel.lengths]
    costs = [(str(n), f"{n} tokens") for n in panel.cost_lengths]
    return (
        _select("quality", "quality at", lengths, str(panel.home))
        + _select("measure", "speed of", measured, "step")
        + _select("cost", "speed and memory at", costs, str(panel.cost_home))
    )


def _select(name: str, label: str, options: list[tuple[str, str]], chosen: str) -> str:
    items = "".join(
        f"<option value='{value}'{' selected' if value == chosen else ''}>{text}</option>" for value, text in options
    )
    return f"<label>{label} <select name='{name}'>{items}</select></label>"


def _chips(panel: Panel, style: Style, numbers: Numbers) -> str:
    return "".join(
        f"<button type='button' class='chip' aria-pressed='true' data-key='{numbers[method.key]}' "
        f"title='show or hide in all charts'><i style='background:{style.colour(method.attention_family)}'></i>"
        f"{numbers[method.key]}&nbsp; {escaped(shorten(method.name, 60))}</button>"
        for method in panel.finished
    )


def _legend(panel: Panel, style: Style) -> str:
    attentions = dict.fromkeys(method.attention_family[0] for method in panel.finished)
    positions = branches(method.position_family for method in panel.finished)
    colours = [f"<span><i style='background:{style.colours[name]}'></i>{escaped(name)}</span>" for name in attentions]
    marks = [
        f"<span><svg viewBox='0 0 12 12' aria-hidden='true'>{SVG[style.glyphs[name]]}</svg>{escaped(told)}</span>"
        if name != "none"
        else "<span>none: no mark</span>"
        for name, told in positions.items()
    ]
    return f"<span>colour, attention:</span>{''.join(colours)}<span>mark inside, position:</span>{''.join(marks)}"


def _table(panel: Panel, numbers: Numbers) -> str:
    if not panel.methods:
        return ""
    differences = panel.differences(panel.home)
    others = [n for n in panel.lengths if n != panel.home]
    heads = [("#", ""), ("method", "text"), ("status", "text"), (f"{escaped(panel.metric)} at {panel.home}", "")]
    heads += [("minus baseline", "")] if differences else []
    heads += [(f"at {n}", "") for n in others]
    heads += [
        (f"tokens/s, training at {panel.cost_home}", ""),
        (f"forward at {panel.cost_home}", ""),
        (f"memory at {panel.cost_home}", ""),
    ]
    heads += [("faster than baseline from", ""), ("time exponent", ""), ("parameters", "")]
    heads += [("implementation", "text")] if _told(panel) else []
    rows = [_row(panel, method, numbers[method.key], others, differences) for method in panel.ranked()]
    return f"<div class='card'><h3>All methods</h3>{_difference_note(panel, differences)}{table(heads, rows)}</div>"


def _told(panel: Panel) -> bool:
    """Whether any trial says which implementation ran."""
    return any(method.impl for method in panel.methods)


def _difference_note(panel: Panel, differences: dict[Key, tuple[Difference, float]]) -> str:
    if not differences or panel.baseline is None:
        return "<p class='faint'>Click a column to sort.</p>"
    some = [difference for difference, _ in differences.values()]
    detectable = max(difference.detectable for difference in some)
    test = (
        "p values are two-sided and adjusted by Holm over the methods"
        if not any(difference.descriptive for difference in some)
        else "fewer than 5 seeds, so no p values"
    )
    return (
        f"<p class='faint'>Click a column to sort. Differences to {escaped(panel.baseline.name)} are paired (same "
        f"seeds, same data order, same {some[0].items} items) with 95 % bootstrap intervals; {test}. "
        f"Smallest difference this run could detect: {number(detectable, 2)}.</p>"
    )


def _row(panel: Panel, method: Method, place: int, others: list[int], differences: dict) -> str:
    family = escaped(" / ".join(method.attention_family) + "; " + " / ".join(method.position_family))
    tag = "<span class='tag'>baseline</span>" if panel.baseline is not None and method.key == panel.baseline.key else ""
    cells = [
        cell(str(place), float(place)),
        cell(escaped(method.name) + tag, method.name, kind="text name", small=family),
    ]
    seeds = f"{len(method.ok)}&nbsp;of&nbsp;{len(method.trials)}&nbsp;seeds"
    cells.append(cell(badge(method.status), method.status, kind="text", small=seeds if len(method.trials) > 1 else ""))
    cells.append(_quality(method, panel.home))
    if differences:
        cells.append(_difference(differences.get(method.key)))
    cells += [_quality(method, n) for n in others]
    n = panel.cost_home
    rate, forward, memory = method.rate(n, "step"), method.seconds(n, "forward"), method.memory(n)
    why = escaped(method.unmeasured(n))
    cells.append(cell(count(rate), rate, small=why.partition(":")[0], title=why))
    cells += [cell(duration(forward), forward), cell(size(memory), memory), _crossover(panel, method)]
    slope = panel.exponent(method)
    shown = f"{number(slope.slope, 3)}{'†' if slope.short else ''}" if slope else DASH
    local = (
        f"{', '.join(number(step, 2) for step in slope.local)} per doubling" if slope and len(slope.local) > 1 else ""
    )
    cells.append(cell(shown, slope.slope if slope else None, small=local))
    p = method.parameters
    cells.append(
        cell(
            count(p.total) if p else DASH,
            float(p.total) if p else None,
            small=f"position {count(p.position)}" if p and p.position else "",
        )
    )
    if _told(panel):
        impl = listing([f"{key}: {value}" for key, value in method.impl.items()])
        cells.append(cell(escaped(impl) or DASH, impl, kind="text"))
    return f"<tr>{''.join(cells)}</tr>"


def _quality(method: Method, length: int) -> str:
    mean, values = method.mean(length), list(method.values(length).values())
    if mean is None:
        why = escaped(method.missing(length))
        return cell(DASH, None, small=why.partition(":")[0] if method.ok else "", title=why)
    spread = f"{number(min(values))} to {number(max(values))}" if len(values) > 1 else ""
    return cell(number(mean), mean, small=spread)


def _difference(found: tuple[Difference, float] | None) -> str:
    if found is None:
        return cell(DASH)
    difference, p = found
    interval = difference.interval
    small = f"{signed(interval.low)} to {signed(interval.high)}"
    small += "" if difference.descriptive else f", p = {number(p, 2)}"
    return cell(signed(interval.mean), interval.mean, small=small)


def _crossover(panel: Panel, method: Method) -> str:
    length = panel.crossover(method)
    if length is None:
        return cell(DASH)
    return cell("every length" if length <= min(panel.cost_lengths) else f"{length:.0f} tokens", length)
