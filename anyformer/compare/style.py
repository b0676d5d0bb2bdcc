"""How a family looks in every chart: a colour for the attention, a glyph for the position encoding."""

from collections.abc import Iterable
from dataclasses import dataclass

INK, FAINT, GRID = "#1F2430", "#6B7280", "#E5E7EB"
# Okabe and Ito's palette, which colour-blind readers can tell apart, without its yellow (too pale) and with two more
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F5FC4", "#8C6D46", "#7A7A7A")
GLYPHS = ("dot", "square", "triangle", "diamond", "cross", "plus", "star")
MATPLOTLIB = {
    "none": "",
    "dot": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "x",
    "plus": "+",
    "star": "*",
}
PLOTLY = {
    "none": "circle",
    "dot": "circle",
    "square": "square",
    "triangle": "triangle-up",
    "diamond": "diamond",
    "cross": "x-thin-open",
    "plus": "cross-thin-open",
    "star": "star",
}
# the same marks on a 12 x 12 field, for the page's legend
SVG = {
    "none": "",
    "dot": "<circle cx='6' cy='6' r='3.2'/>",
    "square": "<rect x='3' y='3' width='6' height='6'/>",
    "triangle": "<path d='M6 2.6 L9.6 9 H2.4 Z'/>",
    "diamond": "<path d='M6 2 L10 6 L6 10 L2 6 Z'/>",
    "cross": "<path d='M3 3 L9 9 M9 3 L3 9'/>",
    "plus": "<path d='M6 2 V10 M2 6 H10'/>",
    "star": "<path d='M6 1.6 L7.3 4.6 10.4 4.8 8 6.9 8.8 10 6 8.3 3.2 10 4 6.9 1.6 4.8 4.7 4.6 Z'/>",
}


@dataclass(frozen=True)
class Style:
    """Colour of each attention family and glyph of each position family, over a whole report."""

    colours: dict[str, str]
    glyphs: dict[str, str]

    def colour(self, family: tuple[str, ...]) -> str:
        return self.colours[family[0]]

    def glyph(self, family: tuple[str, ...]) -> str:
        return self.glyphs[family[0]]


def style(attention_families: Iterable[tuple[str, ...]], position_families: Iterable[tuple[str, ...]]) -> Style:
    """Assigns in order of appearance; families beyond the palette share its last entry. ``none`` gets no glyph."""
    attentions = list(dict.fromkeys(family[0] for family in attention_families))
    positions = list(dict.fromkeys(family[0] for family in position_families if family[0] != "none"))
    colours = {name: COLOURS[min(place, len(COLOURS) - 1)] for place, name in enumerate(attentions)}
    glyphs = {name: GLYPHS[min(place, len(GLYPHS) - 1)] for place, name in enumerate(positions)}
    return Style(colours, {**glyphs, "none": "none"})


def branches(families: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """For each root in order of appearance what a legend says of it: the root, with the branches that occur in brackets."""
    found: dict[str, dict[str, None]] = {}
    for root, *branch in families:
        found.setdefault(root, {}).update(dict.fromkeys(branch[:1]))
    return {root: f"{root} ({', '.join(names)})" if names else root for root, names in found.items()}
