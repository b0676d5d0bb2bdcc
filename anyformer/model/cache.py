"""What a whole model remembers between calls."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from anyformer.context import LayerCache


class Cache:
    """One LayerCache a block, and the facts of all tokens so far in the order they came.

    `Transformer.new_cache` makes an empty one; every forward extends it in place, or leaves it as it was where it raises.

    Args:
        tokens: the places, positions, padding and documents of the tokens so far, for the embedding, and what encodings
            that read neighbours keep of them; it holds no slots.
        layers: the caches of the blocks.
        registers: number of learned tokens before the first one, which blocks see and `length` does not count.
    """

    def __init__(self, tokens: LayerCache, layers: Sequence[LayerCache], registers: int = 0) -> None:
        self.tokens = tokens
        self.layers = list(layers)
        self.registers = registers

    def __repr__(self) -> str:
        return f"Cache(batch_size={self.batch_size}, length={self.length}, layers={len(self.layers)})"

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.tokens.batch_size

    @property
    def length(self) -> int:
        """Number of tokens so far, padding included: the attention_mask of the next call is `[b, length + n]`."""
        return self.tokens.seen

    @property
    def nbytes(self) -> int:
        """Bytes of the keys, values and states that are remembered."""
        tensors = [
            each
            for layer in (self.tokens, *self.layers)
            for part in (layer.slots, layer.state)
            for each in part.values()
        ]
        return sum(each.numel() * each.element_size() for each in tensors)

    def copy(self) -> "Cache":
        """An independent cache with the same content, to continue twice from one point."""
        return Cache(self.tokens.copy(), [layer.copy() for layer in self.layers], self.registers)

    def share(self) -> "Cache":
        """A second cache over the same tensors, at no cost: extending one leaves the other as it was."""
        return Cache(self.tokens.share(), [layer.share() for layer in self.layers], self.registers)

    def detach(self) -> "Cache":
        """The same content cut off from the graph, for training segment by segment."""
        return Cache(self.tokens.detach(), [layer.detach() for layer in self.layers], self.registers)

    def select(self, rows: Int[Tensor, " r"] | Sequence[int]) -> "Cache":
        """The given rows of the batch, in that order, repeats allowed (for beams).

        Raises:
            ValueError: a row that does not exist, or rows that are no list of whole numbers.
        """
        chosen = [int(row) for row in rows]
        if isinstance(rows, Tensor) and (rows.dtype == torch.bool or rows.is_floating_point()):
            raise ValueError(
                f"select: expected the numbers of rows, got a tensor of {rows.dtype}; use mask.nonzero()[:, 0]"
            )
        if not all(0 <= row < self.batch_size for row in chosen):
            raise ValueError(f"select: expected rows from 0 to {self.batch_size - 1}, got {chosen}")
        held = self.tokens.count if self.tokens.count is not None else torch.empty(0)
        index = torch.tensor(chosen, dtype=torch.int64, device=held.device)
        return Cache(self.tokens.select(index), [layer.select(index) for layer in self.layers], self.registers)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens only, to go back to an earlier point; all blocks go back or none does.

        Raises:
            ValueError: `length` is not between 0 and the tokens so far, or a block cannot go back: it keeps a running state, or
                has forgotten tokens out of its reach (copy the cache before the point of return instead).
        """
        earlier = self.share()
        earlier.tokens.crop(length)
        for layer in earlier.layers:
            layer.crop(length + self.registers if length else 0)  # an empty cache gets them with its first tokens
        self.adopt(earlier)

    def adopt(self, other: "Cache") -> None:
        """Take over the content of another cache."""
        self.tokens, self.layers[:] = other.tokens, other.layers
