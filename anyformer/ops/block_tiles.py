"""The layout of arbitrary lists of key blocks: each block of rows against the key blocks gathered for it."""

import numpy as np
import torch
from torch import Tensor

from anyformer.ops.block_cut import MOST_KNOWN, Chunk, Lists, shared_chunks
from anyformer.ops.skew import by_offset
from anyformer.ops.tile import (
    DEAD,
    SHUT,
    Layout,
    Place,
    Scratch,
    document_numbers,
    document_rows,
    fits,
    product,
    shut_documents,
    tiles_at_once,
    working_dtype,
)


class BlockTiles(Layout):
    """Row block t holds the rows from t * block on, key block t those slots; one more key block is closed."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        lists: Lists,
        keep: Tensor | None,
        documents: Tensor | None,
        bias: Tensor | None,
        threads: int,
        learning: bool = False,
    ):
        batch, self.heads, self.n = q.shape[:3]
        self.globals = 0
        self.m, self.block = k.shape[2], lists.block
        self.row_blocks, self.key_blocks = -(-self.n // self.block), -(-self.m // self.block)
        self.rows, closed = self.row_blocks * self.block, (self.key_blocks + 1) * self.block
        # a block of gathered keys takes about as much of the cache as its scores
        self.at_once = tiles_at_once(2 * self.block**2, threads)
        self.scratch = Scratch(working_dtype(q), q.device)
        self.unreadable = keep is not None
        readable = self._zeros(batch, closed, 1)
        readable[:, : self.m, 0] = 1.0 if keep is None else keep.to(readable.dtype)
        self.closed = (1.0 - readable) * SHUT
        self.documents = None
        if documents is not None:
            numbers, slots = document_numbers(documents), self._zeros(batch, closed, 1)
            slots[:, : self.m, 0] = numbers.to(slots.dtype)
            self.documents = document_rows(numbers, self.n, self._zeros(batch, self.rows, 1)), slots
        self.masks = None if lists.masks is None else (1.0 - lists.masks.to(self.scratch.dtype)) * SHUT
        self.bias = bias
        self.shut_offsets = bias is not None and bool((bias <= DEAD).any())
        self.d_bias = self._zeros(self.heads, self._padded_offsets()) if learning and bias is not None else None
        self._bias_head = self._d_bias_head = -1
        self._offsets, self._keys = lists.offsets.cpu().numpy(), lists.keys.cpu().numpy()
        self._partial = None if lists.partial is None else lists.partial.cpu().numpy()
        # a list without keys reads the closed block
        spare = bool((np.diff(self._offsets) == 0).any())
        self.slots = (self.key_blocks + spare) * self.block
        self._chunks = self._known_chunks()

    def load(self, sample: int, source: Tensor, name: str) -> Tensor:
        if not self.unreadable and fits(source, self.slots, self.scratch):
            return source
        slots = self.scratch.take(name, self.slots, source.shape[-1])
        slots[: self.m] = source
        slots[self.m :].zero_()
        return slots.masked_fill_(self.closed[sample, : self.slots] < 0, 0.0) if self.unreadable else slots

    def gradient_room(self, target: Tensor, name: str) -> Tensor:
        in_place = fits(target, self.slots, self.scratch)
        return (target if in_place else self.scratch.take(name, self.slots, target.shape[1])).zero_()

    def unload(self, sample: int, slots: Tensor, target: Tensor) -> None:
        if slots is not target:
            target.copy_(slots[: self.m])

    def shared(self, slots: Tensor) -> Tensor:
        """None in this layout."""
        return slots[:0]

    def chunks(self, sample: int, head: int) -> list[Chunk]:
        count = len(self._offsets)
        index = 0 if count == 1 else head if count == self.heads else sample * self.heads + head
        if index not in self._chunks:
            self._chunks[index] = self._cut(self._offsets[index])
        return self._chunks[index]

    def queries(self, chunk: Chunk, rows: Tensor, name: str) -> Tensor:
        if chunk.first >= 0:
            return self._in_place(chunk, rows)
        return self._gather(rows, chunk.blocks, name).view(chunk.blocks.shape[0], self.block, -1)

    def keys(self, chunk: Chunk, slots: Tensor, name: str) -> Tensor:
        if chunk.run >= 0:
            return slots[self._run(chunk)][None]
        return self._gather(slots, chunk.read.flatten(), name).view(chunk.keys.shape[0], -1, slots.shape[-1])

    def room(self, chunk: Chunk, rows: Tensor, name: str) -> Tensor:
        if chunk.first >= 0:
            return self._in_place(chunk, rows)
        return self.scratch.take(name, chunk.blocks.shape[0], self.block, rows.shape[-1])

    def put(self, chunk: Chunk, tile: Tensor, rows: Tensor) -> None:
        if chunk.first < 0:
            rows.view(self.row_blocks, -1).index_copy_(0, chunk.blocks, tile.flatten(1))

    def spread(self, chunk: Chunk, weights: Tensor, rows: Tensor, slots: Tensor, scale: float = 1.0) -> None:
        columns = weights.transpose(1, 2)
        if chunk.run >= 0:
            slots[self._run(chunk)].addmm_(columns[0], rows[0], alpha=scale)
        else:
            room = self.scratch.take("spread", *columns.shape[:2], rows.shape[2])
            blocks = slots.view(-1, self.block * slots.shape[1])
            tile = product(columns, rows, scale, room)
            blocks.index_add_(0, chunk.read.flatten(), tile.view(-1, blocks.shape[1]))

    def put_in(self, tile: Tensor, columns: Tensor) -> None:
        """None in this layout."""

    def take_out(self, tile: Tensor) -> Tensor:
        """None in this layout."""
        return tile[..., :0]

    def restrict_globals(self, place: Place, columns: Tensor) -> None:
        """None in this layout."""

    def replaced(self, place: Place) -> None:
        """None in this layout."""

    def query_terms(self, place: Place, queries: Tensor, scores: Tensor, scale: float) -> None:
        """None in this layout."""

    def query_terms_backward(
        self, place: Place, queries: Tensor, d_scores: Tensor, d_queries: Tensor, scale: float
    ) -> None:
        """None in this layout."""

    def key_terms(self, place: Place, slots: Tensor, scores: Tensor, scale: float) -> None:
        """None in this layout."""

    def key_terms_backward(self, place: Place, slots: Tensor, d_scores: Tensor, d_slots: Tensor, scale: float) -> None:
        """None in this layout."""

    def value_terms(self, place: Place, weights: Tensor, out: Tensor) -> None:
        """None in this layout."""

    def value_terms_backward(self, place: Place, weights: Tensor, d_out: Tensor, d_weights: Tensor) -> None:
        """None in this layout."""

    def terms(self, place: Place) -> None:
        """None: which blocks meet differs from chunk to chunk, so `restrict` adds everything."""

    def restrict(self, place: Place, scores: Tensor) -> bool:
        sample, chunk = place.sample, place.chunk
        self._add_block_terms(place, scores)
        if self.documents is not None:
            rows, slots = (x[sample] for x in self.documents)
            rows, slots = self.queries(chunk, rows, "row_documents"), self.keys(chunk, slots, "slot_documents")
            shut_documents(scores, rows, slots, self.scratch)
        any_closed = self.unreadable or chunk.short
        if any_closed:
            scores.add_(self.closed[sample].view(-1, self.block)[chunk.keys].view(scores.shape[0], 1, -1))
        return any_closed or self.documents is not None or self.shut_offsets or len(chunk.entries) > 0

    def _add_block_terms(self, place: Place, scores: Tensor) -> None:
        """The masks and the bias of each pair of blocks."""
        chunk = place.chunk
        count, width = chunk.keys.shape
        tiles = self.scratch.take("block_terms", count * width, self.block, self.block)
        if self.bias is not None:
            torch.index_select(self._bias_tiles(self.bias, place.head), 0, self._distances(chunk), out=tiles)
        elif len(chunk.entries):
            tiles.zero_()
        else:
            return
        if self.masks is not None:
            tiles.index_add_(0, chunk.entries, self.masks[chunk.masks])
        self._by_block(scores, width).add_(tiles.view(count, width, self.block, self.block))

    def terms_backward(self, place: Place, d_scores: Tensor) -> None:
        if self.d_bias is not None:
            if place.head != self._d_bias_head:
                self._flush()
                self._d_bias_tiles = self._take_tiles("d_bias_tiles").zero_()
                self._d_bias_head = place.head
            count, width = place.chunk.keys.shape
            tiles = self.scratch.take("block_terms", count, width, self.block, self.block)
            tiles.copy_(self._by_block(d_scores, width))
            self._d_bias_tiles.index_add_(0, self._distances(place.chunk), tiles.flatten(0, 1))

    def bias_gradient(self) -> Tensor | None:
        """[h n+m-1], once every chunk is done."""
        if self.d_bias is None:
            return None
        self._flush()
        return self.d_bias[:, self.rows - self.n :][:, : self.n + self.m - 1]

    def _known_chunks(self) -> dict[int, list[Chunk]]:
        """The chunks of the same lists in earlier calls, by list, to be filled up; as the backward finds those of the forward."""
        if len(self._keys) > MOST_KNOWN:
            return {}
        partial = None if self._partial is None else self._partial.tobytes()
        lists = (self._offsets.shape, self._offsets.tobytes(), self._keys.tobytes(), partial)
        return shared_chunks(*lists, self.m, self.block, self.at_once, self.scratch.device)

    def _cut(self, offsets: np.ndarray) -> list[Chunk]:
        """Longest lists first, so that the lists of a chunk are of one length or nearly."""
        counts = np.diff(offsets)
        order = np.argsort(-counts, kind="stable")
        lengths, chunks, start = counts[order], [], 0
        while start < len(order):
            width = max(int(lengths[start]), 1)
            alike = int(np.searchsorted(-lengths, -0.8 * width, side="left"))
            stop = max(min(start + self.at_once // width, alike), start + 1)
            chunks.append(self._chunk(order[start:stop], offsets, width))
            start = stop
        return chunks

    def _chunk(self, blocks: np.ndarray, offsets: np.ndarray, width: int) -> Chunk:
        entries = offsets[blocks, None] + np.arange(width)
        listed = entries < offsets[blocks + 1, None]
        entries[~listed] = 0
        keys, masks = np.full(entries.shape, self.key_blocks), np.full(entries.shape, -1)
        read = keys
        if len(self._keys):
            keys = np.where(listed, self._keys[entries], keys)
            read = np.where(keys == self.key_blocks, keys[:, :1], keys)
            masks = masks if self._partial is None else np.where(listed, self._partial[entries], masks)
        short = self.key_blocks - 1 if self.m % self.block else self.key_blocks
        masked = np.flatnonzero(masks >= 0)
        in_order = bool((np.diff(blocks) == 1).all())
        run = len(blocks) == 1 and bool((np.diff(keys[0]) == 1).all())
        return Chunk(
            blocks=self._index(blocks),
            keys=self._index(keys),
            entries=self._index(masked),
            masks=self._index(masks.flat[masked]),
            read=self._index(read),
            short=bool((keys >= short).any()),
            run=int(keys[0, 0]) if run else -1,
            first=int(blocks[0]) if in_order else -1,
        )

    def _in_place(self, chunk: Chunk, rows: Tensor) -> Tensor:
        """A view [C q d] of the rows of a chunk."""
        start, count = chunk.first * self.block, chunk.blocks.shape[0]
        return rows[start : start + count * self.block].view(count, self.block, -1)

    def _index(self, numbers: np.ndarray) -> Tensor:
        with torch.inference_mode(False):  # what is kept must serve training too
            return torch.from_numpy(numbers.astype(np.int64)).to(self.scratch.device)

    def _run(self, chunk: Chunk) -> slice:
        return slice(chunk.run * self.block, (chunk.run + chunk.keys.shape[1]) * self.block)

    def _gather(self, x: Tensor, blocks: Tensor, name: str) -> Tensor:
        blocked = x.view(-1, self.block * x.shape[-1])
        return torch.index_select(blocked, 0, blocks, out=self.scratch.take(name, blocks.shape[0], blocked.shape[1]))

    def _by_block(self, scores: Tensor, width: int) -> Tensor:
        """[C q W*q] as a view [C W q q]."""
        return scores.view(-1, self.block, width, self.block).transpose(1, 2)

    def _distances(self, chunk: Chunk) -> Tensor:
        """[C*W]: key block minus row block, counted from the smallest there is."""
        return (chunk.keys - chunk.blocks[:, None] + (self.row_blocks - 1)).flatten()

    def _padded_offsets(self) -> int:
        return (self.row_blocks + self.key_blocks + 1) * self.block - 1

    def _take_tiles(self, name: str) -> Tensor:
        return self.scratch.take(name, self.row_blocks + self.key_blocks, self.block, self.block)

    def _bias_tiles(self, bias: Tensor, head: int) -> Tensor:
        """[distances q q]: the bias of one head in blocks, made once for each head."""
        tiles = self._take_tiles("bias_tiles")
        if head != self._bias_head:
            padded, before = self._zeros(self._padded_offsets()), self.rows - self.n
            padded[before : before + bias.shape[1]] = bias[head].clamp(min=SHUT)
            tiles.copy_(padded.as_strided(tiles.shape, (self.block, 1, 1)).flip(1))
            self._bias_head = head
        return tiles

    def _flush(self) -> None:
        """Add what one head's bias tiles have gathered to its offsets."""
        if self.d_bias is None or self._d_bias_head < 0:
            return
        tiles, block = self._d_bias_tiles, self.block
        sums = by_offset(tiles, self.scratch.take("skewed", tiles.shape[0], block, 2 * block - 1)).sum(1)
        target = self.d_bias[self._d_bias_head]
        target[: tiles.shape[0] * block].view(-1, block).add_(sums[:, :block])
        later = target.as_strided((tiles.shape[0], block - 1), (block, 1), target.storage_offset() + block)
        later.add_(sums[:, block:])
        self._d_bias_head = -1

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.scratch.dtype, device=self.scratch.device)
