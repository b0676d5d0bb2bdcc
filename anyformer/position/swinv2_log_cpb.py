"""Swin V2's bias: a small network of the offset, whose rows and columns it reads on a logarithmic scale.

Paper: Liu et al. 2021, 2111.09883.
Equation: s_ij = q_i . k_j / sqrt(d) + 16 sigmoid(W2 relu(W1 [g(y_i - y_j), g(x_i - x_j)] + b1))_h, with
    g(t) = sign(t) log2(1 + 8 |t| / (size - 1)) / 3 for a window of `size` rows or columns in training.
    cosine: the first term is exp(min(a_h, ln 100)) cos(q_i, k_j), with a learned.
Cost: 3 hidden + hidden h multiply-adds for each offset that occurs, or for each pair where those are fewer.
Deviation: the sigmoid, the 8 and the 3 are the authors' code's; the paper has sign(t) log(1 + |t|) and no bound.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import Size

_BOUND = 16.0
_SHARPEST = math.log(100.0)


class Swinv2LogCpb(Position):
    """Adds a computed number of head and offset to the scaled logits: any offset has one, so that windows may grow after training.

    Args:
        rows: height in tokens of the windows in training, the unit of the offsets.
        columns: their width; None: as rows.
        hidden: width of the network.
        cosine: whether queries and keys are compared by their angle times a learned number for each head, as in Swin V2, in place
            of their product.
    """

    name = "swinv2_log_cpb"
    summary = "a small network of the log-spaced offset of row and column"
    paper = "Liu et al. 2021, 2111.09883"
    family = ("vision", "bias")
    axes = 2

    def __init__(
        self, site: Site, *, rows: Size = 8, columns: Size | None = None, hidden: Size = 512, cosine: bool = False
    ) -> None:
        super().__init__(site)
        self.forms = ((Form.GRID, Form.BIAS),) + ((Form.ROTATE,),) * cosine
        self.size = (rows, rows if columns is None else columns)
        self.hidden = nn.Linear(2, hidden)
        self.out = nn.Linear(hidden, site.heads, bias=False)
        self.log_scale = nn.Parameter(torch.full((site.heads,), math.log(10.0))) if cosine else None

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`16 sigmoid(MLP(g(q_pos - k_pos)))[head]`."""
        offsets = q_pos - k_pos
        if torch.compiler.is_compiling() or offsets.is_meta or not offsets.numel():
            return self._of_pairs(head, offsets)
        low, high = offsets.flatten(0, -2).aminmax(dim=0)
        size = (high - low + 1).tolist()
        if size[0] * size[1] > offsets.numel() // 2:
            return self._of_pairs(head, offsets)
        index = torch.arange(size[0] * size[1], device=offsets.device)
        table = self.network(torch.stack([index // size[1], index % size[1]], dim=-1) + low)
        return table[((offsets - low) * torch.tensor([size[1], 1], device=offsets.device)).sum(-1), head]

    def network(self, offsets: Int[Tensor, "*p 2"]) -> Float[Tensor, "*p h"]:
        """The bias of each head for offsets of query minus key, in the wider of float32 and the weights' dtype."""
        wide = torch.promote_types(torch.float32, self.out.weight.dtype)
        unit = torch.tensor([max(length - 1, 1) for length in self.size], dtype=torch.float64, device=offsets.device)
        spaced = (offsets.sign() * torch.log2(1 + 8 * offsets.abs() / unit) / 3).to(wide)
        first, bias, second = (each.to(wide) for each in (self.hidden.weight, self.hidden.bias, self.out.weight))
        return _BOUND * torch.sigmoid(F.linear(F.relu(F.linear(spaced, first, bias)), second))

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n 2"],
        k_pos: Int[Tensor, "#b m 2"],
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b k m d"]]:
        """Queries and keys of length 1, the queries times the head's number: their positions change nothing."""
        assert self.log_scale is not None, "built to compare by products"
        wide = torch.promote_types(torch.float32, q.dtype)
        factor = self.log_scale.to(wide).clamp(max=_SHARPEST).exp() / self.scale(self.site.head_dim)
        return F.normalize(q.to(wide), dim=-1) * factor[:, None, None], F.normalize(k.to(wide), dim=-1)

    def _of_pairs(self, head: Tensor, offsets: Tensor) -> Tensor:
        """Each pair by itself, where a table of offsets would be larger or its size unknown."""
        values = self.network(offsets)
        shape = torch.broadcast_shapes(values.shape[:-1], head.shape)
        return values.expand(*shape, -1).gather(-1, head.expand(shape)[..., None])[..., 0]
