"""What a tile is: a block of queries [q d] against the keys that those queries may see [s d].

C tiles are computed at once, few enough that their weights [C q s] stay in the processor's cache. A *layout* (a window,
lists of blocks) says how rows and keys are cut into tiles and where a tile's gradient goes; `tile_passes` holds the
mathematics that all layouts share.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHUT = -1e30
"""Added to the score of a pair that may not meet. Finite, so that a row without keys meets no NaN on its way to 0."""

APART = -1e20
"""Times the squared distance of two document numbers (below 2 ** 24) this shuts a pair, and stays finite in float32."""

DEAD = -1e19
"""A row whose largest score lies below this sees no key."""


class Rule(NamedTuple):
    """What is done to every score and weight. `softcap` 0 means none; the seed is read only when there is dropout."""

    scale: float
    softcap: float
    dropout: float
    seed: int


class Place(NamedTuple):
    """One chunk of a call; `number` counts them in the same order forward and backward."""

    sample: int
    head: int
    chunk: Any
    number: int


class Operands(NamedTuple):
    """One head's padded queries [rows d], and keys [slots d] and values [slots v] as the layout holds slots; or their gradients."""

    queries: Tensor
    keys: Any
    values: Any


class Scratch:
    """Buffers that are allocated once and handed out again under their name."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self._flat: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[int, ...], Tensor]] = {}
        self._slices: dict[str, dict[tuple[int, ...], tuple[Tensor, ...]]] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised contiguous buffer; what the last one of this name held is lost."""
        views = self._views.setdefault(name, {})
        if shape not in views:
            size, flat = math.prod(shape), self._flat.get(name)
            if flat is None or flat.numel() < size:
                flat = self._flat[name] = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
                views.clear()
                self._slices.pop(name, None)
            views[shape] = flat[:size].view(shape)
        return views[shape]

    def slices(self, name: str, rows: int, count: int, width: int) -> tuple[Tensor, ...]:
        """The buffer [rows count width] of this name as `count` views [rows width], which cost much more to make than to add."""
        slices = self._slices.setdefault(name, {})
        shape = rows, count, width
        if shape not in slices:
            whole = self.take(name, *shape)
            slices = self._slices.setdefault(name, {})
            slices[shape] = whole.unbind(1)
        return slices[shape]


class Layout(ABC):
    """How a head's rows and keys are cut into tiles.

    Queries live in a buffer of `rows` rows, keys in one of `slots` rows, both padded so that every tile has its full
    size. The first `globals` slots hold keys that every row meets, beside those of its tile. A chunk is whatever the
    layout needs to know about C tiles that are computed at once.
    """

    rows: int
    slots: int
    globals: int
    scratch: Scratch

    @abstractmethod
    def load(self, sample: int, source: Tensor, name: str) -> Any:
        """Keys or values [m d] -> [slots d], padding and unreadable keys 0; where they are, if possible."""

    @abstractmethod
    def gradient_room(self, target: Tensor, name: str) -> Any:
        """Slots [slots d] of zeros, to sum up a gradient in that ends in [m d]; there itself, if possible."""

    @abstractmethod
    def unload(self, sample: int, slots: Any, target: Tensor) -> None:
        """The gradient of `load`: what was summed up in the target's `gradient_room` -> [m d], overwriting it."""

    @abstractmethod
    def shared(self, slots: Any) -> Tensor:
        """The slots of global keys [g d]."""

    @abstractmethod
    def chunks(self, sample: int, head: int) -> Iterable[Any]:
        """The chunks that cover the rows of one head, each row once."""

    @abstractmethod
    def queries(self, chunk: Any, rows: Tensor, name: str) -> Tensor:
        """[rows d] -> [C q d], a view where possible."""

    @abstractmethod
    def keys(self, chunk: Any, slots: Any, name: str) -> Tensor:
        """[slots d] -> [C s d], a view where possible."""

    @abstractmethod
    def room(self, chunk: Any, rows: Tensor, name: str) -> Tensor:
        """Where to write a tile [C q d] that belongs among [rows d]: its place itself where possible."""

    @abstractmethod
    def put(self, chunk: Any, tile: Tensor, rows: Tensor) -> None:
        """Bring what was written into `room` to its place."""

    @abstractmethod
    def spread(self, chunk: Any, weights: Tensor, rows: Tensor, slots: Any, scale: float = 1.0) -> None:
        """Add scale * weights^T rows, [C q s] and [C q d], to the slots that `keys` reads."""

    @abstractmethod
    def put_in(self, tile: Tensor, columns: Tensor) -> None:
        """Write the columns of global keys [C q g] among those of a tile [C q s] that hold no pair."""

    @abstractmethod
    def take_out(self, tile: Tensor) -> Tensor:
        """The columns of global keys [C q g] that `put_in` wrote, with 0 left in their places."""

    @abstractmethod
    def query_terms(self, place: Place, queries: Tensor, scores: Tensor, scale: float) -> None:
        """Add scale * R to the scores in place."""

    @abstractmethod
    def query_terms_backward(
        self, place: Place, queries: Tensor, d_scores: Tensor, d_queries: Tensor, scale: float
    ) -> None:
        """Add the gradient of scale * R to d_queries and to the layout's tables."""

    @abstractmethod
    def key_terms(self, place: Place, slots: Any, scores: Tensor, scale: float) -> None:
        """Add scale times the terms of key and offset to the scores in place, given the keys [slots d]."""

    @abstractmethod
    def key_terms_backward(self, place: Place, slots: Any, d_scores: Tensor, d_slots: Any, scale: float) -> None:
        """Add their gradient to d_slots and to the layout's tables."""

    @abstractmethod
    def value_terms(self, place: Place, weights: Tensor, out: Tensor) -> None:
        """Add U to the output in place."""

    @abstractmethod
    def value_terms_backward(self, place: Place, weights: Tensor, d_out: Tensor, d_weights: Tensor) -> None:
        """Add the gradient of U to d_weights and to the layout's tables."""

    @abstractmethod
    def terms(self, place: Place) -> Tensor | None:
        """The part of B that is the same in every sample, broadcastable to [C q s]."""

    @abstractmethod
    def restrict(self, place: Place, scores: Tensor) -> bool:
        """Add the rest of B to the scores in place; whether a row may now be without keys."""

    @abstractmethod
    def replaced(self, place: Place) -> Tensor | None:
        """The rows [C q 1] of a chunk that come from elsewhere: these give 0 and get no gradient here; None: no row does."""

    @abstractmethod
    def restrict_globals(self, place: Place, columns: Tensor) -> None:
        """Add B to the scores of global keys [C q g] in place."""

    @abstractmethod
    def terms_backward(self, place: Place, d_scores: Tensor) -> None:
        """Add the gradient of B to the layout's tables."""


def product(a: Tensor, b: Tensor, scale: float, out: Tensor, terms: Tensor | None = None) -> Tensor:
    """scale * a b + terms for stacks of matrices, at the price of a b."""
    if terms is None:
        return torch.baddbmm(a[:1, :1, :1], a, b, beta=0, alpha=scale, out=out)
    return torch.baddbmm(terms, a, b, alpha=scale, out=out)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of scores, weights and sums for an input."""
    return torch.promote_types(x.dtype, torch.float32)


def tiles_at_once(scores: int, threads: int) -> int:
    """How many tiles of so many scores fill the second-level caches (1.3 MB of float32 for each thread)."""
    return threads * max(1, 300_000 // max(scores, 1))


def threads(dropout: float) -> int:
    """Threads to size the chunks for. A dropout mask depends on the chunks, so with dropout the number is fixed."""
    return 4 if dropout else torch.get_num_threads()


def rule(scale: float, softcap: float, dropout: float, seed: Tensor | None) -> Rule:
    return Rule(scale, softcap, dropout, 0 if seed is None else int(seed))


def empty_result(q: Tensor, v: Tensor, want_lse: bool) -> tuple[Tensor, Tensor]:
    """Uninitialised out [b h n v] in q's dtype and lse [b h n], or [b h 0] unless wanted."""
    batch, heads, n = q.shape[:3]
    lse = q.new_empty(batch, heads, n if want_lse else 0, dtype=working_dtype(q))
    return q.new_empty(batch, heads, n, v.shape[3]), lse


def without_keys(q: Tensor, v: Tensor, want_lse: bool) -> tuple[Tensor, Tensor]:
    """The result when there is nothing to look at."""
    out, lse = empty_result(q, v, want_lse)
    return out.zero_(), lse.fill_(-math.inf)


def gradient_of(table: Tensor | None, gradient: Tensor | None, first: int = 0) -> Tensor:
    """A table's gradient, given for its rows [h rows ...] from `first` on, 0 elsewhere; empty when there is no table."""
    if table is None:
        return torch.empty(0)
    whole = torch.zeros(table.shape, dtype=table.dtype, device=table.device)
    if gradient is not None:
        whole[:, first : first + gradient.shape[1]] = gradient
    return whole


def document_numbers(documents: Tensor) -> Tensor:
    """The same partition in numbers from 0 to below 2 ** 24, which float32 holds exactly."""
    numbers = documents - documents.min()
    return documents.unique(return_inverse=True)[1] if numbers.max() >= 2**24 else numbers


def document_rows(numbers: Tensor, n: int, rows: Tensor) -> Tensor:
    """Fill [b rows 1] with the numbers of the n queries, the last keys; queries before the first key get -1."""
    shared = min(n, numbers.shape[1])
    rows.fill_(-1.0)[:, n - shared : n, 0] = numbers[:, numbers.shape[1] - shared :].to(rows.dtype)
    return rows


def shut_documents(scores: Tensor, rows: Tensor, keys: Tensor, scratch: Scratch) -> None:
    """Shut the pairs of rows [C q 1] and keys [C s 1] with different document numbers."""
    apart = torch.sub(rows, keys.transpose(1, 2), out=scratch.take("apart", *scores.shape))
    scores.addcmul_(apart, apart, value=APART)


def load_rows(layout: Layout, source: Tensor, asking: Tensor | None, name: str) -> Tensor:
    """Rows [n d] -> [rows d], the source itself where possible; padding, and rows that do not ask, are 0."""
    n, width = source.shape
    if asking is None and fits(source, layout.rows, layout.scratch):
        return source
    rows = layout.scratch.take(name, layout.rows, width)
    rows[:n].copy_(source)
    rows[n:].zero_()
    if asking is not None:
        rows[:n].masked_fill_(~asking[:, None], 0.0)
    return rows


def fits(rows: Tensor, count: int, scratch: Scratch) -> bool:
    """Whether so many rows of a head can be worked on where they are."""
    return rows.shape[0] == count and rows.dtype == scratch.dtype and rows.is_contiguous()


def result_rows(layout: Layout, target: Tensor, name: str) -> Tensor:
    """[rows d] to be filled for a target [n d], which is the target itself where possible."""
    return (
        target if fits(target, layout.rows, layout.scratch) else layout.scratch.take(name, layout.rows, target.shape[1])
    )


def store_rows(rows: Tensor, target: Tensor) -> None:
    """Bring `result_rows` to their target."""
    if rows is not target:
        target.copy_(rows[: target.shape[0]])


def dropout_multiplier(shape: torch.Size, rule: Rule, number: int, scratch: Scratch) -> Tensor:
    """0 or 1 / (1 - p) for each weight of one chunk: a function of the seed and the chunk's number.

    Sixteen random bits a weight cost a fraction of a Bernoulli draw. p is rounded to 1 / 65536 in the draw and in the
    multiplier alike, so the mean stays exact.
    """
    generator = torch.Generator(device=scratch.device).manual_seed((rule.seed + number * 0x9E3779B97F4A7C15) % 2**63)
    size = math.prod(shape)
    bits = scratch.take("bits", -(-size // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    dropped = round(rule.dropout * 65536)
    kept = bits.view(torch.int16)[:size].view(shape) >= dropped - 32768
    return scratch.take("kept", *shape).copy_(kept).mul_(65536 / max(65536 - dropped, 1))
