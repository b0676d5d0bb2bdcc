"""How a position encoding is bound to the tokens of one forward pass."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from anyformer.context import Encoding, LayerCache, Offsets
from anyformer.errors import IncompatibleError
from anyformer.forms import Form
from anyformer.ops.gates import gate_sums, last_seen
from anyformer.position.base import Position
from anyformer.side import Side


def bind(
    position: Position,
    forms: Collection[Form],
    queries: Side,
    keys: Side,
    facts: Float[Tensor, "b m w"] | None = None,
) -> Encoding:
    """Bind an encoding to the two sides of one forward.

    Args:
        forms: the forms that were chosen for this pair of attention and encoding.
        facts: what the encoding prepared of the keys' tokens, where it reads them.
    """
    reader, q_side, k_side, table = reading(position, queries, keys)
    bound = _Bound(reader, frozenset(forms), q_side, k_side, facts)

    def when(needed: set[Form], function: Callable) -> Callable | None:
        return function if bound.forms & needed else None

    def rebind(queries: Side, keys: Side) -> Encoding:
        return bind(position, forms, replace(queries, drawn=table), replace(keys, drawn=table))

    def between(queries: Side, keys: Side, start: int) -> Encoding:
        assert facts is not None, "of what was prepared"
        return bind(position, forms, queries, keys, facts[:, start : start + keys.length])

    everywhere = queries.without is None and keys.without is None
    return Encoding(
        forms=bound.forms,
        scale=position.scale(position.site.head_dim),
        rotate=when({Form.ROTATE, Form.AUGMENT}, bound.rotate),
        turn=when({Form.TURN}, bound.turn),
        turn_back=when({Form.TURN}, bound.turn_back),
        logits=bound.logits if bound.has(Form.BIAS) or bound.has(Form.SCORE) or Form.GATES in bound.forms else None,
        values=bound.values if bound.has(Form.VALUE) else None,
        row=when({Form.ROW}, bound.row),
        offsets=when({Form.TOEPLITZ, Form.TABLE, Form.CLIPPED}, bound.offsets),
        rates=position.rates(queries.places.device) if Form.DECAY in bound.forms else None,
        clip=position.clip if Form.CLIPPED in bound.forms else None,
        grid=when({Form.GRID}, bound.grid),
        boxes=when({Form.BOXES}, position.boxes),
        gates=bound.gates() if Form.GATES in bound.forms and facts is not None else None,
        rebind=None if position.reads_tokens else rebind,
        between=between if facts is not None and bound.forms <= _BETWEEN else None,
        arithmetic=q_side.arithmetic and k_side.arithmetic and everywhere,
        learned=bool(bound.forms & {Form.SCORE, Form.TABLE, Form.APART}) or any(True for _ in position.parameters()),
    )


def shifted(
    position: Position,
    projected: tuple[Tensor, Tensor, Tensor],
    queries: Side,
    keys: Side,
    layer: int,
    cache: LayerCache | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Projected queries, keys and values `[b n|m w]` with SHIFT added; tokens without a position stay as they are."""
    position, queries, keys, _ = reading(position, queries, keys)
    shifts = position.shift(queries.positions, keys.positions, layer, None if cache is None else cache.tables)
    without = queries.without, keys.without, keys.without
    q, k, v = (
        (x + _where_placed(none, by.to(torch.promote_types(torch.float32, x.dtype)))).to(x.dtype)
        for x, by, none in zip(projected, shifts, without, strict=True)
    )
    return q, k, v


def reading(position: Position, queries: Side, keys: Side) -> tuple[Position, Side, Side, Int[Tensor, "p"] | None]:
    """The encoding that reads positions, both sides with the positions that it reads, and the table of those that were drawn.

    Raises:
        SpecError: a position that the encoding does not have.
    """
    position.admit(queries.positions)
    position.admit(keys.positions)
    if not position.draws:
        return position, queries, keys, None
    table = queries.drawn if queries.drawn is not None else keys.drawn
    if table is None:
        table = position.draw(how_many(position, queries.positions, keys.positions))
    q_side = replace(queries, positions=table[queries.positions], arithmetic=False)
    k_side = q_side if keys is queries else replace(keys, positions=table[keys.positions], arithmetic=False)
    return position.drawn_for(), q_side, k_side, table


def how_many(position: Position, *positions: Tensor) -> int:
    """One more than the largest position, or all that exist where values are unknown."""
    if torch.compiler.is_compiling() or any(each.is_meta for each in positions):
        return position.site.max_length
    return max((int(each.max()) + 1 for each in positions if each.numel()), default=0)


def _where_placed(without: Tensor | None, shift: Tensor) -> Tensor:
    return shift if without is None else shift.masked_fill(without[:, :, None], 0.0)


_WRITTEN_OUT = {
    Form.BIAS: {Form.BIAS, Form.TOEPLITZ, Form.GRID, Form.DECAY},
    Form.SCORE: {Form.SCORE, Form.TABLE, Form.APART},
    Form.VALUE: {Form.VALUE},
}
"""The forms of which each is the reference."""

_OF_EITHER = {Form.CLIPPED, Form.BOXES}
"""Forms whose reference is that one which their term offers too."""


_BETWEEN = {Form.ROW, Form.EMBED}
"""The forms of an encoding whose facts of tokens matter to the pairs that they stand between."""


@dataclass(frozen=True)
class _Bound:
    """A position encoding with the sides it is bound to; tokens without a position are neither moved nor biased."""

    position: Position
    forms: frozenset[Form]
    queries: Side
    keys: Side
    facts: Tensor | None = None

    def has(self, reference: Form) -> bool:
        """Whether a term is chosen in one of the forms that `reference` writes out pair by pair."""
        same, either = _WRITTEN_OUT[reference], self.forms & _OF_EITHER
        return any(
            self.forms & same & set(offered) or (reference in offered and either & set(offered))
            for offered in self.position.forms
        )

    def gates(self) -> Tensor:
        assert self.facts is not None, "bound without what the encoding prepared"
        gates = self.facts.mT
        return gates if self.keys.keep is None else gates.masked_fill(~self.keys.keep[:, None], 0.0)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        place = self.position.augment if Form.AUGMENT in self.forms else self.position.rotate
        placed_q, placed_k = place(q, k, self.queries.positions, self.keys.positions)
        everywhere = self.queries.without is None and self.keys.without is None
        if placed_q.shape[-1] > q.shape[-1] and not everywhere:
            raise IncompatibleError(
                f"{self.position.name} widens queries and keys here, so every token needs a position"
            )
        return _unless(self.queries.without, q, placed_q.to(q.dtype)), _unless(
            self.keys.without, k, placed_k.to(k.dtype)
        )

    def turn(self, v: Tensor) -> Tensor:
        return _unless(self.keys.without, v, self.position.turn(v, self.keys.positions))

    def turn_back(self, out: Tensor) -> Tensor:
        return _unless(self.queries.without, out, self.position.turn_back(out, self.queries.positions))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        q_pos, k_pos = self.queries.positions, self.keys.positions
        terms: list[Tensor] = []
        if self.has(Form.BIAS):
            head = torch.arange(self.position.site.heads, device=q.device)[:, None, None]
            terms.append(self.position.bias(head, q_pos[:, None, :, None], k_pos[:, None, None, :]))
        if self.has(Form.SCORE):
            terms.append(self.position.score(q, k, q_pos, k_pos))
        if Form.GATES in self.forms:
            last = None if self.queries is self.keys else last_seen(self.queries.places, self.keys.places)
            terms.append(gate_sums(self.gates(), last).to(torch.promote_types(torch.float32, q.dtype)))
        return self._without(sum(terms[1:], terms[0]))

    def row(self, q: Tensor, k: Tensor, logits: Tensor) -> Tensor:
        facts = self.facts
        if facts is not None and self.keys.keep is not None:
            facts = facts.masked_fill(~self.keys.keep[:, :, None], 0.0)
        return self.position.row(q, k, logits, facts)

    def values(self, weights: Tensor) -> Tensor:
        return self.position.value(self._without(weights), self.queries.positions, self.keys.positions)

    def offsets(self, low: int, high: int) -> Offsets:
        if Form.TOEPLITZ in self.forms:
            return Offsets(bias=self.position.offsets(low, high))
        return self.position.tables(low, high)

    def grid(self, offsets: Tensor) -> Tensor:
        head = torch.arange(self.position.site.heads, device=offsets.device)[:, None]
        return self.position.bias(head, torch.zeros_like(offsets)[None], offsets[None])

    def _without(self, pairs: Tensor) -> Tensor:
        if self.queries.without is not None:
            pairs = pairs.masked_fill(self.queries.without[:, None, :, None], 0.0)
        return pairs if self.keys.without is None else pairs.masked_fill(self.keys.without[:, None, None, :], 0.0)


def _unless(without: Tensor | None, plain: Tensor, placed: Tensor) -> Tensor:
    return placed if without is None else torch.where(without[:, None, :, None], plain, placed)
