"""Sinkhorn attention: blocks of keys are sorted by a learned soft permutation; each block of queries reads its own block and the
one sorted to it.

Paper: Tay, Bahri, Yang, Metzler and Juan 2020, 2002.11296.
Equation, for blocks of `block` places, a key head at a time:

    R_i = net(mean of the keys of block i) / temperature,   P = balance(R),   K'_i = sum_j P_ij K_j,   V'_i = sum_j P_ij V_j
    out of block i = softmax over [K'_i, K_i] of [V'_i, V_i], slot by slot

    balance: log P loses its row sums, then `iterations` times its column sums and its row sums. When causal, only j < i take part,
    the mean runs from place 0 to the first token of block i, and the column sum that row i loses is that of rows up to i.
Deviations: the network reads means of keys, where the paper reads sums of token vectors, which grow with the block. The sorted and
    the own block share one softmax, where the paper's formula adds the two logits. Causal column sums run over earlier rows only:
    later ones would tell the past about the future. Rows then sum to 1 and columns need not.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.attention._blocks import Blocks, blocks, leftmost
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops import softmax as ops
from anyformer.ops.bucket_sorted import sorted_forward
from anyformer.site import Site
from anyformer.typing import Count, PositiveFloat, Size

_FAR = -1e30  # log of a weight that is 0; finite, so that no difference of two is NaN
_LEAST = -60.0  # log of the smallest weight that a causal column sum still tells from 0


class Sinkhorn(Attention):
    """Each block of queries reads its own block of keys and a mixture of blocks that a small network sorts to it.

    Args:
        block: tokens a block.
        iterations: times that columns and rows are balanced.
        temperature: divisor of the network's scores: the smaller, the nearer to one block a row.
        noise: factor on the Gumbel noise added to the scores in training; 0: none.
        hard: whether each row takes its best block only; the network learns by the gradient of the mixture, which then ends in it
            and does not go on to the keys it read.

    Raises:
        SpecError: a negative noise.
    """

    name = "sinkhorn"
    summary = "each block reads itself and a block that a learned soft permutation sorts to it"
    paper = "Tay et al. 2020, 2002.11296"
    family = ("learned pattern", "sinkhorn")
    forms = (Form.ROTATE, Form.TURN, Form.AUGMENT, Form.EMBED)
    absolute = frozenset({Form.ROTATE, Form.TURN, Form.AUGMENT})
    refusal = (
        "it mixes blocks of keys, so no score belongs to one pair of query and key and there is nothing to bias; use an encoding "
        "added at the embedding, such as sinusoidal or learned; rope runs too, but mixed"
    )
    unscored = (
        "scores mixtures of keys beside the keys of a query's own block, so a pair may have no score of its own, or two"
    )
    cross = False
    documents = False
    decodes = "cache"
    rotates = "self"
    ordered = True

    def __init__(
        self,
        site: Site,
        *,
        block: Size = 32,
        iterations: Count = 8,
        temperature: PositiveFloat = 0.75,
        noise: float = 1.0,
        hard: bool = False,
    ) -> None:
        super().__init__(site)
        if noise < 0:
            raise SpecError(f"{self.name}: expected a noise of at least 0, got {noise}")
        self.block = block
        self.iterations = iterations
        self.temperature = temperature
        self.noise = noise
        self.hard = hard
        heads, d, most = site.kv_heads, site.head_dim, -(-site.max_length // block)
        self.inner = nn.Parameter(torch.empty(heads, d, d))
        self.inner_bias = nn.Parameter(torch.zeros(heads, 1, d))
        self.outer = nn.Parameter(torch.empty(heads, d, most))
        self.outer_bias = nn.Parameter(torch.zeros(heads, 1, most))
        for weight in (self.inner, self.outer):
            nn.init.normal_(weight, std=d**-0.5)

    def cost(self) -> Cost:
        """Two blocks for each query, half of its own when causal, and the sorting, half of it when causal."""
        read, sort = ("3", "") if self.site.causal else ("4", "2 ")
        return Cost(
            self.site,
            f"{read} h n block d + {sort}k n m d / block",
            memory="2 h n block + 2 k n d + k n m / block^2",
            sizes={"block": self.block},
        )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation.

        Raises:
            SpecError: more keys than `max_length`.
        """
        if (m := k.shape[2]) > self.site.max_length:
            raise SpecError(
                f"{self.name} was built for at most {self.site.max_length} tokens, got {m}; "
                f"build with max_length={m} or shorten the input"
            )
        if not q.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        encoding = context.encoding
        raw, (q, k) = k, (q, k) if encoding.rotate is None else encoding.rotate(q, k)
        v = v if encoding.turn is None else encoding.turn(v)
        keys, (raw, k, v) = leftmost(context, raw, k, v)
        laid = blocks(context, keys, len(q), self.block)
        weights = self._weights(raw, laid)
        scale = self.site.head_dim**-0.5 if encoding.scale is None else encoding.scale
        out = attend_sorted(q, k, v, weights, laid, scale, context.dropout)
        return out if encoding.turn_back is None else encoding.turn_back(out)

    def _weights(self, k: Float[Tensor, "b k m d"], laid: Blocks) -> Float[Tensor, "b k r g"]:
        """The rows of P that have queries."""
        hidden = torch.relu(summaries(k.detach() if self.hard else k, laid) @ self.inner + self.inner_bias)
        scores = (hidden @ self.outer[..., : laid.count] + self.outer_bias[..., : laid.count]) / self.temperature
        scores = scores.to(torch.promote_types(torch.float32, k.dtype))
        if self.training and self.noise:
            drawn = torch.rand_like(scores).clamp_(min=torch.finfo(scores.dtype).tiny)
            gumbel = drawn.log_().neg_().log_().neg_()
            scores = scores + gumbel * (self.noise / self.temperature)
        allowed = None if laid.whole and not laid.causal else sources(laid)
        weights = balance(scores, allowed, self.iterations, causal=laid.causal)
        if self.hard:
            best = torch.zeros_like(weights).scatter(-1, weights.argmax(dim=-1, keepdim=True), 1.0)
            best = best.masked_fill(~sources(laid), 0.0)
            weights = best + (weights - weights.detach())
        return laid.at_rows(weights)


def summaries(k: Float[Tensor, "b k m d"], laid: Blocks) -> Float[Tensor, "b k g d"]:
    """What the network knows of each block: the mean of its real keys, or when causal of all keys up to its first."""
    if laid.causal:
        by_block, first = laid.keys(k), torch.arange(laid.count, device=k.device) * laid.size
        earlier = F.pad(by_block[:, :, :-1].sum(dim=3).cumsum(dim=2), (0, 0, 1, 0))
        return (earlier + by_block[:, :, :, 0]) / (first + 1)[:, None]
    held = laid.real.sum(dim=-1).clamp(min=1)
    return laid.keys(k).sum(dim=3) / held[:, None, :, None]


def sources(laid: Blocks) -> Bool[Tensor, "b 1 g g"]:
    """Which blocks [.. j] may be sorted to which [.. i, j]: those with a real key, and when causal only j < i."""
    held = laid.real.any(dim=-1)[:, None]
    allowed = held[:, :, :, None] & held[:, :, None, :]
    return allowed.tril(-1) if laid.causal else allowed


def balance(
    scores: Float[Tensor, "b k g g"], allowed: Bool[Tensor, "b 1 g g"] | None, iterations: int, *, causal: bool
) -> Float[Tensor, "b k g g"]:
    """Sinkhorn's balancing of exp(scores) over the allowed pairs (None: all): rows sum to 1, columns nearly so unless causal.

    A row without an allowed pair is 0. When causal, column j is divided in row i by its sum over rows up to i.
    """

    if causal:
        assert allowed is not None
        return _balance_forwards(scores, allowed, iterations)
    far = None if allowed is None else _far(allowed, scores)

    def shown(x: Tensor) -> Tensor:
        return x if far is None else x + far

    x = shown(scores)
    for _ in range(iterations):
        x = shown(shown(x.log_softmax(dim=-1)).log_softmax(dim=-2))
    x = x.softmax(dim=-1)
    return x if allowed is None else x * allowed


def _balance_forwards(
    scores: Float[Tensor, "b k g g"], allowed: Bool[Tensor, "b 1 g g"], iterations: int
) -> Float[Tensor, "b k g g"]:
    """`balance` when causal. Hidden pairs keep plain numbers in between: exp and log of those that are none are slow."""
    x, allowed = (
        scores.mT.contiguous(),
        allowed.mT.contiguous(),
    )  # so that a running sum reads what is stored side by side
    far, counts = _far(allowed, scores), allowed.to(scores.dtype)
    x = x + far
    for _ in range(iterations):  # a running sum of plain weights: rows summed to 1 just now, so none overflows
        x = x.log_softmax(dim=-2).clamp(min=_LEAST)
        sums = (x.exp() * counts).cumsum(dim=-1) + (1.0 - counts)
        x = x - sums.log() + far
    return (x.softmax(dim=-2) * counts).mT


def _far(allowed: Bool[Tensor, "b 1 g g"], scores: Float[Tensor, "b k g g"]) -> Float[Tensor, "b 1 g g"]:
    """What hides a score that it is added to: 0 for the allowed pairs."""
    return torch.zeros(allowed.shape, dtype=scores.dtype, device=scores.device).masked_fill(~allowed, _FAR)


def attend_sorted(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    weights: Float[Tensor, "b k r g"],
    laid: Blocks,
    scale: float,
    dropout: float,
) -> Float[Tensor, "b h n v"]:
    """Softmax attention of each row of queries over its own block and the mixture of blocks with the given weights.

    A slot that some of the mixed blocks do not have (the last one may be partly filled) is the mean over those that have it, and
    counts with their share of the row.
    """
    filled = laid.causal or laid.whole  # every block that is mixed is whole, so a row's shares are 1 or 0
    by_block = laid.keys(k), laid.keys(v)
    if filled and laid.straight and not dropout and q.device.type == "cpu" and not torch.compiler.is_exporting():
        out = sorted_forward(laid.keys(q), *by_block, weights, laid.causal, scale)[0]
        return laid.back(out.to(q.dtype))
    weights = weights.to(k.dtype)
    share = weights @ laid.real.to(k.dtype)[:, None]  # [b k r s]
    there = share.detach() > 0
    divisor = torch.where(there, share, 1.0)[..., None]
    mixed = [(weights @ x.flatten(3)).unflatten(-1, (laid.size, -1)) for x in by_block]
    mixed = mixed if filled else [x / divisor for x in mixed]
    own = [laid.at_rows(x) for x in by_block]
    rows, own_pairs = laid.rows.shape[1], laid.own()
    groups = q.shape[1] // k.shape[1]

    def fold(x: Tensor) -> Tensor:  # rows into the batch
        return x.transpose(1, 2).flatten(0, 1)

    def by_head(x: Tensor) -> Tensor:  # [b k r s] -> [b r, h, 1, s]
        return fold(x.repeat_interleave(groups, dim=1))[:, :, None]

    queries = fold(laid.queries(q))
    keys, values = (fold(torch.cat(pair, dim=3)) for pair in zip(mixed, own, strict=True))
    pairs = own_pairs.flatten(0, 1)[:, None].expand(-1, q.shape[1], -1, -1)
    allowed = torch.cat([by_head(there).expand_as(pairs), pairs], dim=-1)
    if filled:
        seen = allowed if laid.causal else None
        out = ops.fused(queries, keys, values, allowed=seen, scale=scale, dropout=dropout)
    else:
        bias = by_head(torch.where(there, divisor[..., 0].log(), 0.0)).expand_as(pairs)
        bias = torch.cat([bias, torch.zeros_like(bias)], dim=-1)
        out = ops.dense(queries, keys, values, allowed=allowed, bias=bias, scale=scale, dropout=dropout)[0]
    return laid.back(out.unflatten(0, (len(q), rows)).transpose(1, 2))
