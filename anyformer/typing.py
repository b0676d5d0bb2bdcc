"""One alphabet for shapes and one for knobs.

Axis letters, used in every shape of this package:

    b  batch (rows)            n  queries (tokens of x)       m  keys (tokens of the source; n when there is none)
    h  query heads             k  key and value heads         d  width of one head's queries and keys
    v  width of one head's values                             c  width of the model
    r  rows of a table         f  features of a kernel map    a  axes of a position (1 for text, 2 for images)
"""

from typing import Annotated

import annotated_types as at

Count = Annotated[int, at.Ge(0)]
"""A whole number, zero included."""

Size = Annotated[int, at.Ge(1)]
"""A whole number of at least one."""

PositiveFloat = Annotated[float, at.Gt(0)]
"""A number above zero."""

Share = Annotated[float, at.Gt(0), at.Le(1)]
"""A share above zero, up to and including one."""

Fraction = Annotated[float, at.Ge(0), at.Lt(1)]
"""A share from zero up to, not including, one."""
