"""A picture of a pattern as a PNG."""

from pathlib import Path
from textwrap import fill

import torch

from anyformer.pattern._algebra import Or
from anyformer.pattern._facts import whole_number
from anyformer.pattern.base import Pattern

# Okabe and Ito's colours, which colour-blind readers can tell apart
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442")


def draw(pattern: Pattern, path: str | Path, n: int = 64, heads: int = 1, *, causal: bool = False) -> Path:
    """Write a PNG with one panel a head: queries downwards, keys to the right, a colour for each part.

    A pair that several parts allow has the colour of the first.

    Args:
        path: the file to write.
        n: number of tokens.
        heads: number of heads.
        causal: whether a query sees no key after it.

    Returns:
        The path written.

    Raises:
        SpecError: n is below 1, the pattern does not fit the heads, or it has no causal form.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    whole_number("draw", "n", n, 1, "draw(pattern, 'pattern.png', n=64)")
    parts = pattern.parts if isinstance(pattern, Or) else (pattern,)
    masks = [part.dense(n, heads=heads, causal=causal) for part in parts]
    colours = [_COLOURS[i % len(_COLOURS)] for i in range(len(parts))]
    image = torch.ones(heads, n, n, 3)
    for mask, colour in reversed(list(zip(masks, colours, strict=True))):
        image[mask] = torch.tensor(to_rgb(colour))
    figure = Figure(figsize=(4 * heads, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    for head in range(heads):
        axes = figure.add_subplot(1, heads, head + 1)
        axes.imshow(image[head].numpy(), interpolation="nearest", extent=(0, max(n, 1), max(n, 1), 0))
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        if heads > 1:
            axes.set_title(f"head {head}")
    figure.suptitle(fill(repr(pattern), width=45 * heads))
    if len(parts) > 1:
        patches = [Patch(color=colour, label=repr(part)) for part, colour in zip(parts, colours, strict=True)]
        figure.legend(handles=patches, loc="outside lower center", frameon=False, ncols=heads)
    target = Path(path)
    figure.savefig(target, dpi=120, format="png")
    return target
