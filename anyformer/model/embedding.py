"""From token ids to vectors, with the position encodings that are added there."""

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import LayerCache
from anyformer.errors import IncompatibleError
from anyformer.mixer.base import blank, put_back
from anyformer.position.base import Position
from anyformer.side import Side, left_order, take


class Embedding(nn.Module):
    """Looks tokens up and adds positions: encoding(table[token]).

    The table starts with a standard deviation of 1 / sqrt(c): token vectors of length about 1, as encodings expect them.

    Args:
        vocab: number of token ids.
        dim: width of the model.
        encodings: those that offer EMBED, applied in turn.
        dropout: probability of dropping a channel in training.
    """

    def __init__(self, vocab: int, dim: int, encodings: Iterable[Position], dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.encodings = nn.ModuleList(encodings)
        self.dropout = dropout

    def forward(
        self, tokens: Int[Tensor, "b n"], queries: Side, cache: LayerCache | None = None
    ) -> Float[Tensor, "b n c"]:
        """The vectors of the tokens, `queries` saying where they are.

        Args:
            cache: where encodings that read neighbours keep what they know of earlier tokens.

        Raises:
            SpecError: a position that an encoding does not have.
            IncompatibleError: documents beside an encoding that reads neighbours.
        """
        x = placed(self.tokens(tokens), cast(Iterable[Position], self.encodings), queries, tokens, cache)
        return F.dropout(x, self.dropout, self.training)


def placed(
    x: Float[Tensor, "b n c"],
    encodings: Iterable[Position],
    queries: Side,
    tokens: Int[Tensor, "b n"] | None = None,
    cache: LayerCache | None = None,
) -> Float[Tensor, "b n c"]:
    """The vectors with each encoding in them, in turn; those of tokens without a position as they were."""
    for index, encoding in enumerate(encodings):
        encoding.admit(queries.positions)
        if encoding.reads_neighbours:
            with_position = _read(encoding, x, queries, cache, f"embedding {index} ")
        else:
            with_position = encoding.embed(x, queries.positions, tokens)
        x = with_position if queries.without is None else torch.where(queries.without[:, :, None], x, with_position)
    return x


def _read(
    encoding: Position, x: Float[Tensor, "b n c"], queries: Side, cache: LayerCache | None, key: str
) -> Float[Tensor, "b n c"]:
    """`encoding.read` with real tokens moved to the left, and its state under names of its own in the cache."""
    if queries.documents is not None:
        raise IncompatibleError(
            f"{encoding.name} reads neighbours and cannot keep documents of one row apart; give each document a row of its own"
        )
    order = None
    if queries.keep is not None:
        order = left_order(queries.keep)
        x, queries = take(blank(x, queries.keep), order), queries.take(order)
    held = {} if cache is None else cache.state
    state = {name.removeprefix(key): part for name, part in held.items() if name.startswith(key)}
    x = encoding.read(x, queries, None if cache is None else state)
    if cache is not None:
        cache.state |= {key + name: part for name, part in state.items()}
    return x if order is None else put_back(x, order)
