"""Softmax attention inside groups: each tile of queries has a list of keys of its own, gathered from wherever they stand."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.context import Context, Encoding
from anyformer.forms import Form
from anyformer.side import Side

FORMS = (
    Form.ROTATE,
    Form.TURN,
    Form.AUGMENT,
    Form.TOEPLITZ,
    Form.BIAS,
    Form.TABLE,
    Form.SCORE,
    Form.GATES,
    Form.VALUE,
    Form.EMBED,
)
"""The forms of position that `attend_groups` reads, best first; ROTATE, AUGMENT and TURN act before tokens are gathered."""


@dataclass(frozen=True)
class Terms:
    """The terms of an encoding for gathered pairs: one encoding a head, bound to the tokens of all its tiles.

    Each evaluates all heads and keeps its own, which an encoding with an equation for all heads at once cannot avoid.

    Args:
        by_head: one encoding a head.
        gates: sums of the gates between query and key.
    """

    by_head: tuple[Encoding, ...]
    gates: Float[Tensor, "b h t s w"] | None = None

    def logits(self, q: Float[Tensor, "b h t s d"], k: Float[Tensor, "b h t w d"]) -> Float[Tensor, "b h t s w"] | None:
        """The term on the scaled logits."""
        if self.gates is not None:
            return self.gates
        found = [
            _own(each.logits(*(_for_all(x[:, at], len(self.by_head)) for x in (q, k))), at)
            for at, each in enumerate(self.by_head)
            if each.logits is not None
        ]
        return _stacked(found, q) if found else None

    def values(self, weights: Float[Tensor, "b h t s w"]) -> Float[Tensor, "b h t s v"] | None:
        """The term on the outputs."""
        found = [
            _own(each.values(_for_all(weights[:, at], len(self.by_head))), at)
            for at, each in enumerate(self.by_head)
            if each.values is not None
        ]
        return _stacked(found, weights) if found else None


def terms(
    context: Context,
    q_slots: Int[Tensor, "b h t s"],
    k_slots: Int[Tensor, "b h t w"],
    sums: Float[Tensor, "b h m"] | None = None,
) -> Terms | None:
    """The terms of the forward's encoding for the pairs of the tokens in the given slots; None where it has none on pairs.

    Args:
        sums: the sums of gates up to each key (`gate_sums`), where the keys are not in the order that they came in.
    """
    encoding = context.encoding
    if encoding.gates is not None:
        came = gate_sums(encoding.gates)
        to_query = came[:, :, came.shape[2] - context.queries.length :]
        to_key = came if sums is None else sums
        q, k = (
            x.gather(2, slots.flatten(2)).view(slots.shape) for x, slots in ((to_query, q_slots), (to_key, k_slots))
        )
        return Terms((), (q[..., None] - k[..., None, :]).to(encoding.gates.dtype))
    if encoding.rebind is None or (encoding.logits is None and encoding.values is None):
        return None
    pairs = zip(q_slots.unbind(1), k_slots.unbind(1), strict=True)
    return Terms(
        tuple(encoding.rebind(_gathered(context.queries, q), _gathered(context.keys, k)) for q, k in pairs),
    )


def gate_sums(gates: Float[Tensor, "b h m"]) -> Float[Tensor, "b h m"]:
    """The sum of the gates of all tokens up to each, in float64: what counts are small differences of large sums."""
    return gates.double().cumsum(dim=-1)


def attend_groups(
    q: Float[Tensor, "b h t s d"],
    k: Float[Tensor, "b h t w d"],
    v: Float[Tensor, "b h t w v"],
    allowed: Bool[Tensor, "b h t #s #w"] | None,
    scale: float,
    *,
    terms: Terms | None = None,
    bias: Float[Tensor, "b h t #s w"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "b h t s v"]:
    """Softmax attention of each tile's queries over its own keys.

    A row with nothing allowed gives 0. Sums run in the wider of float32 and the input's dtype.

    Args:
        allowed: which pairs may meet; None: all.
    """
    if not k.shape[3]:
        return q.new_zeros(*q.shape[:4], v.shape[4], dtype=torch.promote_types(torch.float32, q.dtype))
    logits, empty = _scored(q, k, allowed, scale, terms, bias)
    return _weighed(torch.softmax(logits, dim=-1), v, empty, terms, dropout)


def attend_groups_with_lse(
    q: Float[Tensor, "b h t s d"],
    k: Float[Tensor, "b h t w d"],
    v: Float[Tensor, "b h t w v"],
    allowed: Bool[Tensor, "b h t s w"],
    scale: float,
    *,
    terms: Terms | None = None,
) -> tuple[Float[Tensor, "b h t s v"], Float[Tensor, "b h t s"]]:
    """The same, and the log of each row's normaliser: -inf where nothing is allowed."""
    if not k.shape[3]:
        wide = torch.promote_types(torch.float32, q.dtype)
        return q.new_zeros(*q.shape[:4], v.shape[4], dtype=wide), q.new_full(q.shape[:4], -torch.inf, dtype=wide)
    logits, empty = _scored(q, k, allowed, scale, terms, None)
    weights = torch.softmax(logits, dim=-1)
    top = logits.detach().argmax(dim=-1, keepdim=True)
    lse = logits.gather(-1, top) - weights.gather(-1, top).log()
    lse = lse if empty is None else lse.masked_fill(empty, -torch.inf)
    return _weighed(weights, v, empty, terms, 0.0), lse[..., 0]


def _scored(
    q: Tensor, k: Tensor, allowed: Tensor | None, scale: float, terms: Terms | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Logits, -inf where a pair may not meet, and the rows that may meet nothing, whose logits are 0; None: there are none."""
    wide = torch.promote_types(torch.float32, q.dtype)
    logits = (q.to(wide) * scale) @ k.to(wide).mT
    added = None if terms is None else terms.logits(q, k)
    for term in (added, bias):
        if term is not None:
            logits = logits + term.to(wide)
    if allowed is None:
        return logits, None
    empty = ~allowed.any(dim=-1, keepdim=True)
    # in place: nothing needs them as they were
    return logits.masked_fill_(~allowed, -torch.inf).masked_fill_(empty, 0.0), empty


def _weighed(weights: Tensor, v: Tensor, empty: Tensor | None, terms: Terms | None, dropout: float) -> Tensor:
    weights = F.dropout(weights, dropout)
    out = weights @ v.to(weights.dtype)
    added = None if terms is None else terms.values(weights)
    if added is not None:
        out = out + added
    return out if empty is None else out.masked_fill(empty, 0.0)


def gather(x: Float[Tensor, "b h n d"], slots: Int[Tensor, "b h t s"]) -> Float[Tensor, "b h t s d"]:
    """The tokens in the given slots."""
    b, h, n, width = x.shape
    begins = n * torch.arange(b * h, device=x.device).view(b, h, 1, 1)
    # rows of one long list: a gather of each channel by itself takes many times as long
    return x.reshape(b * h * n, width).index_select(0, (slots + begins).flatten()).view(*slots.shape, width)


def _for_all(x: Tensor, heads: int) -> Tensor:
    """One head's tiles as rows of a batch, the same for every head."""
    return x.flatten(0, 1)[:, None].expand(-1, heads, -1, -1)


def _own(x: Tensor, head: int) -> Tensor:
    return x[:, min(head, x.shape[1] - 1)]


def _stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    """[b t s w] of each head, where rows of the batch that are all alike may come as one."""
    b, _, t, s = like.shape[:4]
    return torch.stack([part.expand(b * t, s, -1).unflatten(0, (b, t)) for part in parts], dim=1)


def _gathered(tokens: Side, slots: Int[Tensor, "b t s"]) -> Side:
    """One row a tile."""
    taken = tokens.take(slots.flatten(1))

    def by_tile(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unflatten(1, slots.shape[1:]).flatten(0, 1)

    return replace(
        taken,
        places=taken.places.unflatten(1, slots.shape[1:]).flatten(0, 1),
        positions=taken.positions.unflatten(1, slots.shape[1:]).flatten(0, 1),
        keep=by_tile(taken.keep),
        documents=by_tile(taken.documents),
        flags=by_tile(taken.flags),
        without=by_tile(taken.without),
        arithmetic=False,
    )
