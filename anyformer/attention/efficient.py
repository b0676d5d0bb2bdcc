"""Efficient attention: keys are normalised along the sequence and queries along their channels, so that no pair is compared.

Paper: Shen, Zhang, Zhao, Yi and Li 2018, 1812.01243.
Equation: out_i = sum_c softmax_c(q_i)_c sum_j softmax_j(k_jc) v_j; each row of the implied weights sums to 1. Causal, the second
    softmax runs over j <= i: a running average for each channel, which a later key of weight e moves by its share of e.
Decoding: a state of d^2 + d numbers a key head.
Deviation: the paper has no causal form.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.attention.base import Attention
from anyformer.context import Context, LayerCache
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops.linear_gated import gated_linear_attention_with_state


class Efficient(Attention):
    """Each channel of the keys is one average of the values over the whole sequence; each query mixes these d averages. No knobs.

    There are no weights to drop, so dropout acts on the output. The paper scales neither queries nor keys.
    """

    name = "efficient"
    summary = "every key channel averages the values once; each query mixes the averages"
    paper = "Shen et al. 2018, 1812.01243"
    family = ("order of the product", "efficient")
    forms = (Form.ROTATE, Form.TURN, Form.EMBED)
    absolute = frozenset({Form.ROTATE})
    refusal = (
        "its softmax runs along the keys before any query meets them, so no score belongs to a pair; use an encoding added at the "
        "embedding, such as sinusoidal or learned; rope runs too, but mixed"
    )
    documents = False
    decodes = "state"
    weights = False

    def cost(self) -> Cost:
        """Keys times values, summed once, and queries times the sum."""
        return Cost(self.site, "h n d^2 + k m d^2", memory="k d^2")

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        encoding, keep = context.encoding, context.keys.keep
        keep = None if keep is None else keep[:, keep.shape[1] - k.shape[2] :]
        v = v if encoding.turn is None else encoding.turn(v)
        wide = torch.promote_types(torch.float32, q.dtype)
        q, k = torch.softmax(q.to(wide), dim=-1), k.to(wide)
        out = running_average(q, k, v, keep, context.cache) if context.causal else average(q, k, v, keep)
        return out if encoding.turn_back is None else encoding.turn_back(out)


def average(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    keep: Bool[Tensor, "b m"] | None,
) -> Float[Tensor, "b h n v"]:
    """sum_c q_ic sum_j softmax_j(k_jc) v_j over the keys to be read; 0 where there are none."""
    if keep is None:
        k = torch.softmax(k, dim=2)
    else:
        hidden = ~keep[:, None, :, None]
        k = torch.softmax(k.masked_fill(hidden, torch.finfo(k.dtype).min), dim=2).masked_fill(hidden, 0.0)
        v = v.masked_fill(hidden, 0.0)
    averages = k.mT @ v.to(k.dtype)
    q = q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    return (q @ averages.unsqueeze(2)).flatten(1, 2).to(v.dtype)


def running_average(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    keep: Bool[Tensor, "b m"] | None,
    cache: LayerCache | None,
) -> Float[Tensor, "b h n v"]:
    """`average` over the keys up to each query's own place.

    With L_t = log(sum_(j <= t) exp(k_j), the averages are S_t = exp(L_(t-1) - L_t) S_(t-1) + exp(k_t - L_t) v_t: no exponent is
    above 0, and no key is compared with a later one.
    """
    floor = torch.finfo(k.dtype).min / 4  # not -inf, whose differences are no numbers
    if keep is not None:
        k = k.masked_fill(~keep[:, None, :, None], floor)
    fresh = k.new_full((*k.shape[:2], 1, k.shape[3]), floor)
    before = cache.state["log_sum"] if cache is not None and cache.state else fresh
    sums = torch.logcumsumexp(torch.cat([before, k], dim=2), dim=2)
    out, averages = gated_linear_attention_with_state(
        q,
        torch.exp(k - sums[:, :, 1:]),
        v,
        sums[:, :, :-1] - sums[:, :, 1:],
        state=cache.state["averages"] if cache is not None and cache.state else None,
        keep=keep,
    )
    if cache is not None:
        cache.state |= {"averages": averages, "log_sum": sums[:, :, -1:]}
    return out
