"""Routing attention: tokens are clustered around learned centroids, and queries read the keys of their cluster.

Paper: Roy, Saffar, Vaswani and Grangier 2020, 2003.05997.
Equation, with centroids u_c of each head and cos the cosine of two vectors:

    both directions: cluster c holds the w queries and the w keys with the largest cos(x, u_c), w = tokens / clusters;
        o_ic = sum_j softmax_j(s q_i . k_j + b_ij) v_j over the keys of c;  out_i = mean of o_ic over the c that hold i, else 0
    causal: queries are their own keys, k_j = sqrt(d) q_j / |q_j|; token i is in the cluster with the largest cos(q_i, u_c) and
        reads the earlier tokens of its own chunk of w of that cluster and of the chunk before, itself where there is no other

Deviations: centroids are weights whose gradient is that of spherical k-means, d/du of the mean of 1 - cos(x, u_nearest), added in
    the backward and independent of the loss. The paper moves them by a running mean in the forward, which a forward without a
    step, or one that is computed again, would move too. There is no commitment loss. Queries and keys are compared as they are; the
    paper normalises both. Its causal form takes the w nearest tokens of the whole row, so that later tokens decide what earlier
    ones may read.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.attention._chunks import attend_buckets, placed
from anyformer.attention._groups import FORMS, attend_groups, gather, terms
from anyformer.attention.base import Attention
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.ops import softmax as ops
from anyformer.ops.bucket_groups import groups_forward
from anyformer.ops.bucket_keys import as_keys
from anyformer.ops.bucket_nearest import most_near, nearest_own, nearest_slots, units
from anyformer.site import Site
from anyformer.typing import Size


class Routing(Attention):
    """Each query reads the keys that lie nearest to the same centroid.

    Dropout acts on the output: where a weight stands depends on the clusters, and with them would what is dropped.

    Args:
        clusters: number of centroids a head; None: the root of max_length.
        window: tokens a cluster, or a chunk of it when causal; None: tokens / clusters, when causal max_length / clusters.
    """

    name = "routing"
    summary = "queries read the keys that lie nearest to the same learned centroid"
    paper = "Roy et al. 2020, 2003.05997"
    family = ("clustering", "k-means")
    forms = FORMS
    refusal = (
        "it reads chosen pairs one by one, and this form needs every key between two tokens or another product; "
        "use an encoding that embeds, rotates, biases or scores, such as rope or alibi"
    )
    decodes = "cache"
    rotates = "self"
    ordered = True
    weights = False

    def __init__(self, site: Site, *, clusters: Size | None = None, window: Size | None = None) -> None:
        super().__init__(site)
        self.clusters = round(site.max_length**0.5) if clusters is None else clusters
        self.window = -(-site.max_length // self.clusters) if window is None and site.causal else window
        self.spans = window is None and site.causal
        self.cross = not site.causal
        self.documents = self.shares = site.causal
        self.centroids = nn.Parameter(torch.empty(site.heads, self.clusters, site.head_dim))
        nn.init.normal_(self.centroids)

    def cost(self) -> Cost:
        """Cosines with the centroids; then each cluster's queries and keys, or when causal three chunks for each token."""
        sizes = {"clusters": self.clusters} | ({} if self.window is None else {"window": self.window})
        if self.site.causal:
            text, memory = "6 h n window d + h n clusters d", "3 h n window + h n clusters"
        elif self.window is None:
            text, memory = "2 h n m d / clusters + h (n + m) clusters d", "h n m / clusters + h (n + m) clusters"
        else:
            text = "2 h clusters window^2 d + h (n + m) clusters d"
            memory = "h clusters window^2 + h (n + m) clusters"
        return Cost(self.site, text, memory=memory, sizes=sizes)

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b g m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries; see the module's equation. When causal, `k` holds the queries of all tokens, `q` the newest."""
        q, k, v = _clean(q, context.queries.keep), _clean(k, context.keys.keep), _clean(v, context.keys.keep)
        encoding, centroids = context.encoding, self.centroids.detach()
        moves = self.training and torch.is_grad_enabled()
        v = v if encoding.turn is None else encoding.turn(v)
        if self.site.causal:
            found = [nearest_centroids(q.detach(), centroids, summed=moves)]
            out = self._earlier(q, k, ops.repeat_heads(v, q.shape[1]), found[0].clusters, context)
        else:
            found = [nearest_centroids(x.detach(), centroids, summed=True) for x in (q, k)] if moves else []
            out = self._both(q, k, v, context)
        if moves:
            sums, tokens = (
                torch.stack(part).sum(dim=0) for part in ([x.sums for x in found], [x.tokens for x in found])
            )
            out = _Pull.apply(out, self.centroids, pull(sums, tokens, centroids))
        return out if encoding.turn_back is None else encoding.turn_back(out)

    def _earlier(self, q: Tensor, k: Tensor, v: Tensor, clusters: Tensor, context: Context) -> Tensor:
        assert self.window is not None
        clusters = clusters[:, :, None]  # [b h 1 n]
        if context.cache is not None:
            clusters = context.cache.extend("clusters", clusters.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if context.keys.documents is not None:
            clusters = clusters + context.keys.documents[:, None, None] * self.clusters
        q, k = placed(context.encoding, q, as_keys(k), self.site.kv_heads)
        return attend_buckets(q, k, v, clusters, context, self._scale(context), self.window)

    def _both(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        encoding, centroids = context.encoding, self.centroids.detach()
        queries = nearest(q.detach(), centroids, context.queries.keep, self.window)
        keys = nearest(k.detach(), centroids, context.keys.keep, self.window)
        q, k = (q, k) if encoding.rotate is None else encoding.rotate(q, k)
        on_pairs = encoding.gates is not None or encoding.logits is not None or encoding.values is not None
        if q.device.type == "cpu" and not on_pairs and not torch.compiler.is_exporting():
            counts = None
            if queries.count is not None or keys.count is not None:
                counts = torch.stack([each.counts(len(q)) for each in (queries, keys)], dim=1)
            return groups_forward(q, k, v, queries.slots, keys.slots, counts, self._scale(context)).to(v.dtype)
        outs = attend_groups(
            gather(q, queries.slots),
            gather(ops.repeat_heads(k, q.shape[1]), keys.slots),
            gather(ops.repeat_heads(v, q.shape[1]), keys.slots),
            meet(queries.held(), keys.held()),
            self._scale(context),
            terms=terms(context, queries.slots, keys.slots),
        )
        return mean_by_slot(outs, queries.slots, queries.held(), q.shape[2]).to(v.dtype)

    def _scale(self, context: Context) -> float:
        return self.site.head_dim**-0.5 if context.encoding.scale is None else context.encoding.scale


class Nearest(NamedTuple):
    """For each cluster the slots of its tokens, and how many of them count in each sample; None: all."""

    slots: Int[Tensor, "b h c w"]
    count: Int[Tensor, " b"] | None

    def counts(self, batch: int) -> Int[Tensor, " b"]:
        """How many count in each sample."""
        most = self.slots.shape[3]
        return (
            torch.full((batch,), most, device=self.slots.device) if self.count is None else self.count.clamp(max=most)
        )

    def held(self) -> Bool[Tensor, "b h c w"] | None:
        """Whether each slot counts; None: all do."""
        if self.count is None:
            return None
        rank = torch.arange(self.slots.shape[3], device=self.slots.device)
        return (rank < self.count[:, None])[:, None, None].expand_as(self.slots)


def nearest(
    x: Float[Tensor, "b k n d"], centroids: Float[Tensor, "h c d"], keep: Bool[Tensor, "b n"] | None, window: int | None
) -> Nearest:
    """The w tokens nearest to each centroid, the earlier of two equal ones first; each head of x is read by h / k heads.

    Args:
        window: w; None: real tokens / clusters, which may differ from row to row.
    """
    n, clusters = x.shape[2], centroids.shape[1]
    most = min(n, -(-n // clusters) if window is None else window)
    if x.device.type == "cpu" and not torch.compiler.is_exporting():
        slots = nearest_slots(x, centroids, keep, most)
    else:
        kept = None if keep is None else keep[:, None, None]
        slots = most_near(_cosines(x, centroids).mT, kept, most)
    if keep is None:
        return Nearest(slots, None)
    real = keep.sum(dim=1)
    return Nearest(slots, -(-real // clusters) if window is None else real.clamp(max=window))


class Found(NamedTuple):
    """The centroid nearest to each token, the sums of each cluster's tokens as vectors of length 1, and how many are not 0."""

    clusters: Int[Tensor, "b h n"]
    sums: Float[Tensor, "h c d"]
    tokens: Int[Tensor, " h"]


def nearest_centroids(x: Float[Tensor, "b k n d"], centroids: Float[Tensor, "h c d"], *, summed: bool) -> Found:
    """The centroid with the largest cosine for each token; each head of x is read by h / k heads.

    Args:
        summed: whether the sums are asked for, which are zeros otherwise.
    """
    if x.device.type == "cpu" and not torch.compiler.is_exporting():
        return Found(*nearest_own(x, centroids, summed))
    heads, count, width = centroids.shape
    clusters = _cosines(x, centroids).argmax(dim=-1)
    unit = units(ops.repeat_heads(x, heads))
    sums, tokens = unit.new_zeros(heads * count, width), clusters.new_zeros(heads)
    if summed:
        rows = clusters + count * torch.arange(heads, device=x.device)[:, None]
        sums = sums.index_add(0, rows.flatten(), unit.flatten(0, 2))
        tokens = (torch.linalg.vecdot(unit, unit) > 0).sum(dim=(0, 2))
    return Found(clusters, sums.view(heads, count, width), tokens)


def _cosines(x: Float[Tensor, "b k n d"], centroids: Float[Tensor, "h c d"]) -> Float[Tensor, "b h n c"]:
    """The cosine of each token with each centroid."""
    return ops.repeat_heads(units(x), len(centroids)) @ units(centroids).mT


def meet(
    q_held: Bool[Tensor, "b h c w"] | None, k_held: Bool[Tensor, "b h c u"] | None
) -> Bool[Tensor, "b h c _w _u"] | None:
    """Which pairs of a cluster count; None: all do."""
    if q_held is None and k_held is None:
        return None
    if q_held is None:
        return None if k_held is None else k_held[..., None, :]
    return q_held[..., None] if k_held is None else q_held[..., None] & k_held[..., None, :]


def mean_by_slot(
    outs: Float[Tensor, "b h c w v"], slots: Int[Tensor, "b h c w"], held: Bool[Tensor, "b h c w"] | None, n: int
) -> Float[Tensor, "b h n v"]:
    """For each of n tokens the mean of what the clusters that hold it give; 0 where none does."""
    b, h, width = *outs.shape[:2], outs.shape[4]
    rows = (slots + n * torch.arange(b * h, device=slots.device).view(b, h, 1, 1)).flatten()
    counts = outs.new_ones(rows.shape) if held is None else held.flatten().to(outs.dtype)
    parts = outs.reshape(len(rows), width)
    parts = parts if held is None else parts * counts[:, None]
    found = outs.new_zeros(b * h * n, width).index_add(0, rows, parts)
    times = outs.new_zeros(b * h * n).index_add(0, rows, counts)
    return (found / times.clamp(min=1.0)[:, None]).view(b, h, n, width)


def pull(
    sums: Float[Tensor, "h c d"], tokens: Int[Tensor, " h"], centroids: Float[Tensor, "h c d"]
) -> Float[Tensor, "h c d"]:
    """The gradient on centroids u of the mean over tokens of 1 - cos(x, u_nearest).

    Args:
        sums: the sums of each cluster's tokens as vectors of length 1.  tokens: how many there are in all clusters.
    """
    length = centroids.to(sums.dtype).norm(dim=-1, keepdim=True)
    along = centroids.to(sums.dtype) / length
    across = (sums * along).sum(dim=-1, keepdim=True) * along - sums
    return (across / (length * tokens.clamp(min=1)[:, None, None])).to(centroids.dtype)


class _Pull(torch.autograd.Function):
    """Hands the output on; in the backward the centroids get a gradient of their own."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, centroids: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return grad, gradient, None


def _clean(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else torch.where(keep[:, None, :, None], x, torch.zeros_like(x))
