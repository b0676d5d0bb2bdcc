"""From token ids to vectors, with the position encodings that are added there."""

from collections.abc import Iterable
from typing import cast

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.position.base import Position
from anyformer.side import Side


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

    def forward(self, tokens: Int[Tensor, "b n"], queries: Side) -> Float[Tensor, "b n c"]:
        """The vectors of the tokens, `queries` saying where they are.

        Raises:
            SpecError: a position that an encoding does not have.
        """
        x = self.tokens(tokens)
        for encoding in cast(Iterable[Position], self.encodings):
            encoding.admit(queries.positions)
            x = encoding.embed(x, queries.positions, tokens)
        return F.dropout(x, self.dropout, self.training)
