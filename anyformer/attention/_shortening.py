"""Fewer vectors in place of the tokens, for methods whose output may be shorter than their input."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.site import Site


class Shortening(nn.Module):
    """Learned averages of a sequence, as many as it is built for, whatever its length.

        E_aj = exp(w_aj) / sum_j' exp(w_aj'),    y_a = sum_j E_aj x_j    over the real tokens

    j is the place of a token, so padding anywhere changes nothing. Rows of E sum to 1, whatever is left out: averages commute
    with projections, and a stream of averages is as large as a stream of tokens.

    Args:
        site: where it is built; it has a column for each of max_length places.
        count: averages a sequence is shortened to.
    """

    def __init__(self, site: Site, count: int) -> None:
        super().__init__()
        self.count = count
        self.scores = nn.Parameter(torch.empty(count, site.max_length))
        nn.init.normal_(self.scores)

    def forward(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b r c"]:
        """The averages of the real tokens; 0 where there are none.

        Raises:
            SpecError: more tokens than `max_length`.
        """
        if keep is not None:
            x = torch.where(keep[:, :, None], x, torch.zeros((), dtype=x.dtype, device=x.device))
        weights = self.weights(x.shape[1], keep).to(x.dtype)
        # matmul would give other bits in inference than in training
        return torch.bmm(weights.expand(x.shape[0], -1, -1), x)

    def weights(self, n: int, keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "#b r n"]:
        """E for n tokens, in the wider of float32 and its own dtype.

        Raises:
            SpecError: more tokens than `max_length`.
        """
        if n > (most := self.scores.shape[1]):
            raise SpecError(
                f"queries can be shortened from at most {most} tokens here, got {n}; "
                f"build with max_length={n} or shorten the input"
            )
        scores = self.scores.to(torch.promote_types(torch.float32, self.scores.dtype))
        if keep is None:
            return scores[:, :n].softmax(dim=-1)[None]
        places = keep.cumsum(dim=1) - keep.to(torch.int64)
        scores = scores[:, places].transpose(0, 1).masked_fill(~keep[:, None], -torch.inf)
        empty = ~keep.any(dim=1)[:, None, None]
        return scores.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)

    def kept(self, keep: Bool[Tensor, "b n"] | None) -> Bool[Tensor, "b r"] | None:
        """Which averages are of anything, given which tokens are real: all of a row or none."""
        return None if keep is None else keep.any(dim=1, keepdim=True).expand(-1, self.count)
