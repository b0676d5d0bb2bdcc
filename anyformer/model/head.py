"""From the vectors of a Transformer to logits."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.model.block import build_norm


class Head(nn.Module):
    """Reads the normalised vectors of the last block.

    Args:
        kind: "lm": W x for every token. "mlm": W norm(gelu(W_h x + b_h)) + b for every token (Devlin et al. 2018, 1810.04805).
            "classifier": W mean(x) + b, the mean over the real tokens of a row, 0 where there are none.
        dim: width of the model.
        outputs: number of logits.
        norm: "rms" or "layer", for "mlm".

    No weight is shared with the embedding.
    """

    def __init__(
        self, kind: Literal["lm", "mlm", "classifier"], dim: int, outputs: int, norm: Literal["rms", "layer"]
    ) -> None:
        super().__init__()
        self.pools = kind == "classifier"
        self.hidden = nn.Linear(dim, dim) if kind == "mlm" else None
        self.norm = build_norm(norm, dim) if kind == "mlm" else None
        self.out = nn.Linear(dim, outputs, bias=kind != "lm")

    def forward(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b *n o"]:
        """Logits of every token `[b n o]`, or of every row `[b o]` for a classifier."""
        if self.pools:
            return self.out(mean(x, keep))
        if self.hidden is not None and self.norm is not None:
            x = self.norm(F.gelu(self.hidden(x)))
        return self.out(x)


def mean(x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b c"]:
    """The mean of each row's real tokens, summed in the wider of float32 and the input's dtype; 0 where there are none."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    if keep is None:
        return (wide.sum(dim=1) / max(x.shape[1], 1)).to(x.dtype)
    kept = torch.where(keep[:, :, None], wide, torch.zeros((), dtype=wide.dtype, device=x.device))
    return (kept.sum(dim=1) / keep.sum(dim=1, keepdim=True).clamp(min=1)).to(x.dtype)
