"""The Enhanced Mask Decoder: absolute positions enter at the end only, as the queries of a last block that runs several times.

Paper: He et al. 2020, 2006.03654 (DeBERTa), section 3.2.
Equation: with h the output of the last block but one, f the last block with its queries from the first argument and its keys and
    values from the second, and p the code of an absolute encoding,

        z_0 = h + p(position),    z_t = f(z_(t-1), h) for t = 1..passes;    the head reads z_passes

    f has one set of weights, and its skip connection carries z. With p = 0 and one pass this is the ordinary last block.
Cost: passes - 1 more blocks, and n c.
Deviations: blocks are norm-first, f(z, h) = u + feed_forward(norm(u)) with u = z + mixer(norm(z), norm(h)). The released code
    leaves the decoder out where the input has absolute positions already; here whoever asks for it gets it.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor, nn

from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.base import Mixer
from anyformer.model.build import AnySpec, build_position
from anyformer.side import Side
from anyformer.site import Site
from anyformer.typing import Size


class MaskDecoder(nn.Module):
    """Runs the last block of a Transformer with absolute positions in its queries.

    Args:
        site: where a block is built.
        passes: how often the last block runs; 2 in the paper.
        position: spec of the encoding that adds one vector a position: learned as in the paper, sinusoidal, hierarchical ..., on a
            grid vit_learned or sinusoidal_2d.

    Raises:
        SpecError: the encoding adds no vectors; in a forward, a position that it does not have.
    """

    def __init__(self, site: Site, *, passes: Size = 2, position: AnySpec = "learned") -> None:
        super().__init__()
        self.passes = passes
        self.position = build_position(position, site)
        if not self.position.additive:
            raise SpecError(
                "enhanced_mlm: expected a position that adds one vector a position, such as learned, sinusoidal or hierarchical, "
                f"got {self.position.name}; encodings of other kinds belong to the blocks"
            )

    def admit(self, last: Mixer) -> None:
        """Refuse a last block whose mixer cannot tell queries from keys.

        Raises:
            IncompatibleError: it cannot.
        """
        if not last.two_streams:
            raise IncompatibleError(
                f"enhanced_mlm puts positions into the queries of the last block and not into its keys, which {last.name} cannot: "
                f"{last.streams_refusal}; use softmax, local(...), linformer, linear or aft there (attention may be a tuple, one a "
                'block), or head="mlm"'
            )

    def forward(
        self, x: Float[Tensor, "b n c"], queries: Side, last: Callable[[Tensor, Tensor], Tensor]
    ) -> Float[Tensor, "b n c"]:
        """What the head reads.

        Args:
            x: output of the last block but one.
            queries: where the tokens are; those without a position get no vector.
            last: the last block, `(stream, content) -> stream`.
        """
        self.position.admit(queries.positions)
        code = self.position.code(queries.positions)
        if queries.without is not None:
            code = code.masked_fill(queries.without[:, :, None], 0.0)
        z = (x + code).to(x.dtype)
        for _ in range(self.passes):
            z = last(z, x)
        return z
