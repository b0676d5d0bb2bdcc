"""A recurrent front end: a recurrence reads the words before the first block, and its states are the only position.

Paper: Cho et al. 2014, 1406.1078, for the unit; Wang et al. 2019, 1907.05572 (R-Transformer), for a recurrence in place of
    position codes.
Equation: x_i <- x_i + W [h_i; g_i], with h = GRU(x) read from the first real token on and g = GRU'(x) read from the last one
    back; causal: x_i <- x_i + W h_i.
Cost: 3 w (c + w) + w c multiply-adds a token and direction for w = width, n of them one after the other.
Deviation: one recurrence over the whole sequence before the first block; R-Transformer has one over a short window in each.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.ops.recurrent import backwards, last
from anyformer.position.base import Position
from anyformer.side import Side, take
from anyformer.site import Site
from anyformer.typing import Size


class RnnFront(Position):
    """Adds the states of a recurrence over the tokens; positions themselves are never read.

    Args:
        width: channels of the state of one direction; None: dim.
    """

    name = "rnn_front"
    summary = "a recurrent unit reads the tokens before the first block"
    paper = "Cho et al. 2014, 1406.1078; Wang et al. 2019, 1907.05572"
    family = ("absolute", "recurrent")
    scope = "model"
    reads_neighbours = True

    def __init__(self, site: Site, *, width: Size | None = None) -> None:
        super().__init__(site)
        self.forms = ((Form.EMBED,),)
        width = site.dim if width is None else width
        self.ahead = nn.GRU(site.dim, width, batch_first=True)
        self.back = None if site.causal else nn.GRU(site.dim, width, batch_first=True)
        both = width if site.causal else 2 * width
        self.out = nn.Linear(both, site.dim, bias=False)
        # token vectors start with a length of 1: the unit sees inputs of order one, and adds vectors as long as they are
        for unit in (self.ahead,) if self.back is None else (self.ahead, self.back):
            nn.init.normal_(unit.get_parameter("weight_ih_l0"))
        nn.init.normal_(self.out.weight, std=(both * site.dim) ** -0.5)

    def read(self, x: Float[Tensor, "b n c"], queries: Side, state: dict[str, Tensor] | None) -> Float[Tensor, "b n c"]:
        """`x + W [h; g]`; the state of the first unit after the last real token is kept."""
        if x.shape[1] == 0:
            return x
        start = None if state is None else state.get("hidden")
        hidden = self.ahead(x, None if start is None else start[None])[0]
        if state is not None:
            state["hidden"] = last(hidden, queries.keep, start)
        if self.back is not None:
            order = backwards(hidden, queries.keep)
            hidden = torch.cat([hidden, take(self.back(take(x, order))[0], order)], dim=-1)
        return x + self.out(hidden)
