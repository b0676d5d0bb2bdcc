"""The leaves for tokens that see all and are seen by all: `Global` names places, `Flagged` what calls flag and token ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.pattern._facts import MOST, Facts, Places, Traits, whole_number
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import Cover, Grid


@dataclass(frozen=True, repr=False)
class Global(Pattern):
    """Tokens that see all and are seen by all; when causal they are only seen.

    Args:
        tokens: their places. A negative one counts from the last real token, -1 being that token; a causal layer
            refuses it.
    """

    tokens: tuple[int, ...] | list[int] = (0,)

    def __post_init__(self) -> None:
        places = self.tokens if isinstance(self.tokens, tuple | list) else ()
        if not places or not all(type(place) is int for place in places):
            raise SpecError(
                f"Global: expected a list of at least one place, got {self.tokens!r}; for example Global([0])"
            )
        for place in places:
            whole_number("Global", "each place", place, -MOST, "Global([0])")
        object.__setattr__(self, "tokens", tuple(sorted(set(self.tokens), key=lambda place: (place < 0, place))))

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        self.traits(facts.causal)  # refuses places counted from the end
        key = self._holds(batch, k, facts)
        return key if facts.causal else key | self._holds(batch, q, facts)

    def cover(self, grid: Grid) -> Cover:
        tokens = {token if token >= 0 else token + grid.length for token in self.tokens}
        return grid.hubs(torch.tensor(sorted(token for token in tokens if token >= 0), dtype=torch.int64))

    def traits(self, causal: bool) -> Traits:
        if causal and min(self.tokens) < 0:
            raise SpecError(
                f"{self!r}: a causal layer does not know its last token; expected places from 0, got "
                f"{min(self.tokens)}; for example Global([0])"
            )
        return Traits(depends=frozenset({"place", "lengths"} if min(self.tokens) < 0 else {"place"}))

    def _holds(self, batch: Places, place: Places, facts: Facts) -> Tensor:
        met = place.new_zeros((), dtype=torch.bool)
        for first, last in _stretches(tuple(self.tokens)):
            if first >= 0:
                met = met | ((place >= first) & (place <= last))
            else:
                end = facts.length_of(batch, place)
                met = met | ((place >= (end + first).clamp(min=0)) & (place <= end + last))
        return met

    def __repr__(self) -> str:
        return f"Global({list(self.tokens)})"


@dataclass(frozen=True, repr=False)
class Flagged(Pattern):
    """`Global` for tokens that are flagged. A flag on padding counts for nothing.

    Args:
        ids: token ids whose tokens are flagged, wherever a model knows them, beside those that a call flags (`global_mask`).
            One pattern has one list of them.
    """

    ids: tuple[int, ...] | list[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.ids, tuple | list):
            raise SpecError(f"Flagged: expected a list of token ids, got {self.ids!r}; for example Flagged([13, 14])")
        for each in self.ids:
            whole_number("Flagged", "each token id", each, 0, "Flagged([13, 14])")
        object.__setattr__(self, "ids", tuple(sorted(set(self.ids))))

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        if facts.flags is None or facts.flags.numel() == 0:
            return q.new_zeros((), dtype=torch.bool)
        key = self._holds(batch, k, facts)
        return key if facts.causal else key | self._holds(batch, q, facts)

    def cover(self, grid: Grid) -> Cover:
        flags = torch.zeros(0, dtype=torch.bool) if grid.facts.flags is None else grid.facts.flags[0].cpu()
        return grid.hubs(flags[: grid.length].nonzero()[:, 0])

    def traits(self, causal: bool) -> Traits:
        return Traits(depends=frozenset({"flags", "lengths"}))

    def _holds(self, batch: Places, place: Places, facts: Facts) -> Tensor:
        assert facts.flags is not None
        real = facts.length_of(batch, place).clamp(max=facts.flags.shape[1])
        inside = (place >= 0) & (place < real)
        return inside & facts.flags[batch, torch.where(inside, place, 0)]

    def __repr__(self) -> str:
        return f"Flagged({list(self.ids)})" if self.ids else "Flagged()"


def global_tokens(tokens: tuple[int, ...] | list[int] = (0,), ids: tuple[int, ...] | list[int] = ()) -> Pattern:
    """Tokens that see all and are seen by all, by their places and by their token ids; when causal they are only seen.

    Args:
        tokens: places; a negative one counts from the last real token, which a causal layer refuses.
        ids: token ids, such as those of punctuation.

    Raises:
        SpecError: neither is given, or one is out of range.
    """
    if not ids:
        return Global(tokens)
    return Global(tokens) | Flagged(ids) if tokens else Flagged(ids)


def _stretches(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbouring places; places from the start and from the end are kept apart."""
    runs = groupby(enumerate(tokens), key=lambda item: (item[1] - item[0], item[1] < 0))
    places = [[token for _, token in run] for _, run in runs]
    return [(run[0], run[-1]) for run in places]
