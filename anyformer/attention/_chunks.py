"""Tokens that share a bucket, cut into chunks inside it: each reads its own chunk and the one before, itself only where alone.

A chunk is cut every so many tokens of its bucket, counted from the first. What comes later, and padding, moves none.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from anyformer.attention._groups import attend_groups_with_lse, gather, terms
from anyformer.context import Context, Encoding
from anyformer.ops import softmax as ops
from anyformer.ops.bucket_node import bucket_forward

_HELD = 2**24  # pairs up to which the weights of all rounds are kept for the backward


def placed(
    encoding: Encoding, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h m d"], heads: int
) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b h m e"]]:
    """Queries and their keys with their positions in them.

    Args:
        heads: key heads of the site. An encoding has columns for that many, and there are as many keys as queries here: those that
            would share a head are placed one after the other.
    """
    if encoding.rotate is None:
        return q, k
    pairs = [encoding.rotate(q, part) for part in k.unflatten(1, (heads, -1)).unbind(2)]
    return pairs[0][0], torch.stack([part for _, part in pairs], dim=2).flatten(1, 2)


def attend_buckets(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    buckets: Int[Tensor, "b h r m"],
    context: Context,
    scale: float,
    size: int,
) -> Float[Tensor, "b h n v"]:
    """Softmax attention over the tokens met in any of r rounds, each with a bucket for every token.

    Args:
        q: the last n of m tokens; k: the same tokens as keys.
        buckets: the bucket of each token, below any number that matters to int64.
        size: tokens a chunk.
    """
    order, chunk = cut(buckets, context.keys.keep, size)
    if context.cache is not None or q.shape[2] <= 2 * size:
        return attend_pairs(q, k, v, chunk, context, scale)
    return attend_chunks(q, k, v, order, chunk, context, scale, size)


def cut(
    buckets: Int[Tensor, "b h r m"], keep: Bool[Tensor, "b m"] | None, size: int
) -> tuple[Int[Tensor, "b h r m"], Int[Tensor, "b h r m"]]:
    """The slots sorted by bucket, padding last, and the number of each slot's chunk.

    A chunk and the one before in its bucket have numbers that differ by 1; chunks of two buckets by more. Padding has -1.
    """
    m = buckets.shape[-1]
    slots = torch.arange(m, device=buckets.device)
    if keep is not None:
        buckets = torch.where(keep[:, None, None], buckets, torch.iinfo(torch.int64).max // max(m, 1) - 1)
    found = (buckets * m + slots).sort(dim=-1)
    order = found.indices
    by_bucket = buckets.gather(-1, order)
    begins = F.pad(by_bucket[..., 1:] != by_bucket[..., :-1], (1, 0), value=True)
    rank = slots - torch.where(begins, slots, 0).cummax(dim=-1).values
    number = (begins.to(torch.int32) + (rank % size == 0).to(torch.int32)).cumsum(dim=-1, dtype=torch.int32)
    number = torch.zeros_like(number).scatter(-1, order, number)
    return order, number if keep is None else torch.where(keep[:, None, None], number, -1)


def meets(chunk_q: Int[Tensor, "..."], chunk_k: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Whether a query in one chunk reads the keys in another: in its own and the one before; padding is in none."""
    ahead = chunk_q - torch.where(chunk_k < 0, torch.iinfo(torch.int32).max // 2, chunk_k)
    return (ahead >> 1) == 0  # 0 or 1


def attend_pairs(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h m d"],
    v: Float[Tensor, "b h m v"],
    chunk: Int[Tensor, "b h r m"],
    context: Context,
    scale: float,
) -> Float[Tensor, "b h n v"]:
    """`attend_buckets` over all pairs."""
    n, m = q.shape[2], k.shape[2]
    slots = torch.arange(m, device=q.device)
    newest = slots[m - n :, None]
    other = slots < newest if context.causal else slots != newest
    allowed = meets(chunk[..., m - n :, None], chunk[..., None, :]).any(dim=2) & other
    real = chunk[:, :, 0, None, :] >= 0
    allowed = allowed | (~allowed.any(dim=-1, keepdim=True) & (slots == newest) & real)
    encoding = context.encoding
    return ops.dense(
        q,
        k,
        v,
        allowed=allowed,
        bias=None if encoding.logits is None else encoding.logits(q, k),
        scale=scale,
        values=encoding.values,
    )[0]


def attend_chunks(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n v"],
    order: Int[Tensor, "b h r n"],
    chunk: Int[Tensor, "b h r n"],
    context: Context,
    scale: float,
    size: int,
) -> Float[Tensor, "b h n v"]:
    """`attend_buckets` a round at a time: tiles of `size` tokens in the order of their buckets read a window of that order.

    A pair counts in the first round that it is met in. In training, rounds with many pairs are computed again in the backward.
    """
    encoding = context.encoding
    on_pairs = encoding.gates is not None or encoding.logits is not None or encoding.values is not None
    if not on_pairs and not torch.compiler.is_exporting():
        return bucket_forward(q, k, v, order, chunk, context.causal, scale, size)[0].to(q.dtype)
    outs, logs = [], []
    pairs = order.numel() * (3 if context.causal else 4) * size
    again = torch.is_grad_enabled() and pairs > _HELD
    for at in range(order.shape[2]):
        given = q, k, v, order[:, :, at], chunk[:, :, : at + 1], context, scale, size
        out, log = checkpoint(_round, *given, use_reentrant=False) if again else _round(*given)
        outs.append(out)
        logs.append(log)
    lse = torch.stack(logs)
    share = lse.masked_fill((lse == -torch.inf).all(dim=0), 0.0).softmax(dim=0)
    return (share[..., None] * torch.stack(outs)).sum(dim=0).to(q.dtype)


def _round(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, chunk: Tensor, context: Context, scale: float, size: int
) -> tuple[Tensor, Tensor]:
    """Outputs of one round, and the log of each row's normaliser: -inf for rows with nothing but themselves."""
    n, tiles = order.shape[-1], -(-order.shape[-1] // size)
    after = 0 if context.causal else 1

    def tiled(x: Tensor, fill: int) -> Tensor:  # [b h n] -> [b h tiles size]
        return F.pad(x, (0, tiles * size - n), value=fill).unflatten(-1, (tiles, size))

    def windows(x: Tensor, fill: int) -> Tensor:  # -> [b h tiles window]
        x = F.pad(x, (2 * size, (tiles + after) * size - n), value=fill).unflatten(-1, (-1, size))
        return torch.cat([x[:, :, start : start + tiles] for start in range(3 + after)], dim=-1)

    q_slots, k_slots = tiled(order, 0), windows(order, 0)
    by_order = chunk.gather(-1, order[:, :, None].expand_as(chunk))
    met = [meets(tiled(each, -9)[..., None], windows(each, -1)[..., None, :]) for each in by_order.unbind(2)]
    slot_q, slot_k = q_slots[..., None].to(torch.int32), k_slots[..., None, :].to(torch.int32)
    allowed = met[-1] & (slot_k < slot_q if context.causal else slot_k != slot_q)
    for earlier in met[:-1]:
        allowed = allowed & ~earlier
    alone = ~allowed.any(dim=-1, keepdim=True)
    allowed = allowed | (alone & (slot_k == slot_q) & met[-1])
    out, lse = attend_groups_with_lse(
        gather(q, q_slots),
        gather(k, k_slots),
        gather(v, k_slots),
        allowed,
        scale,
        terms=terms(context, q_slots, k_slots),
    )
    back = torch.zeros_like(order).scatter(-1, order, torch.arange(n, device=order.device).expand_as(order))
    out = out.flatten(2, 3).gather(2, back[..., None].expand(*back.shape, out.shape[-1]))
    lse = lse.masked_fill(alone[..., 0], -torch.inf).flatten(2).gather(2, back)
    return out, lse
