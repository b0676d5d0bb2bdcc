"""Learned blocks: a small network decides at low resolution which blocks of pairs are computed.

Paper: the idea of a learned binary pattern is that of Tay et al. 2020, 2002.11296; the estimator is the straight-through one of
    Bengio, Leonard and Courville 2013, 1308.3432. The definition below is this package's own.
Equation, for groups of `group` places, a key head at a time, with x_r the mean of the real keys of group r:

    s_rc = (x_r W_q) . (x_c W_k) / sqrt(d) + u[c - r]    (c - r clipped to +-8; when causal x_{r-1} stands for x_r, and c < r)
    G_rc = 1 for c = r and for the keep - 1 largest s_rc of row r
    out_i = sum_j softmax_j(s q_i . k_j + b_ij) v_j      over the allowed j with G[i // group, j // group] = 1

    A binary choice has no slope. In the backward a kept logit of group c counts as if sigmoid((s_rc - t_r) / temperature) had been
    added to it, with t_r midway between the last score kept and the first one left out; where nothing is left out there is none.
Deviations: none from the definition. The network reads means of keys without a gradient to them: what the estimator says ends in
    the network, so the gradient of everything else stays exact.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.attention._blocks import Blocks, blocks, leftmost
from anyformer.attention._groups import FORMS, attend_groups, gate_sums, gather, terms
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size

_REACH = 8  # groups to either side that a bias tells apart


class Chosen(NamedTuple):
    """The groups that each row of queries reads besides its own.

    Args:
        groups: their numbers.
        held: which of them count; a row may have fewer to choose from.
        gate: 0 in value, with the gradient of the estimator.
    """

    groups: Int[Tensor, "b k r c"]
    held: Bool[Tensor, "b k r c"]
    gate: Float[Tensor, "b k r c"]


class LearnedBlocks(Attention):
    """Each group of queries reads its own group of keys and those that a small network chooses for it.

    Args:
        group: tokens that share one decision.
        keep: groups that each reads, its own included.
        temperature: width of the sigmoid in the backward, in units of the network's scores.
    """

    name = "learned_blocks"
    summary = "a small network decides which blocks of pairs are computed"
    paper = "after Tay et al. 2020, 2002.11296, and Bengio et al. 2013, 1308.3432"
    family = ("learned pattern", "blocks")
    forms = FORMS
    refusal = (
        "it reads chosen pairs one by one, and this form needs every key between two tokens or another product; "
        "use an encoding that embeds, rotates, biases or scores, such as rope or alibi"
    )
    cross = False
    documents = False
    decodes = "cache"
    rotates = "self"
    ordered = True

    def __init__(self, site: Site, *, group: Size = 32, keep: Size = 4, temperature: PositiveFloat = 1.0) -> None:
        super().__init__(site)
        self.group = group
        self.keep = keep
        self.temperature = temperature
        self.rows = nn.Parameter(torch.empty(site.kv_heads, site.head_dim, site.head_dim))
        self.columns = nn.Parameter(torch.empty(site.kv_heads, site.head_dim, site.head_dim))
        self.offsets = nn.Parameter(torch.zeros(site.kv_heads, 2 * _REACH + 1))
        for weight in (self.rows, self.columns):
            nn.init.normal_(weight, std=site.head_dim**-0.5)

    def cost(self) -> Cost:
        """The blocks that are kept, half of its own when causal, and the network that chooses them."""
        read, choose = ("(2 keep - 1)", "/ 2") if self.site.causal else ("2 keep", "")
        return Cost(
            self.site,
            f"h n {read} group d + k n m d / group^2 {choose}".strip() + " + k (n + m) d^2 / group",
            memory="h n keep group + k n m / group^2",
            sizes={"group": self.group, "keep": self.keep},
        )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation."""
        if not q.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        encoding = context.encoding
        raw, (q, k) = k, (q, k) if encoding.rotate is None else encoding.rotate(q, k)
        v = v if encoding.turn is None else encoding.turn(v)
        gates = None if encoding.gates is None else gate_sums(encoding.gates)
        keys, (raw, k, v, *moved) = leftmost(context, raw, k, v, *([] if gates is None else [gates[..., None]]))
        laid = blocks(context, keys, len(q), self.group)
        chosen = choose(self._scores(raw.detach(), laid), columns(laid), self.keep - 1, self.temperature)
        scale = self.site.head_dim**-0.5 if encoding.scale is None else encoding.scale
        sums = moved[0][..., 0] if moved else None
        out = attend_chosen(q, k, v, chosen, laid, replace(context, keys=keys), scale, sums)
        return out if encoding.turn_back is None else encoding.turn_back(out)

    def _scores(self, k: Float[Tensor, "b k m d"], laid: Blocks) -> Float[Tensor, "b k r g"]:
        """What the network says of each row of queries and each group of keys."""
        means = laid.keys(k).sum(dim=3) / laid.real.sum(dim=-1).clamp(min=1)[:, None, :, None]
        earlier = torch.cat([torch.zeros_like(means[:, :, :1]), means[:, :, :-1]], dim=2)
        offset = torch.arange(laid.count, device=k.device) - laid.rows[..., None]  # [b r g]
        near = self.offsets[:, offset.clamp(-_REACH, _REACH) + _REACH].transpose(0, 1)
        products = (laid.at_rows(earlier if laid.causal else means) @ self.rows) @ (means @ self.columns).mT
        return products * k.shape[-1] ** -0.5 + near


def columns(laid: Blocks) -> Bool[Tensor, "b 1 r g"]:
    """The groups that a row may choose: others than its own that hold a real key, when causal earlier ones."""
    number = torch.arange(laid.count, device=laid.rows.device)
    row = laid.rows[..., None]
    free = number < row if laid.causal else number != row
    return (free & laid.real.any(dim=-1)[:, None])[:, None]


def choose(
    scores: Float[Tensor, "b k r g"], allowed: Bool[Tensor, "b 1 r g"], count: int, temperature: float
) -> Chosen:
    """The `count` allowed groups with the largest scores, and the gate of each."""
    ranked = scores.masked_fill(~allowed, -torch.inf)
    top = ranked.topk(min(count + 1, scores.shape[-1]), dim=-1)
    groups, kept = top.indices[..., :count], top.values[..., :count]
    held = kept.detach() > -torch.inf
    if not held.shape[-1] or top.values.shape[-1] <= count:  # nothing to keep, or nothing to leave out
        return Chosen(groups, held, torch.zeros_like(kept))
    out = top.values[..., count:].detach()
    between = (kept[..., -1:].detach() + out) / 2
    forced = ~held | (out == -torch.inf)
    soft = torch.sigmoid((kept - between).masked_fill(forced, 0.0) / temperature)
    return Chosen(groups, held, soft - soft.detach())


def attend_chosen(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    chosen: Chosen,
    laid: Blocks,
    context: Context,
    scale: float,
    sums: Float[Tensor, "b h m"] | None = None,
) -> Float[Tensor, "b h n v"]:
    """Softmax attention of each row of queries over its own group and the chosen ones.

    Args:
        sums: the sums of gates up to each key, where the encoding has gates.
    """
    size, heads = laid.size, k.shape[1]
    own = laid.rows[:, None, :, None].expand(-1, heads, -1, -1)
    groups = torch.cat([own, chosen.groups], dim=-1)  # [b k r c]
    inside = torch.arange(size, device=q.device)
    slots = (groups[..., None] * size + inside).flatten(3)  # [b k r w]

    def gathered(x: Tensor) -> Tensor:
        by_group = laid.keys(x).flatten(3)  # [b k g size * d]
        return by_query_head(gather(by_group, groups).unflatten(4, (size, -1)).flatten(3, 4))

    def by_query_head(x: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // heads, dim=1)

    real = (
        laid.real[:, None]
        .expand(-1, heads, -1, -1)
        .flatten(2)
        .gather(2, slots.flatten(2))
        .unflatten(2, slots.shape[2:])
    )
    others = (real[..., size:] & chosen.held.repeat_interleave(size, dim=-1))[:, :, :, None].expand(
        -1, -1, -1, size, -1
    )
    allowed = torch.cat([laid.own()[:, None].expand(-1, heads, -1, -1, -1), others], dim=-1)
    gate = torch.cat([torch.zeros_like(own, dtype=chosen.gate.dtype), chosen.gate], dim=-1)
    q_slots = laid.query_slots()[:, None].expand(-1, q.shape[1], -1, -1)
    out = attend_groups(
        laid.queries(q),
        gathered(k),
        gathered(v),
        by_query_head(allowed),
        scale,
        terms=terms(context, q_slots, by_query_head(slots).clamp(max=k.shape[2] - 1), sums),
        bias=by_query_head(gate.repeat_interleave(size, dim=-1))[:, :, :, None],
        dropout=context.dropout,
    )
    return laid.back(out).to(q.dtype)
