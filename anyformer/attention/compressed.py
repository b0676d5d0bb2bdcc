"""Memory-compressed attention: a strided convolution shortens keys and values before they are read.

Paper: Liu et al. 2018, 1801.10198, section 4.2.3.
Equation, with s the stride and slot c over the places cs to cs + s - 1:

    k'_c = sum_t k_(cs + t) K_t,   v'_c = sum_t v_(cs + t) V_t,   out_i = sum_c softmax_c(scale * q_i . k'_c + b_ic) v'_c

K_t and V_t are s matrices [d d] a key head, without bias. Not causal, c runs over the slots with a real token. When causal, over
those whose last place is at most i, and one more of score 0 and learned value, so that the first s - 1 have something to read.
Deviations: a position encoding places a slot at its last real token (the paper has sinusoids in the input only); the causal form
reads a slot from its last place on; a cache keeps the tokens, not the slots.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.forms import Form
from anyformer.ops import softmax as ops
from anyformer.ops.left import leftmost
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Size


class Compressed(Attention):
    """Each query reads one key and value for every `stride` tokens, made by a convolution.

    Slots index places, so tokens know their place even without an encoding. When causal, a query cannot read the tokens of the
    slot that it stands in, except at its last place: alternate with a local layer, as the paper does. A sample without real
    keys gives 0.

    Args:
        stride: tokens that one slot stands for, and the width of the convolution.
    """

    name = "compressed"
    summary = "a strided convolution shortens keys and values before they are read"
    paper = "Liu et al. 2018, 1801.10198"
    family = ("fewer keys", "compressed")
    forms = (Form.ROTATE, Form.TURN, Form.TOEPLITZ, Form.BIAS, Form.TABLE, Form.SCORE, Form.VALUE, Form.EMBED)
    refusal = (
        "it reads slots of several tokens, and this form needs every key between two tokens or another product; "
        "use an encoding that embeds, rotates, biases or scores, such as rope or alibi"
    )
    documents = False
    decodes = "cache"
    rotates = "self"
    compares = False
    ordered = True

    def __init__(self, site: Site, *, stride: Size = 4) -> None:
        super().__init__(site)
        shape = (site.kv_heads, stride, site.head_dim, site.head_dim)
        self.stride = stride
        self.key_taps = nn.Parameter(torch.empty(shape))
        self.value_taps = nn.Parameter(torch.empty(shape))
        for taps in (self.key_taps, self.value_taps):
            nn.init.normal_(taps, std=(stride * site.head_dim) ** -0.5)
        self.start = nn.Parameter(torch.zeros(site.kv_heads, site.head_dim)) if site.causal else None

    def cost(self) -> Cost:
        """The convolutions, then scores and values of the slots."""
        return Cost(
            self.site,
            "2 k m d^2 + 2 pairs d / stride",
            memory="pairs / stride + 2 k m d / stride",
            again="pairs d / stride",
            sizes={"stride": self.stride},
        )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        queries, keys = context.queries, context.keys
        if context.cache is not None:
            keys, moved = leftmost(keys, k.transpose(1, 2), v.transpose(1, 2))
            k, v = (part.transpose(1, 2) for part in moved)
        if (keep := keys.keep) is not None:
            k, v = (torch.where(keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
        last = (torch.arange((keys.length - 1) // self.stride + 1, device=q.device) + 1) * self.stride - 1
        slots, allowed = self._slots(queries, keys, last)
        k, v = shortened(k, self.key_taps), shortened(v, self.value_taps)
        return self._read(q, k, v, allowed, replace(context, keys=slots))

    def _slots(
        self, queries: Side, keys: Side, last: Int[Tensor, " s"]
    ) -> tuple[Side, Bool[Tensor, "#b 1 #n r"] | None]:
        """The slots as keys, each at its last real token, and which of them each query may read (None: all).

        When causal, the first column is that of the learned slot, which has no place.
        """
        count = None if keys.keep is None else keys.keep.sum(dim=1, keepdim=True)
        ends = last.clamp(max=keys.length - 1)[None] if count is None else torch.minimum(last, count - 1).clamp(min=0)
        slots = replace(keys.take(ends.expand(keys.batch, -1)), arithmetic=False)
        if self.start is None:
            return slots, None if count is None else (last - self.stride + 1 < count)[:, None, None, :]
        places = queries.places[:, None, :, None]
        readable = (places >= 0) & (keys.length > 0 if count is None else count[:, :, None, None] > 0)
        return slots, torch.cat([readable, (last <= places) & readable], dim=-1)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, context: Context) -> Tensor:
        """Attention over the slots, placed by the encoding."""
        encoding = context.encoding
        if encoding.rebind is not None:
            encoding = encoding.rebind(context.queries, context.keys)
        if encoding.rotate is not None:
            q, k = encoding.rotate(q, k)
        v = v if encoding.turn is None else encoding.turn(v)
        bias = None if encoding.logits is None else encoding.logits(q, ops.repeat_heads(k, q.shape[1]))
        values = encoding.values
        if self.start is not None:
            start = self.start[None, :, None].to(v.dtype).expand(v.shape[0], -1, -1, -1)
            k, v = F.pad(k, (0, 0, 1, 0)), torch.cat([start, v], dim=2)
            bias = None if bias is None else F.pad(bias, (1, 0))
            values = None if encoding.values is None else _without_first(encoding.values)
        facts = {
            "allowed": allowed,
            "bias": bias,
            "scale": self.site.head_dim**-0.5 if encoding.scale is None else encoding.scale,
            "dropout": context.dropout,
        }
        if values is not None or (bias is not None and encoding.learned):
            out = ops.dense(q, k, v, values=values, **facts)[0]
        else:
            out = ops.fused(q, k, v, **facts)
        return out if encoding.turn_back is None else encoding.turn_back(out)


def _without_first(values: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The term on the weights of all slots but the first."""
    return lambda weights: values(weights[..., 1:])


def shortened(x: Float[Tensor, "b k m d"], taps: Float[Tensor, "k s d e"]) -> Float[Tensor, "b k c e"]:
    """One vector for every s tokens, sum_t x_(cs + t) taps_t; hidden tokens of x must be 0."""
    stride = taps.shape[1]
    if not x.shape[2]:
        return x.new_zeros(*x.shape[:2], 0, taps.shape[3])
    slots = F.pad(x, (0, 0, 0, stride - 1)).unfold(2, stride, stride)  # b k c d s; what is left over is only filling
    return torch.einsum("bkcds,ksde->bkce", slots, taps)
