"""Learned tokens before every row: external global tokens.

Paper: Ainslie et al. 2020, "ETC", 2004.08483; as registers of images Darcet et al. 2023, 2309.16588.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.errors import IncompatibleError
from anyformer.model.config import ModelConfig
from anyformer.model.head import Head
from anyformer.side import Side


class Registers(nn.Module):
    """Vectors that stand before the first token of each row, at places 0 to count - 1 and without a position.

    Args:
        count: number of them.
        dim: width of the model.
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.count = count
        self.vectors = nn.Parameter(torch.empty(count, dim))
        nn.init.normal_(self.vectors, std=dim**-0.5)

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b t c"]:
        """The registers, then the tokens."""
        return torch.cat([self.vectors.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)

    def facts(self, facts: dict[str, Any], queries: Side, *, first: bool) -> dict[str, Any]:
        """The arguments of blocks that are given registers too.

        Args:
            facts: the arguments for the tokens.  queries: where the new tokens are.
            first: whether this call brings the registers; later ones find them in the cache.

        Raises:
            IncompatibleError: documents in one row: a register would join them.
        """
        if facts["document_ids"] is not None:
            raise IncompatibleError(
                "registers are read by all tokens of a row, so documents in one row would meet in them; give each document a row "
                "of its own, or registers=0"
            )
        more, (b, n) = self.count if first else 0, facts["tokens"].shape
        positions = queries.positions.expand(b, *queries.positions.shape[1:])
        mask, without, flags = (facts[name] for name in ("attention_mask", "no_position", "global_mask"))
        without = queries.places.new_zeros((b, n), dtype=torch.bool) if without is None else without
        return facts | {
            "tokens": _before(facts["tokens"], more, -1),  # an id that no token has
            "attention_mask": None if mask is None else _before(mask, self.count, 1),
            "positions": _before(positions, more, 0),
            "no_position": _before(without, more, 1),
            "global_mask": None if flags is None else _before(flags, more, 0),
        }


def build_registers(config: ModelConfig, head: Head) -> Registers | None:
    """The registers of a model; None: it has none.

    Raises:
        IncompatibleError: the head puts positions into the last block.
    """
    if not config.registers:
        return None
    if head.decoder is not None:
        raise IncompatibleError(
            f"{config.head} puts the positions of tokens into the last block, and registers have none; use "
            'head="mlm", or registers=0'
        )
    return Registers(config.registers, config.dim)


def _before(part: Tensor, count: int, value: int) -> Tensor:
    """What is known of tokens, after the same of `count` registers."""
    return torch.cat([part.new_full((part.shape[0], count, *part.shape[2:]), value), part], dim=1)
