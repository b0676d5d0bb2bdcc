"""Convolutions of several widths over the tokens, the largest response of each filter, and logits linear in these.

Paper: Kim 2014, 1408.5882; over complex numbers Wang et al. 2019, 1912.12333, filters as in Trabelsi et al. 2017, 1705.09792.
Equation, with complex filters F = A + iB of width w and one real bias a filter, over windows that begin at a real token (behind the
last one zeros):

    y_t = sum_u F_u x_(t + u),   out = [max_t relu(Re y_t + b) | max_t relu(Im y_t + b)]

Initial filters are normal, complex ones of modulus Rayleigh(1 / sqrt(fan in)) and uniform phase; biases are 0.1.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.classify.base import Classifier, Number, as_real_matrix, check_sizes
from anyformer.errors import SpecError
from anyformer.model.build import AnySpec


class CNNClassifier(Classifier):
    """Filters over neighbouring tokens, their largest responses, and logits linear in these.

    Args:
        filters: responses of each width; complex, real and imaginary parts of half as many. None: dim.
        widths: tokens that filters cover.

    The others are those of `Classifier`.

    Raises:
        SpecError: as `Classifier`, no widths or one below 1, or an odd number of filters for complex numbers.
    """

    def __init__(
        self,
        *,
        vocab: int,
        dim: int,
        outputs: int,
        number: Number = "complex",
        position: AnySpec | None = None,
        max_length: int = 2048,
        seed: int = 0,
        filters: int | None = None,
        widths: tuple[int, ...] = (3, 4, 5),
    ) -> None:
        filters = dim if filters is None else filters
        if not widths:
            raise SpecError("expected widths to be at least one number of tokens, such as (3, 4, 5), got ()")
        check_sizes(filters=filters, **{f"widths[{number}]": width for number, width in enumerate(widths)})
        super().__init__(
            vocab=vocab,
            dim=dim,
            outputs=outputs,
            number=number,
            position=position,
            max_length=max_length,
            seed=seed,
            features=filters * len(widths),
        )
        self.split("filters", filters, self.parts)
        with self.drawing("cnn"):
            self.convolutions = nn.ModuleList(Convolution(dim, filters, width, self.parts) for width in widths)

    def features(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b f"]:
        """See the module's equation."""
        if not x.shape[1]:
            return x.new_zeros(len(x), self.out.in_features)
        responses = torch.cat([each(x) for each in self.convolutions], dim=-1)
        if keep is not None:
            responses = responses * keep[:, :, None]  # never below 0 as they are
        return responses.amax(dim=1)


class Convolution(nn.Module):
    """relu(F * x + b) for each token and the width - 1 behind it, zeros beyond the end.

    Args:
        dim: channels of a token.  filters: responses.  width: tokens of a window.
        parts: 1 for real numbers; 2 for complex ones, real parts first.
    """

    def __init__(self, dim: int, filters: int, width: int, parts: int) -> None:
        super().__init__()
        shape = filters // parts, dim // parts, width
        std = (shape[1] * width * parts / 2) ** -0.5
        self.weights = nn.ParameterList(nn.init.normal_(torch.empty(shape), std=std) for _ in range(parts))
        self.bias = nn.Parameter(torch.full((filters // parts,), 0.1))

    def forward(self, x: Float[Tensor, "b n c"]) -> Float[Tensor, "b n f"]:
        """See the module's equation."""
        weight = self.weights[0] if len(self.weights) == 1 else as_real_matrix(*self.weights)
        padded = F.pad(x.mT, (0, weight.shape[-1] - 1))
        return F.relu(F.conv1d(padded, weight, self.bias.repeat(len(self.weights)))).mT
