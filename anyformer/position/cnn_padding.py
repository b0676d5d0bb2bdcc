"""Convolutions before the first block, whose zero padding is the only source of positions.

Paper: Islam, Jia and Bruce 2020, 2001.08248.
Equation: x_i <- x_i + h_i, with h the last of `depth` convolutions, all but the last followed by a ReLU:
    h^l_i = b^l + sum_t W^l_t h^(l-1)_(i + t) over the tokens up to size // 2 before and after i, on a grid in both directions; when
    causal, over the size - 1 tokens before i and i itself. What lies beyond the border is 0, or mirrored, or the other end.
Cost: depth size c^2 multiply-adds a token, on a grid depth size^2 c^2.
Beyond the paper, which reads positions out of image classifiers: the same as a position encoding, also of sequences.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.left import newest
from anyformer.ops.neighbours import Padding, gathered, in_line, on_grid, real_tokens
from anyformer.position.base import Position
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Size


class CnnPadding(Position):
    """Adds what a stack of convolutions makes of a token's neighbours: with zeros beyond the border it can tell where that is.

    Args:
        depth: number of convolutions.
        size: tokens that one covers, an odd number where not causal.
        padding: what lies beyond the ends of a sequence: "zeros", which tell the position; "reflect", the sequence mirrored, or
            "circular", its other end, which do not, for comparison.
        grid: whether tokens are neighbours by row and column rather than by their order.

    Raises:
        SpecError: an even size in both directions; a causal grid; another padding than zeros on a grid or when causal.
    """

    name = "cnn_padding"
    summary = "convolutions before the first block, whose zero padding tells positions"
    paper = "Islam et al. 2020, 2001.08248"
    family = ("other", "convolution")
    scope = "model"
    reads_neighbours = True

    def __init__(
        self, site: Site, *, depth: Size = 2, size: Size = 3, padding: Padding = "zeros", grid: bool = False
    ) -> None:
        super().__init__(site)
        if grid and site.causal:
            raise SpecError(
                "cnn_padding: on a grid there is no earlier and later; use grid=False in causal models, or causal=False"
            )
        if not site.causal and size % 2 == 0:
            raise SpecError(
                f"cnn_padding: a filter around a token covers an odd number of tokens, got size={size}; use {size + 1}"
            )
        if padding != "zeros" and (grid or site.causal):
            raise SpecError(
                f"cnn_padding: padding={padding} needs both ends of a sequence; on a grid and in causal models use zeros"
            )
        self.forms = ((Form.EMBED,),)
        self.axes = 2 if grid else 1
        self.size = size
        self.padding: Padding = padding
        taps = size * size if grid else size
        self.filters = nn.Parameter(torch.empty(depth, taps, site.dim, site.dim))
        self.constants = nn.Parameter(torch.zeros(depth, site.dim))
        nn.init.normal_(self.filters, std=(2 / (taps * site.dim)) ** 0.5)

    def read(self, x: Float[Tensor, "b n c"], queries: Side, state: dict[str, Tensor] | None) -> Float[Tensor, "b n c"]:
        """`x + h`; when causal, the last size - 1 inputs of each convolution are kept."""
        present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        for part in (queries.keep, None if queries.without is None else ~queries.without):
            present = present if part is None else present & part
        slots = None if self.site.causal else self._slots(x, queries, present)
        hidden = x
        for layer, (filters, constant) in enumerate(zip(self.filters, self.constants, strict=True)):
            hidden = hidden.masked_fill(~present[:, :, None], 0.0)
            seen = self._behind(hidden, layer, queries, state) if slots is None else gathered(hidden, slots)
            hidden = torch.einsum("bntc,tcd->bnd", seen, filters) + constant
            if layer < len(self.filters) - 1:
                hidden = F.relu(hidden)
        return x + hidden

    def _slots(self, x: Tensor, queries: Side, present: Tensor) -> Tensor:
        half = self.size // 2
        if self.axes == 2:
            return on_grid(queries.positions.expand(len(x), -1, -1), half, present)
        return in_line(x.shape[1], half, half, real=real_tokens(x, queries.keep), padding=self.padding)

    def _behind(self, x: Tensor, layer: int, queries: Side, state: dict[str, Tensor] | None) -> Tensor:
        """Each token with the size - 1 before it, those of earlier calls included, `[b n t c]`."""
        before, name = self.size - 1, f"tail {layer}"
        start = None if state is None else state.get(name)
        tail = x.new_zeros(len(x), before, x.shape[2]) if start is None else start
        seen = torch.cat([tail, x], dim=1)
        if state is not None:
            state[name] = newest(seen, before, queries.keep)
        return gathered(seen, in_line(seen.shape[1], before, 0, real=real_tokens(seen, None))[:, before:])
