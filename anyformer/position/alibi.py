"""ALiBi: a penalty on distance, with a slope of its own for each head.

Paper: Press, Smith and Lewis 2021, 2108.12409.
Equation: s_ij = q_i . k_j / sqrt(d) - m_h |i - j|, with m_h = 2 ** (-8 h / H), h = 1..H, where H is a power of two.
Cost: one multiply-add a pair; as a running state, one product a token.
Beyond the paper, which is causal: both directions are penalised alike.
"""

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site


class Alibi(Position):
    """Subtracts slope times distance from the scaled logits: near keys count more, in steep heads only they.

    No weights and no knobs. The slopes are the authors' for any number of heads: those of the power of two below,
    followed by every second one of the next power of two. The same term fades a running state: `exp(-m |i - j|)` is a
    product of one factor a token (`rates`).
    """

    name = "alibi"
    summary = "minus slope times distance on the scaled logits, a slope for each head"
    paper = "Press et al. 2021, 2108.12409"
    family = ("since the survey", "alibi")
    scope = "model"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.forms = ((Form.TOEPLITZ, Form.BIAS, Form.DECAY),)

    def rates(self, device: torch.device | None = None) -> Float64[Tensor, "h"]:
        """DECAY: what each head's log weight loses a token of distance."""
        return torch.tensor(slopes(self.site.heads), dtype=torch.float64, device=device)

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`-m_head |k_pos - q_pos|`, in float64."""
        return -self.rates(head.device)[head] * (k_pos - q_pos).abs()

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """`-m_h |offset|` for offsets low..high, in float64 on the CPU."""
        return -self.rates()[:, None] * torch.arange(low, high + 1).abs()


def slopes(heads: int) -> list[float]:
    """The authors' slope of each head."""
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is not above heads
    return _geometric(power) + _geometric(2 * power)[0::2][: heads - power]


def _geometric(heads: int) -> list[float]:
    return [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
