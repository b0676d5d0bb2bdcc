"""Sinusoidal positions: a fixed code of sines and cosines, added to the token vectors.

Paper: Vaswani et al. 2017, 1706.03762.
Equation: x_i <- sqrt(c) x_i + p(i), with sin(i w_l) and cos(i w_l) in p(i) and w_l = base ** (-2 l / c).
Cost: n c.
Beyond the paper: the two other layouts found in the field, and odd widths, where the last cosine is left out (t2t: a
    last 0).
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from anyformer.forms import Form
from anyformer.ops.phases import phases
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat

Layout = Literal["paper", "concat", "t2t"]


class Sinusoidal(Position):
    """Adds waves of geometrically spaced wavelengths, from 2 pi to 2 pi * base tokens; any position, no weights.

    Args:
        layout: "paper" interleaves, `[sin 0, cos 0, sin 1, cos 1, ...]`; "concat" puts all sines first, `[sin 0, sin 1,
            ... | cos 0, cos 1, ...]` (Marian, Transformer-XL); "t2t" does so with w_l = base ** (-l / (c/2 - 1)), so
            that the slowest wave is `base` times as long as the fastest (tensor2tensor, fairseq, M2M100).
        base: ratio of the longest to the shortest wavelength.
        scale_tokens: whether token vectors are multiplied by sqrt(c) first, as in the paper: |p(i)| is sqrt(c / 2),
            beside which vectors of length about 1 (a table drawn with standard deviation c ** -0.5) would drown. Turn
            it off where the vectors already have entries of about 1.
    """

    name = "sinusoidal"
    summary = "a fixed code of sines and cosines, added to the token vectors"
    paper = "Vaswani et al. 2017, 1706.03762"
    family = ("absolute", "trigonometric")
    scope = "model"
    additive = True

    def __init__(
        self, site: Site, *, layout: Layout = "paper", base: PositiveFloat = 10000.0, scale_tokens: bool = True
    ) -> None:
        super().__init__(site)
        self.forms = ((Form.EMBED,),)
        self.relative = False
        self.layout: Layout = layout
        self.base = base
        self.scale_tokens = scale_tokens

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`sqrt(c) x + p(positions)`, added in the wider of float32 and x's dtype."""
        wide = torch.promote_types(torch.float32, x.dtype)
        scaled = x.to(wide) * x.shape[-1] ** 0.5 if self.scale_tokens else x.to(wide)
        return (scaled + self.code(positions).to(wide)).to(x.dtype)

    def code(self, positions: Int[Tensor, "#b n"]) -> Float64[Tensor, "#b n c"]:
        """The waves at these positions."""
        return waves(positions, self.site.dim, self.layout, self.base)


def waves(positions: Int[Tensor, "*p"], width: int, layout: Layout, base: float) -> Float64[Tensor, "*p c"]:
    """The vectors p(position) of `width` channels; see `Sinusoidal` for the layouts."""
    if layout == "t2t":
        half = width // 2
        exponents = torch.arange(half, dtype=torch.float64, device=positions.device) / -max(half - 1, 1)
        angles = positions[..., None] * base**exponents
        code = torch.cat([angles.sin(), angles.cos()], dim=-1)
        return torch.nn.functional.pad(code, (0, width - 2 * half))
    angles = phases(positions, width, base)
    if layout == "concat":
        return torch.cat([angles.sin(), angles[..., : width // 2].cos()], dim=-1)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :width]
