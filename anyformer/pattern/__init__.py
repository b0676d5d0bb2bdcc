"""Patterns: which pairs of a query and a key may meet. See `base` for the noun, `leaves` for the simplest ones."""

from anyformer.pattern._algebra import from_head as from_head
from anyformer.pattern._algebra import union_of as union_of
from anyformer.pattern._decompose import Parts as Parts
from anyformer.pattern._decompose import Piece as Piece
from anyformer.pattern._decompose import decompose as decompose
from anyformer.pattern._facts import Facts as Facts
from anyformer.pattern._flags import flag_ids as flag_ids
from anyformer.pattern.base import Pattern as Pattern
