"""Rows that see every key, added to the result of a sparse layout."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.softmax import dense, fused


def with_full_rows(
    out: Float[Tensor, "b h n v"],
    lse: Float[Tensor, "b h lse"],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    rows: Int[Tensor, "b g"],
    keep: Bool[Tensor, "b m"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    bias: Float[Tensor, "#b #h g m"] | None = None,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h lse"]]:
    """The same result, but the rows of these queries hold softmax attention to all keys: O(g * m).

    Args:
        out, lse: of any layout; what it computed for these rows is replaced, and gets no gradient.
        rows: indices of queries, distinct in a sample; -1 for none.
        keep, documents, scale, softcap, dropout: as for `window_attention`.
        bias: added to the scores of these rows.

    Returns:
        The output, and the log of each row's normaliser, `[b h 0]` if lse came so.
    """
    n, m = q.shape[2], k.shape[2]
    index = rows.clamp(min=0)
    asked = q.take_along_dim(index[:, None, :, None], 2)
    allowed = None if keep is None else keep[:, None, None]
    if keep is not None:
        k, v = (x.masked_fill(~keep[:, None, :, None], 0.0) for x in (k, v))
    if documents is not None:
        documents = documents - documents.min() + 1
        mine = F.pad(documents, (max(n - m, 0), 0))[:, max(m - n, 0) :].gather(1, index)
        same = mine[:, None, :, None] == documents[:, None, None]
        allowed = same if allowed is None else allowed & same
    want_lse = lse.shape[2] == n
    if want_lse or softcap is not None:
        full, full_lse = dense(asked, k, v, allowed=allowed, bias=bias, scale=scale, softcap=softcap, dropout=dropout)
    else:
        full, full_lse = fused(asked, k, v, allowed=allowed, bias=bias, scale=scale, dropout=dropout), None
    place = torch.where(rows < 0, n, rows)[:, None, :, None].expand(-1, q.shape[1], -1, -1)  # n: a row that is cut off
    out = F.pad(out, (0, 0, 0, 1)).scatter(2, place.expand_as(full), full)[:, :, :n]
    if full_lse is not None and want_lse:
        lse = F.pad(lse, (0, 1)).scatter(2, place[..., 0], full_lse)[:, :, :n]
    return out, lse
