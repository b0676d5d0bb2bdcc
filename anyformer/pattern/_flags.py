"""Which token ids a pattern flags."""

from anyformer.errors import SpecError
from anyformer.pattern._algebra import walk
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Flagged


def flag_ids(pattern: Pattern) -> tuple[int, ...]:
    """The token ids of every `Flagged` inside a pattern; none: tokens are flagged by calls only.

    Raises:
        SpecError: two of them name different ids, and a forward has one flag a token.
    """
    found = sorted({tuple(part.ids) for part in walk(pattern) if isinstance(part, Flagged)})
    if len(found) > 1:
        together = sorted({each for ids in found for each in ids})
        raise SpecError(
            f"{pattern!r}: expected one list of token ids in all of it, got {' and '.join(map(str, map(list, found)))}; "
            f"for example Flagged({together})"
        )
    return found[0] if found else ()
