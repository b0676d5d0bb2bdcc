"""FastText: the mean of the token vectors, and logits linear in it.

Paper: Joulin et al. 2016, 1607.01759; over complex numbers Wang et al. 2019, 1912.12333.
Equation, with x_i the token vectors of n tokens:

    real: W mean_i x_i + b          complex: W mean_i (Re x_i + Im x_i) + b

With an encoding that is added, the real one sees a bag of tokens: the mean of sums is the sum of means. With complex_order the mean
knows where each word stood.
Deviation: no word n-grams and no hierarchical softmax.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from anyformer.classify.base import Classifier, Number
from anyformer.model.build import AnySpec
from anyformer.model.head import mean


class FastTextClassifier(Classifier):
    """The mean of the token vectors, and logits linear in it; arguments are those of `Classifier`."""

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
    ) -> None:
        super().__init__(
            vocab=vocab,
            dim=dim,
            outputs=outputs,
            number=number,
            position=position,
            max_length=max_length,
            seed=seed,
            features=dim // 2 if number == "complex" else dim,
        )

    def features(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b f"]:
        """See the module's equation."""
        return mean(x, keep).unflatten(-1, (self.parts, -1)).sum(dim=1)
