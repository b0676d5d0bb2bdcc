"""Patterns: which pairs of a query and a key may meet. See `base` for the noun, `leaves` for the simplest ones."""

from anyformer.pattern._decompose import Parts as Parts
from anyformer.pattern._decompose import Piece as Piece
from anyformer.pattern._decompose import decompose as decompose
from anyformer.pattern._facts import Facts as Facts
from anyformer.pattern.base import Pattern as Pattern
