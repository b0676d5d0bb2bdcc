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
    shut_documents,
    tiles_at_once,
    working_dtype,
)
from anyformer.ops.window_cut import Chunk, Extras, block_rows, shut_columns


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
        self.span = -(-(self.globals + self.block + left + right) // 16) * 16 - self.globals
        self.rows = blocks * self.block
        self.slots = self.globals + (blocks - 1) * self.block + self.span
        self.scratch = Scratch(working_dtype(q), q.device)

        self.shift = self.globals + left + self.n - self.m  # window key j lies in slot j + shift
        self.first = max(0, self.globals - self.shift)
        self.last = max(self.first, min(self.m, self.slots - self.shift))
        widest = max(left, right)
        self._reach = [widest if reach is None else min(each, widest) for each in reach or [widest]]
        self._chunks = {each: self._cut(each, blocks, threads) for each in set(self._reach)}
        self._close(q.shape[0], extras)
        self._take_tables(extras)
        self._make_room(q.shape[1], learning)

    def _close(self, batch: int, extras: Extras) -> None:
        """What keeps pairs apart: keys that may not be read, documents, global keys that a row meets in its window."""
        self.closed = self._closed_slots(batch, extras.keep)
        every = {chunk for chunks in self._chunks.values() for chunk in chunks}
        self._has_closed = [{x: bool(self.keys(x, row, "closed").any()) for x in every} for row in self.closed]
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
                    shut[chunk.number] = (
                        shut_columns(
                            keys, places[self._rows(chunk)].view(chunk.count, self.block, 1), self.left, right
                        ).to(self.scratch.dtype)
                        * SHUT
                    )

    def _take_tables(self, extras: Extras) -> None:
        """The tables by offset, and the bias of global columns."""
        width = self.block + self.span - 1
        self.bias = None if extras.bias is None else self._by_offset(extras.bias[..., None], width)[..., 0]
        self.query_table = None if extras.query_table is None else self._by_offset(extras.query_table, width)
        self.value_table = None if extras.value_table is None else self._by_offset(extras.value_table, width)
        # seen from a key, rows come in the order of falling offsets
        self.key_table = None if extras.key_table is None else self._by_offset(extras.key_table, width).flip(1)
        self.global_bias = None if extras.global_bias is None else self._global_bias_rows(extras.global_bias)
        self._terms_of_head = -1

    def _make_room(self, heads: int, learning: bool) -> None:
        """Room for the gradients of the tables; none where nobody asks for them."""

        def room(table: Tensor | None) -> Tensor | None:
            return torch.zeros_like(table) if learning and table is not None else None

        self.d_query_table, self.d_value_table = room(self.query_table), room(self.value_table)
        self.d_key_table, self.d_global_bias = room(self.key_table), room(self.global_bias)
        self.d_bias_tiles = self._zeros(heads, self.block, self.span) if learning and self.bias is not None else None

    def load(self, sample: int, source: Tensor, name: str) -> Tensor:
        slots = self._fill(self.scratch.take(name, self.slots, source.shape[-1]), sample, source)
        return slots.masked_fill_(self.closed[sample] < 0, 0.0) if self.unreadable else slots

    def unload(self, sample: int, slots: Tensor, target: Tensor) -> None:
        total = target if self.global_keys is None else self.scratch.take("unload", *target.shape)
        total[: self.first].zero_()
        total[self.first : self.last] = slots[self.first + self.shift : self.last + self.shift]
        total[self.last :].zero_()
        if self.global_keys is not None:
            target.copy_(total.index_add_(0, self.global_keys[sample].clamp(min=0), slots[: self.globals]))

    def chunks(self, sample: int, head: int) -> list[Chunk]:
        return self._chunks[self._reach[head % len(self._reach)]]

    def queries(self, chunk: Chunk, rows: Tensor, name: str) -> Tensor:
        return rows[self._rows(chunk)].view(chunk.count, self.block, -1)

    def keys(self, chunk: Chunk, slots: Tensor, name: str) -> Tensor:
        if not self.globals:
            return self._windows(slots, chunk, chunk.start, chunk.count)
        tile = self.scratch.take(name, chunk.count, self.globals + chunk.span, slots.shape[-1])
        tile[:, : self.globals] = slots[: self.globals]
        tile[:, self.globals :] = self._windows(slots, chunk, chunk.start, chunk.count)
        return tile

    def room(self, chunk: Chunk, rows: Tensor, name: str) -> Tensor:
        return self.queries(chunk, rows, name)

    def put(self, chunk: Chunk, tile: Tensor, rows: Tensor) -> None:
        """Nothing to do: the room is the place."""

    def spread(self, chunk: Chunk, tile: Tensor, slots: Tensor) -> None:
        if self.globals:
            slots[: self.globals] += tile[:, : self.globals].sum(0)
        step = -(-chunk.span // self.block)  # windows this far apart share no key
        for first in range(min(step, chunk.count)):
            part = tile[first::step, self.globals :]
            self._windows(slots, chunk, chunk.start + first, part.shape[0], step).add_(part)

    def query_terms(self, place: Place, queries: Tensor, scores: Tensor, scale: float) -> None:
        if self.query_table is not None:
            skewed = self._skewed(place.chunk)
            table = self._of_chunk(self.query_table, place)
            torch.mm(queries.flatten(0, 1), table.t(), out=skewed.flatten(0, 1))
            scores[..., self.globals :].add_(by_column(skewed, place.chunk.span), alpha=scale)

    def query_terms_backward(
        self, place: Place, queries: Tensor, d_scores: Tensor, d_queries: Tensor, scale: float
    ) -> None:
        if self.query_table is None:
            return
        skewed = by_offset(d_scores[..., self.globals :], self._skewed(place.chunk)).flatten(0, 1)
        d_queries.flatten(0, 1).addmm_(skewed, self._of_chunk(self.query_table, place), alpha=scale)
        if self.d_query_table is not None:
            self._of_chunk(self.d_query_table, place).addmm_(skewed.t(), queries.flatten(0, 1), alpha=scale)

    def key_terms(self, place: Place, slots: Tensor, scores: Tensor, scale: float) -> None:
        if self.key_table is not None:
            met = self._met(place.chunk)
            torch.mm(self._window_slots(slots, place.chunk), self._key_table(self.key_table, place).t(), out=met)
            scores[..., self.globals :].add_(by_tile(met, self.block, place.chunk.span), alpha=scale)

    def key_terms_backward(self, place: Place, slots: Tensor, d_scores: Tensor, d_slots: Tensor, scale: float) -> None:
        if self.key_table is None:
            return
        d_met = self._met(place.chunk).zero_()
        by_tile(d_met, self.block, place.chunk.span).copy_(d_scores[..., self.globals :])
        keys, d_keys = (self._window_slots(x, place.chunk) for x in (slots, d_slots))
        d_keys.addmm_(d_met, self._key_table(self.key_table, place), alpha=scale)
        if self.d_key_table is not None:
            self._key_table(self.d_key_table, place).addmm_(d_met.t(), keys, alpha=scale)

    def value_terms(self, place: Place, weights: Tensor, out: Tensor) -> None:
        if self.value_table is not None:
            skewed = by_offset(weights[..., self.globals :], self._skewed(place.chunk))
            out.flatten(0, 1).addmm_(skewed.flatten(0, 1), self._of_chunk(self.value_table, place))

    def value_terms_backward(self, place: Place, weights: Tensor, d_out: Tensor, d_weights: Tensor) -> None:
        if self.value_table is None:
            return
        skewed = self._skewed(place.chunk)
        if self.d_value_table is not None:
            by_offset(weights[..., self.globals :], skewed)
            self._of_chunk(self.d_value_table, place).addmm_(skewed.flatten(0, 1).t(), d_out.flatten(0, 1))
        torch.mm(d_out.flatten(0, 1), self._of_chunk(self.value_table, place).t(), out=skewed.flatten(0, 1))
        d_weights[..., self.globals :].add_(by_column(skewed, place.chunk.span))

    def terms(self, place: Place) -> Tensor:
        tile = self.scratch.take("terms", self.block, self.globals + self.span)
        head = 0 if self.bias is None else place.head
        if head != self._terms_of_head:
            offsets = self._band() if self.bias is None else self.bias[head].clamp(min=SHUT) + self._band()
            tile[:, : self.globals] = 0.0
            tile[:, self.globals :] = toeplitz(offsets, self.span)
            self._terms_of_head = head
        if self.globals:
            return tile
        return tile[:, place.chunk.skip : place.chunk.skip + place.chunk.span]

    def restrict(self, place: Place, scores: Tensor) -> bool:
        sample, chunk = place.sample, place.chunk
        if self._has_closed[sample][chunk]:
            scores.add_(self.keys(chunk, self.closed[sample], "closed").transpose(1, 2))
        if self.documents is not None:
            rows, slots = (x[sample] for x in self.documents)
            rows, slots = self.queries(chunk, rows, "row_documents"), self.keys(chunk, slots, "slot_documents")
            shut_documents(scores, rows, slots, self.scratch)
        shut = self._shut_globals[sample].get(chunk.number)
        if shut is not None:
            scores[..., : self.globals].add_(shut)
        if self.global_bias is not None:
            scores[..., : self.globals] += self._global_terms(self.global_bias, place)
        return self.may_die

    def terms_backward(self, place: Place, d_scores: Tensor) -> None:
        if self.d_bias_tiles is not None:
            skip, span = place.chunk.skip, place.chunk.span
            self.d_bias_tiles[place.head, :, skip : skip + span] += d_scores[..., self.globals :].sum(0)
        if self.d_global_bias is not None:
            self._global_terms(self.d_global_bias, place).add_(d_scores[..., : self.globals])

    def table_gradients(self) -> list[Tensor | None]:
        """Those of bias, query_table, value_table, key_table and global_bias, once every chunk is done."""
        d_bias = None
        if self.d_bias_tiles is not None:
            d_bias = self.offsets_of(torch.stack([diagonal_sums(tile) for tile in self.d_bias_tiles]))
        d_query_table = None if self.d_query_table is None else self.offsets_of(self.d_query_table)
        d_value_table = None if self.d_value_table is None else self.offsets_of(self.d_value_table)
        d_global_bias = None if self.d_global_bias is None else self.d_global_bias[:, :, : self.n]
        d_key_table = None if self.d_key_table is None else self.offsets_of(self.d_key_table.flip(1))
        return [d_bias, d_query_table, d_value_table, d_key_table, d_global_bias]

    def offsets_of(self, table: Tensor) -> Tensor:
        """The offsets -left to right among those of a padded table [h w ...]."""
        return table[:, self.block - 1 : self.block + self.left + self.right]

    def _by_offset(self, table: Tensor, width: int) -> Tensor:
        """A table by offset [h left+right+1 d] -> [h w d], 0 at the offsets that a tile holds beyond the window."""
        padded = self._zeros(table.shape[0], width, table.shape[2])
        self.offsets_of(padded).copy_(table)
        return padded

    def _band(self) -> Tensor:
        offsets = self._zeros(1, self.block + self.span - 1) + SHUT
        self.offsets_of(offsets).zero_()
        return offsets[0]

    def _fill(self, slots: Tensor, sample: int, source: Tensor) -> Tensor:
        slots[: self.first + self.shift].zero_()
        slots[self.first + self.shift : self.last + self.shift] = source[self.first : self.last]
        slots[self.last + self.shift :].zero_()
        if self.global_keys is not None:
            slots[: self.globals] = source[self.global_keys[sample].clamp(min=0)]
        return slots

    def _closed_slots(self, batch: int, keep: Tensor | None) -> Tensor:
        """[b slots 1]: SHUT where a slot holds no key that may be read, else 0."""
        readable = self._zeros(batch, self.slots, 1)
        for sample in range(batch):
            source = readable.new_ones(self.m, 1) if keep is None else keep[sample, :, None].to(readable.dtype)
            self._fill(readable[sample], sample, source)
            if self.global_keys is not None:
                readable[sample, : self.globals].masked_fill_(self.global_keys[sample, :, None] < 0, 0.0)
        return (1.0 - readable) * SHUT

    def _document_slots(self, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Document numbers of the rows [b rows 1] and of the slots [b slots 1]."""
        numbers = document_numbers(documents)
        slots = self._zeros(documents.shape[0], self.slots, 1)
        for sample, row in enumerate(numbers):
            self._fill(slots[sample], sample, row[:, None].to(slots.dtype))
        return document_rows(numbers, self.n, self._zeros(documents.shape[0], self.rows, 1)), slots

    def _global_bias_rows(self, bias: Tensor) -> Tensor:
        """[b|1 h n g] -> [b|1 h rows g], finite."""
        rows = self._zeros(*bias.shape[:2], self.rows, self.globals)
        rows[:, :, : self.n] = bias.clamp(min=SHUT)
        return rows

    def _global_terms(self, bias: Tensor, place: Place) -> Tensor:
        """A view [C q g] of the rows of one chunk."""
        sample = place.sample if bias.shape[0] > 1 else 0
        return self.queries(place.chunk, bias[sample, place.head], "global_bias")

    def _near_globals(self, keys: Tensor) -> list[Chunk]:
        """The chunks in which a row meets one of the global keys [g] in its window, or may not meet it when causal."""
        (chunks,) = self._chunks.values()  # with global keys all heads reach alike
        first = torch.tensor([x.start for x in chunks], device=keys.device) * self.block + self.m - self.n
        count = torch.tensor([x.count for x in chunks], device=keys.device) * self.block
        reach = self.m if self.causal else self.right
        near = (keys >= first[:, None] - self.left) & (keys < (first + count)[:, None] + reach)
        return [chunk for chunk, is_near in zip(chunks, near.any(1).tolist(), strict=True) if is_near]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.scratch.dtype, device=self.scratch.device)

    def _skewed(self, chunk: Chunk) -> Tensor:
        return self.scratch.take("skewed", chunk.count, self.block, self.block + chunk.span - 1)

    def _of_chunk(self, table: Tensor, place: Place) -> Tensor:
        """A view of the rows that a chunk meets of a padded table by offset [h w d]."""
        return table[place.head, place.chunk.skip : place.chunk.skip + self.block + place.chunk.span - 1]

    def _key_table(self, table: Tensor, place: Place) -> Tensor:
        """`_of_chunk` of a table by falling offset."""
        stop = table.shape[1] - place.chunk.skip
        return table[place.head, stop - (self.block + place.chunk.span - 1) : stop]

    def _window_slots(self, slots: Tensor, chunk: Chunk) -> Tensor:
        """A view of the slots that a chunk's windows hold, each once."""
        start = self.globals + chunk.start * self.block + chunk.skip
        return slots[start : start + (chunk.count - 1) * self.block + chunk.span]

    def _met(self, chunk: Chunk) -> Tensor:
        """Room for what each of these slots makes of each offset."""
        slots = (chunk.count - 1) * self.block + chunk.span
        return self.scratch.take("met", slots, self.block + chunk.span - 1)

    def _cut(self, reach: int, blocks: int, threads: int) -> list[Chunk]:
        """The chunks of a head that needs the keys up to `reach` places away only."""
        if self.globals:  # their columns come before those of the window, so that a chunk cannot begin later
            reach = self.left + self.right
        left, right = max(self.left - reach, 0) // 16 * 16, max(self.right - reach, 0)
        at_once = tiles_at_once(self.block * (self.globals + self.span - left - right), threads)
        first, last = (x + self.shift - self.globals for x in (self.first, self.last))  # columns of block 0 with a key
        chunks = []
        for number, start in enumerate(range(0, blocks, at_once)):
            count = min(at_once, blocks - start)
            skip, stop = left, self.span - right
            if not self.globals:
                skip = max(skip, min(first - (start + count - 1) * self.block, self.span - 16) // 16 * 16)
                stop = max(min(stop, last - start * self.block), skip + 1)
            chunks.append(Chunk(number, start, count, skip, min(-(-(stop - skip) // 16) * 16, self.span - skip)))
        return chunks

    def _rows(self, chunk: Chunk) -> slice:
        return slice(chunk.start * self.block, (chunk.start + chunk.count) * self.block)

    def _windows(self, slots: Tensor, chunk: Chunk, start: int, count: int, step: int = 1) -> Tensor:
        """A view [count span d] of the chunk's columns of the windows of the blocks start, start + step, ..."""
        width = slots.shape[-1]
        first = slots.storage_offset() + (self.globals + start * self.block + chunk.skip) * width
        return slots.as_strided((count, chunk.span, width), (step * self.block * width, width, 1), first)
