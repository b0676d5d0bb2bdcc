"""cosFormer: linear attention through relu, with weights that a cosine of the distance lowers.

Paper: Qin et al. 2022, 2202.08791. Rotary positions: Su et al. 2021, 2104.09864, eq. 19.
Equation: out_i = sum_j w_ij v_j / max(sum_j w_ij, 1e-6), w_ij = (relu(q_i) . relu(k_j)) cos(pi (i - j) / (2 M)); the cosine of
    a difference is cos cos + sin sin, so features are relu(x) cos(a) and relu(x) sin(a) with a = pi place / (2 M). A rotary
    encoding turns relu(q) and relu(k) in the numerator only.
Decoding: a state of 2 d^2 + 2 d numbers a key head.
Deviation: M is max_length where causal, for the authors' code takes the length at hand, so that later tokens move earlier
    outputs; else it is the real length of each sample.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.attention import _features
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.side import Side
from anyformer.site import Site


class CosFormer(Attention):
    """Each query reads one sum over all keys, near ones with full weight and those M places away with none. No knobs.

    It knows distances by itself, so no position encoding is needed. There are no weights to drop, so dropout acts on the output.
    Queries and keys enter without a factor, which numerator and denominator would share. Not causal, documents cannot share a row,
    for M would be the length of each.
    """

    name = "cosformer"
    summary = "linear attention through relu, with weights that a cosine of the distance lowers"
    paper = "Qin et al. 2022, 2202.08791"
    family = ("order of the product", "cosformer")
    forms = (
        Form.ROTATE,
        Form.TURN,
        Form.GATES,
        Form.DECAY,
        Form.TOEPLITZ,
        Form.CLIPPED,
        Form.GRID,
        Form.BOXES,
        Form.EMBED,
    )
    refusal = _features.REFUSAL
    decodes = "state"
    keyed = _features.KEYED
    rotates = "self"
    ordered = True
    weights = False

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.documents = self.spans = site.causal

    def cost(self) -> Cost:
        """Keys times values, summed once, and queries times the sum, with 2 d features."""
        return Cost(self.site, "2 h n d^2 + 2 k m d^2", memory="2 d (h n + k m + k d)")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: causal and more tokens than `max_length`, where weights would turn negative.
        """
        m, most = k.shape[2], self.site.max_length
        tokens = m if context.cache is None else context.cache.seen
        if context.causal and tokens > most:
            raise SpecError(
                f"{self.name} was built for distances of less than {most} tokens, got {tokens} tokens; "
                f"build with max_length={tokens} or shorten the input"
            )
        queries, keys = context.queries, context.keys.part(context.keys.length - m, context.keys.length)
        reach = torch.tensor([[most]], device=q.device) if context.causal else longest(queries, keys)
        wide = torch.promote_types(torch.float32, q.dtype)
        raw = q, k
        q, k = torch.relu(q.to(wide)), torch.relu(k.to(wide))
        q_den, k_den = reweighted(q, queries.places, reach), reweighted(k, keys.places, reach)
        rotate = context.encoding.rotate
        if rotate is None:
            return _features.attend(q_den, k_den, v, context, raw=raw)
        q, k = rotate(q, k)
        q, k = reweighted(q, queries.places, reach), reweighted(k, keys.places, reach)
        return _features.attend(q, k, v, context, raw=raw, q_den=q_den, k_den=k_den)


def reweighted(
    x: Float[Tensor, "b k t d"], places: Int[Tensor, "#b t"], reach: Int[Tensor, "#b 1"]
) -> Float[Tensor, "b k t 2*d"]:
    """x cos(a) and x sin(a) side by side, with a = pi place / (2 reach)."""
    angles = (places.double() * (math.pi / 2) / reach)[:, None, :, None]
    return torch.cat([x * angles.cos().to(x.dtype), x * angles.sin().to(x.dtype)], dim=-1)


def longest(queries: Side, keys: Side) -> Int[Tensor, "#b 1"]:
    """The real length of each sample, of its queries or its keys, whichever are more; at least 1."""
    lengths = [
        torch.tensor([[each.length]], device=each.places.device)
        if each.keep is None
        else each.keep.sum(1, keepdim=True)
        for each in (queries, keys)
    ]
    return torch.maximum(*lengths).clamp(min=1)
