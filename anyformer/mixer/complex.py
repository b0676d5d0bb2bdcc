"""Attention over complex numbers: a pair is weighed by the length of the product of query and key.

Paper: Wang et al. 2019, 1912.12333, with the conjugate that its code leaves out; here as one layer of any model.
Equation: the c channels are c/2 complex numbers, real parts first. For each head, with real matrices W and R the rotation of a
rotary encoding, both acting on real and imaginary parts alike,

    q_i = R_i W_q x_i,   k_j = R_j W_k x_j,   v_j = W_v x_j      [head_dim complex numbers each]
    w_ij = softmax_j(|conj(q_i) . k_j| / sqrt(head_dim) + b_ij),   out_i = W_o sum_j w_ij v_j

Where a channel of q and k turns by e^{i om p} with its position p, conj(q) . k sees p_j - p_i, and q . k (`conjugate=False`, the
paper's code) p_i + p_j.
Deviations: the length has the gradient 0 at 0, instead of a small number under its root; positions run forwards.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import PlainValidator
from torch import Tensor, nn

from anyformer.attention._shortening import Shortening
from anyformer.attention.base import Attention
from anyformer.context import Context, Encoding
from anyformer.cost import Cost, symbols
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form, Verdict, check
from anyformer.mixer._explained import implied, score_terms, weighing
from anyformer.mixer.base import Mixer
from anyformer.pattern.read import reads_as_pattern
from anyformer.position.base import Position
from anyformer.position.bind import bind
from anyformer.registry import bind as bind_knobs
from anyformer.registry import canonical, find
from anyformer.side import Side
from anyformer.site import Site
from anyformer.spec import Spec, parse

_READ = (Form.ROTATE, Form.TURN, Form.TOEPLITZ, Form.BIAS, Form.EMBED)


def _canonical(value: object) -> Spec:
    if not isinstance(value, str | Spec):
        raise SpecError(f"expected an attention such as softmax, local(64) or reformer, got {value!r}")
    spec = parse(value)
    if reads_as_pattern(spec):
        spec = Spec("softmax", (), (("pattern", spec),))
    return canonical(find("attention", spec.name), spec)


AttentionSpec = Annotated[Spec, PlainValidator(_canonical)]
"""A knob that takes the spec of an attention or a pattern."""

SOFTMAX = Spec("softmax")


class Complex(Mixer):
    """Complex queries and keys meet by the length of their product; real and imaginary parts of the values are averaged alike.

    Args:
        conjugate: whether the query is conjugated: then a pair depends on the difference of positions, else on their sum.
        attention: spec of the attention or pattern that weighs the lengths.
        bias: whether the four projections have a bias, which both parts get.
        dropout: probability of dropping an attention weight in training (of an output channel where there are no weights).

    Raises:
        SpecError: dim is odd.
        IncompatibleError: the attention reads no score of a pair, or it cannot use the position.
    """

    name = "complex"
    summary = "complex queries and keys meet by the length of their product"
    paper = "Wang et al. 2019, 1912.12333"
    family = ("full", "complex")
    forms = _READ
    refusal = (
        "a pair is weighed by the length of a complex product, to which this form has nothing to add; use an encoding that embeds, "
        "rotates or biases, such as complex_order, rope or alibi"
    )
    causal = True  # the attention's own word follows

    def __init__(
        self,
        site: Site,
        position: Position,
        *,
        conjugate: bool = True,
        attention: AttentionSpec = SOFTMAX,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        if site.dim % 2:
            raise SpecError(f"complex: real and imaginary parts need an even dim, got {site.dim}; choose another")
        within = _built(attention, replace(site, head_dim=2 * site.head_dim))
        self.forms = tuple(form for form in _READ if form in within.forms)
        self.absolute = within.absolute
        self.verdict: Verdict = check(self, position, site)
        self.attention, self.position, self.conjugate, self.dropout = within, position, conjugate, dropout
        self.unscored = within.unscored
        self.causal, self.causal_refusal, self.cross = within.causal, within.causal_refusal, within.cross
        self.documents, self.documents_refusal = within.documents, within.documents_refusal
        self.takes_flags, self.flag_ids, self.ordered = within.takes_flags, within.flag_ids, within.ordered
        self.two_streams, self.streams_refusal = not within.shares, "its keys are its queries"
        self.decodes = within.decodes
        width, half = site.heads * site.head_dim, site.dim // 2
        self.q = nn.Linear(half, width, bias=bias)
        self.k = None if within.shares else nn.Linear(half, site.kv_heads * site.head_dim, bias=bias)
        self.v = nn.Linear(half, site.kv_heads * site.head_dim, bias=bias)
        self.o = nn.Linear(width, half, bias=bias)

    def cost(self) -> Cost | None:
        """That of its attention over real heads twice as wide, the second product of each pair, and the projections."""
        inner = self.attention.cost()
        if inner is None or "pairs" not in symbols(inner.products):
            return None
        keys = "k m / 2" if self.k is None else "k m"
        return replace(inner, products=f"{inner.products} + pairs d + c d (h n + {keys})")

    @property
    def shortening(self) -> Shortening | None:
        """That of its attention."""
        return self.attention.shortening

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b r c"]:
        """The mixed sequence; see the module's equation."""
        cache, d = context.cache, self.site.head_dim
        q, k, v = self._heads(x, context)
        q, k, v, context = self._placed(q, k, v, context)
        out = self.attention(q, k, v, context)
        if not self.attention.weights:
            out = F.dropout(out, self.dropout, self.training)
        if cache is not None:
            cache.forget(self.attention.horizon)
        out = out.unflatten(-1, (2, d)).permute(0, 2, 3, 1, 4).flatten(3)  # b n parts width
        return self.o(out.flatten(1, 2)).unflatten(1, (-1, 2)).flatten(2)

    def pair_weights(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b h r m"] | None:
        """Those of its attention, which both parts of the values share; None where it weighs channels differently."""
        q, k, v, facts = self._placed(*self._heads(x, context), context)
        facts, keep = weighing(facts), context.queries.keep
        real = keep if self.shortening is None else self.shortening.kept(keep)
        return implied(lambda values: self.attention(q, k, values, facts), v, slots, real)

    def pair_terms(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> dict[str, Float[Tensor, "b h r m"]]:
        """The lengths of products without a position, what rotating adds to them, and the bias."""
        if not self.attention.scores_pairs:
            return super().pair_terms(x, context, slots)
        bare_q, bare_k, v = self._heads(x, context)
        q, k, _, facts = self._placed(bare_q, bare_k, v, context)
        length = facts.encoding.product
        assert length is not None, "a pair of complex numbers has a length"
        if facts.encoding.rotate is not None and self.attention.rotates == "self":
            q, k = facts.encoding.rotate(q, k)
        added = bind(self.position, self.verdict.forms, context.queries, context.keys)  # its logits without the lengths
        return score_terms(length, (bare_q, bare_k), (q, k), replace(facts, encoding=added), slots)

    def _heads(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens, without a position."""
        d, source = self.site.head_dim, x if context.x is None else context.x
        q, v = _projected(self.q, x, d), _projected(self.v, source, d)
        return q, q if self.k is None else _projected(self.k, source, d), v

    def _placed(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor, Context]:
        """What the attention is given: queries, the keys and values of all tokens so far, and the context."""
        cache = context.cache
        encoding = self._encoding(context.queries, context.keys if cache is None else context.queries)
        if encoding.rotate is not None and self.attention.rotates == "before":
            q, k = encoding.rotate(q, k)
        if cache is not None:
            k = cache.extend("k", k.transpose(1, 2)).transpose(1, 2)
            v = cache.extend("v", v.transpose(1, 2)).transpose(1, 2)
            encoding = self._encoding(context.queries, context.keys)
        return q, k, v, replace(context, encoding=encoding, dropout=self.dropout if self.training else 0.0)

    def _encoding(self, queries: Side, keys: Side) -> Encoding:
        return _complex(bind(self.position, self.verdict.forms, queries, keys), conjugate=self.conjugate)


def modulus(q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], *, conjugate: bool) -> Float[Tensor, "b h n m"]:
    """|conj(q) . k|, or |q . k|, of d/2 complex numbers stored as real parts, then imaginary parts.

    In the wider of float32 and the input's dtype; its gradient is 0 where it is 0.
    """
    wide = torch.promote_types(torch.float32, q.dtype)
    real, imaginary = k.to(wide).chunk(2, dim=-1)
    sign = 1 if conjugate else -1
    along = torch.cat([real, sign * imaginary], dim=-1)
    across = torch.cat([imaginary, -sign * real], dim=-1)
    square = sum((torch.einsum("bhnd,bhmd->bhnm", q.to(wide), part).square() for part in (along, across)), start=0.0)
    return torch.as_tensor(square).clamp(min=torch.finfo(wide).tiny).sqrt()


def _complex(encoding: Encoding, *, conjugate: bool) -> Encoding:
    """An encoding that rotates and turns both parts alike, and holds the whole score of a pair."""
    rotate, added, rebind = encoding.rotate, encoding.logits, encoding.rebind
    scale = encoding.scale

    def on_parts(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert rotate is not None, "asked for where nothing rotates"
        parts = [rotate(*pair) for pair in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)]
        placed_q, placed_k = (torch.cat(part, dim=-1) for part in zip(*parts, strict=True))
        return placed_q, placed_k

    def product(q: Tensor, k: Tensor) -> Tensor:
        return modulus(q, k, conjugate=conjugate) * (1.0 if scale is None else scale)

    def logits(q: Tensor, k: Tensor) -> Tensor:
        own = product(q, k)
        return own if added is None else own + added(q, k)

    return replace(
        encoding,
        forms=encoding.forms | {Form.PRODUCT},
        scale=0.0,  # the product that attentions take themselves counts nothing
        rotate=None if rotate is None else on_parts,
        turn=_both(encoding.turn),
        turn_back=_both(encoding.turn_back),
        logits=logits,
        product=product,
        offsets=None,
        rebind=None if rebind is None else lambda q, k: _complex(rebind(q, k), conjugate=conjugate),
        learned=True,
    )


def _both(function: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor] | None:
    """A map of heads, done to real and imaginary parts."""
    if function is None:
        return None
    return lambda x: torch.cat([function(part) for part in x.chunk(2, dim=-1)], dim=-1)


def _projected(weight: nn.Module, x: Float[Tensor, "b t c"], head_dim: int) -> Float[Tensor, "b h t d"]:
    """Heads of complex numbers: both parts of x through the same real matrix."""
    parts = weight(x.unflatten(-1, (2, -1)).flatten(1, 2)).unflatten(1, (-1, 2))  # b t parts width
    return parts.unflatten(-1, (-1, head_dim)).permute(0, 3, 1, 2, 4).flatten(3)


def _built(spec: Spec, site: Site) -> Attention:
    method = find("attention", spec.name)
    built = method.target(site, **bind_knobs(method, spec))
    if not {Form.SCORE, Form.PRODUCT} & {*built.forms}:
        raise IncompatibleError(
            f"complex: {built.name} reads no score of a single pair, and the length of a complex product is no sum over features; "
            "use softmax, a pattern or an attention that scores pairs such as reformer or topk, or put complex_order alone before "
            f"{built.name}"
        )
    return built
