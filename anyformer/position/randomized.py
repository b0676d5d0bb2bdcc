"""Randomized positions: any encoding reads ascending random numbers in place of 0, 1, 2, ..., so that training meets far ones.

Paper: Ruoss et al. 2023, 2305.16843.
Equation: position i is read as P_i, where P_0 < P_1 < ... are distinct and drawn from 0..longest-1 without order.
Cost: that of the base, without its forms by offset, and one sort of `longest` numbers.
Deviation: in eval the draw is one and the same whatever the length (a text then means the same in one pass and token by token):
    max_length numbers, from the layer's seed. The paper draws anew there too, as many as there are tokens.
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.draws import generator
from anyformer.position._nested import ROPE, PositionSpec, build
from anyformer.position._tables import with_knobs
from anyformer.position.base import Position
from anyformer.position.bind import how_many
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import Size

_BY_OFFSET = {Form.TOEPLITZ, Form.GRID, Form.BOXES, Form.DECAY, Form.TABLE, Form.CLIPPED}


class Randomized(Position):
    """Gives its base drawn positions: a fresh draw for all rows and layers at each step of training, a fixed one in eval.

    Args:
        base: spec of the encoding that reads the drawn positions; its tables have `longest` rows.
        longest: how many positions are drawn from; None: 4 max_length. With max_length nothing is random.

    Raises:
        SpecError: `longest` is below max_length, or the base does not read one position a token.
    """

    name = "randomized"
    summary = "another encoding reads ascending random positions in place of 0, 1, 2, ..."
    paper = "Ruoss et al. 2023, 2305.16843"
    family = ("since the survey", "randomized")

    def __init__(self, site: Site, *, base: PositionSpec = ROPE, longest: Size | None = None) -> None:
        super().__init__(site)
        self.draws = 4 * site.max_length if longest is None else longest
        if self.draws < site.max_length:
            raise SpecError(
                f"randomized: expected longest to be at least max_length={site.max_length}, so that every token has a position "
                f"of its own, got {longest}; leave it out for four times that"
            )
        self.base = build(base, replace(site, max_length=self.draws))
        if self.base.axes != 1 or self.base.reads_neighbours or self.base.reads_tokens or self.base.draws:
            raise SpecError(
                f"randomized: expected a base that reads one position a token, such as rope, t5, learned or sinusoidal, "
                f"got {self.base.name}"
            )
        # real gaps are irregular: what counts on offsets being places is gone
        self.forms = tuple(tuple(form for form in term if form not in _BY_OFFSET) for term in self.base.forms)
        if not all(self.forms) or not self.forms:
            raise SpecError(
                f"randomized: {self.base.name} reads no single positions; use a base such as rope, t5 or learned"
            )
        self.lacks = dict.fromkeys(_BY_OFFSET, "draws positions, so that offsets are no distances between tokens")
        self.relative = False
        self.causal_only = self.base.causal_only
        self.scope = self.base.scope
        self.limit = site.max_length
        self.places: Tensor
        self.register_buffer("places", torch.arange(site.max_length))
        if not self.places.is_meta:
            self.places.copy_(self._fixed(site.max_length))

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The same draws, of which more are read.

        Raises:
            SpecError: fewer numbers to draw from than tokens.
        """
        if to > self.draws:
            raise SpecError(
                f"extend: randomized draws from {self.draws} positions, so that {to} tokens have none of their own; "
                f"use to={self.draws} or less"
            )
        return with_knobs(spec, longest=self.draws)

    def carry(self, way: Spec, to: int) -> dict[str, Tensor]:
        """All weights, and the fixed draw of as many positions as there are tokens now."""
        return {**self.state_dict(), "places": self._fixed(to).to(self.places.device)}

    def scale(self, head_dim: int) -> float:
        """The base's."""
        return self.base.scale(head_dim)

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """What the base makes of the drawn positions."""
        self.admit(positions)
        return self.base.embed(x, self.draw(how_many(self, positions))[positions], tokens)

    def draw(self, count: int) -> Int[Tensor, "p"]:
        """The position that stands for each of 0..count-1 or more: `count` new ones in training, else the fixed ones."""
        if not self.training:
            return self.places
        return torch.randperm(self.draws, device=self.places.device)[:count].sort().values

    def drawn_for(self) -> Position:
        """The base."""
        return self.base

    def _fixed(self, count: int) -> Int[Tensor, "p"]:
        everywhere = torch.randperm(self.draws, generator=generator(self.site.seed, "randomized"), device="cpu")
        return everywhere[:count].sort().values
