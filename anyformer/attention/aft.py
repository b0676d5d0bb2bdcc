"""Attention-free transformer: every channel averages the values with weights of its own, from keys and places alone.

Paper: Zhai et al. 2021, 2105.14103.
Equation, for each channel, over the places j that padding and causality leave to place i:

    out_i = sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)

    full:    w_ij = u_i . t_j with learned u, t [max_length rank]      simple:  w_ij = 0
    local:   the same where |i - j| < window, else 0                   conv:    w_ij = f[h, j - i] there, else 0

and, of every variant, plus the bias b_ij of a position encoding: any term of a pair that reads places or the tokens in between.
Deviations: queries, keys and values are split into heads, so that a bias may differ by head, as f does; f has no normalisation.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.left import leftmost
from anyformer.ops.softmax import repeat_heads
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Size

_ROWS = 16
"""Rows of a causal block: within one, every pair and channel is written out."""


class AFT(Attention):
    """Each channel of each token averages the values; queries only gate what comes out.

    There are no weights of pairs to drop, so dropout acts on the output. A sample without real keys gives 0.

    Args:
        variant: "full" learns a bias for each pair of places, "local" for places less than `window` apart, "conv" for offsets of
            less than `window` and each head, "simple" none.
        window: distance from which a pair has no learned bias, in tokens.
        rank: columns of the factors of the bias, in "full" and "local".
    """

    name = "aft"
    summary = "every channel averages the values with weights from keys and places; queries gate the result"
    paper = "Zhai et al. 2021, 2105.14103"
    family = ("new framework", "attention-free")
    forms = (Form.TOEPLITZ, Form.BIAS, Form.APART, Form.GATES, Form.TURN, Form.EMBED)
    refusal = (
        "its queries meet no keys, so there is no product to rotate or score; use an encoding that is added at the embedding or "
        "biases pairs by their places, such as alibi or t5"
    )
    documents = False
    decodes = "cache"
    weights = False
    compares = False

    def __init__(
        self,
        site: Site,
        *,
        variant: Literal["full", "local", "simple", "conv"] = "full",
        window: Size = 32,
        rank: Size = 64,
    ) -> None:
        super().__init__(site)
        self.variant = variant
        self.window = window
        self.cross = variant == "simple"
        self.ordered = variant != "simple" or site.causal
        shapes = {"simple": (), "conv": ((site.heads, 2 * window - 1),)}
        factors = ((site.max_length, rank), (site.max_length, rank))
        self.bias = nn.ParameterList(torch.empty(shape) for shape in shapes.get(variant, factors))
        for part in self.bias:
            nn.init.normal_(part, std=0.1)

    def cost(self) -> Cost:
        """Numerator and denominator of every channel over all pairs, without a bias over all keys; and the bias's factors."""
        if self.variant == "simple":
            return Cost(self.site, "2 h m d", memory="2 h d")
        if self.variant == "conv":
            return Cost(self.site, "2 pairs d", memory="pairs")
        return Cost(self.site, "2 pairs d + n m rank", memory="n m", sizes={"rank": self.bias[0].shape[1]})

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: more keys than `max_length`, in "full" and "local".
        """
        if (m := k.shape[2]) > self.site.max_length and self.variant in ("full", "local"):
            raise SpecError(
                f"{self.name} was built for at most {self.site.max_length} tokens, got {m}; "
                f"build with max_length={m}, shorten the input, or use variant=conv or simple"
            )
        keys, encoding = context.keys, context.encoding
        if (keep := keys.keep) is not None:
            k, v = (torch.where(keep[:, None, :, None], part, torch.zeros_like(part)) for part in (k, v))
        v = v if encoding.turn is None else encoding.turn(v)
        wide = torch.promote_types(torch.float32, q.dtype)
        k, v = (repeat_heads(part, q.shape[1]).to(wide) for part in (k, v))
        given = None if encoding.logits is None else encoding.logits(q, k).to(wide)
        if context.cache is not None:
            keys, k, v, given = _to_the_left(keys, k, v, given)
            keep = keys.keep
        w = self._bias(q, k, context.queries, given)
        if not context.causal:
            out = averaged(k, v, w, keep, q.shape[2])
        elif context.cache is None or m == q.shape[2]:
            out = averaged_causally(k, v, w, keep, q.shape[2])
        else:  # rows of a cache differ in length
            allowed = keys.places[:, None, None, :] <= context.queries.places[:, None, :, None]
            out = written_out(k, v, w, allowed if keep is None else allowed & keep[:, None, None, :])
        out = torch.sigmoid(q) * out.to(q.dtype)
        return out if encoding.turn_back is None else encoding.turn_back(out)

    def _bias(self, q: Tensor, k: Tensor, queries: Side, given: Tensor | None) -> Float[Tensor, "#b #h n m"] | None:
        """w of the module's equation, the encoding's bias included; None where it is 0."""
        if self.variant == "simple":
            return given
        offsets = torch.arange(k.shape[2], device=q.device) - queries.places[..., None]  # b|1 n m
        near = offsets.abs() < self.window
        if self.variant == "conv":
            taps = self.bias[0][:, offsets.clamp(1 - self.window, self.window - 1) + self.window - 1]
            own = taps.transpose(0, 1).masked_fill(~near[:, None], 0.0)
        else:
            rows, columns = self.bias[0][queries.places], self.bias[1][: k.shape[2]]
            own = torch.einsum("bnr,mr->bnm", rows, columns)
            own = (own if self.variant == "full" else own.masked_fill(~near, 0.0))[:, None]
        return own.to(k.dtype) if given is None else own.to(k.dtype) + given


def _to_the_left(
    keys: Side, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Side, Tensor, Tensor, Float[Tensor, "#b #h n m"] | None]:
    """Keys, values and the bias `[b|1 h n m]` of their pairs with the slot of each real key its place."""
    if bias is None:
        keys, (k, v) = leftmost(keys, k.transpose(1, 2), v.transpose(1, 2))
        return keys, k.transpose(1, 2), v.transpose(1, 2), None
    keys, (k, v, bias) = leftmost(keys, k.transpose(1, 2), v.transpose(1, 2), bias.movedim(3, 1))
    return keys, k.transpose(1, 2), v.transpose(1, 2), bias.movedim(1, 3)


Sums = tuple[Tensor, Tensor, Tensor]
"""sum_j exp(k_j + w_ij - top) v_j, the same without v_j, and top, each `[b h n d]` or one row for all."""


def written_out(
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m d"],
    w: Float[Tensor, "#b #h n m"] | None,
    allowed: Bool[Tensor, "#b 1 n m"],
) -> Float[Tensor, "b h n d"]:
    """The average of the module's equation, pair by pair and channel by channel; the specification of the faster ones."""
    blocks = [slice(first, first + _ROWS) for first in range(0, allowed.shape[2], _ROWS)]
    outs = [_divided(_pairs(k, v, None if w is None else w[:, :, rows], allowed[:, :, rows])) for rows in blocks]
    return torch.cat(outs, dim=2) if outs else k[:, :, :0]


def averaged(
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m d"],
    w: Float[Tensor, "#b #h n m"] | None,
    keep: Bool[Tensor, "b m"] | None,
    n: int,
) -> Float[Tensor, "b h n d"]:
    """`written_out` where every query reads all real keys: exp(k + w) = exp(k) exp(w), one product of matrices."""
    return _divided(_all(k, v, w, keep)).expand(-1, -1, n, -1)


def averaged_causally(
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m d"],
    w: Float[Tensor, "#b #h n m"] | None,
    keep: Bool[Tensor, "b m"] | None,
    n: int,
) -> Float[Tensor, "b h n d"]:
    """`written_out` where query i reads the real keys up to i + m - n.

    Block by block, for a bound of the exponents over all keys would let the future push the past below the smallest number: the
    keys before a block are read as `averaged` reads them, bounded by themselves, and those in it pair by pair.
    """
    m, outs = k.shape[2], []
    real = k.new_ones(1, m, dtype=torch.bool) if keep is None else keep
    before = max(0, m - n)
    past = _all(k[:, :, :before], v[:, :, :before], None, real[:, :before])
    for first in range(0, n, _ROWS):
        places = torch.arange(first, min(first + _ROWS, n), device=k.device) + m - n
        rows = slice(first, first + len(places))
        start, stop = max(0, first + m - n), max(0, rows.stop + m - n)
        block = slice(start, stop)
        bias = None if w is None else w[:, :, rows]
        allowed = (torch.arange(start, stop, device=k.device) <= places[:, None]) & real[:, None, None, block]
        near = _pairs(k[:, :, block], v[:, :, block], None if bias is None else bias[..., block], allowed)
        if bias is not None:
            past = _all(k[:, :, :start], v[:, :, :start], bias[..., :start], real[:, :start])
        outs.append(_divided(_joined(near, past)))
        if bias is None:
            past = _joined(past, _all(k[:, :, block], v[:, :, block], None, real[:, block]))
    return torch.cat(outs, dim=2) if outs else k[:, :, :0]


def _pairs(k: Tensor, v: Tensor, w: Tensor | None, allowed: Tensor) -> Sums:
    """Pair by pair over the allowed keys `[b|1 1 n m]`."""
    allowed, logits = allowed[..., None], k[:, :, None]
    logits = logits.expand(-1, -1, allowed.shape[2], -1, -1) if w is None else logits + w[..., None]
    powers, top = _powers(logits, allowed, dim=3)
    return (powers * v[:, :, None]).sum(dim=3), powers.sum(dim=3), top[:, :, :, 0]


def _all(k: Tensor, v: Tensor, w: Tensor | None, keep: Tensor | None) -> Sums:
    """Over all real keys `[b|1 m]`; one row for all queries where there is no w."""
    powers, top = _powers(k, None if keep is None else keep[:, None, :, None], dim=2)
    if w is None:
        return (powers * v).sum(dim=2, keepdim=True), powers.sum(dim=2, keepdim=True), top
    mixed, bias_top = _powers(w, None if keep is None else keep[:, None, None, :], dim=3)
    weighted, total = (torch.einsum("bhnm,bhmd->bhnd", mixed, part) for part in (powers * v, powers))
    return weighted, total, top + bias_top


def _powers(x: Tensor, allowed: Tensor | None, dim: int) -> tuple[Tensor, Tensor]:
    """exp(x - top), 0 where not allowed, and top, the largest allowed entry along `dim`."""
    low = torch.finfo(x.dtype).min / 4  # stays finite when two are added or subtracted
    if allowed is not None:
        x = x.masked_fill(~allowed, low)
    empty = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    top = x.detach().amax(dim=dim, keepdim=True) if x.shape[dim] else x.new_full(empty, low)
    powers = torch.exp(x - top)
    return powers if allowed is None else powers.masked_fill(~allowed, 0.0), top


def _joined(one: Sums, other: Sums) -> Sums:
    """The sums over both sets of keys."""
    top = torch.maximum(one[2], other[2])
    parts = [[part * torch.exp(sums[2] - top) for part in sums[:2]] for sums in (one, other)]
    return parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], top


def _divided(sums: Sums) -> Tensor:
    """The average; 0 where there was no key."""
    total = torch.where(sums[1] > 0, sums[1], 1.0)
    return torch.where(sums[1] > 0, sums[0] / total, 0.0)
