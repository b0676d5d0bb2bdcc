"""Softmax attention over any pattern.

Paper: Vaswani et al. 2017, 1706.03762; the patterns name their own.
Equation: out_i = sum_j softmax_j(s q_i . k_j + b_ij) v_j over the pairs (i, j) that pattern, causality, padding and documents
    allow. With a sink, softmax counts one more key, of logit z_h in head h and of value 0.
Sink: Xiao et al. 2023, 2309.17453; a logit without key and value: Agarwal et al. 2025, 2508.10925.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention import _flex, _pieces
from anyformer.attention._parted import choose, run
from anyformer.attention._ways import took
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops import softmax as ops
from anyformer.pattern import decompose, flag_ids, union_of
from anyformer.pattern.base import Pattern
from anyformer.pattern.pairs import count, pairs, remembered_bias
from anyformer.site import Site

Impl = Literal["auto", "reference", "torch", "tiles", "flex"]


class Softmax(Attention):
    """Each query averages the values of the keys it may meet, weighted by the exponential of its product with them.

    Args:
        pattern: which pairs may meet, for example `Local(128) | Global([0])`; None: all.
        softcap: bound c of the logits, `c * tanh(logits / c)`; None: no bound.
        sink: whether each head learns a logit z, at first 0, of a key that takes weight and holds no value, so that a head with
            nothing to say need not put its weight on some token. A row's weights sum to sigmoid(lse - z), lse being the log of
            the sum over its keys.

    Raises:
        SpecError: the pattern is for another number of heads, has no causal form, or flags by several lists of token ids.
    """

    name = "softmax"
    summary = "every query reads every key that the pattern allows, weighted by softmax"
    paper = "Vaswani et al. 2017, 1706.03762"
    family = ("full",)
    forms: tuple[Form, ...] = (
        Form.ROTATE,
        Form.TURN,
        Form.TOEPLITZ,
        Form.BIAS,
        Form.TABLE,
        Form.SCORE,
        Form.GATES,
        Form.VALUE,
        Form.EMBED,
    )
    refusal = "it reads every pair, yet this form has no reader; use an encoding that embeds, rotates, biases or scores"
    takes_pattern = True
    decodes = "cache"

    def __init__(
        self, site: Site, *, pattern: Pattern | None = None, softcap: float | None = None, sink: bool = False
    ) -> None:
        super().__init__(site)
        if pattern is not None:
            pattern.check(site.heads, causal=site.causal)
        self.pattern = pattern
        self.softcap = softcap
        self.sink = nn.Parameter(torch.zeros(site.heads)) if sink else None
        self.ordered = pattern is not None
        self.takes_flags = pattern is not None
        self.flag_ids = () if pattern is None else flag_ids(pattern)
        self.cross = not self.flag_ids  # those of one sequence
        # places run on over a row: what depends on them would cut the second document elsewhere than the first
        counting = [] if pattern is None else counts_places(pattern, causal=site.causal)
        self.documents = not counting
        count_them = f"{' and '.join(map(repr, counting))} count{'s' * (len(counting) == 1)}"
        self.documents_refusal = f", because {count_them} places over the whole row"
        self.horizon = None if pattern is None else pattern.horizon()
        if pattern is None or leaves_no_gap(pattern, site.heads, site.layer, causal=site.causal):
            self.forms = (*self.forms, Form.ROW)
        else:
            self.refusal = "its pattern leaves out keys between query and key; use local(...) or no pattern"

    def cost(self) -> Cost:
        """Scores, and the values that they weigh."""
        pattern, site = self.pattern, self.site

        def kept(n: int, m: int) -> int:
            assert pattern is not None
            return count(pattern, n, m, site.heads, causal=site.causal, layer=site.layer)

        return Cost(site, "2 pairs d", memory="pairs", again="pairs d", pairs=None if pattern is None else kept)

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        facts = replace(
            context,
            pattern=context.pattern if context.pattern is not None else self.pattern,
            softcap=context.softcap if context.softcap is not None else self.softcap,
            sink=context.sink if context.sink is not None else self.sink,
        )
        return attend(q, k, v, facts)


def attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    context: Context,
    scale: float | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "b h n v"]:
    """Softmax attention under the facts of `context`.

    Args:
        scale: factor on q . k; None: the encoding's, or d ** -0.5.
        impl: "tiles" cuts the pairs into tiles, "flex" calls FlexAttention, "torch" the fused dense kernel, "reference" writes the
            softmax out; "auto" takes flex for patterns on a GPU, elsewhere tiles where a pattern leaves few enough pairs or terms
            by offset would cost the dense kernels more, else pieces of rows where other terms would need a large tensor of all
            pairs, else the fused kernel where that can do it.

    Raises:
        SpecError: the implementation cannot do what was asked.
    """
    encoding = context.encoding
    flex = impl == "flex" or (impl == "auto" and _flex.pays(q, k, v, context))
    if flex and not _flex.fits(q, k, context):
        raise SpecError(
            'impl="flex" needs at least one token, terms that are a bias by offset, no cache, no dropout, no sink and no mask or '
            'bias of your own; use impl="auto"'
        )
    path = choose(q, k, context, always=impl == "tiles") if impl in ("auto", "tiles") and not flex else None
    if path is None and impl == "tiles":
        raise SpecError(
            'impl="tiles" needs a pattern or terms by offset, no cache and no mask of your own; use impl="auto"'
        )
    if impl == "torch" and needs_weights(context):
        raise SpecError('impl="torch" has no softcap, no learned term on logits and none on values; use impl="auto"')
    pieces = impl == "auto" and path is None and not flex and _pieces.pays(q, k, context)
    if path is None and not flex and not pieces and (impl == "reference" or needs_weights(context)):
        return attend_with_lse(q, k, v, context, scale)[0]
    k, v = _clean(k, context), _clean(v, context)
    v = v if encoding.turn is None else encoding.turn(v)
    if flex:
        took("flex")
        out = _flex.run(q, k, v, context, _scale(q, context, scale))
    elif path is not None:
        took(path.name)
        out = run(path, q, k, v, context, _scale(q, context, scale))
    elif pieces:
        took("pieces")
        out = _pieces.run(q, k, v, context, _scale(q, context, scale))
    else:
        took("fused")
        bias, told = _bias(q, k, context), context.plainly_causal
        if bias is None and not told:
            bias = remembered_bias(context, q.shape[1])
            told = bias is not None
        out = ops.fused(
            q,
            k,
            v,
            allowed=None if told else pairs(context, q.shape[1]),
            bias=bias,
            lower_triangle=context.plainly_causal,
            scale=_scale(q, context, scale),
            dropout=context.dropout,
            sink=context.sink,
        )
    return out if encoding.turn_back is None else encoding.turn_back(out)


def attend_with_lse(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    context: Context,
    scale: float | None = None,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """The dense reference under the facts of `context`, with the log-sum-exp of every row over its keys."""
    took("written out")
    encoding = context.encoding
    k, v = _clean(k, context), _clean(v, context)
    out, lse = ops.dense(
        q,
        k,
        v if encoding.turn is None else encoding.turn(v),
        allowed=pairs(context, q.shape[1]),
        bias=_bias(q, k, context),
        scale=_scale(q, context, scale),
        softcap=context.softcap,
        dropout=context.dropout,
        values=encoding.values,
        rows=None if encoding.row is None else partial(encoding.row, q, ops.repeat_heads(k, q.shape[1])),
        sink=context.sink,
    )
    return (out if encoding.turn_back is None else encoding.turn_back(out)), lse


def counts_places(pattern: Pattern, *, causal: bool) -> list[Pattern]:
    """The parts of a union whose answer depends on where in the row a pair is, not on its distance only."""
    return [each for each in union_of(pattern) if "place" in each.traits(causal).depends]


def leaves_no_gap(pattern: Pattern, heads: int, layer: int, *, causal: bool) -> bool:
    """Whether with two keys a query always meets those between them too."""
    parts = [decompose(each, causal=causal) for each, _ in pattern.groups_of(heads, layer)]
    return all(each.band is not None and each.rest is None and not each.tokens and not each.flagged for each in parts)


def needs_weights(context: Context) -> bool:
    """Whether only the written-out softmax will do: logits are capped or have a learned term, or the output has a term over
    the weights."""
    encoding = context.encoding
    learned = encoding.logits is not None and encoding.learned
    own = (context.softcap, encoding.values, encoding.row)
    return any(part is not None for part in own) or learned


def _scale(q: Tensor, context: Context, scale: float | None) -> float:
    if scale is not None:
        return scale
    return q.shape[-1] ** -0.5 if context.encoding.scale is None else context.encoding.scale


def _bias(q: Tensor, k: Tensor, context: Context) -> Tensor | None:
    if context.encoding.logits is None:
        return context.bias
    term = context.encoding.logits(q, ops.repeat_heads(k, q.shape[1]))
    return term if context.bias is None else term + context.bias


def _clean(x: Tensor, context: Context) -> Tensor:
    """Keys and values of padding as zeros: 0 times NaN would reach the output."""
    return (
        x
        if context.keys.keep is None
        else torch.where(context.keys.keep[:, None, :, None], x, torch.zeros((), dtype=x.dtype, device=x.device))
    )
