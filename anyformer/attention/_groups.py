"""Softmax attention inside groups: each tile of queries has a list of keys of its own, gathered from wherever they stand."""

from collections.abc import Callable
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


_TOKENS = (
    2**12
)  # tokens of tiles, each head's counted, of which terms are made at once: an encoding may hold hundreds of numbers a token


@dataclass(frozen=True)
class Terms:
    """The terms of an encoding for gathered pairs: encodings bound to the tokens of a few tiles of one head.

    Each evaluates all heads and keeps its own, which an encoding with an equation for all heads at once cannot avoid; a few
    tiles at a time, because what it makes on the way may be much larger than the term.

    Args:
        by_head: for each head, the encodings of its tiles.
        tiles: of each encoding, the last one's excepted.
        gates: sums of the gates between query and key.
    """

    by_head: tuple[tuple[Encoding, ...], ...]
    tiles: int = 1
    gates: Float[Tensor, "b h t s w"] | None = None

    def logits(self, q: Float[Tensor, "b h t s d"], k: Float[Tensor, "b h t w d"]) -> Float[Tensor, "b h t s w"] | None:
        """The term on the scaled logits."""
        if self.gates is not None:
            return self.gates
        return self._of_all([[each.logits for each in own] for own in self.by_head], q, k)

    def values(self, weights: Float[Tensor, "b h t s w"]) -> Float[Tensor, "b h t s v"] | None:
        """The term on the outputs."""
        return self._of_all([[each.values for each in own] for own in self.by_head], weights)

    def _of_all(
        self, terms: list[list[Callable[..., Tensor] | None]], *given: Float[Tensor, "b h t _ _"]
    ) -> Tensor | None:
        heads, found = len(self.by_head), []
        for at, own in enumerate(terms):
            pieces = zip(own, *(x[:, at].split(self.tiles, dim=1) for x in given), strict=True)
            parts = [
                _own(term(*(_for_all(x, heads) for x in piece)), at, piece[0])
                for term, *piece in pieces
                if term is not None
            ]
            found += [torch.cat(parts, dim=1)] if parts else []
        return torch.stack(found, dim=1) if found else None


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
        return Terms((), gates=(q[..., None] - k[..., None, :]).to(encoding.gates.dtype))
    if encoding.rebind is None or (encoding.logits is None and encoding.values is None):
        return None
    (b, heads, _, s), w = q_slots.shape, k_slots.shape[3]
    tiles, by_head = max(1, _TOKENS // max(1, b * heads * (s + w))), []
    for own in zip(q_slots.unbind(1), k_slots.unbind(1), strict=True):
        pieces = zip(*(slots.split(tiles, dim=1) for slots in own), strict=True)
        by_head.append(
            tuple(encoding.rebind(_gathered(context.queries, q), _gathered(context.keys, k)) for q, k in pieces)
        )
    return Terms(tuple(by_head), tiles)


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
    if allowed is None and added is None:
        return logits, None
    if allowed is not None:
        logits = logits.masked_fill_(~allowed, -torch.inf)  # in place: nothing needs them as they were
    empty = logits.detach().amax(dim=-1, keepdim=True) == -torch.inf  # an encoding may shut pairs too
    return logits.masked_fill_(empty, 0.0), empty


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


def _for_all(x: Float[Tensor, "b t s d"], heads: int) -> Float[Tensor, "_ h s d"]:
    """One head's tiles as rows of a batch, the same for every head."""
    return x.flatten(0, 1)[:, None].expand(-1, heads, -1, -1)


def _own(x: Float[Tensor, "_ _ s w"], head: int, like: Float[Tensor, "b t s _"]) -> Float[Tensor, "b t s w"]:
    """One head's terms by tile, where rows of the batch that are all alike, and heads, may come as one."""
    own = x[:, min(head, x.shape[1] - 1)]
    return own.expand(like.shape[0] * like.shape[1], like.shape[2], -1).unflatten(0, like.shape[:2])


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
