"""ALiBi: a penalty on distance, with a slope of its own for each head.

Paper: Press, Smith and Lewis 2021, 2108.12409.
Equation: s_ij = q_i . k_j / sqrt(d) - m_h |i - j|, with m_h = 2 ** (-8 h / H), h = 1..H, where H is a power of two.
Cost: one multiply-add a pair; as a running state, one product a token.
Beyond the paper, which is causal, two forms for both directions:
    symmetric:  the equation as it is
    halves:     the slopes of H / 2 heads, twice; heads h <= H / 2 have s_ij = -inf for j > i, the others for j < i
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site


class Alibi(Position):
    """Subtracts slope times distance from the scaled logits: near keys count more, in steep heads only they.

    No weights. The slopes are the authors' for any number of heads: those of the power of two below, followed by every second
    one of the next power of two. The same term fades a running state: `exp(-m |i - j|)` is a product of one factor a token
    (`rates`).

    Args:
        both: what a site for both directions makes of it: "symmetric", later keys are penalised as earlier ones are; "halves",
            the first half of the heads reads no later key and the second half no earlier one, so that order is told apart.

    Raises:
        SpecError: "halves" where the site is causal, or for an odd number of heads.
    """

    name = "alibi"
    summary = "minus slope times distance on the scaled logits, a slope for each head"
    paper = "Press et al. 2021, 2108.12409"
    family = ("since the survey", "alibi")
    scope = "model"

    def __init__(self, site: Site, *, both: Literal["symmetric", "halves"] = "symmetric") -> None:
        super().__init__(site)
        if both == "halves" and site.causal:
            raise SpecError(
                "alibi: both=halves gives one half of the heads to later keys, and this site is causal; use alibi, whose heads all "
                "read earlier keys"
            )
        if both == "halves" and site.heads % 2:
            raise SpecError(
                f"alibi: both=halves gives half of the heads to each direction, expected an even number of heads, got "
                f"{site.heads}; use both=symmetric, or another number of heads"
            )
        self.halves = both == "halves"
        by_offset = (Form.TOEPLITZ, Form.BIAS)
        self.forms = (by_offset if self.halves else (*by_offset, Form.DECAY),)
        if self.halves:
            self.lacks = {Form.DECAY: "with both=halves fades in another direction in each half of the heads"}

    def rates(self, device: torch.device | None = None) -> Float64[Tensor, "h"]:
        """DECAY: what each head's log weight loses a token of distance."""
        heads = self.site.heads
        each = slopes(heads // 2) * 2 if self.halves else slopes(heads)
        return torch.tensor(each, dtype=torch.float64, device=device)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`-m_head |k_pos - q_pos|`, in float64; -inf where `halves` shuts the pair."""
        return self._of(head, k_pos - q_pos)

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """`-m_h |offset|` for offsets low..high, in float64 on the CPU; -inf where `halves` shuts them."""
        return self._of(torch.arange(self.site.heads)[:, None], torch.arange(low, high + 1))

    def _of(self, head: Tensor, offset: Tensor) -> Tensor:
        term = -self.rates(head.device)[head] * offset.abs()
        if not self.halves:
            return term
        ahead = head >= self.site.heads // 2
        return term.masked_fill(torch.where(ahead, offset < 0, offset > 0), -torch.inf)


def slopes(heads: int) -> list[float]:
    """The authors' slope of each head."""
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is not above heads
    return _geometric(power) + _geometric(2 * power)[0::2][: heads - power]


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
