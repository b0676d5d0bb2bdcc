"""The small values around a pattern: what it may know of a forward, and what can be said of it as a whole."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd, lcm

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from anyformer.errors import SpecError

Places = Int[Tensor, "..."]
Band = tuple[int | None, int | None]
MOST = 2**31 - 1  # of any number of a pattern, so that products of two fit into int64


@dataclass(frozen=True, eq=False)
class Facts:
    """What a pattern may know of one forward besides the pair.

    Args:
        lengths: number of real keys of each sample; None: `length` for all.
        length: number of real keys where `lengths` is None; None: all keys (the readers fill it in).
        flags: which places are flagged as global; None: none.
        layer: number of the layer.
        causal: whether a query sees no key after it.
        seed: root of random structure, joined with the pattern's own.
    """

    lengths: Int[Tensor, "b"] | None = None
    length: int | None = None
    flags: Bool[Tensor, "b m"] | None = None
    layer: int = 0
    causal: bool = False
    seed: int = 0

    def length_of(self, batch: Places, like: Places) -> Places:
        """Number of real keys of each sample, broadcastable with `like`.

        Raises:
            SpecError: neither `lengths` nor `length` is set.
        """
        if self.lengths is not None:
            return self.lengths[batch].long()
        if self.length is None:
            raise SpecError(
                "this pattern counts from the last real token: expected Facts(length=...) or Facts(lengths=...), "
                "got neither"
            )
        return torch.full_like(like, self.length)

    def samples(self) -> "list[Facts]":
        """The facts of each sample alone, with its length as a number."""
        given = self.lengths if self.lengths is not None else self.flags
        batch = 1 if given is None else len(given)
        lengths = [self.length] * batch if self.lengths is None else self.lengths.tolist()
        flags = [None if self.flags is None else self.flags[i : i + 1] for i in range(batch)]
        return [replace(self, lengths=None, length=each, flags=flag) for each, flag in zip(lengths, flags, strict=True)]


@dataclass(frozen=True)
class Traits:
    """What can be said of a pattern without looking at a pair.

    Args:
        band: (left, right) where its pairs are exactly -left <= k - q <= right, None for no limit; None: it is no band.
        horizon: how many tokens before a query a key can still be seen; None: for ever.
        stride: (q - k) is always a multiple of this.
        depends: what beside the distance of the pair its answer depends on: "place", "head", "layer", "lengths", "flags".
    """

    band: Band | None = None
    horizon: int | None = None
    stride: int = 1
    depends: frozenset[str] = frozenset()

    @staticmethod
    def of_either(traits: "list[Traits]") -> "Traits":
        """What holds of every pair that any of several patterns allows; a band only where all have the same."""
        bands = {each.band for each in traits}
        return Traits(
            band=bands.pop() if len(bands) == 1 else None,
            horizon=_widest([each.horizon for each in traits]),
            stride=gcd(*(each.stride for each in traits)),
            depends=frozenset().union(*(each.depends for each in traits)),
        )

    @staticmethod
    def of_union(traits: "list[Traits]") -> "Traits":
        """`of_either` where the pairs of all are united, so that several bands make one."""
        return replace(Traits.of_either(traits), band=_band([each.band for each in traits], _widest))

    @staticmethod
    def of_intersection(traits: "list[Traits]") -> "Traits":
        """What holds of the pairs that all of several patterns allow."""
        return Traits(
            band=_band([each.band for each in traits], _narrowest),
            horizon=_narrowest([each.horizon for each in traits]),
            stride=lcm(*(each.stride for each in traits)),
            depends=frozenset().union(*(each.depends for each in traits)),
        )


def _band(bands: list[Band | None], reach: Callable[[list[int | None]], int | None]) -> Band | None:
    known = [band for band in bands if band is not None]
    return (
        (reach([left for left, _ in known]), reach([right for _, right in known])) if len(known) == len(bands) else None
    )


def _widest(reaches: list[int | None]) -> int | None:
    return None if None in reaches else max((each for each in reaches if each is not None), default=None)


def _narrowest(reaches: list[int | None]) -> int | None:
    return min((each for each in reaches if each is not None), default=None)


def whole_number(owner: str, name: str, value: object, least: int, instead: str) -> int:
    """`value`, if it is a whole number from `least` to `MOST`.

    Raises:
        SpecError: it is not; the message shows `instead` as an example.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MOST:
        over = isinstance(value, int) and value > MOST
        bound = f"at most {MOST}" if over else f"at least {least}"
        raise SpecError(f"{owner}: expected {name} as a whole number of {bound}, got {value!r}; for example {instead}")
    return value
