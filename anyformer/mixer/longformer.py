"""Longformer: a sliding window, and global tokens with projections of their own.

Paper: Beltagy et al. 2020, 2004.05150.
Equation, with real tokens P and flagged ones G, s the scale and b the encoding's term:

    not in G: out_i = sum_j softmax_j(s q_i . k_j + b_ij) v_j      over j in P with |i - j| <= window, and j in G
    in G:     out_i = sum_j softmax_j(s q'_i . k'_j + b_ij) v'_j   over j in P

each j once. q, k, v and q', k', v' are six projections of x. When causal, j <= i and every row is of the first kind:
G acts as keys only, and q', k', v' do not exist.
Deviation: the paper's window is two-sided (512 there is 256 here).
"""

from dataclasses import replace
from itertools import groupby

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.attention.softmax import attend
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form, Verdict, check
from anyformer.mixer._explained import implied, products, score_terms, weighing
from anyformer.mixer._prepared import prepared
from anyformer.mixer.base import Mixer
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Dilated, Flagged, PerHead
from anyformer.pattern.pairs import count
from anyformer.position.base import Position
from anyformer.position.bind import bind, shifted
from anyformer.side import Side, left_order, take
from anyformer.site import Site
from anyformer.typing import Count, Size

_PROJECTIONS: tuple[str, ...] = ("q", "k", "v", "q_norm", "k_norm")


class Longformer(Mixer):
    """Each token reads a window and the tokens that `global_mask` or `ids` flag; these read all, by projections of their own.

    Flags on padding count for nothing. When causal, flagged tokens are only read, by later ones. Without global tokens
    (`max_globals=0`) a cache keeps the window only.

    Args:
        window: number of keys read strictly before a token, and as many after it where not causal.
        max_globals: most flagged tokens a row; more are refused.
        dilation: distance between neighbouring keys of the window, in tokens; the window reaches window * dilation far. A list
            gives one for each head.
        ids: token ids whose tokens are flagged, beside those of `global_mask`; together at most `max_globals` a row.
        bias: whether projections have a bias.
        qk_norm: whether queries and keys are RMS-normalised per head before they are placed.
        dropout: probability of dropping an attention weight in training.

    Raises:
        IncompatibleError: it cannot use the position.
        SpecError: there are not as many dilations as heads, or there are token ids and max_globals=0.
    """

    name = "longformer"
    summary = "a sliding window, and flagged tokens that read all and are read by all"
    paper = "Beltagy et al. 2020, 2004.05150"
    family = ("human-made pattern", "combined")
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
    outside: tuple[Form, ...] = (Form.SHIFT,)
    refusal = (
        "it reads chosen pairs one by one, and this form needs every key between two tokens or another product; "
        "use an encoding that embeds, rotates, biases or scores, such as rope or alibi"
    )
    causal = True
    two_streams = True
    documents = True
    takes_flags = True
    decodes = "cache"
    ordered = True

    def __init__(
        self,
        site: Site,
        position: Position,
        *,
        window: Count = 256,
        max_globals: Count = 16,
        dilation: Size | tuple[Size, ...] = 1,
        ids: tuple[Count, ...] = (),
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        self.verdict: Verdict = check(self, position, site)
        if ids and not max_globals:
            raise SpecError(
                f"longformer: ids={list(ids)} flag tokens, and max_globals=0 leaves no room; raise max_globals"
            )
        self.position = position
        self.max_globals, self.flag_ids = max_globals, ids
        self.dropout = dropout
        band = _band(site, window, dilation)
        self.pattern = band | Flagged() if max_globals else band
        self.q, self.k, self.v, self.q_norm, self.k_norm = _projections(site, bias, qk_norm)
        self.for_globals: nn.ModuleDict | None = None
        if not site.causal:
            self.for_globals = nn.ModuleDict(dict(zip(_PROJECTIONS, _projections(site, bias, qk_norm), strict=True)))
        self.o = nn.Linear(site.heads * site.head_dim, site.dim, bias=bias)

    def cost(self) -> Cost:
        """Window and global keys, global rows, projections, all with as many global tokens as there may be."""
        site = self.site
        pattern, sizes = self.pattern, {"max_globals": self.max_globals}
        text = "2 pairs d + 2 h n max_globals d + 2 n c d (h + k)"
        if self.for_globals is not None and self.max_globals:
            text += " + 2 h max_globals n d + max_globals c h d + 2 n c k d"
        return Cost(
            site,
            text,
            memory="pairs + h n max_globals" + ("" if self.for_globals is None else " + h max_globals n"),
            again="pairs d + h n max_globals d" + ("" if self.for_globals is None else " + h max_globals n d"),
            sizes=sizes,
            pairs=lambda n, m: count(pattern, n, m, site.heads, causal=site.causal),
        )

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation.

        Raises:
            SpecError: a row has more than `max_globals` flagged tokens.
        """
        self._admit(flagged(context.keys))
        if x.shape[1] == 0:
            return x
        context = replace(context, dropout=self.dropout if self.training else 0.0)
        out = self._window(x, context)
        if self.for_globals is not None and self.max_globals and (flags := flagged(context.queries)) is not None:
            out = torch.where(flags[:, :, None], self._global_rows(x, flags, self.for_globals, context), out)
        return self.o(out)

    def pair_weights(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b h r m"] | None:
        """Its softmax weights: of v, and in flagged rows of v'."""
        q, k, v, facts = self._local(*self._local_heads(x, context), x, context)
        facts = weighing(facts)
        found = implied(lambda values: attend(q, k, values, facts), v, slots, context.queries.keep)
        flags = flagged(context.queries)
        if found is None or flags is None or self.for_globals is None or not self.max_globals:
            return found
        (own_q, own_k, own_v), own, rank = self._global_heads(x, flags, self.for_globals, context)
        if own.encoding.rotate is not None:
            own_q, own_k = own.encoding.rotate(own_q, own_k)
        own = weighing(own)
        rows = implied(lambda values: attend(own_q, own_k, values, own), own_v, rank.gather(1, slots), None)
        return None if rows is None else torch.where(flags.gather(1, slots)[:, None, :, None], rows, found)

    def pair_terms(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> dict[str, Float[Tensor, "b h r m"]]:
        """Content, rotation and bias of all pairs, in or out of the window; in flagged rows those of q' and k'."""
        bare_q, bare_k, v = self._local_heads(x, context)
        q, k, _, facts = self._local(bare_q, bare_k, v, x, context)
        score = products(q.shape[-1] ** -0.5 if facts.encoding.scale is None else facts.encoding.scale)
        found = score_terms(score, (bare_q, bare_k), (q, k), facts, slots)
        flags = flagged(context.queries)
        if flags is None or self.for_globals is None or not self.max_globals:
            return found
        bare, own, rank = self._global_heads(x, flags, self.for_globals, context)
        placed = bare[:2] if own.encoding.rotate is None else own.encoding.rotate(*bare[:2])
        rows = score_terms(score, bare[:2], placed, own, rank.gather(1, slots))
        chosen = flags.gather(1, slots)[:, None, :, None]
        return {name: torch.where(chosen, rows[name], term) for name, term in found.items()}

    def _window(self, x: Tensor, context: Context) -> Tensor:
        """Every token as a local one, flagged ones included; heads merged."""
        q, k, v, facts = self._local(*self._local_heads(x, context), x, context)
        out = attend(q, k, v, facts)
        if context.cache is not None:
            context.cache.forget(self.pattern.horizon())
        return out.transpose(1, 2).flatten(2)

    def _local_heads(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the new tokens as local ones, not yet rotated."""
        own = self.q, self.k, self.v, self.q_norm, self.k_norm
        return self._heads(own, x, x if context.x is None else context.x, context.queries, context)

    def _local(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor, Context]:
        """What every token reads as a local one: queries, the keys and values of all tokens so far, and the context."""
        cache, source = context.cache, x if context.x is None else context.x
        facts = prepared(self.position, source, context.queries, cache, slots=True)
        new_keys = context.keys if cache is None else context.queries
        encoding = bind(self.position, self.verdict.forms, context.queries, new_keys, facts if cache is None else None)
        if encoding.rotate is not None:
            q, k = encoding.rotate(q, k)
        if cache is not None:
            k = cache.extend("k", k.transpose(1, 2)).transpose(1, 2)
            v = cache.extend("v", v.transpose(1, 2)).transpose(1, 2)
            encoding = bind(self.position, self.verdict.forms, context.queries, context.keys, facts)
        return q, k, v, replace(context, pattern=self.pattern, encoding=encoding)

    def _global_rows(self, x: Tensor, flags: Tensor, own: nn.ModuleDict, context: Context) -> Tensor:
        """What flagged tokens read, at their slots (others hold anything); only `max_globals` rows are computed."""
        (q, k, v), facts, rank = self._global_heads(x, flags, own, context)
        if facts.encoding.rotate is not None:
            q, k = facts.encoding.rotate(q, k)
        return take(attend(q, k, v, facts).transpose(1, 2).flatten(2), rank)

    def _global_heads(
        self, x: Tensor, flags: Tensor, own: nn.ModuleDict, context: Context
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Context, Int[Tensor, "b n"]]:
        """Queries of flagged tokens, keys and values of all by projections of their own, not yet rotated; the context of these
        rows, and the row of each flagged token among them."""
        slots = left_order(flags)[:, : self.max_globals]
        rows = at(context.queries, slots)
        heads = self._heads(tuple(own.values()), take(x, slots), x if context.x is None else context.x, rows, context)
        encoding = bind(self.position, self.verdict.forms, rows, context.keys)
        rank = (flags.cumsum(dim=1) - 1).clamp(0, slots.shape[1] - 1)
        return heads, replace(context, queries=rows, encoding=encoding), rank

    def _heads(
        self, projections: tuple[nn.Module, ...], x: Tensor, source: Tensor, queries: Side, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b h n d] of x, keys and values [b k m d] of the source, normalised and not yet rotated."""
        *linear, q_norm, k_norm = projections
        q, k, v = (each(tokens) for each, tokens in zip(linear, (x, source, source), strict=True))
        if Form.SHIFT in self.verdict.forms:
            keys = context.keys if context.cache is None else context.queries
            q, k, v = shifted(self.position, (q, k, v), queries, keys, context.layer, context.cache)
        q, k, v = (each.unflatten(-1, (-1, self.site.head_dim)).transpose(1, 2) for each in (q, k, v))
        return q_norm(q), k_norm(k), v

    def _admit(self, flags: Bool[Tensor, "b m"] | None) -> None:
        if flags is None or flags.numel() == 0 or torch.compiler.is_compiling() or flags.is_meta:
            return
        most = int(flags.sum(dim=1).max())
        if most > self.max_globals:
            raise SpecError(
                f"{self.name} was built for at most {self.max_globals} global tokens a row, got {most}; "
                f"flag fewer in global_mask or use longformer(max_globals={most})"
            )


def _band(site: Site, window: int, dilation: int | tuple[int, ...]) -> Pattern:
    right = 0 if site.causal else window
    if isinstance(dilation, int):
        return Dilated(window, right, dilation)
    if len(dilation) != site.heads:
        example = ", ".join(["1"] * (site.heads - 1) + ["2"])
        raise SpecError(
            f"longformer: expected one dilation, or one for each of the {site.heads} heads, got {len(dilation)}; "
            f"for example dilation=[{example}]"
        )
    return PerHead(*((Dilated(window, right, step), len(list(run))) for step, run in groupby(dilation)))


def flagged(tokens: Side) -> Bool[Tensor, "b t"] | None:
    """Which real tokens are flagged as global; None: none."""
    return tokens.flags if tokens.flags is None or tokens.keep is None else tokens.flags & tokens.keep


def at(tokens: Side, slots: Int[Tensor, "b g"]) -> Side:
    """The tokens of the given slots of each row."""

    def chosen(part: Tensor | None) -> Tensor | None:
        return None if part is None else take(part, slots)

    return Side(
        places=take(tokens.places, slots),
        positions=take(tokens.positions, slots),
        keep=chosen(tokens.keep),
        documents=chosen(tokens.documents),
        without=chosen(tokens.without),
        arithmetic=False,
    )


def _projections(site: Site, bias: bool, qk_norm: bool) -> list[nn.Module]:
    """What `_PROJECTIONS` names."""
    linear = [
        nn.Linear(site.dim, heads * site.head_dim, bias=bias) for heads in (site.heads, site.kv_heads, site.kv_heads)
    ]
    return [*linear, *(nn.RMSNorm(site.head_dim, eps=1e-6) if qk_norm else nn.Identity() for _ in range(2))]
