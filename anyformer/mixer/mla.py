"""Multi-head latent attention: keys and values of all heads come from one short vector a token, and only that is cached.

Paper: DeepSeek-AI 2024, 2405.04434, section 2.1.
Equation, for each head h, with R the rotation of a rotary encoding:

    c_j = norm(W_d x_j) [latent],   key_j = [U_h c_j ; R_j (W_r x_j)],   value_j = V_h c_j
    query_i = [content of W_q x_i ; R_i of the rest],   out = W_o softmax(scale * query . key + b) value

Head h reads U_h [content latent] and V_h [content latent]; W_r x [head_dim] is shared by all heads. With earlier tokens in a cache
(c and the rotated W_r x of each), U_h moves to the query and V_h to the output, so that no key or value is ever made:

    (U_h c_j) . q = c_j . (U_h^T q),   sum_j w_ij V_h c_j = V_h (sum_j w_ij c_j)

Decoding: latent + head_dim numbers a token.
Deviations: the rotated part is as wide as a head of the site, for which the encoding was built, and exists without rotary encoding
too; values are as wide as `content`.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.attention.softmax import attend
from anyformer.context import Context, Encoding
from anyformer.cost import Cost
from anyformer.forms import Form, Verdict, check
from anyformer.mixer._explained import implied, products, score_terms, weighing
from anyformer.mixer.base import Mixer
from anyformer.position.base import Position
from anyformer.position.bind import bind
from anyformer.site import Site
from anyformer.typing import Size


class MLA(Mixer):
    """Attention whose keys and values are short vectors shared by all heads, expanded on the fly.

    Args:
        latent: channels of the shared vector; None: four times head_dim.
        content: channels of a head that are not rotated, and of its values; None: head_dim.
        q_latent: channels of a short vector that queries come from; None: they come from x.
        bias: whether the projections of x and the last one have a bias.
        dropout: probability of dropping an attention weight in training.

    Raises:
        IncompatibleError: it cannot use the position.
    """

    name = "mla"
    summary = "keys and values of all heads come from one short vector a token, which is all that is cached"
    paper = "DeepSeek-AI 2024, 2405.04434"
    family = ("full", "head sharing")
    forms: tuple[Form, ...] = (Form.ROTATE, Form.TOEPLITZ, Form.BIAS, Form.EMBED)
    refusal = (
        "a cached token has no key or value of its own, so nothing can score or turn one; use an encoding that embeds, rotates or "
        "biases, such as rope or alibi"
    )
    causal = True
    cross = True
    two_streams = True
    documents = True
    decodes = "cache"

    def __init__(
        self,
        site: Site,
        position: Position,
        *,
        latent: Size | None = None,
        content: Size | None = None,
        q_latent: Size | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        self.verdict: Verdict = check(self, position, site)
        self.position = position
        self.dropout = dropout
        self.latent = 4 * site.head_dim if latent is None else latent
        self.content = site.head_dim if content is None else content
        self.q_down = nn.Identity() if q_latent is None else nn.Linear(site.dim, q_latent, bias=bias)
        self.q_norm = nn.Identity() if q_latent is None else nn.RMSNorm(q_latent, eps=1e-6)
        queries = site.heads * (self.content + site.head_dim)
        self.q = nn.Linear(site.dim if q_latent is None else q_latent, queries, bias=bias and q_latent is None)
        self.down = nn.Linear(site.dim, self.latent + site.head_dim, bias=bias)
        self.norm = nn.RMSNorm(self.latent, eps=1e-6)
        self.up = nn.Linear(self.latent, site.heads * 2 * self.content, bias=False)
        self.o = nn.Linear(site.heads * self.content, site.dim, bias=bias)

    def cost(self) -> Cost:
        """Scores and values, the keys and values made of the short vectors, and the projections."""
        sizes = {"latent": self.latent, "content": self.content}
        queries = "n c h (content + d)"
        if isinstance(self.q_down, nn.Linear):
            queries, sizes = "n q_latent (c + h (content + d))", sizes | {"q_latent": self.q_down.out_features}
        text = f"pairs (2 content + d) + 2 m h latent content + {queries} + m c (latent + d) + n h content c"
        return Cost(self.site, text, memory="pairs + 2 h m content", again="pairs (content + d)", sizes=sizes)

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        cache = context.cache
        q, q_rotated, latents, shared = self._short(x, context)
        new_keys = context.keys if cache is None else context.queries
        encoding = bind(self.position, self.verdict.forms, context.queries, new_keys)
        q_rotated, shared = _rotated(encoding, q_rotated, shared)
        if cache is not None:
            latents, shared = cache.extend("latents", latents), cache.extend("shared", shared)
            encoding = bind(self.position, self.verdict.forms, context.queries, context.keys)
        facts = replace(context, encoding=encoding, dropout=self.dropout if self.training else 0.0)
        absorb = cache is not None and context.keys.length > x.shape[1]
        read = self._absorbed if absorb else self._explicit
        return self.o(read(q, q_rotated, latents, shared, facts).transpose(1, 2).flatten(2))

    def pair_weights(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b h r m"] | None:
        """Its softmax weights, of the values V_h c_j."""
        q, q_rotated, latents, shared = self._short(x, context)
        encoding = bind(self.position, self.verdict.forms, context.queries, context.keys)
        q_rotated, shared = _rotated(encoding, q_rotated, shared)
        q, k, v = self._expanded(q, q_rotated, latents, shared)
        facts = weighing(replace(context, encoding=encoding))
        return implied(lambda values: self._attend(q, k, values, facts), v, slots, context.queries.keep)

    def pair_terms(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> dict[str, Float[Tensor, "b h r m"]]:
        """Both parts of the key without a position as "content", what rotating one of them adds, and the bias."""
        q, q_rotated, latents, shared = self._short(x, context)
        encoding = bind(self.position, self.verdict.forms, context.queries, context.keys)
        facts = replace(context, encoding=encoding)
        bare = self._expanded(q, q_rotated, latents, shared)[:2]
        q_rotated, shared = _rotated(encoding, q_rotated, shared)
        placed = self._expanded(q, q_rotated, latents, shared)[:2]
        return score_terms(products(self._scale(facts)), bare, placed, facts, slots)

    def _short(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both parts of the queries [b h n d], and the short vectors [b m latent] and shared keys [b m d] of the new tokens."""
        site = self.site
        q = self.q(self.q_norm(self.q_down(x))).unflatten(-1, (site.heads, -1)).transpose(1, 2)
        q, q_rotated = q.split([self.content, site.head_dim], dim=-1)
        latents, shared = self.down(x if context.x is None else context.x).split([self.latent, site.head_dim], dim=-1)
        return q, q_rotated, self.norm(latents), shared

    def _explicit(self, q: Tensor, q_rotated: Tensor, latents: Tensor, shared: Tensor, context: Context) -> Tensor:
        """With a key and a value for each token and head."""
        return self._attend(*self._expanded(q, q_rotated, latents, shared), context)

    def _expanded(self, q: Tensor, q_rotated: Tensor, latents: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A query, a key and a value for each token and head."""
        k, v = self.up(latents).unflatten(-1, (self.site.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        k = torch.cat([k, shared[:, None].expand(-1, self.site.heads, -1, -1)], dim=-1)
        return torch.cat([q, q_rotated], dim=-1), k, v

    def _absorbed(self, q: Tensor, q_rotated: Tensor, latents: Tensor, shared: Tensor, context: Context) -> Tensor:
        """With the vectors of the cache as the only keys and values, for all heads."""
        to_key, to_value = self.up.weight.unflatten(0, (self.site.heads, -1)).chunk(2, dim=1)  # h content latent
        q = torch.cat([torch.einsum("bhnd,hdl->bhnl", q, to_key), q_rotated], dim=-1)
        found = self._attend(q, torch.cat([latents, shared], dim=-1)[:, None], latents[:, None], context)
        return torch.einsum("bhnl,hdl->bhnd", found, to_value)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Softmax attention; values are filled up to the width of the keys, which the fused kernel needs."""
        filled = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        return attend(q, k, filled, context, scale=self._scale(context))[..., : v.shape[-1]]

    def _scale(self, context: Context) -> float:
        usual = self.site.head_dim**-0.5
        factor = 1.0 if context.encoding.scale is None else context.encoding.scale / usual
        return factor * (self.content + self.site.head_dim) ** -0.5


def _rotated(encoding: Encoding, q: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated parts of queries and of the keys that all heads share, in their place."""
    if encoding.rotate is None:
        return q, shared
    q, k = encoding.rotate(q, shared[:, None])
    return q, k[:, 0]
