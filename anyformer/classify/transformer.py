"""The complex-valued Transformer: real and imaginary parts go through the same weights and meet in the attention only.

Paper: Wang et al. 2019, 1912.12333.
Equation: blocks x + attention(norm(x)), then x + feed_forward(norm(x)). Norms, feed-forwards and the four projections are real and
act on real and imaginary parts alike; the attention is `complex` (its file has the equation). Logits are linear in the mean of the
normalised vectors, real parts followed by imaginary parts. The real twin has `softmax` there and one part.
Deviations: norms before the branches, RMS norms and gated feed-forwards, as in every model here; the mean for the last token.
"""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.classify.base import Classifier, Number, check_sizes, on_parts
from anyformer.mixer.base import Mixer
from anyformer.model.block import build_norm
from anyformer.model.build import AnySpec, build_mixer
from anyformer.model.feed_forward import FeedForward
from anyformer.model.head import mean
from anyformer.site import Site


class TransformerClassifier(Classifier):
    """Blocks of attention and feed-forward over the tokens, and logits linear in the mean of their vectors.

    Args:
        depth: number of blocks.
        heads: heads of a block, of dim / heads channels (complex, of half as many numbers).
        conjugate: whether queries are conjugated; nothing for real numbers.

    The others are those of `Classifier`.

    Raises:
        SpecError: as `Classifier`, and heads that do not divide the width of a part.
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
        depth: int = 2,
        heads: int = 4,
        conjugate: bool = True,
    ) -> None:
        check_sizes(depth=depth, heads=heads)
        super().__init__(
            vocab=vocab,
            dim=dim,
            outputs=outputs,
            number=number,
            position=position,
            max_length=max_length,
            seed=seed,
            features=dim,
        )
        attention = "softmax" if number == "real" else f"complex(conjugate={conjugate})"
        with self.drawing("transformer"):
            self.blocks = nn.ModuleList(
                ClassifierBlock(self._site(heads, layer, depth), attention, self.parts) for layer in range(depth)
            )
            self.norm = build_norm("rms", dim // self.parts)

    def features(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b f"]:
        """See the module's equation."""
        for block in self.blocks:
            x = block(x, keep)
        return mean(on_parts(self.norm, x, self.parts), keep)

    def _site(self, heads: int, layer: int, depth: int) -> Site:
        width = self.split("dim", self.dim, self.parts * heads)
        return Site(
            self.dim,
            heads,
            max_length=self.site.max_length,
            head_dim=width,
            layer=layer,
            depth=depth,
            seed=self.seed,
        )


class ClassifierBlock(nn.Module):
    """x + mixer(norm(x)), then x + feed_forward(norm(x)), all but the mixer on real and imaginary parts alike.

    Args:
        site: where the mixer is built.
        attention: its spec.
        parts: 1 for real numbers, 2 for complex ones.
    """

    def __init__(self, site: Site, attention: AnySpec, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.mixer_norm, self.feed_forward_norm = (build_norm("rms", site.dim // parts) for _ in range(2))
        self.mixer: Mixer = build_mixer(attention, "none", site, bias=False)
        self.feed_forward = FeedForward(site.dim // parts, "swiglu")

    def forward(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n c"]:
        """The stream after this block."""
        x = x + self.mixer(on_parts(self.mixer_norm, x, self.parts), attention_mask=keep)
        return x + on_parts(lambda part: self.feed_forward(self.feed_forward_norm(part)), x, self.parts)
