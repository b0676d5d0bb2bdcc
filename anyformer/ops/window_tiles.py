"""The layout of a sliding window: blocks of rows against overlapping strided views of one buffer of keys."""

import torch
from torch import Tensor

from anyformer.ops.skew import by_column, by_offset, by_tile, diagonal_sums, toeplitz
from anyformer.ops.tile import (
    DEAD,
    SHUT,
    Layout,
    Place,
    Scratch,
    document_numbers,
    document_rows,
    product,
    shut_documents,
    working_dtype,
)
from anyformer.ops.window_cut import Chunk, Extras, block_rows, cut, shut_columns
from anyformer.ops.window_slots import INSIDE, LEFT, Slots, Strip
from anyformer.ops.window_tables import GlobalBias, OffsetTable


class WindowTiles(Layout):
    """Block t holds rows t * block onwards and reads the global slots and the `span` window slots from t * block on.

    Columns that no row of a chunk needs are left out: those without a key, and those beyond the head's reach.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        left: int,
        right: int,
        causal: bool,
        extras: Extras,
        threads: int,
        reach: list[int] | None = None,
        learning: bool = False,
    ):
        self.n, self.m = q.shape[2], k.shape[2]
        self.left, self.right, self.causal = left, right, causal
        self.block = min(block_rows(left + right), self.n)
        blocks = -(-self.n // self.block)
        self.global_keys = extras.global_keys
        self.globals = 0 if extras.global_keys is None else extras.global_keys.shape[1]
        # rows of scores that are no multiple of 16 long would make every product slower
        self.span = -(-max(self.block + left + right, left + right + 1 + self.globals) // 16) * 16
        self._inside = slice(self.block - 1, self.block + left + right)  # of a tile's offsets those of the window
        self._free = self._free_columns(q.device)
        self.rows = blocks * self.block
        self.slots = self.globals + (blocks - 1) * self.block + self.span
        self.scratch = Scratch(working_dtype(q), q.device)

        # window key j lies in slot j + shift
        self.strip = Strip(self.m, self.globals, self.slots, self.globals + left + self.n - self.m, self.scratch)
        widest = max(left, right)
        self._reach = [widest if reach is None else min(each, widest) for each in reach or [widest]]
        self._chunks = {
            each: cut(self.strip, self.block, self.span, *self._beyond(each), threads) for each in set(self._reach)
        }
        self._close(q.shape[0], extras)
        self._replaced = self._chunks_with(extras.full_rows)
        self._take_tables(q.shape[1], extras, learning)

    def _beyond(self, reach: int) -> tuple[int, int]:
        """Columns of a tile on the left and on the right that a head does not need whose keys are up to `reach` places away."""
        if self.globals:  # their columns have their places in whole tiles
            return 0, 0
        return max(self.left - reach, 0), max(self.right - reach, 0)

    def _close(self, batch: int, extras: Extras) -> None:
        """What keeps pairs apart: keys that may not be read, documents, global keys that a row meets in its window."""
        self.closed = self._closed_slots(batch, extras.keep)
        every = {chunk for chunks in self._chunks.values() for chunk in chunks}
        closed = [Slots.whole(row) for row in self.closed]
        self._has_closed = [{x: bool(self.keys(x, row, "closed").any()) for x in every} for row in closed]
        self._closed_globals = [bool(row[: self.globals].any()) for row in self.closed]
        self.documents = None if extras.documents is None else self._document_slots(extras.documents)
        no_key = extras.global_keys is not None and bool((extras.global_keys < 0).any())
        self.unreadable = extras.keep is not None or no_key
        shut_offsets = extras.bias is not None and bool((extras.bias <= DEAD).any())
        self.may_die = extras.keep is not None or self.n > self.m or shut_offsets
        self._shut_globals: list[dict[int, Tensor]] = [{} for _ in range(batch)]
        if self.global_keys is not None:
            places = torch.arange(self.rows, device=self.global_keys.device) + self.m - self.n
            right = self.n + self.m if self.causal else self.right
            for keys, shut in zip(self.global_keys, self._shut_globals, strict=True):
                for chunk in self._near_globals(keys):
                    rows = places[self._rows(chunk)].view(chunk.count, self.block, 1)
                    shut[chunk.number] = shut_columns(keys, rows, self.left, right).to(self.scratch.dtype) * SHUT

    def _take_tables(self, heads: int, extras: Extras, learning: bool) -> None:
        """The tables by offset, the bias of global columns, and room for gradients; none where nobody asks for them."""

        def table(values: Tensor | None, *, learning: bool = learning, falling: bool = False) -> OffsetTable | None:
            if values is None:
                return None
            dtype = self.scratch.dtype
            return OffsetTable(values, self.block, self.span, dtype, learning=learning, falling=falling)

        self.query_table, self.value_table = table(extras.query_table), table(extras.value_table)
        self.key_table = table(extras.key_table, falling=True)  # seen from a key, rows come by falling offset
        bias = table(None if extras.bias is None else extras.bias[..., None], learning=False)
        self.bias = None if bias is None else bias.values[..., 0]
        self._terms_of_head = -1
        self.global_bias = None
        if extras.global_bias is not None:
            self.global_bias = GlobalBias(
                extras.global_bias, self.rows, self.block, self.scratch.dtype, learning=learning
            )
        self.d_bias_tiles = self._zeros(heads, self.block, self.span) if learning and self.bias is not None else None

    def load(self, sample: int, source: Tensor, name: str) -> Slots:
        slots = self.strip.load(source, name, self._globals_of(sample), copied=self.unreadable)
        if self.unreadable:
            slots.parts[INSIDE].masked_fill_(self.closed[sample] < 0, 0.0)
        return slots

    def gradient_room(self, target: Tensor, name: str) -> Slots:
        return self.strip.room(target, name)

    def unload(self, sample: int, slots: Slots, target: Tensor) -> None:
        self.strip.unload(slots, target, self._globals_of(sample))

    def shared(self, slots: Slots) -> Tensor:
        return slots.parts[LEFT][: self.globals]

    def chunks(self, sample: int, head: int) -> list[Chunk]:
        return self._chunks[self._reach[head % len(self._reach)]]

    def queries(self, chunk: Chunk, rows: Tensor, name: str) -> Tensor:
        return rows[self._rows(chunk)].view(chunk.count, self.block, -1)

    def keys(self, chunk: Chunk, slots: Slots, name: str) -> Tensor:
        return self._windows(slots, chunk)

    def room(self, chunk: Chunk, rows: Tensor, name: str) -> Tensor:
        return self.queries(chunk, rows, name)

    def put(self, chunk: Chunk, tile: Tensor, rows: Tensor) -> None:
        """Nothing to do: the room is the place."""

    def spread(self, chunk: Chunk, weights: Tensor, rows: Tensor, slots: Slots, scale: float = 1.0) -> None:
        columns, step = weights.transpose(1, 2), -(-chunk.span // self.block)  # windows this far apart share no key
        gapless = chunk.span == step * self.block  # such windows lie end to end, so that the product itself can add
        tile = None
        if not gapless:
            tile = product(columns, rows, scale, self.scratch.take("spread", *columns.shape[:2], rows.shape[2]))
        for first in range(min(step, chunk.count)):
            count = -(-(chunk.count - first) // step)
            windows = self._windows(slots, chunk, first, count, step)
            if tile is None:
                windows.baddbmm_(columns[first::step], rows[first::step], alpha=scale)
            else:
                windows.add_(tile[first::step])

    def put_in(self, tile: Tensor, columns: Tensor) -> None:
        tile.flatten(1).index_copy_(1, self._free, columns.flatten(1))

    def take_out(self, tile: Tensor) -> Tensor:
        columns = self._in_free_columns(tile)
        tile.flatten(1).index_fill_(1, self._free, 0.0)
        return columns

    def query_terms(self, place: Place, queries: Tensor, scores: Tensor, scale: float) -> None:
        if self.query_table is not None:
            skewed = self._skewed(place.chunk)
            torch.mm(queries.flatten(0, 1), self.query_table.of(place).t(), out=skewed.flatten(0, 1))
            scores.add_(by_column(skewed, place.chunk.span), alpha=scale)

    def query_terms_backward(
        self, place: Place, queries: Tensor, d_scores: Tensor, d_queries: Tensor, scale: float
    ) -> None:
        if self.query_table is None:
            return
        skewed = by_offset(d_scores, self._skewed(place.chunk)).flatten(0, 1)
        d_queries.flatten(0, 1).addmm_(skewed, self.query_table.of(place), alpha=scale)
        sums = self.query_table.sums_of(place)
        if sums is not None:
            sums.addmm_(skewed.t(), queries.flatten(0, 1), alpha=scale)

    def key_terms(self, place: Place, slots: Slots, scores: Tensor, scale: float) -> None:
        if self.key_table is not None:
            met = self._met(place.chunk)
            torch.mm(self._window_slots(slots, place.chunk), self.key_table.of(place).t(), out=met)
            scores.add_(by_tile(met, self.block, place.chunk.span), alpha=scale)

    def key_terms_backward(self, place: Place, slots: Slots, d_scores: Tensor, d_slots: Slots, scale: float) -> None:
        if self.key_table is None:
            return
        d_met = self._met(place.chunk).zero_()
        by_tile(d_met, self.block, place.chunk.span).copy_(d_scores)
        keys, d_keys = (self._window_slots(x, place.chunk) for x in (slots, d_slots))
        d_keys.addmm_(d_met, self.key_table.of(place), alpha=scale)
        sums = self.key_table.sums_of(place)
        if sums is not None:
            sums.addmm_(d_met.t(), keys, alpha=scale)

    def value_terms(self, place: Place, weights: Tensor, out: Tensor) -> None:
        if self.value_table is not None:
            skewed = by_offset(weights, self._skewed(place.chunk))
            out.flatten(0, 1).addmm_(skewed.flatten(0, 1), self.value_table.of(place))

    def value_terms_backward(self, place: Place, weights: Tensor, d_out: Tensor, d_weights: Tensor) -> None:
        if self.value_table is None:
            return
        skewed, sums = self._skewed(place.chunk), self.value_table.sums_of(place)
        if sums is not None:
            by_offset(weights, skewed)
            sums.addmm_(skewed.flatten(0, 1).t(), d_out.flatten(0, 1))
        torch.mm(d_out.flatten(0, 1), self.value_table.of(place).t(), out=skewed.flatten(0, 1))
        d_weights.add_(by_column(skewed, place.chunk.span))

    def terms(self, place: Place) -> Tensor:
        tile = self.scratch.take("terms", self.block, self.span)
        head = 0 if self.bias is None else place.head
        if head != self._terms_of_head:
            offsets = self._band() if self.bias is None else self.bias[head].clamp(min=SHUT) + self._band()
            tile.copy_(toeplitz(offsets, self.span))
            self._terms_of_head = head
        return tile[:, place.chunk.skip : place.chunk.skip + place.chunk.span]

    def restrict(self, place: Place, scores: Tensor) -> bool:
        sample, chunk = place.sample, place.chunk
        if self._has_closed[sample][chunk]:
            scores.add_(self.keys(chunk, Slots.whole(self.closed[sample]), "closed").transpose(1, 2))
        if self.documents is not None:
            rows, slots = (x[sample] for x in self.documents)
            rows, slots = self.queries(chunk, rows, "row_documents"), self._windows(Slots.whole(slots), chunk)
            shut_documents(scores, rows, slots, self.scratch)
        return self.may_die

    def restrict_globals(self, place: Place, columns: Tensor) -> None:
        sample, chunk = place.sample, place.chunk
        if self._closed_globals[sample]:
            columns.add_(self.closed[sample, : self.globals, 0])
        if self.documents is not None:
            rows, slots = (x[sample] for x in self.documents)
            rows = self.queries(chunk, rows, "row_documents")
            shut_documents(columns, rows, slots[None, : self.globals], self.scratch)
        shut = self._shut_globals[sample].get(chunk.number)
        if shut is not None:
            columns.add_(shut)
        if self.global_bias is not None:
            columns.add_(self.global_bias.of(place))

    def replaced(self, place: Place) -> Tensor | None:
        return self._replaced[place.sample].get(place.chunk) if self._replaced else None

    def terms_backward(self, place: Place, d_scores: Tensor) -> None:
        if self.d_bias_tiles is not None:
            skip, span = place.chunk.skip, place.chunk.span
            self.d_bias_tiles[place.head, :, skip : skip + span] += d_scores.sum(0)
        sums = None if self.global_bias is None else self.global_bias.sums_of(place)
        if sums is not None:
            sums.add_(self._in_free_columns(d_scores))

    def table_gradients(self) -> list[Tensor | None]:
        """Those of bias, query_table, value_table, key_table and global_bias, once every chunk is done."""
        d_bias = None
        if self.d_bias_tiles is not None:
            d_bias = torch.stack([diagonal_sums(tile) for tile in self.d_bias_tiles])[:, self._inside]
        tables = (self.query_table, self.value_table, self.key_table, self.global_bias)
        return [d_bias, *(None if each is None else each.gradient() for each in tables)]

    def _band(self) -> Tensor:
        offsets = self._zeros(self.block + self.span - 1) + SHUT
        offsets[self._inside] = 0.0
        return offsets

    def _free_columns(self, device: torch.device) -> Tensor:
        """[q*g]: where a tile [q s] has room for the columns of global keys.

        Row i meets the columns i to i + left + right of its tile, so that at least block - 1 are free, before them or behind.
        """
        rows, keys = torch.arange(self.block, device=device)[:, None], torch.arange(self.globals, device=device)
        columns = torch.where(keys < rows, keys, self.left + self.right + 1 + keys)
        return (rows * self.span + columns).flatten()

    def _in_free_columns(self, tile: Tensor) -> Tensor:
        """[C q g]."""
        return tile.flatten(1).index_select(1, self._free).view(*tile.shape[:2], -1)

    def _globals_of(self, sample: int) -> Tensor | None:
        return None if self.global_keys is None else self.global_keys[sample]

    def _closed_slots(self, batch: int, keep: Tensor | None) -> Tensor:
        """[b slots 1]: SHUT where a slot holds no key that may be read, else 0."""
        readable = self._zeros(batch, self.slots, 1)
        for sample in range(batch):
            source = readable.new_ones(self.m, 1) if keep is None else keep[sample, :, None].to(readable.dtype)
            self.strip.fill(readable[sample], source, self._globals_of(sample))
            if self.global_keys is not None:
                readable[sample, : self.globals].masked_fill_(self.global_keys[sample, :, None] < 0, 0.0)
        return (1.0 - readable) * SHUT

    def _document_slots(self, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Document numbers of the rows [b rows 1] and of the slots [b slots 1]."""
        numbers = document_numbers(documents)
        slots = self._zeros(documents.shape[0], self.slots, 1)
        for sample, row in enumerate(numbers):
            self.strip.fill(slots[sample], row[:, None].to(slots.dtype), self._globals_of(sample))
        return document_rows(numbers, self.n, self._zeros(documents.shape[0], self.rows, 1)), slots

    def _near_globals(self, keys: Tensor) -> list[Chunk]:
        """The chunks in which a row meets one of the global keys [g] in its window, or may not meet it when causal."""
        (chunks,) = self._chunks.values()  # with global keys all heads reach alike
        first = torch.tensor([x.start for x in chunks], device=keys.device) * self.block + self.m - self.n
        count = torch.tensor([x.count for x in chunks], device=keys.device) * self.block
        reach = self.m if self.causal else self.right
        near = (keys >= first[:, None] - self.left) & (keys < (first + count)[:, None] + reach)
        return [chunk for chunk, is_near in zip(chunks, near.any(1).tolist(), strict=True) if is_near]

    def _chunks_with(self, rows: Tensor | None) -> list[dict[Chunk, Tensor]]:
        """For each sample the chunks that hold some of its rows [g] (-1: none), and which they are."""
        found: list[dict[Chunk, Tensor]] = []
        every = {chunk for chunks in self._chunks.values() for chunk in chunks}
        for index in () if rows is None else rows:
            index = index[index >= 0]
            here = torch.zeros(self.rows, 1, dtype=torch.bool, device=index.device).index_fill_(0, index, True)
            blocks = set((index // self.block).tolist())
            near = [x for x in every if any(x.start <= block < x.start + x.count for block in blocks)]
            found.append({chunk: self.queries(chunk, here, "replaced") for chunk in near})
        return found

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.scratch.dtype, device=self.scratch.device)

    def _skewed(self, chunk: Chunk) -> Tensor:
        return self.scratch.take("skewed", chunk.count, self.block, self.block + chunk.span - 1)

    def _window_slots(self, slots: Slots, chunk: Chunk) -> Tensor:
        """A view of the slots that a chunk's windows hold, each once."""
        return slots.run(chunk.part, chunk.slot, (chunk.count - 1) * self.block + chunk.span)

    def _met(self, chunk: Chunk) -> Tensor:
        """Room for what each of these slots makes of each offset."""
        slots = (chunk.count - 1) * self.block + chunk.span
        return self.scratch.take("met", slots, self.block + chunk.span - 1)

    def _rows(self, chunk: Chunk) -> slice:
        return slice(chunk.start * self.block, (chunk.start + chunk.count) * self.block)

    def _windows(self, slots: Slots, chunk: Chunk, first: int = 0, count: int | None = None, step: int = 1) -> Tensor:
        """A view [count span d] of the windows of a chunk's blocks first, first + step, ..."""
        start, count = chunk.slot + first * self.block, chunk.count if count is None else count
        return slots.windows(chunk.part, start, count, chunk.span, step * self.block)
