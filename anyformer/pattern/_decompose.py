"""A pattern cut into the parts that fast engines have special ways for."""

from dataclasses import dataclass, replace
from functools import reduce

from anyformer.pattern._algebra import Or
from anyformer.pattern._facts import Band
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Causal, Flagged, Full, Global, Local


@dataclass(frozen=True)
class Piece:
    """A pattern as the pairs of a simple source that other parts do not have."""

    pattern: Pattern
    source: Pattern


@dataclass(frozen=True)
class Parts:
    """A pattern as the union of global tokens, a band, and the rest.

    Args:
        tokens: places of global tokens, see `Global`.
        flagged: whether flagged tokens are global too, see `Flagged`.
        band: (left, right) of -left <= k - q <= right, None for no limit; None: there is no band.
        rest: every pair that is neither in the band nor of a global token; None: there are none.
        pieces: the rest again, as patterns without a common pair: those whose queries and keys lie a multiple of the same stride
            apart make one piece, which has an order of its own in which its blocks are dense; the others make the last.
    """

    tokens: tuple[int, ...]
    flagged: bool
    band: Band | None
    rest: Pattern | None
    pieces: "tuple[Piece, ...]" = ()

    def disjoint(self) -> tuple[Pattern, ...]:
        """Patterns without a common pair whose union is the whole: global tokens, the band without them, the rest."""
        hubs, band = self._hubs(), self._band()
        apart = band & ~hubs if band and hubs else band
        return tuple(part for part in (hubs, apart, self.rest) if part is not None)

    def _hubs(self) -> Pattern | None:
        parts = [*([Global(self.tokens)] if self.tokens else []), *([Flagged()] if self.flagged else [])]
        return reduce(Pattern.__or__, parts) if parts else None

    def _band(self) -> Pattern | None:
        match self.band:
            case None:
                return None
            case (None, None):
                return Full()
            case (None, 0):
                return Causal()
            case (None, right):
                return Causal() | Local(0, right)
            case (left, None):
                return ~Causal() | Local(left, 0)
            case (left, right):
                return Local(left, right)


def decompose(pattern: Pattern, *, causal: bool = False) -> Parts:
    """The parts of a pattern; no pair is in two of `decompose(pattern).disjoint()`.

    >>> decompose(Local(256) | Global([0]) | Local(2, 0))
    Parts(tokens=(0,), flagged=False, band=(256, 256), rest=None)

    Args:
        causal: whether a query sees no key after it; the band then ends at the query.

    Raises:
        SpecError: the pattern has no causal form.
    """
    pattern.traits(causal)
    terms = pattern.parts if isinstance(pattern, Or) else (pattern,)
    bands = [term for term in terms if term.traits(causal).band is not None]
    tokens = tuple(dict.fromkeys(token for term in terms if isinstance(term, Global) for token in term.tokens))
    others = [term for term in terms if term not in bands and not isinstance(term, Global | Flagged)]
    flagged = any(isinstance(term, Flagged) for term in terms)
    parts = Parts(tokens, flagged, reduce(Pattern.__or__, bands).band(causal=causal) if bands else None, None)
    if not others:
        return parts
    outside = [~part for part in (parts._band(), parts._hubs()) if part is not None]
    rest = reduce(Pattern.__and__, outside, reduce(Pattern.__or__, others))
    return replace(parts, rest=rest, pieces=_pieces(others, outside, causal))


def _pieces(others: list[Pattern], outside: list[Pattern], causal: bool) -> tuple[Piece, ...]:
    groups: dict[int, list[Pattern]] = {}
    for term in sorted(others, key=lambda term: -term.traits(causal).stride):
        groups.setdefault(term.traits(causal).stride, []).append(term)
    pieces = []
    for terms in groups.values():
        together = reduce(Pattern.__or__, terms)
        pieces.append(Piece(reduce(Pattern.__and__, outside, together), together))
        outside = [*outside, ~together]
    return tuple(pieces)
