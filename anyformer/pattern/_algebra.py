"""The algebra of patterns: union, intersection and complement, and patterns of their own for heads and layers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.pattern._facts import Facts, Places, Traits, whole_number
from anyformer.pattern.base import Pattern
from anyformer.pattern.layout import Cover, Grid


@dataclass(frozen=True, repr=False)
class Or(Pattern):
    """Pairs that any part allows, written `a | b`."""

    parts: tuple[Pattern, ...]

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return reduce(torch.logical_or, [part.meets(batch, head, q, k, facts) for part in self.parts])

    def cover(self, grid: Grid) -> Cover:
        return reduce(Cover.__or__, [part.cover(grid) for part in self.parts])

    def traits(self, causal: bool) -> Traits:
        return Traits.of_union([part.traits(causal) for part in self.parts])

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


@dataclass(frozen=True, repr=False)
class And(Pattern):
    """Pairs that all parts allow, written `a & b`."""

    parts: tuple[Pattern, ...]

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return reduce(torch.logical_and, [part.meets(batch, head, q, k, facts) for part in self.parts])

    def cover(self, grid: Grid) -> Cover:
        return reduce(Cover.__and__, [part.cover(grid) for part in self.parts])

    def traits(self, causal: bool) -> Traits:
        return Traits.of_intersection([part.traits(causal) for part in self.parts])

    def __repr__(self) -> str:
        return " & ".join(_bracketed(part, Or) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """Pairs that the part does not allow, written `~a`; no key after the query when causal."""

    part: Pattern

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return ~self.part.meets(batch, head, q, k, facts)

    def cover(self, grid: Grid) -> Cover:
        return ~self.part.cover(grid)

    def traits(self, causal: bool) -> Traits:
        return Traits(depends=self.part.traits(causal).depends)

    def __repr__(self) -> str:
        return "~" + _bracketed(self.part, (Or, And))


@dataclass(frozen=True, repr=False, init=False)
class PerHead(Pattern):
    """A pattern of its own for each run of query heads: `PerHead((Local(64), 4), (bigbird(), 4))`.

    Args:
        groups: (pattern, number of query heads), in the order of the heads. Patterns see the original head numbers.

    Raises:
        SpecError: no group, or one that is not a pattern with a count of at least 1.
    """

    groups: tuple[tuple[Pattern, int], ...]

    def __init__(self, *groups: tuple[Pattern, int]) -> None:
        right = all(isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], Pattern) for group in groups)
        if not groups or not right:
            raise SpecError(
                f"PerHead: expected pairs of a pattern and a number of heads, got {groups!r}; for example {_PER_HEAD}"
            )
        for _, count in groups:
            whole_number("PerHead", "a number of heads", count, 1, _PER_HEAD)
        object.__setattr__(self, "groups", groups)

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        met, start = [], 0
        for pattern, count in self.groups:
            met.append(pattern.meets(batch, head, q, k, facts) & (head >= start) & (head < start + count))
            start += count
        return reduce(torch.logical_or, met)

    def cover(self, grid: Grid) -> Cover:
        return self.at(grid.head, grid.facts.layer).cover(grid)

    def traits(self, causal: bool) -> Traits:
        common = Traits.of_either([pattern.traits(causal) for pattern, _ in self.groups])
        return replace(common, depends=common.depends | {"head"})

    def __repr__(self) -> str:
        return f"PerHead({', '.join(map(repr, self.groups))})"


@dataclass(frozen=True, repr=False, init=False)
class PerLayer(Pattern):
    """A pattern of its own for each layer, in turn: layer i has pattern i % (number of patterns).

    Args:
        patterns: at least one.

    Raises:
        SpecError: there is none, or one is no pattern.
    """

    patterns: tuple[Pattern, ...]

    def __init__(self, *patterns: Pattern) -> None:
        if not patterns or not all(isinstance(pattern, Pattern) for pattern in patterns):
            raise SpecError(
                f"PerLayer: expected patterns, got {patterns!r}; for example PerLayer(Local(64), Strided(64))"
            )
        object.__setattr__(self, "patterns", patterns)

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return self.patterns[facts.layer % len(self.patterns)].meets(batch, head, q, k, facts)

    def cover(self, grid: Grid) -> Cover:
        return self.at(grid.head, grid.facts.layer).cover(grid)

    def traits(self, causal: bool) -> Traits:
        common = Traits.of_either([pattern.traits(causal) for pattern in self.patterns])
        return replace(common, depends=common.depends | {"layer"})

    def __repr__(self) -> str:
        return f"PerLayer({', '.join(map(repr, self.patterns))})"


@dataclass(frozen=True, repr=False)
class FromHead(Pattern):
    """A pattern as the heads from `first` on see it, which count from 0 here."""

    part: Pattern
    first: int

    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        return self.part.meets(batch, head + self.first, q, k, facts)

    def cover(self, grid: Grid) -> Cover:
        return self.part.cover(replace(grid, head=grid.head + self.first))

    def traits(self, causal: bool) -> Traits:
        return self.part.traits(causal)

    def __repr__(self) -> str:
        return f"{_bracketed(self.part, (Or, And))} of heads from {self.first}"


_PER_HEAD = "PerHead((Local(64), 4), (Full(), 4))"


def walk(pattern: Pattern) -> Iterator[Pattern]:
    """The pattern and every pattern inside it."""
    yield pattern
    inner: tuple[Pattern, ...] = ()
    match pattern:
        case Or(parts=inner) | And(parts=inner) | PerLayer(patterns=inner):
            pass
        case Not(part=part):
            inner = (part,)
        case PerHead(groups=groups):
            inner = tuple(part for part, _ in groups)
    for part in inner:
        yield from walk(part)


def join(kind: type[Or] | type[And], left: Pattern, right: Pattern) -> Pattern:
    """Union or intersection, with nested ones flattened and each part once."""
    parts = dict.fromkeys(
        part for side in (left, right) for part in (side.parts if isinstance(side, kind) else (side,))
    )
    return kind(tuple(parts)) if len(parts) > 1 else left


def resolve(pattern: Pattern, head: int, layer: int) -> Pattern:
    """The pattern of one head and layer, without PerHead and PerLayer."""
    match pattern:
        case PerHead(groups=groups):
            numbers = [i for i, (_, count) in enumerate(groups) for _ in range(count)]
            return resolve(groups[numbers[head]][0], head, layer)
        case PerLayer(patterns=patterns):
            return resolve(patterns[layer % len(patterns)], head, layer)
        case Or(parts=parts) | And(parts=parts):
            return reduce(partial(join, type(pattern)), [resolve(part, head, layer) for part in parts])
        case Not(part=part):
            return ~resolve(part, head, layer)
    return pattern


def head_numbers(pattern: Pattern, heads: int | range) -> tuple[int, ...]:
    """The numbers of the heads.

    Raises:
        SpecError: there are none, or a PerHead inside has another number of heads.
    """
    numbers = tuple(range(heads)) if isinstance(heads, int) else tuple(heads)
    if not numbers:
        raise SpecError(
            f"expected heads as a number of at least 1 or a range of numbers, got {heads!r}; for example heads=8"
        )
    for node in walk(pattern):
        if isinstance(node, PerHead):
            total = sum(count for _, count in node.groups)
            fits = total == heads if isinstance(heads, int) else max(numbers) < total
            if not fits:
                raise SpecError(
                    f"{node!r} is for {total} query heads, the layer has {heads}; make the counts sum to {heads}"
                )
    return numbers


def from_head(pattern: Pattern, first: int, *, causal: bool) -> Pattern:
    """The pattern as the heads from `first` on see it, where they count from 0; it is the same where heads do not matter.

    Args:
        pattern: of one head and layer, as `resolve` gives it.
    """
    if not first or "head" not in pattern.traits(causal).depends:
        return pattern
    match pattern:
        case Or(parts=parts) | And(parts=parts):
            return type(pattern)(tuple(from_head(part, first, causal=causal) for part in parts))
        case Not(part=part):
            return Not(from_head(part, first, causal=causal))
    return FromHead(pattern, first)


def union_of(pattern: Pattern) -> tuple[Pattern, ...]:
    """The patterns that are united in this one."""
    return pattern.parts if isinstance(pattern, Or) else (pattern,)


def _bracketed(pattern: Pattern, weaker: type | tuple[type, ...]) -> str:
    return f"({pattern!r})" if isinstance(pattern, weaker) else repr(pattern)
