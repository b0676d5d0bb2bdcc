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

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.attention.softmax import attend
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form, Verdict, check
from anyformer.mixer._prepared import prepared
from anyformer.mixer.base import Mixer
from anyformer.pattern.leaves import Dilated, Flagged
from anyformer.pattern.pairs import count
from anyformer.position.base import Position
from anyformer.position.bind import bind, shifted
from anyformer.side import Side, left_order, take
from anyformer.site import Site
from anyformer.typing import Count, Size

_PROJECTIONS: tuple[str, ...] = ("q", "k", "v", "q_norm", "k_norm")


class Longformer(Mixer):
    """Each token reads a window and the tokens that `global_mask` flags; these read all, by projections of their own.

    Flags on padding count for nothing. When causal, flagged tokens are only read, by later ones. Without global tokens
    (`max_globals=0`) a cache keeps the window only.

    Args:
        window: number of keys read strictly before a token, and as many after it where not causal.
        max_globals: most flagged tokens a row; more are refused.
        dilation: distance between neighbouring keys of the window, in tokens; the window reaches window * dilation far.
        bias: whether projections have a bias.
        qk_norm: whether queries and keys are RMS-normalised per head before they are placed.
        dropout: probability of dropping an attention weight in training.

    Raises:
        IncompatibleError: it cannot use the position.
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
        dilation: Size = 1,
        bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(site)
        self.verdict: Verdict = check(self, position, site)
        self.position = position
        self.max_globals = max_globals
        self.dropout = dropout
        band = Dilated(window, 0 if site.causal else window, dilation)
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

    def _window(self, x: Tensor, context: Context) -> Tensor:
        """Every token as a local one, flagged ones included; heads merged."""
        cache = context.cache
        own = self.q, self.k, self.v, self.q_norm, self.k_norm
        source = x if context.x is None else context.x
        q, k, v = self._heads(own, x, source, context.queries, context)
        facts = prepared(self.position, source, context.queries, cache, slots=True)
        new_keys = context.keys if cache is None else context.queries
        encoding = bind(self.position, self.verdict.forms, context.queries, new_keys, facts if cache is None else None)
        if encoding.rotate is not None:
            q, k = encoding.rotate(q, k)
        if cache is not None:
            k = cache.extend("k", k.transpose(1, 2)).transpose(1, 2)
            v = cache.extend("v", v.transpose(1, 2)).transpose(1, 2)
            encoding = bind(self.position, self.verdict.forms, context.queries, context.keys, facts)
        out = attend(q, k, v, replace(context, pattern=self.pattern, encoding=encoding))
        if cache is not None:
            cache.forget(self.pattern.horizon())
        return out.transpose(1, 2).flatten(2)

    def _global_rows(self, x: Tensor, flags: Tensor, own: nn.ModuleDict, context: Context) -> Tensor:
        """What flagged tokens read, at their slots (others hold anything); only `max_globals` rows are computed."""
        slots = left_order(flags)[:, : self.max_globals]
        rows = at(context.queries, slots)
        source = x if context.x is None else context.x
        q, k, v = self._heads(tuple(own.values()), take(x, slots), source, rows, context)
        encoding = bind(self.position, self.verdict.forms, rows, context.keys)
        if encoding.rotate is not None:
            q, k = encoding.rotate(q, k)
        out = attend(q, k, v, replace(context, queries=rows, encoding=encoding)).transpose(1, 2).flatten(2)
        rank = flags.cumsum(dim=1) - 1  # a flagged token's row among those computed
        return take(out, rank.clamp(0, slots.shape[1] - 1))

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
