"""Multi-head attention: the mixer that gives an Attention its projections, its heads, its position encoding and its cache.

Paper: Vaswani et al. 2017, 1706.03762; shared key heads: Shazeer 2019, 1911.02150 and Ainslie et al. 2023, 2305.13245.
"""

from dataclasses import replace

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.attention._shortening import Shortening
from anyformer.attention.base import Attention
from anyformer.attention.softmax import Softmax
from anyformer.context import Context, Encoding
from anyformer.cost import Cost
from anyformer.errors import IncompatibleError
from anyformer.forms import Form, Verdict, check
from anyformer.mixer._explained import implied, products, score_terms, weighing
from anyformer.mixer._prepared import prepared
from anyformer.mixer.base import Mixer
from anyformer.position.base import Position
from anyformer.position.bind import bind, shifted
from anyformer.side import Side
from anyformer.site import Site


class MultiHead(Mixer):
    """Projects x to queries, keys and values, splits heads, places them, attends, merges and projects.

    `af.MultiHead(dim, heads, attention="softmax", position="rope")` builds one from specs; this constructor takes built parts.

    Args:
        site: where it is built.
        attention: how pairs mix.
        position: what a token knows about where it is.
        bias: whether the four projections have a bias.
        qk_norm: whether queries and keys are RMS-normalised per head before they are placed.
        dropout: probability of dropping an attention weight in training (of an output channel where there are no weights).

    Raises:
        IncompatibleError: the attention cannot use the position, cannot be causal, or the position offers only EMBED.
    """

    name = "multihead"
    summary = "projections and heads around an attention"
    paper = "Vaswani et al. 2017, 1706.03762"
    family = ("framework",)
    causal = True  # the attention's own word follows

    def __init__(
        self,
        site: Site,
        attention: Attention,
        position: Position,
        *,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        if all(offered == (Form.EMBED,) for offered in position.forms) and position.forms:
            raise IncompatibleError(
                f"{position.name} is added at the embedding, which a single layer does not have: use Transformer, "
                'or give the layer position="none" and add the encoding to x yourself'
            )
        self.verdict: Verdict = check(attention, position, site)
        self.attention = attention
        self.position = position
        self.name = attention.name
        self.forms, self.outside, self.absolute = attention.forms, attention.outside, attention.absolute
        self.refusal, self.unscored = attention.refusal, attention.unscored
        self.causal, self.causal_refusal, self.cross = attention.causal, attention.causal_refusal, attention.cross
        self.fixed_width, self.estimates = attention.fixed_width, attention.estimates
        self.documents, self.documents_refusal = attention.documents, attention.documents_refusal
        self.takes_flags, self.flag_ids = attention.takes_flags, attention.flag_ids
        self.two_streams, self.streams_refusal = not attention.shares, "its keys are its queries"
        self.ordered = attention.ordered or Form.ROW in self.verdict.forms  # what stands between is read off slots
        self.decodes = "cache" if attention.keyed & set(self.verdict.forms) else attention.decodes
        self.dropout = dropout
        self.q = nn.Linear(site.dim, site.heads * site.head_dim, bias=bias)
        self.k = None if attention.shares else nn.Linear(site.dim, site.kv_heads * site.head_dim, bias=bias)
        self.v = nn.Linear(site.dim, site.kv_heads * site.head_dim, bias=bias)
        self.o = nn.Linear(site.heads * site.head_dim, site.dim, bias=bias)
        self.q_norm = nn.RMSNorm(site.head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(site.head_dim, eps=1e-6) if qk_norm and self.k is not None else nn.Identity()

    def cost(self) -> Cost | None:
        """That of its attention and the projections."""
        inner = self.attention.cost()
        if inner is None:
            return None
        keys = "c d (2 h n + k m)" if self.k is None else "2 c d (h n + k m)"
        if self.shortening is not None:
            keys = "c d (h n + h queries + 2 k m)"
        return replace(inner, products=f"{inner.products} + {keys}")

    @property
    def shortening(self) -> Shortening | None:
        """That of its attention."""
        return self.attention.shortening

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b r c"]:
        """The mixed sequence; see the class."""
        q, k, v = self._heads(x, context)
        q, k, v, facts = self._placed(q, k, v, x, context)
        out = self.attention(q, k, v, facts)
        if not self.attention.weights:
            out = F.dropout(out, self.dropout, self.training)
        if context.cache is not None:
            context.cache.forget(self.attention.horizon if self.decodes == "cache" else 0)
        return self.o(out.transpose(1, 2).flatten(2))

    def pair_weights(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b h r m"] | None:
        """Those of its attention, explicit or implied; None where it weighs channels differently."""
        q, k, v, facts = self._placed(*self._heads(x, context), x, context)
        facts, keep = weighing(facts), context.queries.keep
        real = keep if self.shortening is None else self.shortening.kept(keep)
        return implied(lambda values: self.attention(q, k, values, facts), v, slots, real)

    def pair_terms(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> dict[str, Float[Tensor, "b h r m"]]:
        """Content, rotation, bias and row, where its attention compares single pairs."""
        attention = self.attention
        if not attention.scores_pairs:
            return super().pair_terms(x, context, slots)
        bare_q, bare_k, v = self._heads(x, context)
        q, k, _, facts = self._placed(bare_q, bare_k, v, x, context)
        encoding = facts.encoding
        if encoding.rotate is not None and attention.rotates == "self":
            q, k = encoding.rotate(q, k)
        softcap = None
        if isinstance(attention, Softmax):
            softcap, facts = attention.softcap, replace(facts, pattern=attention.pattern)
        scale = bare_q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale
        return score_terms(products(scale, softcap), (bare_q, bare_k), (q, k), facts, slots)

    def _heads(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b h n d], keys and values [b k m d] of the new tokens, normalised and without a position."""
        q, v = self.q(x), self.v(context.x)
        k = v if self.k is None else self.k(context.x)  # with shared keys a stand-in of the right width
        if Form.SHIFT in self.verdict.forms:
            new_keys = context.queries if context.cache is not None else context.keys
            q, k, v = shifted(self.position, (q, k, v), context.queries, new_keys, context.layer, context.cache)
        q = self.q_norm(_split(q, self.site.heads))
        k = q if self.k is None else self.k_norm(_split(k, self.site.kv_heads))
        return q, k, _split(v, self.site.kv_heads)

    def _placed(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, Context]:
        """What the attention is given: queries, the keys and values of all tokens so far, and the context."""
        new_keys = context.queries if context.cache is not None else context.keys
        newest = self._encoding(context.queries, new_keys)
        if newest.rotate is not None and self.attention.rotates == "before":
            q, k = newest.rotate(q, k)
        slots = context.cache is not None and self.decodes == "cache"
        facts = prepared(self.position, x if context.x is None else context.x, new_keys, context.cache, slots=slots)
        encoding = newest if facts is None or slots else self._encoding(context.queries, new_keys, facts)
        if context.cache is not None and slots:  # facts are of all keys so far
            k = context.cache.extend("k", k.transpose(1, 2)).transpose(1, 2)
            v = context.cache.extend("v", v.transpose(1, 2)).transpose(1, 2)
            encoding = self._encoding(context.queries, context.keys, facts)
        return q, k, v, replace(context, encoding=encoding, dropout=self.dropout if self.training else 0.0)

    def _encoding(self, queries: Side, keys: Side, facts: Tensor | None = None) -> Encoding:
        return bind(self.position, self.verdict.forms, queries, keys, facts)


def _split(x: Float[Tensor, "b t w"], heads: int) -> Float[Tensor, "b h t d"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
