"""The spatial gate of gMLP and aMLP: a learned mixture of normalised tokens, by place."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.mixer.base import blank
from anyformer.ops.left import leftmost
from anyformer.site import Site


class SpatialGate(nn.Module):
    """g_i = sum_j W_ij norm(z_j) + b_i over the real tokens j, and j <= i when causal.

    W starts near 0 and b at 1, so that the gate starts as one that lets all through.

    Args:
        width: channels of z.
        toeplitz: whether W_ij depends on j - i only.
    """

    def __init__(self, site: Site, width: int, *, toeplitz: bool) -> None:
        super().__init__()
        longest = site.max_length
        self.causal = site.causal
        self.norm = nn.LayerNorm(width)
        self.weight = nn.Parameter(torch.empty((2 * longest - 1,) if toeplitz else (longest, longest)))
        self.bias = nn.Parameter(torch.ones(longest))
        nn.init.uniform_(self.weight, -1e-3 / longest, 1e-3 / longest)

    def forward(self, z: Float[Tensor, "b n f"], context: Context) -> Float[Tensor, "b n f"]:
        """The gates; a cache keeps the normalised tokens."""
        z = self.norm(z)
        if context.queries.keep is not None:  # the norm's bias made padding non-zero
            z = blank(z, context.queries.keep)
        if context.cache is None:  # slots are places
            n = z.shape[1]
            return torch.einsum("nm,bmf->bnf", self.first(n), z) + self.bias[:n, None]
        places = context.queries.places
        z = leftmost(context.keys, context.cache.extend("z", z))[1][0]
        return torch.einsum("bnm,bmf->bnf", self.rows(places, z.shape[1]), z) + self.bias[places][..., None]

    def first(self, n: int) -> Float[Tensor, "n n"]:
        """The first n rows and columns of W: a part of the table, where picking its rows would copy them."""
        if self.weight.dim() == 1:
            return self.rows(torch.arange(n, device=self.weight.device)[None], n)[0]
        weight = self.weight[:n, :n]
        return weight.tril() if self.causal else weight

    def rows(self, places: Int[Tensor, "#b n"], m: int) -> Float[Tensor, "#b n m"]:
        """The rows of W at these places, over the places 0 to m - 1."""
        columns = torch.arange(m, device=places.device)
        if self.weight.dim() == 1:
            rows = self.weight[columns - places[..., None] + self.weight.shape[0] // 2]
        else:
            rows = self.weight[:, :m][places]
        return rows.masked_fill(columns > places[..., None], 0.0) if self.causal else rows
