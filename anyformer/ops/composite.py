"""`window_attention` and `block_attention` out of ordinary operators: to export them, and to differentiate twice."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.rows import with_full_rows
from anyformer.ops.softmax import dense, repeat_heads
from anyformer.ops.tile import working_dtype
from anyformer.ops.window_cut import block_rows


def window_attention_composite(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    left: int,
    right: int,
    causal: bool = False,
    keep: Bool[Tensor, "b m"] | None = None,
    asking: Bool[Tensor, "b n"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    bias: Float[Tensor, "h o"] | None = None,
    query_table: Float[Tensor, "h o d"] | None = None,
    value_table: Float[Tensor, "h o v"] | None = None,
    key_table: Float[Tensor, "h o d"] | None = None,
    global_keys: Int[Tensor, "b g"] | None = None,
    global_bias: Float[Tensor, "#b h n g"] | None = None,
    full_rows: Int[Tensor, "b f"] | None = None,
    full_bias: Float[Tensor, "#b #h f m"] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """`window_attention` with the weights of all windows in memory: O(n * (left + right)). Needs at least one key."""
    (batch, heads, n, _), m, right = q.shape, k.shape[2], 0 if causal else right
    given, wide = (q, k, v), working_dtype(q)
    k, v = (repeat_heads(x if keep is None else x.masked_fill(~keep[:, None, :, None], 0.0), heads) for x in (k, v))
    q = q if asking is None else q.masked_fill(~asking[:, None, :, None], 0.0)
    bias, query_table, value_table, key_table = (
        None if x is None else x[:, : left + right + 1] for x in (bias, query_table, value_table, key_table)
    )
    cut = WindowCut(n, m, left, right, q.device)
    logits = cut.rows(q.to(wide)) @ cut.keys(k.to(wide)).mT  # [b h t q s]
    if query_table is not None:
        logits = logits + cut.pick(cut.rows(q.to(wide)) @ query_table.to(wide).mT[:, None])
    if key_table is not None:
        logits = logits + cut.pick_by_key(cut.keys(k.to(wide) @ key_table.to(wide).mT))
    logits = capped(logits * scale, softcap)
    if bias is not None:
        logits = logits + cut.pick(bias.to(wide)[None, :, None, None].expand(batch, -1, *logits.shape[2:4], -1))
    allowed = cut.allowed if keep is None else cut.allowed & cut.keys(keep[:, None, :, None]).mT
    rows_documents = None
    if documents is not None:
        documents = documents - documents.min() + 1
        rows_documents = F.pad(documents, (max(n - m, 0), 0))[:, None, max(m - n, 0) :, None]
        allowed = allowed & (cut.rows(rows_documents) == cut.keys(documents[:, None, :, None]).mT)
    logits, columns = logits.masked_fill(~allowed, -math.inf), logits.shape[-1]
    values = cut.keys(v.to(wide))

    if global_keys is not None:
        seen = _seen(global_keys, n, m, left, right, causal, keep)
        if documents is not None and rows_documents is not None:
            seen = seen & (rows_documents[:, 0] == documents.gather(1, global_keys.clamp(min=0))[:, None])
        far_keys, far_values = (x.to(wide).gather(2, _picked(global_keys.clamp(min=0), x)) for x in (k, v))  # [b h g d]
        far = capped(q.to(wide) @ far_keys.mT * scale, softcap)  # [b h n g]
        far = (far if global_bias is None else far + global_bias.to(wide)).masked_fill(~seen[:, None], -math.inf)
        logits = torch.cat([logits, cut.rows(far)], -1)
        values = torch.cat([values, far_values[:, :, None].expand(-1, -1, values.shape[2], -1, -1)], -2)

    empty = (logits == -math.inf).all(-1, keepdim=True)
    if asking is not None:
        empty = empty | ~cut.rows(asking[:, None, :, None])
    logits = logits.masked_fill(empty, 0.0)
    lse = torch.logsumexp(logits, -1, keepdim=True).masked_fill(empty, -math.inf)
    weights = F.dropout(torch.softmax(logits, -1).masked_fill(empty, 0.0), dropout)
    out = weights @ values
    if value_table is not None:
        out = out + cut.sums(weights[..., :columns]) @ value_table.to(wide)[:, None]
    result = out.flatten(2, 3)[:, :, :n].to(q.dtype), lse.flatten(2, 4)[:, :, :n]
    if full_rows is None:
        return result
    full_rows = full_rows if asking is None else torch.where(asking.gather(1, full_rows.clamp(min=0)), full_rows, -1)
    hiding, rule = {"keep": keep, "documents": documents}, {"scale": scale, "softcap": softcap, "dropout": dropout}
    return with_full_rows(*result, *given, rows=full_rows, bias=full_bias, **hiding, **rule)


def _seen(
    global_keys: Int[Tensor, "b g"],
    n: int,
    m: int,
    left: int,
    right: int,
    causal: bool,
    keep: Bool[Tensor, "b m"] | None,
) -> Bool[Tensor, "b n g"]:
    """Which global keys a row meets beside its window."""
    offset = global_keys[:, None] - torch.arange(m - n, m, device=global_keys.device)[:, None]
    seen = (global_keys >= 0)[:, None] & ((offset < -left) | (offset > right))
    seen = seen & (offset <= 0) if causal else seen
    return seen if keep is None else seen & keep.gather(1, global_keys.clamp(min=0))[:, None]


def block_attention_composite(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    block: int,
    offsets: Int[Tensor, "lists rowblocks"],
    keys: Int[Tensor, " entries"],
    partial: Int[Tensor, " entries"] | None = None,
    masks: Bool[Tensor, "masks block block"] | None = None,
    keep: Bool[Tensor, "b m"] | None = None,
    asking: Bool[Tensor, "b n"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    bias: Float[Tensor, "h offsets"] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """`block_attention` through a mask of all pairs: O(n * m)."""
    heads, n, m = q.shape[1], q.shape[2], k.shape[2]
    allowed = allowed_pairs(n, m, block, offsets, keys, partial, masks).unflatten(0, (-1, min(heads, offsets.shape[0])))
    if keep is not None:
        k, v = (x.masked_fill(~keep[:, None, :, None], 0.0) for x in (k, v))
        allowed = allowed & keep[:, None, None]
    if documents is not None:
        documents = documents - documents.min() + 1
        rows = F.pad(documents, (max(n - m, 0), 0))[:, max(m - n, 0) :]
        allowed = allowed & (rows[:, None, :, None] == documents[:, None, None])
    if asking is not None:
        q = q.masked_fill(~asking[:, None, :, None], 0.0)
        allowed = allowed & asking[:, None, :, None]
    if bias is not None:
        places = torch.arange(m - n, m, device=q.device)
        bias = bias[:, torch.arange(m, device=q.device) - places[:, None] + (m - 1)][None]
    return dense(q, k, v, allowed=allowed, bias=bias, scale=scale, softcap=softcap, dropout=dropout)


def allowed_pairs(
    n: int, m: int, block: int, offsets: Tensor, keys: Tensor, partial: Tensor | None, masks: Tensor | None
) -> Bool[Tensor, "lists n m"]:
    """The pairs that lists of blocks let meet."""
    lists, row_blocks, key_blocks = offsets.shape[0], offsets.shape[1] - 1, -(-m // block)
    tiles = torch.zeros(lists * row_blocks * key_blocks, block, block, dtype=torch.bool, device=keys.device)
    starts = torch.cat([offsets[:, :-1].flatten(), offsets[-1:, -1]])
    row = torch.searchsorted(starts, torch.arange(len(keys), device=keys.device), right=True) - 1
    listed = torch.ones(len(keys), block, block, dtype=torch.bool, device=keys.device)
    if masks is not None and partial is not None:
        listed = torch.where((partial < 0)[:, None, None], listed, masks[partial.clamp(min=0)])
    tiles = tiles.index_put((row * key_blocks + keys,), listed)
    pairs = tiles.view(lists, row_blocks, key_blocks, block, block).transpose(2, 3)
    return pairs.reshape(lists, row_blocks * block, key_blocks * block)[:, :n, :m]


def _picked(index: Int[Tensor, "b g"], x: Float[Tensor, "b h m d"]) -> Int[Tensor, "b h g d"]:
    """What `gather` asks for; `take_along_dim` would hold an exported batch and length to those of the example."""
    return index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


class WindowCut:
    """Index tensors that cut rows into t blocks of q, and keys into the s keys that each block can reach."""

    def __init__(self, n: int, m: int, left: int, right: int, device: torch.device):
        self.n, self.block, self.reach = n, block_rows(left + right), left + right
        self.blocks = -(-n // self.block) + 1  # never just 1: an exporter would hold every length to that
        first = torch.arange(self.blocks, device=device)[:, None] * self.block + (m - n) - left
        columns = torch.arange(self.block + self.reach, device=device)
        self.offset = columns - torch.arange(self.block, device=device)[:, None]  # [q s], counted from -left
        self.index = first + columns  # [t s]
        inside = (self.index >= 0) & (self.index < m)
        self.allowed = inside[:, None] & (self.offset >= 0) & (self.offset <= self.reach)  # [t q s]
        self.index = self.index.clamp(0, m - 1)
        self.offset = self.offset.clamp(0, self.reach)

    def rows(self, x: Tensor) -> Tensor:
        """[b h n d] -> [b h t q d]"""
        return F.pad(x, (0, 0, 0, self.blocks * self.block - self.n)).unflatten(2, (self.blocks, self.block))

    def keys(self, x: Tensor) -> Tensor:
        """[b h m d] -> [b h t s d]"""
        return x[:, :, self.index]

    def pick(self, by_offset: Tensor) -> Tensor:
        """[b h t q o] -> [b h t q s]"""
        return by_offset.gather(-1, self.offset.expand(*by_offset.shape[:3], -1, -1))

    def pick_by_key(self, by_offset: Tensor) -> Tensor:
        """[b h t s o] -> [b h t q s]"""
        return by_offset.gather(-1, self.offset.mT.expand(*by_offset.shape[:3], -1, -1)).mT

    def sums(self, weights: Tensor) -> Tensor:
        """[b h t q s] -> [b h t q o]: the adjoint of `pick`."""
        none = weights.new_zeros(*weights.shape[:4], self.reach + 1)
        return none.scatter_add(-1, self.offset.expand_as(weights), weights)
