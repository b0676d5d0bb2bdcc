"""Synthesizer: attention weights that are not made from products of queries and keys.

Paper: Tay et al. 2020, 2005.00743.
Equation, for each head, over the places j that padding and causality leave to place i, with v_j = W_v x_j:

    out_i = W_o sum_j softmax_j(S_ij) v_j,   S = sum_p alpha_p S_p,   alpha = softmax of a learned number for each part p

    dense:       h_i = relu(W_1 x_i),  S_ij = (h_i W_2 + b_2)_j
    factorised:  A_i = h_i W_a + b_a,  B_i = h_i W_b + b_b,  S_ij = A_i[j // width] B_i[j mod width]
    random:      S_ij = R_ij learned (or fixed);   factorised: S = R_1 R_2^T with `rank` columns
    dot:         S_ij = scale * (W_q x_i) . (W_k x_j)

Places index columns of W_2 and both axes of R, [max_length] long; width is the root of max_length, rounded up.
Deviation: none; one learned number a part, where some codes have one a head.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.mixer.base import Mixer
from anyformer.ops.left import leftmost
from anyformer.ops.softmax import fused, repeat_heads
from anyformer.pattern.pairs import pairs
from anyformer.side import take
from anyformer.site import Site
from anyformer.typing import Size


class Synthesizer(Mixer):
    """Each token's weights come from the token alone, or from nothing but its place.

    Args:
        dense: weights from the token: "full", "factorised" into two short vectors, or "none".
        random: weights from the place: "full", "factorised" into two thin matrices, "fixed" as they were drawn, or "none".
        dot: whether products of queries and keys are a part too.
        rank: columns of the factors of a factorised random part.
        bias: whether the linear layers have a bias.
        dropout: probability of dropping a weight in training.

    Raises:
        SpecError: no part at all.
    """

    name = "synthesizer"
    summary = "attention weights from each token alone, or from places alone, without comparing tokens"
    paper = "Tay et al. 2020, 2005.00743"
    family = ("new framework", "synthesizer")
    causal = True
    decodes = "cache"
    ordered = True

    def __init__(
        self,
        site: Site,
        *,
        dense: Literal["full", "factorised", "none"] = "full",
        random: Literal["full", "factorised", "fixed", "none"] = "none",
        dot: bool = False,
        rank: Size = 8,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        if dense == random == "none":
            raise SpecError(
                f"synthesizer: expected at least one part besides dot, got dense=none and random=none{', dot' * dot}; use "
                "dense=full, random=full or a factorised one" + ("; for dot alone use softmax" if dot else "")
            )
        self.limit = site.max_length
        self.dropout = dropout
        inner = site.heads * site.head_dim
        self.dense = None if dense == "none" else Dense(site, factorised=dense == "factorised", bias=bias)
        self.random = None if random == "none" else Random(site, random, rank)
        self.q = nn.Linear(site.dim, inner, bias=bias) if dot else None
        self.k = nn.Linear(site.dim, site.kv_heads * site.head_dim, bias=bias) if dot else None
        self.v = nn.Linear(site.dim, site.kv_heads * site.head_dim, bias=bias)
        self.o = nn.Linear(inner, site.dim, bias=bias)
        parts = sum(part is not None for part in (self.dense, self.random, self.q))
        self.shares = nn.Parameter(torch.zeros(parts)) if parts > 1 else None

    def cost(self) -> Cost:
        """The values that are weighed, the weights of each part, and the projections."""
        factorised = self.dense is not None and len(self.dense.out) > 1
        full = self.dense is not None and not factorised
        text = f"{1 + full + (self.q is not None)} pairs d".removeprefix("1 ")
        text += f" + {'2 ' * (self.q is not None)}n c d (h + k)" + " + n c h d" * (self.dense is not None)
        text, sizes = text + " + 2 h n d max_length^(1/2)" * factorised, {}
        if self.random is not None and len(self.random.table) > 1:
            text, sizes = text + " + pairs rank", {"rank": self.random.table[0].shape[-1]}
        return Cost(self.site, text, memory="pairs", sizes=sizes)

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        if x.shape[1] == 0:
            return x
        cache, keys = context.cache, context.keys
        rows = {"v": self.v(x)} | ({} if self.k is None else {"k": self.k(x)})
        if cache is not None:
            rows = {name: cache.extend(name, part) for name, part in rows.items()}
            keys, moved = leftmost(keys, *rows.values())
            rows = dict(zip(rows, moved, strict=True))
        width = self.site.head_dim
        v = repeat_heads(rows["v"].unflatten(-1, (-1, width)).transpose(1, 2), self.site.heads)
        if keys.keep is not None:  # 0 times NaN would reach the output
            v = torch.where(keys.keep[:, None, :, None], v, torch.zeros_like(v))
        out = self._weighed(x, v, rows.get("k"), replace(context, keys=keys))
        return self.o(out.transpose(1, 2).flatten(2))

    def _weighed(self, x: Tensor, v: Tensor, k: Tensor | None, context: Context) -> Float[Tensor, "b h n v"]:
        """The values that each token reads; dense scores alone are a product, of which no tensor of all pairs is made."""
        dropout, m = self.dropout if self.training else 0.0, v.shape[2]
        if self.dense is None or not self.dense.thin or self.shares is not None:
            return weighed(self.logits(x, k, context.queries.places, m), pairs(context, 1), v, dropout)
        triangle = context.plainly_causal
        allowed = None if triangle else pairs(context, 1)
        return weighed_products(*self.dense.factors(x, m), v, allowed, triangle, dropout)

    def pair_weights(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b h r m"] | None:
        """Its softmax weights."""
        terms = self.pair_terms(x, context, slots)
        rows = replace(context, queries=context.queries.take(slots))
        return softmax(torch.stack(list(terms.values())).sum(dim=0), pairs(rows, 1))

    def pair_terms(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> dict[str, Float[Tensor, "b h r m"]]:
        """Its parts times their shares, of all places: "dense", "random", and of a dot part "content"."""
        k = None if self.k is None else self.k(x)
        parts = self._parts(take(x, slots), k, take(context.queries.places, slots), context.keys.length)
        return {name: part.expand(len(x), -1, -1, -1) for name, part in parts.items()}

    def logits(
        self, x: Float[Tensor, "b n c"], k: Float[Tensor, "b m kd"] | None, places: Int[Tensor, "#b n"], m: int
    ) -> Float[Tensor, "#b h n m"]:
        """S of the module's equation.

        Args:
            x: the tokens of the queries.  k: keys of a dot part, heads merged.  places: those of the queries.
            m: number of keys, at places 0 to m - 1.
        """
        weighted = list(self._parts(x, k, places, m).values())
        return sum(weighted[1:], weighted[0])

    def _parts(self, x: Tensor, k: Tensor | None, places: Tensor, m: int) -> dict[str, Tensor]:
        """The parts of `logits` by name, with their shares."""
        parts = {}
        if self.dense is not None:
            parts["dense"] = self.dense(x, m)
        if self.random is not None:
            parts["random"] = self.random(places, m)
        if self.q is not None and k is not None:
            queries, keys = (part.unflatten(-1, (-1, self.site.head_dim)).transpose(1, 2) for part in (self.q(x), k))
            parts["content"] = queries @ repeat_heads(keys, self.site.heads).mT * self.site.head_dim**-0.5
        if self.shares is None:
            return parts
        shares = torch.softmax(self.shares, dim=0)
        return {name: share * part for share, (name, part) in zip(shares, parts.items(), strict=True)}


class Dense(nn.Module):
    """Scores from each token alone."""

    def __init__(self, site: Site, *, factorised: bool, bias: bool) -> None:
        super().__init__()
        self.width = math.isqrt(site.max_length - 1) + 1
        sizes = (-(-site.max_length // self.width), self.width) if factorised else (site.max_length,)
        self.head_dim = site.head_dim
        self.thin = not factorised
        """Whether the scores are a product of something of the token and something of the place."""
        self.hidden = nn.Linear(site.dim, site.heads * site.head_dim, bias=bias)
        self.out = nn.ParameterList(torch.empty(site.heads, site.head_dim, size) for size in sizes)
        self.out_bias = nn.ParameterList(torch.zeros(site.heads, size) for size in sizes if bias)
        for weight in self.out:
            nn.init.normal_(weight, std=site.head_dim**-0.5)

    def forward(self, x: Float[Tensor, "b n c"], m: int) -> Float[Tensor, "b h n m"]:
        """The scores of places 0 to m - 1."""
        hidden = self._hidden(x)
        if len(self.out) == 1:
            return self._scores(hidden, 0, m)
        coarse, fine = (self._scores(hidden, part, weight.shape[-1]) for part, weight in enumerate(self.out))
        places = torch.arange(m, device=x.device)
        return coarse[..., places // self.width] * fine[..., places % self.width]

    def factors(self, x: Float[Tensor, "b n c"], m: int) -> tuple[Float[Tensor, "b h n f"], Float[Tensor, "b h m f"]]:
        """What the scores of places 0 to m - 1 are a product of, where they are one."""
        hidden, columns = self._hidden(x), self.out[0][..., :m].mT
        if len(self.out_bias):
            hidden = F.pad(hidden, (0, 1), value=1.0)
            columns = torch.cat([columns, self.out_bias[0][:, :m, None]], dim=-1)
        return hidden, columns.expand(len(x), -1, -1, -1)

    def _hidden(self, x: Tensor) -> Tensor:
        return F.relu(self.hidden(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _scores(self, hidden: Tensor, part: int, count: int) -> Tensor:
        scores = torch.einsum("bhnd,hdm->bhnm", hidden, self.out[part][..., :count])
        return scores + self.out_bias[part][:, None, :count] if len(self.out_bias) else scores


class Random(nn.Module):
    """Scores from places alone."""

    def __init__(self, site: Site, kind: Literal["full", "factorised", "fixed"], rank: int) -> None:
        super().__init__()
        longest = site.max_length
        shapes = [(longest, rank)] * 2 if kind == "factorised" else [(longest, longest)]
        self.table = nn.ParameterList(torch.empty(site.heads, *shape) for shape in shapes)
        for part in self.table:
            nn.init.normal_(part, std=rank**-0.25 if kind == "factorised" else 1.0)
            part.requires_grad_(kind != "fixed")

    def forward(self, places: Int[Tensor, "#b n"], m: int) -> Float[Tensor, "#b h n m"]:
        """The scores of places 0 to m - 1 at the rows of the given places."""
        if len(self.table) == 1:
            return self.table[0][:, :, :m][:, places].transpose(0, 1)
        rows = self.table[0][:, places].transpose(0, 1)  # b h n rank
        return torch.einsum("bhnr,hmr->bhnm", rows, self.table[1][:, :m])


def weighed_products(
    left: Float[Tensor, "b h n f"],
    right: Float[Tensor, "b h m f"],
    v: Float[Tensor, "b h m v"],
    allowed: Bool[Tensor, "#b 1 #n m"] | None,
    triangle: bool,
    dropout: float,
) -> Float[Tensor, "b h n v"]:
    """`weighed` of the logits left right^T, of which no tensor is made.

    Args:
        triangle: whether the allowed pairs are exactly those of a lower triangle (then `allowed` is None).
    """
    value = v.shape[3]
    most = max(left.shape[3], value)  # the kernel that makes no tensor of all pairs wants one width
    left, right, v = (F.pad(x, (0, most - x.shape[3])) for x in (left, right, v))
    out = fused(left, right, v, allowed=allowed, lower_triangle=triangle, scale=1.0, dropout=dropout)
    return out[..., :value]


def softmax(logits: Float[Tensor, "#b h n m"], allowed: Bool[Tensor, "#b 1 #n m"] | None) -> Float[Tensor, "b h n m"]:
    """Softmax of the allowed logits, in the wider of float32 and their dtype; a row without any gives 0."""
    logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
    if allowed is None:
        return torch.softmax(logits, dim=-1)
    hidden = ~allowed
    weights = torch.softmax(logits.masked_fill(hidden, torch.finfo(logits.dtype).min), dim=-1)
    return weights.masked_fill(hidden, 0.0)


def weighed(
    logits: Float[Tensor, "#b h n m"],
    allowed: Bool[Tensor, "#b 1 #n m"] | None,
    v: Float[Tensor, "b h m v"],
    dropout: float,
) -> Float[Tensor, "b h n v"]:
    """Softmax of the allowed logits times the values, in the wider of float32 and their dtype; a row without any gives 0."""
    weights = softmax(logits, allowed)
    if dropout:  # each row of the batch draws its own
        weights = F.dropout(weights.expand(len(v), -1, -1, -1), dropout)
    # not `@`: it rounds broadcast products differently where a gradient is needed
    return torch.einsum("bhnm,bhmv->bhnv", weights.to(v.dtype), v)
