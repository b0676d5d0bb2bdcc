"""Linformer: keys and values are compressed along the length to a fixed number of slots.

Paper: Wang et al. 2020, 2006.04768.
Equation: K' = E^T K, V' = F^T V, out = softmax(scale * q K'^T) V'; E and F are [max_length rank], and m keys use the
first m rows. With shortened queries q' = A q, and the residual is A x: the output has as many rows as A.
Deviation: none for keys and values. The paper keeps all queries; where no output for each token is needed they may be fewer, too.
Rows of A are positive with the sum 1 over the real tokens, so that padding changes no size and the residual stays an average.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention._shortening import Shortening
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops import softmax as ops
from anyformer.site import Site
from anyformer.typing import Size


class Linformer(Attention):
    """Each query reads `rank` learned mixtures of the keys instead of the keys.

    The mixtures index slots, so tokens know their place even without an encoding. A sample without real keys gives 0.

    Args:
        rank: number of mixtures that keys and values are compressed to.
        sharing: "none": E and F for each key head; "heads": one E and one F for all of them; "kv": one E = F for all; "layers":
            that one for all layers of a model too.
        queries: number of averages that queries are shortened to, the layer's output with them, for models that score a whole
            sequence (head="classifier"); None: all queries, one output for each token.

    Raises:
        IncompatibleError: the site is causal.
    """

    name = "linformer"
    summary = "keys and values are compressed along the length to a fixed number of learned mixtures"
    paper = "Wang et al. 2020, 2006.04768"
    family = ("fewer keys", "linformer")
    forms = (Form.ROTATE, Form.TURN, Form.AUGMENT, Form.PRODUCT, Form.EMBED)
    absolute = frozenset({Form.ROTATE, Form.TURN, Form.AUGMENT, Form.PRODUCT})
    refusal = (
        "it compresses the key axis, so no score belongs to one pair of query and key and there is nothing to bias; "
        "use an encoding added at the embedding, such as sinusoidal or learned; rope runs too, but mixed"
    )
    causal = False
    causal_refusal = (
        "each of its mixtures holds every place, the future too; use linear, local(128) or softmax for causal models"
    )
    documents = False
    ordered = True

    def __init__(
        self,
        site: Site,
        *,
        rank: Size = 64,
        sharing: Literal["none", "heads", "kv", "layers"] = "none",
        queries: Size | None = None,
    ) -> None:
        super().__init__(site)
        shape = (site.kv_heads, site.max_length, rank) if sharing == "none" else (site.max_length, rank)
        self.mixes = nn.ParameterList(torch.empty(shape) for _ in range(1 if sharing in ("kv", "layers") else 2))
        self.common = "mixes" if sharing == "layers" else None
        for mix in self.mixes:
            nn.init.normal_(mix, std=rank**-0.5)
        if queries is not None:
            self.shortening = Shortening(site, queries)
            self.forms = tuple(form for form in self.forms if form is not Form.TURN)
            self.refusal = (
                "what it gives are averages of queries, which stand nowhere; leave out queries=..., or " + self.refusal
            )

    def cost(self) -> Cost:
        """Keys and values mixed, then scores and values of the mixtures."""
        sizes, memory = {"rank": self.mixes[0].shape[-1]}, "h n rank + 2 k rank d"
        if self.shortening is None:
            return Cost(self.site, "2 k m rank d + 2 h n rank d", memory=memory, sizes=sizes)
        sizes["queries"] = self.shortening.count
        products = "2 k m rank d + h n queries d + 2 h queries rank d"
        return Cost(self.site, products, memory="n queries + h queries (rank + d) + 2 k rank d", sizes=sizes)

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h r v"]:
        """Outputs of the queries, or of the averages that they are shortened to; see the module's equation.

        Raises:
            SpecError: more keys than `max_length`.
        """
        if (m := k.shape[2]) > self.site.max_length:
            raise SpecError(
                f"{self.name} was built for at most {self.site.max_length} tokens, got {m}; "
                f"build with max_length={m} or shorten the input"
            )
        if (keep := context.keys.keep) is not None:
            k, v = (torch.where(keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
        encoding = context.encoding
        if self.shortening is not None:
            q = self._shortened(q, context)
        v = v if encoding.turn is None else encoding.turn(v)
        scale = q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale
        k, v = compress(k, self.mixes[0]), compress(v, self.mixes[-1])
        if encoding.product is None:
            out = ops.fused(q, k, v, scale=scale, dropout=context.dropout)
        else:  # the fused kernel has no gradient for it
            product = encoding.product(q, ops.repeat_heads(k, q.shape[1]))
            out, _ = ops.dense(q, k, v, bias=product, scale=scale, dropout=context.dropout)
        return out if encoding.turn_back is None else encoding.turn_back(out)

    def _shortened(self, q: Float[Tensor, "b h n d"], context: Context) -> Float[Tensor, "b h r d"]:
        assert self.shortening is not None
        shorter = self.shortening(q.transpose(1, 2).flatten(2), context.queries.keep)
        return shorter.unflatten(2, (q.shape[1], -1)).transpose(1, 2)


def compress(x: Float[Tensor, "b k m d"], mix: Float[Tensor, "*k most r"]) -> Float[Tensor, "b k r d"]:
    """The mixtures sum_j mix[j, r] x_j, with one mix for all heads or one a head; hidden tokens of x must be 0."""
    heads = "k" if mix.dim() == 3 else ""
    return torch.einsum(f"bkmd,{heads}mr->bkrd", x, mix[..., : x.shape[2], :])
