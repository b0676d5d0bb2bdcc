"""A recurrent unit with a cell, and logits linear in the mean of its states.

Paper: Hochreiter and Schmidhuber 1997; over complex numbers Wang et al. 2019, 1912.12333.
Equation, with complex W = A + iB and U, for the gates i, f, o and the candidate g:

    gate = sigmoid(W x + U h + b),   g = tanh(W_g x + U_g h + b_g),   c' = f * c + i * g,   h' = o * tanh(c')

where sigmoid, tanh and the products * act on real and imaginary parts alike. So it is a real unit, twice as wide, with the matrices
[[A, -B], [B, A]], and runs as one.
Deviation: the authors' code runs a unitary unit over real parts, followed by imaginary parts as further tokens; this is the complex
unit that the paper means. Logits read the mean of all states.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.classify.base import Classifier, Number, as_real_matrix, check_sizes
from anyformer.model.build import AnySpec
from anyformer.model.head import mean

_GATES = 4


class LSTMClassifier(Classifier):
    """One recurrent unit over the tokens, and logits linear in the mean of its states.

    Args:
        width: channels of the state; complex, real and imaginary parts of half as many numbers. None: dim.

    The others are those of `Classifier`.

    Raises:
        SpecError: as `Classifier`, or an odd width for complex numbers.
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
        width: int | None = None,
    ) -> None:
        width = dim if width is None else width
        check_sizes(width=width)
        super().__init__(
            vocab=vocab,
            dim=dim,
            outputs=outputs,
            number=number,
            position=position,
            max_length=max_length,
            seed=seed,
            features=width,
        )
        self.split("width", width, self.parts)
        with self.drawing("lstm"):
            self.unit = nn.LSTM(dim, width, batch_first=True) if number == "real" else ComplexLSTM(dim, width)

    def features(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b f"]:
        """See the module's equation."""
        if not x.shape[1]:
            return x.new_zeros(len(x), self.out.in_features)
        return mean(self.unit(x)[0], keep)


class ComplexLSTM(nn.Module):
    """A recurrent unit with complex weights; see the module's equation.

    Args:
        dim: channels of a token, real parts first.
        width: channels of the state, likewise.
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        shapes = {"x": (width // 2, dim // 2), "h": (width // 2, width // 2)}
        self.real, self.imaginary = (
            nn.ParameterDict({name: torch.empty(_GATES, *shape) for name, shape in shapes.items()}) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.empty(_GATES * width))  # of each gate real parts, then imaginary parts
        for weight in self.parameters():
            nn.init.uniform_(weight, -(width**-0.5), width**-0.5)

    def forward(
        self, x: Float[Tensor, "b n c"]
    ) -> tuple[Float[Tensor, "b n w"], tuple[Float[Tensor, "1 b w"], Float[Tensor, "1 b w"]]]:
        """The states of all tokens, and the last state and cell, as `torch.nn.LSTM` gives them."""
        matrices = [
            torch.cat([as_real_matrix(a, b) for a, b in zip(self.real[name], self.imaginary[name], strict=True)])
            for name in ("x", "h")
        ]
        start = x.new_zeros(1, len(x), self.width)
        weights = [*matrices, self.bias, torch.zeros_like(self.bias)]
        states, last, cell = torch.lstm(x, [start, start], weights, True, 1, 0.0, self.training, False, True)
        return states, (last, cell)
