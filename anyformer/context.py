"""What one forward pass knows: its two sides of tokens, the position encoding bound to them, and one layer's cache.

Place: the number of real tokens before a token in its row, cached tokens included. Patterns, causality and slots read places.
Position: what encodings read. By default the place, from 0 again in each document; the user may give any.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from anyformer.forms import Form
from anyformer.side import Side, left_order, restart, side, take

Pair = tuple[Tensor, Tensor]


@runtime_checkable
class AllowsPairs(Protocol):
    """What a Context needs of a Pattern."""

    def allows(self, batch: Tensor, head: Tensor, q: Tensor, k: Tensor, facts: object) -> Tensor: ...


@dataclass(frozen=True)
class Offsets:
    """The terms of an encoding as tables over a range of offsets r of key minus query.

        s_ij = scale * ((q_i + shift) . (k_j + keys[r]) + k_j . queries[r]) + bias[r],    o_i = sum_j w_ij (v_j + values[r])

    Args:
        bias: on the scaled logits.  keys: added to keys.  values: added to values.  shift: added to queries.
        queries: met by keys.
    """

    bias: Float[Tensor, "h r"] | None = None
    keys: Float[Tensor, "h r d"] | None = None
    values: Float[Tensor, "h r v"] | None = None
    shift: Float[Tensor, "h d"] | None = None
    queries: Float[Tensor, "h r d"] | None = None


@dataclass(frozen=True)
class Boxes:
    """Terms by rectangles r of offsets of key minus query on a grid: scale * (q_i . keys[r] + k_j . queries[r]), v_j + values[r].

    Args:
        edges: first and last row, first and last column of each; together they hold every offset once.
    """

    edges: Int[Tensor, "r 4"]
    keys: Float[Tensor, "h r d"] | None = None
    queries: Float[Tensor, "h r d"] | None = None
    values: Float[Tensor, "h r v"] | None = None


@dataclass(frozen=True)
class Encoding:
    """A position encoding bound to the positions of one forward: all that an attention may call of it.

    Args:
        forms: the chosen forms; an attention asks `has`.
        scale: factor on the product of query and key; None leaves it to the attention (head_dim ** -0.5).
        rotate: `(q, k) -> (q, k)`, the transform of ROTATE or of AUGMENT, which widens both.
        turn: `v -> v` and `turn_back`: `out -> out`, the transform of TURN.
        logits: `(q[b h n d], k[b h m d]) -> [b|1 h n m]`, the sum of the terms on the scaled logits, pair by pair.
        values: `weights[b h n m] -> [b h n v]`, the sum of the VALUE terms, to be added to the output.
        offsets: `(low, high) -> Offsets`, every term on logits and values as tables over offsets low..high of key minus query,
            both included; holds where positions are places (`arithmetic`).
        product: `(q[b h n d], k[b h m d]) -> [b h n m]`, what stands for the scaled product of query and key, whichever vectors are
            compared; `logits` holds it too, and `scale` is 0.
        row: `(q[b h n d], k[b h m d], logits[b h n m]) -> logits`, the scaled and masked logits with the ROW term.
        gates: the log of the factor that each key's token puts on the weight of every pair it stands between or is the query of,
            at most 0, and 0 for padding; `logits` has their sums.
        rates: what each head's log weight loses a token of distance (DECAY).
        clip: how far before and after a query the offsets go that differ from each other (CLIPPED).
        grid: `offsets[r 2] -> [h r]`, the term of GRID for offsets of key minus query.  boxes: `() -> Boxes`, those of BOXES.
        rebind: `(queries, keys) -> Encoding`, the same encoding bound to some of the tokens; None where it knows more of them
            than their side.  between: `(queries, keys, start) -> Encoding`, bound to keys in a row from slot `start` on, of which
            the last query stands at the last; None where its terms are not of what stands between.
        arithmetic: whether positions are places, so that offsets may be computed instead of gathered.
        learned: whether `logits` may need a gradient of its own. The fused kernel has none for a bias, and choosing by the
            gradient mode would give other bits in inference than in training.
    """

    forms: frozenset[Form] = frozenset()
    scale: float | None = None
    rotate: Callable[[Tensor, Tensor], Pair] | None = None
    turn: Callable[[Tensor], Tensor] | None = None
    turn_back: Callable[[Tensor], Tensor] | None = None
    logits: Callable[[Tensor, Tensor], Tensor] | None = None
    values: Callable[[Tensor], Tensor] | None = None
    offsets: "Callable[[int, int], Offsets] | None" = None
    product: Callable[[Tensor, Tensor], Tensor] | None = None
    row: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    gates: Float[Tensor, "b h m"] | None = None
    rates: Float[Tensor, " h"] | None = None
    clip: tuple[int, int] | None = None
    grid: Callable[[Tensor], Tensor] | None = None
    boxes: Callable[[], Boxes] | None = None
    rebind: "Callable[[Side, Side], Encoding] | None" = None
    between: "Callable[[Side, Side, int], Encoding] | None" = None
    arithmetic: bool = True
    learned: bool = False

    def has(self, form: Form) -> bool:
        return form in self.forms


def newest(
    name: str, given: Shaped[Tensor, "b t"] | None, b: int, n: int, cache: "LayerCache | None"
) -> Shaped[Tensor, "b n"] | None:
    """The part for the last `n` tokens of what was given for all tokens so far.

    Args:
        name: what the argument is called, for the message.

    Raises:
        ValueError: its shape is not that of all tokens so far.
    """
    if given is None:
        return None
    total = n + (0 if cache is None else cache.seen)
    if given.shape != (b, total):
        so_far = "" if cache is None or not cache.seen else f" ({cache.seen} tokens in the cache and {n} new)"
        raise ValueError(f"{name}: expected shape [{b}, {total}]{so_far}, got {list(given.shape)}")
    return given[:, total - n :]


def truths(name: str, mask: Shaped[Tensor, "b t"] | None) -> Bool[Tensor, "b t"] | None:
    """A mask of True and False, or of 1 and 0, as True and False.

    Args:
        name: what the argument is called, for the message.

    Raises:
        ValueError: it holds floating numbers, as masks that are added to scores do: there 0 means yes.
    """
    if mask is not None and (mask.is_floating_point() or mask.is_complex()):
        got = str(mask.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name}: expected True or 1 for yes, got {got}; of a mask that is added to scores write mask == 0"
        )
    return None if mask is None else mask.to(torch.bool)


def sides(
    n: int,
    device: torch.device,
    parts: Mapping[str, Tensor | None],
    cache: "LayerCache | None",
    keep: Bool[Tensor, "b n"] | None,
) -> tuple[Side, Side]:
    """The sides of `n` new tokens and of all tokens so far, which the cache then remembers.

    Places continue from the cache; positions that are not given are places, from 0 again in each document.

    Args:
        parts: the named tensors of `side`, for the new tokens in the order of their slots.
        keep: which of the new tokens are real, in the order they came.
    """
    start = 0 if cache is None or cache.count is None else cache.count
    queries = side(n, device, start=start, **parts)
    keys = queries if cache is None else cache.remember(queries, keep)
    if queries.documents is None or parts["positions"] is not None:
        return queries, keys
    queries = restart(keys, n)
    if cache is None:
        return queries, queries
    earlier = keys.positions[:, : keys.length - n].expand(len(queries.positions), -1)
    cache.side = replace(keys, positions=torch.cat([earlier, queries.positions], dim=1))
    return queries, cache.side


@dataclass(frozen=True)
class Context:
    """The frozen facts of one forward.

    Args:
        causal: whether a query may look at keys of its own or an earlier place only.
        queries: the side of the queries.  keys: the side of the keys, remembered tokens included.
        tokens: token ids of the queries, for encodings that read them.
        x: what keys and values are made of: the mixer's input, or the source.
        pattern: which pairs may meet; None: all (that causality leaves).
        mask: pairs of the user's own, True where they may meet.  bias: a term of the user's own on the scaled logits.
        encoding: the position encoding, bound.
        dropout: probability of dropping a weight now (0 in eval).
        softcap: bound c of `c * tanh(logits / c)`, or None.  sink: logit of a key that all meet and that holds no value, or None.
        cache: the layer's cache.  layer: the layer's index.
        aligned: whether query slot i of n stands where key slot i + m - n of m does; not where the rows of two sequences differ in
            their padding.
    """

    causal: bool
    queries: Side
    keys: Side
    tokens: Int[Tensor, "b n"] | None = None
    x: Float[Tensor, "b m c"] | None = None
    pattern: AllowsPairs | None = None
    mask: Bool[Tensor, "#b #h n m"] | None = None
    bias: Float[Tensor, "#b #h n m"] | None = None
    encoding: Encoding = field(default_factory=Encoding)
    dropout: float = 0.0
    softcap: float | None = None
    sink: Float[Tensor, " h"] | None = None
    cache: "LayerCache | None" = None
    layer: int = 0
    aligned: bool = True

    @property
    def restricted(self) -> bool:
        """Whether anything but causality keeps a pair apart."""
        facts = (self.pattern, self.mask, self.keys.keep, self.keys.documents)
        return any(fact is not None for fact in facts)

    @property
    def plainly_causal(self) -> bool:
        """Whether the pairs are exactly the lower triangle of a square."""
        return self.causal and not self.restricted and self.aligned and self.queries.length == self.keys.length


class LayerCache:
    """What one layer remembers between calls.

    `side` holds the facts of the remembered tokens, `slots` tensors with one entry a remembered token (`[b slots ...]`: keys,
    values), `state` tensors of a fixed size (`[b ...]`: running sums, hidden states, the tail of a convolution), `tables` tensors
    that belong to no row (what an encoding has worked out about positions so far), `count` the
    number of real tokens of each row so far. `seen` counts the tokens ever given, padding included, remembered or not; `given`
    says which of them were real, in the order they came (None: all), for slots may hold them in another.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._empty()

    def _empty(self) -> None:
        self.seen = 0
        self.count: Tensor | None = None  # Int[b 1]
        self.given: Tensor | None = None  # Bool[b seen]
        self.side: Side | None = None
        self.slots: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.tables: dict[str, Tensor] = {}

    def extend(self, name: str, new: Tensor) -> Tensor:
        """Append `new[b n ...]` to the slots called `name` and return all of them."""
        old = self.slots.get(name)
        self.slots[name] = new if old is None else torch.cat([old, new], dim=1)
        return self.slots[name]

    def remember(self, new: Side, keep: Bool[Tensor, "b n"] | None = None) -> Side:
        """Append the facts of new tokens and return those of all remembered ones.

        Args:
            keep: which of the new tokens are real, in the order they came, which need not be that of `new`; None: all.
        """
        if keep is not None or self.given is not None:
            shape = (self.batch_size, self.seen), (self.batch_size, new.length)
            past, added = (torch.ones(each, dtype=torch.bool, device=new.places.device) for each in shape)
            parts = past if self.given is None else self.given, added if keep is None else keep
            self.given = torch.cat(parts, dim=1)
        self.seen += new.length
        added = new.length if new.keep is None else new.keep.sum(dim=1, keepdim=True)
        before = new.places.new_zeros(self.batch_size, 1) if self.count is None else self.count
        self.count = before + added
        self.side = new if self.side is None else self.side.join(new)
        return self.side

    def forget(self, horizon: int | None) -> None:
        """Drop the slots that no later query can see: those more than `horizon` places before the next token of their row."""
        if horizon is None or self.side is None or self.count is None or self.side.documents is not None:
            return
        useful = self.side.places >= self.count - horizon
        if self.side.keep is not None:
            useful = useful & self.side.keep
        useful = useful.any(dim=0)
        first = int(useful.to(torch.uint8).argmax()) if bool(useful.any()) else self.side.length
        self.side = self.side.part(first, self.side.length)
        self.slots = {name: tensor[:, first:] for name, tensor in self.slots.items()}

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens only, to go back to an earlier point.

        Raises:
            ValueError: `length` is not between 0 and the tokens seen; tokens have been forgotten; or the layer keeps a running
                state, which cannot go back (copy the cache before the point of return instead).
        """
        if not 0 <= length <= self.seen:
            raise ValueError(f"crop: expected a length from 0 to the {self.seen} tokens seen, got {length}")
        if length == self.seen:
            return
        if length == 0 or self.side is None:
            self._empty()
            return
        if self.state:
            raise ValueError(
                f"crop: a running state ({', '.join(sorted(self.state))}) cannot go back to {length} tokens; "
                "copy() the cache at that point and continue from the copy"
            )
        if self.side.length < self.seen:
            raise ValueError(
                f"crop: only the last {self.side.length} of {self.seen} tokens are remembered; copy() the cache instead"
            )
        if self.given is None:
            kept, keep = self.side.part(0, length), None
            slots = {name: tensor[:, :length] for name, tensor in self.slots.items()}
        else:  # the tokens that stay are the first real ones of each row, wherever their slots are
            keep = self.given[:, :length]
            stays = self.side.places < keep.sum(dim=1, keepdim=True)
            stays = stays if self.side.keep is None else stays & self.side.keep
            order = left_order(stays)[:, :length]
            kept = replace(self.side, keep=stays).take(order)
            slots = {name: take(tensor, order) for name, tensor in self.slots.items()}
        self._empty()
        self.remember(kept, keep)
        self.slots = slots

    def share(self) -> "LayerCache":
        """A second cache over the same tensors, at no cost: extending one leaves the other as it was."""
        return self._map(lambda tensor: tensor, lambda side: side)

    def copy(self) -> "LayerCache":
        """An independent cache with the same content."""
        return self._map(Tensor.clone, lambda side: side)

    def select(self, rows: Int[Tensor, "r"]) -> "LayerCache":
        """The given rows of the batch, in that order, repeats allowed (for beams)."""
        selected = self._map(lambda tensor: tensor[rows], lambda side: side.rows(rows))
        selected.batch_size = len(rows)
        return selected

    def detach(self) -> "LayerCache":
        """The same content cut off from the graph (for training segment by segment)."""
        other = self._map(Tensor.detach, lambda side: side)
        other.tables = {name: tensor.detach() for name, tensor in self.tables.items()}
        return other

    def _map(self, function: Callable[[Tensor], Tensor], facts: Callable[[Side], Side]) -> "LayerCache":
        other = LayerCache(self.batch_size)
        other.seen = self.seen
        other.count = None if self.count is None else function(self.count)
        other.given = None if self.given is None else function(self.given)
        other.side = None if self.side is None else facts(self.side)
        other.slots = {name: function(tensor) for name, tensor in self.slots.items()}
        other.state = {name: function(tensor) for name, tensor in self.state.items()}
        other.tables = dict(self.tables)  # replaced, never written to
        return other
