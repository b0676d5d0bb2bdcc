"""Concatenated positions: the code of a position stands beside the token vector, and one product mixes both.

Paper: Su 2021, https://kexue.fm/archives/8130 (no arXiv id).
Equation: x_i <- W [x_i; p_i] = W_x x_i + W_p p_i, with the code p_i of any encoding that adds one vector a position.
Cost: n c (c + w) for codes of w = width channels, and that of the source; c (c + w) weights.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position._nested import LEARNED, PositionSpec, additive
from anyformer.position._tables import inner, with_knobs
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import Size


class Concatenated(Position):
    """Appends the code of a position to the token vector and projects both to the width of the model.

    It starts as `x + W_p p`, W_p being drawn so that the second vector is as long as a token vector, about 1.

    Args:
        source: spec of the encoding that makes the codes: learned, sinusoidal, hierarchical, rnn, or on a grid sinusoidal_2d or
            vit_learned.
        width: channels of a code; None: dim.

    Raises:
        SpecError: the source adds no vector a position; in `embed`, a position that the source does not have.
    """

    name = "concatenated"
    summary = "the code of the position beside the token vector, and one product of both"
    paper = "Su 2021, kexue.fm/archives/8130"
    family = ("absolute", "merge")
    scope = "model"

    def __init__(self, site: Site, *, source: PositionSpec = LEARNED, width: Size | None = None) -> None:
        super().__init__(site)
        self.forms = ((Form.EMBED,),)
        self.relative = False
        width = site.dim if width is None else width
        codes = Site(width, site.heads, head_dim=site.head_dim, causal=site.causal, max_length=site.max_length)
        self.source = additive(self.name, source, codes)
        self.axes, self.limit, self.digits = self.source.axes, self.source.limit, self.source.digits
        self.extensions = self.source.extensions
        self.weight = nn.Parameter(torch.empty(site.dim, site.dim + width))
        with torch.no_grad():
            first = torch.zeros((1, 1) if self.axes == 1 else (1, 1, self.axes), dtype=torch.int64)
            length = self.source.code(first).norm()
            nn.init.eye_(self.weight[:, : site.dim])
            self.weight[:, site.dim :].normal_(std=site.dim**-0.5).div_(length)

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The same over the source that takes over."""
        return with_knobs(spec, source=self.source.extended(inner(spec, "source") or LEARNED, way, to))

    def carry(self, way: Spec, to: int) -> dict[str, Tensor]:
        """What the source carries, and everything else as it is."""
        own = {name: part for name, part in self.state_dict().items() if not name.startswith("source.")}
        return own | {f"source.{name}": part for name, part in self.source.carry(way, to).items()}

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n *a"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`W [x; p]`, in the wider of float32 and x's dtype."""
        wide = torch.promote_types(torch.float32, x.dtype)
        code = self.source.code(positions).to(wide).expand(x.shape[0], -1, -1)
        return F.linear(torch.cat([x.to(wide), code], dim=-1), self.weight.to(wide)).to(x.dtype)
