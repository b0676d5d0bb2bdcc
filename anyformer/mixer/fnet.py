"""FNet: tokens are mixed by a Fourier transform, without any weight.

Paper: Lee-Thorp et al. 2021, 2105.03824.
Equation: out = Re(DFT_tokens(DFT_channels(x))), both transforms unnormalised; with cosine and sine matrices C and S,
out = C_n x C_c - S_n x S_c.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.mixer.base import Mixer
from anyformer.site import Site


class FNet(Mixer):
    """Each output is a sum of all tokens and channels with fixed waves; order enters through the waves.

    Args:
        dropout: probability of dropping a channel of the output in training.

    Raises:
        IncompatibleError: the site is causal.
    """

    name = "fnet"
    summary = "a Fourier transform over tokens and channels in place of attention"
    paper = "Lee-Thorp et al. 2021, 2105.03824"
    family = ("attention-free", "fourier")
    causal_refusal = "its waves run over the whole sequence, the future too; use gru, conv or linear for causal models"
    takes_mask = False
    mask_refusal = (
        "every output depends on the length that is transformed; group sequences of equal length without a mask, "
        "or use linformer, conv or softmax"
    )
    ordered = True

    def __init__(self, site: Site, *, dropout: float = 0.0) -> None:
        super().__init__(site)
        self.dropout = nn.Dropout(dropout)

    def cost(self) -> Cost:
        """Half the operations of both fast transforms of real numbers, 5/2 a number and doubling."""
        return Cost(self.site, "5/4 n c (log2(n) + log2(c))", memory="2 n c")

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b n c"]:
        """The mixed sequence; see the module's equation."""
        return self.dropout(fourier(x))


def fourier(x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n c"]:
    """Real part of the transform over tokens and channels, computed in the wider of float32 and the input's dtype."""
    if x.numel() == 0:
        return x
    return _Waves.apply(x.to(torch.promote_types(torch.float32, x.dtype))).to(x.dtype)


class _Waves(torch.autograd.Function):
    """The transform, whose matrices are symmetric: it is its own adjoint, and needs nothing of its input for that."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        # of real numbers, the waves beyond the middle are those before it, turned round
        waves = torch.fft.rfft2(x).real
        rest = waves[..., 1 : (x.shape[-1] + 1) // 2].flip(-2, -1).roll(1, dims=-2)
        return torch.cat([waves, rest], dim=-1)

    @staticmethod
    def backward(ctx: FunctionCtx, d_out: Tensor) -> Tensor:  # type: ignore[override]  # one output
        return _Waves.apply(d_out)
