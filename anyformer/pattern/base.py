"""Pattern: which pairs of a query and a key may meet. A frozen, hashable, printable value without tensors.

A pattern is defined by one method, `meets`, on integer tensors of places (numbers of real tokens before a token).
Everything else reads that definition: the dense mask, the block layout, FlexAttention. `repr` is the text that a spec
reads back.

    >>> from anyformer.pattern.leaves import Global, Local
    >>> pattern = Local(1, 0) | Global([0])
    >>> pattern
    Local(1, 0) | Global([0])
    >>> pattern.dense(4, causal=True)[0].int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.pattern._facts import Band, Places, Traits, whole_number
from anyformer.pattern._facts import Facts as Facts
from anyformer.pattern.layout import NONE, SOME, WHOLE, BlockLayout, Cover, Grid, assemble


class Pattern(ABC):
    """Which pairs may meet; see the module.

    A leaf is a frozen dataclass that writes `meets`, `cover`, `traits` and `__repr__`; its `repr` is its spec.
    """

    @abstractmethod
    def meets(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        """Whether query place q may meet key place k; causality is added by `allows`. See there."""

    @abstractmethod
    def cover(self, grid: Grid) -> Cover:
        """NONE, SOME or WHOLE for each tile of one head, right for the pairs of `grid.domain()`."""

    @abstractmethod
    def traits(self, causal: bool) -> Traits:
        """What holds of all pairs. Raises SpecError where the pattern has no causal form."""

    @property
    def side(self) -> int | None:
        """Tokens of the blocks that `squares` tells of; None: it tells of none, as where their number grows with the length."""
        return None

    def squares(self, batch: Places, head: Places, row: Places, facts: Facts) -> list[Tensor]:
        """Blocks of keys that hold all that a block of queries meets, one tensor an entry of its list, repeats and -1 for none
        included, of queries that are in none of `full_squares`. As many at any length."""
        return []

    def full_squares(self, batch: Places, facts: Facts) -> list[Tensor]:
        """Blocks of queries that meet every key, one tensor each; -1 for none."""
        return []

    def allows(self, batch: Places, head: Places, q: Places, k: Places, facts: Facts) -> Bool[Tensor, "..."]:
        """Whether a query may meet a key: the definition of the pattern, causality included, padding not.

        Args:
            batch, head: numbers of the sample and of the query head.
            q, k: places of query and key. The four tensors broadcast with each other; all may be without axes.
            facts: what else the pattern may know.

        Returns:
            True where they may meet, broadcastable to the shape that the four have together.
        """
        met = self.meets(batch, head, q, k, facts)
        return met & (k <= q) if facts.causal else met

    def mask_mod(self, facts: Facts, shift: int = 0) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """`allows` as FlexAttention's `f(batch, head, q, kv)`; `shift` is added to q, to make indices places."""
        return lambda batch, head, q, kv: self.allows(batch, head, q + shift, kv, facts)

    def dense(
        self, n: int, m: int | None = None, *, heads: int | range = 1, causal: bool = False, facts: Facts | None = None
    ) -> Bool[Tensor, "h n m"]:
        """The mask of one sample: the oracle of every other reader.

        Args:
            n, m: number of queries and keys (m = n unless given); the last query sees the last key.
            heads: number of heads, or their numbers.
            causal: whether a query sees no key after it.
            facts: of one sample.

        Raises:
            SpecError: the heads do not fit, the facts are those of several samples (use `dense_batch`), or of another
                length.
        """
        masks = self.dense_batch(n, m, heads=heads, causal=causal, facts=facts)
        if len(masks) != 1:
            raise SpecError(f"dense: expected the facts of one sample, got {len(masks)}; use dense_batch")
        return masks[0]

    def dense_batch(
        self, n: int, m: int | None = None, *, heads: int | range = 1, causal: bool = False, facts: Facts | None = None
    ) -> Bool[Tensor, "b h n m"]:
        """`dense` for every sample of `facts`."""
        m, numbers, facts = self._request(n, m, heads, causal, facts)
        batch = torch.arange(len(facts.samples()))[:, None, None, None]
        head = torch.tensor(numbers, dtype=torch.int64)[:, None, None]
        mask = self.allows(batch, head, torch.arange(m - n, m)[:, None], torch.arange(m), facts)
        return mask.expand(len(batch), len(numbers), n, m).clone()

    def blocks(
        self,
        n: int,
        block: int,
        m: int | None = None,
        *,
        heads: int | range = 1,
        causal: bool = False,
        facts: Facts | None = None,
        reorder: bool = True,
    ) -> BlockLayout:
        """The tiles of block x block tokens that hold allowed pairs, by arithmetic: work and memory follow the tiles
        kept.

        Every allowed pair lies in a kept tile. A kept tile may hold none where the pattern has `&` or `~`. Groups are
        as few as the pattern allows: one head where all are alike, one sample where the facts do not matter. Padding is
        not considered.

        Args:
            n, block, m: queries, side of a tile in tokens, keys (n unless given).
            heads, causal, facts: as for `dense`; facts may be of several samples.
            reorder: whether a pattern with a stride may sort tokens by residue class (only where n == m).

        Raises:
            SpecError: as `dense`, and for a block below 1.
        """
        whole_number("blocks", "block", block, 1, "blocks(n, 64)")
        m, numbers, facts = self._request(n, m, heads, causal, facts)
        traits = self.traits(facts.causal)
        if "head" not in traits.depends:
            numbers = numbers[:1]
        facts = replace(
            facts,
            lengths=facts.lengths if "lengths" in traits.depends else None,
            length=facts.length if "lengths" in traits.depends else m,
            flags=facts.flags if "flags" in traits.depends else None,
            layer=facts.layer if "layer" in traits.depends else 0,
        )
        stride = traits.stride if reorder and n == m else 1
        if facts.lengths is not None or facts.flags is not None or torch.compiler.is_compiling():
            return _layout(self, n, m, block, numbers, facts, stride)
        return _cached_layout(self, n, m, block, numbers, facts.length, facts.layer, facts.causal, facts.seed, stride)

    def block_mask(
        self,
        n: int,
        m: int | None = None,
        *,
        heads: int | range = 1,
        causal: bool = False,
        facts: Facts | None = None,
        block: int = 128,
        device: torch.device | str = "cpu",
        also: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Any:
        """FlexAttention's BlockMask from the layout, query blocks included; heads and samples only where they differ.

        Args:
            block: side of a tile in tokens.
            device: where the lists go; tensors in `facts` must lie there.
            also: a further `f(batch, head, q, kv)` on indices that a pair must pass (padding, documents).
        """
        from torch.nn.attention.flex_attention import BlockMask

        m, numbers, facts = self._request(n, m, heads, causal, facts)
        layout = self.blocks(n, block, m, heads=heads, facts=facts, reorder=False)
        _, row, column = layout.tiles()
        # FlexAttention applies no bounds inside a whole tile, so those that stick out are given to the mask
        whole = layout.whole & ((row + 1) * block <= n) & ((column + 1) * block <= m) & (also is None)
        some_count, some, whole_count, full = (
            part.to(device) for chosen in (~whole, whole) for part in layout.lists(chosen)
        )

        def mask_mod(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            allowed = self.allows(batch, head + numbers[0], q + (m - n), kv, facts)
            return allowed if also is None else allowed & also(batch, head, q, kv)

        return BlockMask.from_kv_blocks(
            some_count,
            some,
            whole_count,
            full,
            BLOCK_SIZE=block,
            mask_mod=mask_mod,
            seq_lengths=(n, m),
            compute_q_blocks=True,
        )

    def density(self, n: int, m: int | None = None, *, heads: int | range = 1, causal: bool = False) -> float:
        """Share of the n * m pairs that is allowed, exactly; time and memory follow the runs of kept keys."""
        m, numbers, facts = self._request(n, m, heads, causal, None)
        if n * m == 0:
            return 0.0
        traits = self.traits(causal)
        asked = numbers if "head" in traits.depends else numbers[:1]
        grids = [Grid(n, m, 1, head, facts, traits.stride if n == m else 1) for head in asked]
        return sum(_count(self, grid) for grid in grids) / (n * m * len(asked))

    def horizon(self) -> int | None:
        """How many tokens before a query a key can still be seen; a cache may drop older ones. None: for ever."""
        return self.traits(causal=False).horizon

    def band(self, *, causal: bool = False) -> Band | None:
        """(left, right) where the pairs are those with -left <= k - q <= right, None for no limit; None: no band."""
        band = self.traits(causal).band
        return (band[0], 0) if band and causal else band

    def at(self, head: int, layer: int = 0) -> "Pattern":
        """The pattern of one head and layer, without PerHead and PerLayer."""
        from anyformer.pattern import _algebra

        return _algebra.resolve(self, head, layer)

    def groups_of(self, heads: int | range, layer: int = 0) -> "list[tuple[Pattern, range]]":
        """Neighbouring heads of equal pattern, with their original numbers.

        Raises:
            SpecError: a PerHead has another number of heads.
        """
        runs = groupby(self.check(heads), key=lambda head: self.at(head, layer))
        spans = [(pattern, list(numbers)) for pattern, numbers in runs]
        return [(pattern, range(numbers[0], numbers[-1] + 1)) for pattern, numbers in spans]

    def check(self, heads: int | range, *, causal: bool = False) -> tuple[int, ...]:
        """The numbers of the heads, if the pattern can serve them.

        Raises:
            SpecError: a PerHead has another number of heads, or the pattern has no causal form.
        """
        from anyformer.pattern import _algebra

        self.traits(causal)
        return _algebra.head_numbers(self, heads)

    def text(self, n: int = 64, width: int = 64, *, head: int = 0, causal: bool = False) -> str:
        """A small drawing, queries downwards and keys to the right: a character is darker the more of its pairs are
        allowed.

        Args:
            n: number of tokens.
            width: characters a line; a character is twice as high as wide.
        """
        mask = self.at(head).dense(n, heads=range(head, head + 1), causal=causal).double()
        lines, columns = min(n, max(width // 2, 1)), min(n, max(width, 1))
        share = torch.nn.functional.adaptive_avg_pool2d(mask, (lines, columns))[0] if n else mask[0]
        shades = " ░▒▓█"
        level = torch.where(share > 1 - 1e-9, 4, (share * 3).ceil())  # empty, three greys, full
        return "\n".join("".join(shades[int(each)] for each in line).rstrip() for line in level)

    def __or__(self, other: "Pattern") -> "Pattern":
        from anyformer.pattern import _algebra

        return _algebra.join(_algebra.Or, self, other) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: "Pattern") -> "Pattern":
        from anyformer.pattern import _algebra

        return _algebra.join(_algebra.And, self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> "Pattern":
        from anyformer.pattern import _algebra

        return self.part if isinstance(self, _algebra.Not) else _algebra.Not(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A knob of this type reads a Pattern, a spec or its text."""
        from pydantic_core import core_schema

        from anyformer.pattern.read import pattern_of

        return core_schema.no_info_plain_validator_function(pattern_of)

    def _request(
        self, n: int, m: int | None, heads: int | range, causal: bool, facts: Facts | None
    ) -> tuple[int, tuple[int, ...], Facts]:
        """Number of keys, numbers of heads and complete facts of a reader's call."""
        facts = Facts() if facts is None else facts
        m = n if m is None else m
        facts = replace(facts, length=m if facts.length is None else facts.length, causal=causal or facts.causal)
        longest = facts.length if facts.lengths is None or not len(facts.lengths) else int(facts.lengths.max())
        if longest is not None and longest > m:
            raise SpecError(f"expected facts of at most the {m} keys there are, got a length of {longest}")
        return m, self.check(heads, causal=facts.causal), facts


def _cover(pattern: Pattern, grid: Grid) -> Cover:
    if grid.tiles == 0:
        return grid.constant(NONE)
    cover = pattern.cover(grid)
    return cover & grid.domain() if grid.facts.causal or grid.stride > 1 else cover


def _count(pattern: Pattern, grid: Grid) -> int:
    """Number of allowed pairs of a grid of single pairs."""
    cover = _cover(pattern, grid)
    open_tiles, _ = cover.tiles(SOME, SOME)
    q, k = grid.query_places()[open_tiles // grid.columns], grid.order()[open_tiles % grid.columns]
    zero = torch.zeros_like(q)
    met = pattern.allows(zero, zero + grid.head, q, k, grid.facts).expand(q.shape)
    return cover.size(WHOLE) + int(met.sum())


def _layout(
    pattern: Pattern, n: int, m: int, block: int, heads: tuple[int, ...], facts: Facts, stride: int
) -> BlockLayout:
    samples = facts.samples()
    grids = [Grid(n, m, block, head, each, stride) for each in samples for head in heads]
    return assemble(grids, [_cover(pattern, grid) for grid in grids], len(samples), len(heads))


@lru_cache(maxsize=64)
def _cached_layout(
    pattern: Pattern,
    n: int,
    m: int,
    block: int,
    heads: tuple[int, ...],
    length: int | None,
    layer: int,
    causal: bool,
    seed: int,
    stride: int,
) -> BlockLayout:
    with torch.inference_mode(False):  # what is kept must serve training too
        return _layout(pattern, n, m, block, heads, Facts(length=length, layer=layer, causal=causal, seed=seed), stride)
