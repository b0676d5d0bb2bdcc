"""Recursive positions: a trained recurrence makes each position's code from the one before it.

Paper: Su 2021, https://kexue.fm/archives/8130, for the idea; Liu, Yu, Dhillon and Hsieh 2020, 2003.09229, who compare with it.
Equation: x_i <- x_i + g * p_i, with p_0 learned, p_k = GRU(z_k, p_(k-1)) and one factor g a channel; z_k = k / max_length, or 0.
Cost: 3 c (c + 1) multiply-adds for each position up to the largest one, one after the other, and n c.
Deviation: the factor g, which lets codes start as long as token vectors.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site


class Rnn(Position):
    """Adds the states of a gated recurrent unit that runs from position to position without looking at tokens.

    Each call runs it from 0 to its largest position; nothing is stored, so decoding pays for all positions at every step.

    Args:
        drive: input of the unit: "time", the position over max_length, or "none", where codes far out run into a point or a
            circle and are told apart no longer.

    Raises:
        SpecError: (in `embed`) a position is negative.
    """

    name = "rnn"
    summary = "a recurrence makes each position's code from the one before"
    paper = "Su 2021, kexue.fm/archives/8130; Liu et al. 2020, 2003.09229"
    family = ("absolute", "recurrent")
    scope = "model"
    additive = True

    def __init__(self, site: Site, *, drive: Literal["time", "none"] = "time") -> None:
        super().__init__(site)
        self.forms = ((Form.EMBED,),)
        self.relative = False
        if drive == "time":  # max_length is the unit of time: a longer one slows it down
            self.extensions = ("stretch",)
        self.drive: Literal["time", "none"] = drive
        self.start = nn.Parameter(torch.empty(site.dim))
        self.unit = nn.GRUCell(1, site.dim)
        self.factor = nn.Parameter(torch.full((site.dim,), 2 * site.dim**-0.5))
        nn.init.normal_(self.start)
        nn.init.normal_(self.unit.weight_ih)
        nn.init.normal_(self.unit.weight_hh, std=2 * site.dim**-0.5)  # smaller weights forget p_0 within ten steps

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`x + g * p`, added in the wider of float32 and the weights' dtype."""
        return (x + self.code(positions)).to(x.dtype)

    def code(self, positions: Int[Tensor, "#b n"]) -> Float[Tensor, "#b n c"]:
        """`g * p` at these positions."""
        last = self._last(positions)
        wide = torch.promote_types(torch.float32, self.start.dtype)
        start = self.start.to(wide)[None, None]
        time = torch.arange(1, last + 1, dtype=torch.float64, device=start.device)[None, :, None] / self.site.max_length
        drive = (time if self.drive == "time" else torch.zeros_like(time)).to(wide)
        states = torch.cat([start, run(self.unit, drive, start)], dim=1)[0] if last else start[0]
        return (self.factor.to(wide) * states)[positions]

    def _last(self, positions: Tensor) -> int:
        """The largest position, or of the model where values are unknown: a look-up beyond it then fails."""
        if torch.compiler.is_compiling() or positions.is_meta:
            return self.site.max_length - 1
        if positions.numel() == 0:
            return 0
        if (least := int(positions.min())) < 0:
            raise SpecError(f"rnn: expected positions from 0, got {least}")
        return int(positions.max())


def run(unit: nn.GRUCell, inputs: Float[Tensor, "1 n i"], start: Float[Tensor, "1 1 c"]) -> Float[Tensor, "1 n c"]:
    """The states of a unit, in the dtype of its inputs."""
    given = [each.to(inputs.dtype) for each in (unit.weight_ih, unit.weight_hh, unit.bias_ih, unit.bias_hh)]
    return torch.gru(
        inputs,
        start,
        given,
        has_biases=True,
        num_layers=1,
        dropout=0.0,
        train=False,
        bidirectional=False,
        batch_first=True,
    )[0]
