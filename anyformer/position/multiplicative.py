"""Multiplicative positions: the code of a position scales the channels of a token vector instead of being added.

Paper: Su 2021, https://kexue.fm/archives/8130 (no arXiv id).
Equation: x_i <- x_i * (1 + p_i), with the code p_i of any encoding that adds one vector a position.
Cost: n c, and that of the source.
Deviation: the factor is 1 + p and not p, so that a small code leaves the token as it is.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.forms import Form
from anyformer.position._nested import LEARNED, PositionSpec, additive
from anyformer.position._tables import inner, with_knobs
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec


class Multiplicative(Position):
    """Multiplies token vectors by one plus the code of their position, channel by channel.

    Args:
        source: spec of the encoding that makes the codes: learned, sinusoidal, hierarchical, rnn, or on a grid sinusoidal_2d or
            vit_learned.

    Raises:
        SpecError: the source adds no vector a position; in `embed`, a position that the source does not have.
    """

    name = "multiplicative"
    summary = "token vectors times one plus the code of their position"
    paper = "Su 2021, kexue.fm/archives/8130"
    family = ("absolute", "merge")
    scope = "model"

    def __init__(self, site: Site, *, source: PositionSpec = LEARNED) -> None:
        super().__init__(site)
        self.forms = ((Form.EMBED,),)
        self.relative = False
        self.source = additive(self.name, source, site)
        self.axes, self.limit, self.digits = self.source.axes, self.source.limit, self.source.digits
        self.extensions = self.source.extensions

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
        """`x * (1 + p)`, in the wider of float32 and x's dtype."""
        wide = torch.promote_types(torch.float32, x.dtype)
        return (x.to(wide) * (1.0 + self.source.code(positions).to(wide))).to(x.dtype)
