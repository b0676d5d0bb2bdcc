"""PEG: a convolution with one small filter a channel; where it meets the zeros beyond the border, it tells where the border is.

Paper: Chu et al. 2021, 2102.10882.
Equation: x_i <- x_i + b + sum_t f_t * x_(i + t), over the tokens up to size // 2 before and after i, on a grid in both directions;
    absent ones are 0. When causal, over the size - 1 tokens before i and i itself.
Cost: size c multiply-adds a token, on a grid size^2 c.
Deviation: it stands before the first block, where the paper's stands after it.
Beyond the paper: sequences, and causal ones.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.left import newest
from anyformer.ops.neighbours import gathered, in_line, on_grid, real_tokens
from anyformer.position.base import Position
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Size


class Peg(Position):
    """Adds to each token a filtered sum of its neighbours. Class tokens, which have no position, are neither read nor changed.

    Args:
        size: tokens that a filter covers, an odd number where not causal.
        grid: whether tokens are neighbours by row and column rather than by their order.

    Raises:
        SpecError: an even size in both directions; a causal grid.
    """

    name = "peg"
    summary = "a small convolution over neighbouring tokens, before the first block"
    paper = "Chu et al. 2021, 2102.10882"
    family = ("other", "convolution")
    scope = "model"
    reads_neighbours = True

    def __init__(self, site: Site, *, size: Size = 3, grid: bool = False) -> None:
        super().__init__(site)
        if grid and site.causal:
            raise SpecError(
                "peg: on a grid there is no earlier and later; use grid=False in causal models, or causal=False"
            )
        if not site.causal and size % 2 == 0:
            raise SpecError(
                f"peg: a filter around a token covers an odd number of tokens, got size={size}; use {size + 1}"
            )
        self.forms = ((Form.EMBED,),)
        self.axes = 2 if grid else 1
        self.size = size
        taps = size * size if grid else size
        self.filter = nn.Parameter(torch.empty(taps, site.dim))
        self.constant = nn.Parameter(torch.zeros(site.dim))
        nn.init.normal_(self.filter, std=(2 / taps) ** 0.5)

    def read(self, x: Float[Tensor, "b n c"], queries: Side, state: dict[str, Tensor] | None) -> Float[Tensor, "b n c"]:
        """`x + b + f * x`; when causal, the last size - 1 tokens are kept."""
        seen = x if queries.without is None else x.masked_fill(queries.without[:, :, None], 0.0)
        if self.axes == 2:
            positions = queries.positions.expand(len(x), -1, -1)
            present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            for part in (queries.keep, None if queries.without is None else ~queries.without):
                present = present if part is None else present & part
            slots = on_grid(positions, self.size // 2, present)
        elif self.site.causal:
            before = self.size - 1
            start = None if state is None else state.get("tail")
            tail = x.new_zeros(len(x), before, x.shape[2]) if start is None else start
            seen = torch.cat([tail, seen], dim=1)
            if state is not None:
                state["tail"] = newest(seen, before, queries.keep)
            slots = in_line(seen.shape[1], before, 0, real=real_tokens(seen, None))[:, before:]
        else:
            half = self.size // 2
            slots = in_line(x.shape[1], half, half, real=real_tokens(x, queries.keep))
        return x + self.constant + torch.einsum("bntc,tc->bnc", gathered(seen, slots), self.filter)
