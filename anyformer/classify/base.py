"""What text classifiers share: tokens embedded with their positions, real ones moved to the left, features, logits.

Complex numbers are stored as real parts, then imaginary parts, on the last axis.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import newest, truths
from anyformer.errors import SpecError
from anyformer.mixer.base import blank
from anyformer.model.arguments import check_ids, check_shapes
from anyformer.model.build import AnySpec, added_at_embedding, build_position
from anyformer.model.embedding import Embedding
from anyformer.model.initial import seeded
from anyformer.side import left_order, side, take
from anyformer.site import Site

Number = Literal["real", "complex"]


class Classifier(nn.Module):
    """Logits of classes from the tokens of a row. A subclass is one model: it builds what it needs within `drawing()` and writes
    `features`.

    Args:
        vocab: number of token ids.
        dim: channels of a token vector; complex, real and imaginary parts of half as many numbers.
        outputs: number of classes.
        number: "real" or "complex".
        position: spec of an encoding added at the embedding; None: complex_order, or sinusoidal for real numbers.
        max_length: longest sequence in tokens that tables are made for.
        seed: of the initial weights.
        features: number of features that the logits are linear in.

    Raises:
        SpecError: another number, a size that is no whole number of at least 1, an odd dim for complex ones, a wrong spec, or an
            encoding that is not added at the embedding.
    """

    def __init__(
        self,
        *,
        vocab: int,
        dim: int,
        outputs: int,
        number: Number,
        position: AnySpec | None,
        max_length: int,
        seed: int,
        features: int,
    ) -> None:
        super().__init__()
        if number not in ("real", "complex"):
            raise SpecError(f'expected number="real" or number="complex", got {number!r}')
        check_sizes(vocab=vocab, dim=dim, outputs=outputs, max_length=max_length)
        self.number: Number = number
        self.split("dim", dim, self.parts)
        self.vocab, self.dim, self.outputs, self.seed = vocab, dim, outputs, seed
        usual = "complex_order" if number == "complex" else "sinusoidal"
        self.site = Site(dim, 1, max_length=max_length, seed=seed)
        with self.drawing("embedding"):
            placed = build_position(usual if position is None else position, self.site)
            if placed.forms and not added_at_embedding(placed):
                raise SpecError(
                    f"expected an encoding added at the embedding, such as complex_order, sinusoidal or none, got {placed.name}"
                )
            self.embedding = Embedding(vocab, dim, [placed] if placed.forms else [], 0.0)
            nn.init.normal_(self.embedding.tokens.weight, std=dim**-0.5)  # vectors of length about 1
            self.out = nn.Linear(features, outputs)

    @property
    def parts(self) -> int:
        """Real numbers that make one: 1, or 2 for complex ones."""
        return 2 if self.number == "complex" else 1

    def features(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b f"]:
        """What logits are linear in. Real tokens come first in each row, padding (where `keep` is False) is 0."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "#b n"] | None = None,
    ) -> Float[Tensor, "b o"]:
        """Logits of the classes; those of a row without real tokens are the bias.

        Args:
            tokens: token ids; those of padding are not looked at.
            attention_mask: which tokens are real (True or 1); None: all.
            positions: position of each token; None: the number of real tokens before it.

        Raises:
            SpecError: a token id beyond the vocabulary, or a position that the encoding does not have.
            ValueError: an argument whose shape does not fit.
        """
        check_shapes(tokens, positions=positions, global_mask=None, reads_flags=False, cache=None, depth=0)
        b, n = tokens.shape
        keep = truths("attention_mask", newest("attention_mask", attention_mask, b, n, None))
        tokens = tokens if keep is None else tokens.masked_fill(~keep, 0)
        check_ids(tokens, self.vocab)
        queries = side(n, tokens.device, keep=keep, positions=positions)
        if keep is not None:
            order = left_order(keep)
            tokens, queries = take(tokens, order), queries.take(order)
        x = self.embedding(tokens, queries)
        return self.out(self.features(x if queries.keep is None else blank(x, queries.keep), queries.keep))

    @staticmethod
    def split(name: str, size: int, by: int) -> int:
        """A size over a number of equal parts.

        Raises:
            SpecError: it cannot be split so.
        """
        if size % by:
            raise SpecError(f"expected {name} to be a multiple of {by}, of at least {by}, got {size}")
        return size // by

    @contextmanager
    def drawing(self, role: str) -> Iterator[None]:
        """Draw initial weights by the seed and a role; the global generator stays as it is."""
        with seeded(self.seed, "classifier", role):
            yield


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are no whole numbers of at least 1, all in one message.

    Raises:
        SpecError: there are such.
    """
    wrong = {
        name: size for name, size in sizes.items() if isinstance(size, bool) or not isinstance(size, int) or size < 1
    }
    if wrong:
        told = (f"expected {name} to be a whole number of at least 1, got {size!r}" for name, size in wrong.items())
        raise SpecError("; ".join(told))


def on_parts(function: Callable[[Tensor], Tensor], x: Float[Tensor, "b n c"], parts: int) -> Float[Tensor, "b n w"]:
    """A function of real vectors `[b t c]`, done to real and imaginary parts alike."""
    return function(x.unflatten(-1, (parts, -1)).flatten(1, 2)).unflatten(1, (-1, parts)).flatten(2)


def as_real_matrix(a: Float[Tensor, "o i *w"], b: Float[Tensor, "o i *w"]) -> Float[Tensor, "oo ii *w"]:
    """A + iB as the real matrix that multiplies real parts, followed by imaginary parts: [[A, -B], [B, A]]."""
    return torch.cat([torch.cat([a, -b], dim=1), torch.cat([b, a], dim=1)], dim=0)
