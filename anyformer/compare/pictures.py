"""Pictures of methods: what an attention makes of a sample, and what a position encoding knows, also beyond its length."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.compare.style import COLOURS, INK
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.mixer.multihead import MultiHead
from anyformer.model.build import added_at_embedding, build_mixer, build_position
from anyformer.model.config import ModelConfig
from anyformer.model.explain import Call, calls_of, terms, weights
from anyformer.model.initial import seeded
from anyformer.model.transformer import Transformer
from anyformer.ops.draws import generator
from anyformer.position.base import Position
from anyformer.side import grid
from anyformer.site import Site
from anyformer.spec import Spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 16  # channels of a head in a picture
_TOKENS, _INFLUENCE = 64, 24  # most tokens of a sample; the second where each row takes a gradient for each channel
_HATCH: dict[str, Any] = {"facecolor": "none", "edgecolor": COLOURS[1], "hatch": "//", "linewidth": 0}
_LINES = ("solid", "dashed", "dotted", "dashdot")


def draw_weights(spec: Spec, path: Path, n: int, heads: int, *, causal: bool) -> int:
    """Draw what each token of a sample takes from each, one panel a head, and return the number of tokens.

    The sample is a row of random tokens and then the same row again; queries and keys share a projection, so that alike tokens
    meet. Weights are drawn from seed 0. A mixer without queries and keys is drawn by the influence of each token, as one head.
    """
    site = Site(_WIDTH * heads, heads, causal=causal, max_length=n)
    with seeded(0, "picture"):
        layer = build_mixer(spec, "none", site)
    if isinstance(layer, MultiHead) and layer.k is not None:
        layer.k.load_state_dict(layer.q.state_dict())
    weighs = isinstance(layer, MultiHead) and "x" not in layer.attention.reads
    n = min(n, _TOKENS if weighs else _INFLUENCE)
    half = torch.randn(-(-n // 2), site.dim, generator=generator(0, "sample"))
    first = torch.arange(n)[None] == 0  # a sample has no ids: its first token stands for those that are flagged by them
    flags = first if layer.flag_ids else None
    (call,) = calls_of(layer, partial(layer, 3 * torch.cat([half, half])[None, :n], global_mask=flags))
    rows = n if layer.shortening is None else layer.shortening.count
    matrices = weights(call, range(rows), None)[0]
    figure = _figure(4 * len(matrices), 4)
    for head, matrix in enumerate(matrices):
        axes = figure.add_subplot(1, len(matrices), head + 1)
        _image(axes, matrix)
        axes.set(xlabel="token that is read", ylabel="token that reads")
        if len(matrices) > 1:
            axes.set_title(f"head {head}")
    what = "weights" if weighs else "influence"
    figure.suptitle(fill(f"{spec}: {what} on {n} tokens, the second half like the first", 45 * len(matrices)))
    figure.savefig(path, dpi=120, format="png")
    return n


def draw_position(spec: Spec, path: Path, length: int, heads: int, *, causal: bool) -> str:
    """Draw an encoding up to twice the length it is built for, and return why it refuses what lies beyond ("" if it does not).

    Left what a token or a query becomes at each position, or what each head adds at each offset; right the score of equal tokens
    over their distance. All tokens are the same one, so all that differs is the position.
    """
    with seeded(0, "picture"):
        position = build_position(spec, Site(_WIDTH * heads, heads, max_length=length))
    side = math.isqrt(length)
    trained, beyond = (length, 2 * length) if position.axes == 1 else (side, 2 * side)
    causal, refused = causal or position.causal_only, ""
    call, model = _call(spec, position, length, heads, trained, causal=causal)
    shown = trained
    try:
        call, model = _call(spec, position, length, heads, beyond, causal=causal)
        shown = beyond
    except SpecError as error:
        refused = str(error)
    figure = _figure(11, 5)
    left, right = (figure.add_subplot(1, 2, at) for at in (1, 2))
    placed = next(part for part in model.modules() if isinstance(part, Position))
    _draw_code(left, placed, call)
    if position.axes == 1:
        _mark_rows(left, shown, trained, beyond)
        _draw_distances(right, call, trained, beyond, causal=causal)
    else:
        _draw_grid(right, call, shown, trained, beyond)
    if refused:
        figure.supxlabel(fill(f"beyond {trained}: refused. {refused}", 150), fontsize=7)
    figure.suptitle(f"{spec}, built for {f'{trained} x {trained}' if position.axes == 2 else trained} positions")
    figure.savefig(path, dpi=120, format="png")
    return refused


def _call(
    spec: Spec, position: Position, length: int, heads: int, most: int, *, causal: bool
) -> tuple[Call, Transformer]:
    """What one layer of softmax attention is handed for equal tokens at positions 0..most-1, on a grid most x most."""
    config = ModelConfig(
        vocab=1,
        dim=_WIDTH * heads,
        depth=1,
        heads=heads,
        attention="softmax",
        position=str(spec),
        causal=causal,
        max_length=length,
    )
    model = Transformer(config)
    places = None if position.axes == 1 else grid(most, most)
    with torch.no_grad(), seeded(0, "picture"):
        for part in model.modules():
            for each in part.parameters() if isinstance(part, Position) else ():
                if each.numel() > 1 and each.min() == each.max():  # untrained, it says nothing yet
                    each.normal_(std=0.5)
        tokens = torch.zeros(1, most**position.axes, dtype=torch.int64)
        (call,) = calls_of(model, lambda: model(tokens, positions=places))
    return call, model


def _draw_code(axes: "Axes", position: Position, call: Call) -> None:
    """What the one token, or else the one query or value, becomes at each position; else the score of each pair of places."""
    n = call.x.shape[1]
    forms = {form for way in position.forms for form in way}
    one, places = torch.ones(1, position.site.heads, n, position.site.head_dim), torch.arange(n)[None]
    moved = position.axes == 1 and not position.draws
    if added_at_embedding(position):
        image, title = call.x[0], "the token as the layer reads it"
    elif moved and Form.ROTATE in forms:
        image, title = position.rotate(one, one, places, places)[0][0, 0], "a query of ones in its position"
    elif moved and Form.TURN in forms:
        image, title = position.turn(one, places)[0, 0], "a value of ones in its position"
    else:
        image, title = _scores(call, range(n))[0], "score of every pair, head 0"
    _image(axes, image.detach())
    across = "key" if image.shape[1] == n else "channel"
    axes.set(xlabel=across, ylabel="position" if position.axes == 1 else "token, row by row", title=title)


def _mark_rows(axes: "Axes", n: int, trained: int, beyond: int) -> None:
    """Where the rows end that it is built for, and what it refuses."""
    axes.axhline(trained, color=INK, linewidth=1, linestyle="dashed")
    axes.set_ylim(beyond, 0)
    if n < beyond:
        axes.axhspan(n, beyond, **_HATCH)
        axes.text(
            axes.get_xlim()[1] / 2, (n + beyond) / 2, "refused", ha="center", va="center", backgroundcolor="white"
        )


def _draw_distances(axes: "Axes", call: Call, trained: int, beyond: int, *, causal: bool) -> None:
    """The score of the last token with all before it, and where not causal of the first with all after it."""
    n = call.x.shape[1]
    scores = _scores(call, [n - 1, 0])
    for head, (last, first) in enumerate(scores):
        look = {"color": COLOURS[head % len(COLOURS)], "linestyle": _LINES[head % len(_LINES)], "linewidth": 1.4}
        axes.plot(range(1 - n, 1), last.tolist(), label=f"head {head}", **look)
        if not causal:
            axes.plot(range(n), first.tolist(), **look)
    for edge in (-trained,) if causal else (-trained, trained):
        axes.axvline(edge, color=INK, linewidth=1, linestyle="dashed")
        if n < beyond:
            axes.axvspan(edge, math.copysign(beyond, edge), **_HATCH)
    axes.set_xlim(-beyond, 0 if causal else beyond)
    axes.set(xlabel="key - query", title="score of equal tokens; dashed: length it is built for")
    axes.legend(frameon=False, fontsize=8)


def _draw_grid(axes: "Axes", call: Call, shown: int, trained: int, beyond: int) -> None:
    """The score of the token in the middle with all others of the grid."""
    from matplotlib.patches import Rectangle

    middle = shown // 2 * shown + shown // 2
    _image(axes, _scores(call, [middle])[0, 0].view(shown, shown))
    axes.add_patch(Rectangle((0, 0), trained, trained, fill=False, edgecolor=INK, linestyle="dashed"))
    axes.set_xlim(0, beyond)
    axes.set_ylim(beyond, 0)
    if shown < beyond:
        axes.add_patch(Rectangle((0, shown), beyond, beyond - shown, **_HATCH))
        axes.add_patch(Rectangle((shown, 0), beyond - shown, shown, **_HATCH))
        axes.text(beyond / 2, (shown + beyond) / 2, "refused", ha="center", va="center", backgroundcolor="white")
    axes.set(xlabel="column", ylabel="row", title="score with the middle token; dashed: grid it is built for")


def _scores(call: Call, rows: Sequence[int]) -> Float[Tensor, "h r m"]:
    total = sum(terms(call, rows, None).values())
    assert isinstance(total, Tensor)
    return total[0]


def _figure(width: int, height: int) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _image(axes: "Axes", image: Float[Tensor, "rows columns"]) -> None:
    """A heat map from white up to blue and, where there are negative numbers, down to vermilion."""
    from matplotlib.colors import LinearSegmentedColormap

    low, high = float(image.min()), float(image.max())
    both = low < 0
    most = max(abs(low), abs(high)) or 1.0
    colours = LinearSegmentedColormap.from_list(
        "", [COLOURS[1], "white", COLOURS[0]] if both else ["white", COLOURS[0]]
    )
    rows, columns = image.shape
    drawn = axes.imshow(
        image.double().numpy(),
        cmap=colours,
        vmin=-most if both else 0.0,
        vmax=most,
        aspect="auto",
        interpolation="nearest",
        extent=(0, columns, rows, 0),
    )
    axes.figure.colorbar(drawn, ax=axes, fraction=0.046, pad=0.02)
