"""The interactive figures of the page, by plotly. Text is escaped: plotly reads some HTML tags in any text."""

import html
import math
from typing import Literal

import plotly.graph_objects as go

from anyformer.compare.labels import ticks
from anyformer.compare.panel import MEASURES, Method, Numbers, Panel
from anyformer.compare.style import PLOTLY, Style
from anyformer.compare.text import count, duration, number, plain, shorten, size

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
GREY = "#8A909C"  # read on a light and on a dark page


def escaped(text: str) -> str:
    """One line of text that can hold no markup."""
    return html.escape(plain(text))


def bubbles(panel: Panel, style: Style, numbers: Numbers) -> go.Figure:
    """Quality over speed, area = memory. A trace's ``meta`` holds its values at every length, for the selectors."""
    figure = _figure("", "")
    for method in panel.finished:
        x, y = method.rate(panel.cost_home, "step"), method.mean(panel.home)
        colour = style.colour(method.attention_family)
        meta = {
            **_facts(panel, method),
            "key": numbers[method.key],
            "name": escaped(shorten(method.name, 30)),
            "role": "disc",
        }
        shown = {"x": [x], "y": [y], "hoverinfo": "text", "mode": "markers"}
        disc = {"color": colour, "opacity": 0.82, "size": 12, "line": {"color": "rgba(255,255,255,0.85)", "width": 1}}
        figure.add_trace(go.Scatter(**shown, hovertext=[summary(panel, method)], marker=disc, meta=meta))
        glyph = style.glyph(method.position_family)
        mark = {
            "symbol": PLOTLY[glyph],
            "size": 5.5,
            "color": "white",
            "opacity": 0 if glyph == "none" else 1,
            "line": {"color": "white", "width": 1.5},
        }
        figure.add_trace(go.Scatter(**{**shown, "hoverinfo": "skip"}, marker=mark, meta={**meta, "role": "mark"}))
    sizes = {n: size(_heaviest(panel, n)) for n in panel.cost_lengths}
    lines = [{"name": escaped(shorten(name, 18)), "value": value} for name, value in panel.lines()]
    figure.update_layout(
        meta={
            "kind": "bubbles",
            "metric": escaped(panel.metric),
            "lower": panel.better == "lower",
            "lines": lines,
            "measures": MEASURES,
            "sizes": sizes,
        },
        xaxis={"type": "log"},
        margin={"l": 70, "r": 150, "t": 34, "b": 60},
        height=540,
    )
    return figure


def extrapolation(panel: Panel, style: Style, numbers: Numbers) -> go.Figure:
    """Quality over the length it was scored at: a line through the means, a point for every seed."""
    figure = _figure(
        "length scored at (tokens)",
        f"{escaped(panel.metric)} ({'lower' if panel.better == 'lower' else 'higher'} is better)",
    )
    for method in panel.finished:
        means = [method.mean(n) for n in panel.lengths]
        seeds = [(n, value) for n in panel.lengths for value in method.values(n).values()]
        line = _line(panel, method, style)
        figure.add_trace(
            go.Scatter(
                x=panel.lengths,
                y=means,
                mode="lines",
                line=line,
                hoverinfo="skip",
                connectgaps=False,
                meta=_meta(method, style, numbers),
            )
        )
        texts = [f"<b>{escaped(method.name)}</b><br>{n} tokens: {number(value)}" for n, value in seeds]
        figure.add_trace(
            go.Scatter(
                x=[n for n, _ in seeds],
                y=[value for _, value in seeds],
                mode="markers",
                hovertext=texts,
                hoverinfo="text",
                marker={"size": 7},
                meta=_meta(method, style, numbers),
            )
        )
    if panel.train_length:
        figure.add_vline(x=panel.train_length, line={"color": GREY, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=math.log10(panel.train_length),
            y=1,
            yref="paper",
            text="trained at",
            showarrow=False,
            xanchor="left",
            yanchor="bottom",
            font={"size": 11, "color": GREY},
        )
    _log_lengths(figure, panel.lengths)
    return figure


def over_length(panel: Panel, style: Style, numbers: Numbers, what: Literal["step", "memory"]) -> go.Figure:
    """Time or memory of one training step for one sequence, over its length, both axes logarithmic."""
    title = "time per sequence" if what == "step" else "memory per sequence"
    figure = _figure("length (tokens)", title)
    for method in panel.finished:
        values = [_cost(method, n, what) for n in panel.cost_lengths]
        text = [
            f"<b>{escaped(method.name)}</b><br>{n} tokens: {_unit(value, what)}"
            for n, value in zip(panel.cost_lengths, values, strict=True)
        ]
        line = _line(panel, method, style)
        figure.add_trace(
            go.Scatter(
                x=panel.cost_lengths,
                y=values,
                mode="lines+markers",
                line=line,
                marker={"size": 6},
                hovertext=text,
                hoverinfo="text",
                meta=_meta(method, style, numbers),
            )
        )
    _log_lengths(figure, panel.cost_lengths)
    known = [value for method in panel.finished for n in panel.cost_lengths if (value := _cost(method, n, what))]
    marks = ticks(min(known), max(known), binary=what == "memory") if known else []
    text = [size(value) if what == "memory" else duration(value) for value in marks]
    figure.update_yaxes(type="log", tickvals=marks, ticktext=text)
    return figure


def curves(panel: Panel, style: Style, numbers: Numbers) -> go.Figure:
    """Training loss over steps, every seed its own line."""
    figure = _figure("step", "training loss")
    for method in panel.finished:
        line = {**_line(panel, method, style), "width": 1.4}
        for trial in method.ok:
            points = [(step, loss) for step, loss in trial.curve if math.isfinite(loss)]
            text = [
                f"<b>{escaped(method.name)}</b>, seed {trial.seed}<br>step {step}: {number(loss)}"
                for step, loss in points
            ]
            figure.add_trace(
                go.Scatter(
                    x=[step for step, _ in points],
                    y=[loss for _, loss in points],
                    mode="lines",
                    line=line,
                    hovertext=text,
                    hoverinfo="text",
                    meta=_meta(method, style, numbers),
                )
            )
    return figure


def summary(panel: Panel, method: Method) -> str:
    """Everything about a method in a few lines, for the hover box."""
    lines = [
        f"<b>{escaped(method.name)}</b>",
        escaped(f"{' / '.join(method.attention_family)}; {' / '.join(method.position_family)}"),
    ]
    if method.parameters:
        lines.append(
            f"{count(method.parameters.total)} parameters, {count(method.parameters.position)} of them for position"
        )
    values = ", ".join(number(value) for value in method.values(panel.home).values())
    lines.append(f"{len(method.ok)} of {len(method.trials)} seeds: {values} at {panel.home} tokens")
    for n in panel.lengths:
        if n != panel.home:
            found = method.mean(n)
            lines.append(f"{n} tokens: {escaped(shorten(method.missing(n), 60)) if found is None else number(found)}")
    for n in panel.cost_lengths:
        cost = f"{count(method.rate(n, 'step'))} tokens/s in training, {size(method.memory(n))}"
        lines.append(f"{n} tokens: {escaped(shorten(method.unmeasured(n), 60)) or cost}")
    return "<br>".join(lines)


def _heaviest(panel: Panel, length: int) -> float | None:
    return max((memory for method in panel.finished if (memory := method.memory(length))), default=None)


def _facts(panel: Panel, method: Method) -> dict:
    seeds = {n: list(method.values(n).values()) for n in panel.lengths}
    return {
        "quality": {n: method.mean(n) for n in panel.lengths},
        "low": {n: min(values) for n, values in seeds.items() if values},
        "high": {n: max(values) for n, values in seeds.items() if values},
        "speed": {measure: {n: method.rate(n, measure) for n in panel.cost_lengths} for measure in MEASURES},
        "memory": {n: method.memory(n) for n in panel.cost_lengths},
    }


def _figure(x: str, y: str) -> go.Figure:
    clear = "rgba(0,0,0,0)"
    figure = go.Figure()
    figure.update_layout(
        template="none",
        meta={"kind": "lines"},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        showlegend=False,
        hovermode="closest",
        height=340,
        margin={"l": 64, "r": 150, "t": 34, "b": 52},
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left", "font": {"size": 12}},
        xaxis={"title": {"text": x}, "zeroline": False},
        yaxis={"title": {"text": y, "standoff": 10}, "zeroline": False, "automargin": True},
    )
    return figure


def _meta(method: Method, style: Style, numbers: Numbers) -> dict:
    name = escaped(shorten(method.name, 22))
    return {"key": numbers[method.key], "name": name, "colour": style.colour(method.attention_family)}


def _line(panel: Panel, method: Method, style: Style) -> dict:
    colour = style.colour(method.attention_family)
    family = [other.key for other in panel.finished if style.colour(other.attention_family) == colour]
    return {"color": colour, "dash": DASHES[family.index(method.key) % len(DASHES)], "width": 2}


def _log_lengths(figure: go.Figure, lengths: tuple[int, ...]) -> None:
    figure.update_xaxes(type="log", tickvals=list(lengths), ticktext=[str(n) for n in lengths])


def _cost(method: Method, length: int, what: Literal["step", "memory"]) -> float | None:
    return method.sequence_seconds(length, "step") if what == "step" else method.sequence_memory(length)


def _unit(value: float | None, what: Literal["step", "memory"]) -> str:
    return size(value) if what == "memory" else f"{number(None if value is None else value * 1e3)} ms"
