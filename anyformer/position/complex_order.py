"""Complex order: each word is a wave; its content is the amplitude, and the phase grows with the position.

Paper: Wang, Zhao, Lioma, Li, Zhang and Simonsen 2019, 1912.12333.
Equation: f(w, i)_l = r_wl exp(1j (om_wl i + th_wl)) for c/2 complex channels l, stored as real parts, then imaginary parts. Hence
    f(w, i + s) = f(w, i) exp(1j om_w s).
Cost: n c; c/2 learned frequencies, or one for each word, or c/2 for each word.
Deviations: r and th are the token vector itself, read as complex numbers. The authors' classifiers start with frequencies in
    proportion to the word's id, their Transformer with the frequencies that all words start with here.
"""

from typing import Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat, Size


class ComplexOrder(Position):
    """Turns each token vector, as complex numbers, by its position times learned frequencies; its length stays.

    Args:
        frequencies: what has frequencies of its own: "dimension", each channel, the same for all words; "word", each word, the same
            for all channels; "both", each channel of each word.
        phase: whether words have phases: the token vector is then real parts, followed by imaginary parts. If not, its two halves
            add up to amplitudes, over sqrt(2).
        vocab: number of token ids, for "word" and "both".
        base: ratio of the fastest to the slowest frequency at the start; those of words are drawn between.

    Raises:
        SpecError: dim is odd; no vocab where words have frequencies; (in `embed`) no token ids, or one beyond vocab.
    """

    name = "complex_order"
    summary = "token vectors as complex numbers, turned by position times learned frequencies"
    paper = "Wang et al. 2019, 1912.12333"
    family = ("other", "complex")
    scope = "model"

    def __init__(
        self,
        site: Site,
        *,
        frequencies: Literal["dimension", "word", "both"] = "dimension",
        phase: bool = True,
        vocab: Size | None = None,
        base: PositiveFloat = 10000.0,
    ) -> None:
        super().__init__(site)
        if site.dim % 2:
            raise SpecError(f"complex_order: real and imaginary parts need an even dim, got {site.dim}; choose another")
        if (vocab is None) != (frequencies == "dimension"):
            raise SpecError(
                f"complex_order: expected vocab, the number of token ids, where words have frequencies, and only there, got "
                f"frequencies={frequencies} and vocab={vocab}"
            )
        self.forms = ((Form.EMBED,),)
        self.relative = False
        self.phase = phase
        self.vocab = vocab
        waves = base ** (-torch.arange(site.dim // 2) * 2 / site.dim)
        match frequencies:
            case "dimension":
                start = waves
            case "word":
                start = base ** -torch.rand(vocab or 1, 1)
            case _:
                start = waves.repeat(vocab or 1, 1)
        self.frequencies = nn.Parameter(start)

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`[r cos(om i + th) | r sin(om i + th)]`, in the wider of float32 and x's dtype."""
        wide = torch.promote_types(torch.float32, x.dtype)
        angles = positions[..., None] * self._of(tokens)
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        real, imaginary = x.to(wide).chunk(2, dim=-1)
        if self.phase:
            parts = real * cos - imaginary * sin, real * sin + imaginary * cos
        else:
            amplitude = (real + imaginary) * 0.5**0.5
            parts = amplitude * cos, amplitude * sin
        return torch.cat(parts, dim=-1).to(x.dtype)

    def _of(self, tokens: Int[Tensor, "b n"] | None) -> Float64[Tensor, "*bn f"]:
        """The frequencies of these tokens, of one channel where all are alike."""
        wide = self.frequencies.to(torch.float64)
        if self.vocab is None:
            return wide
        if tokens is None:
            raise SpecError("complex_order: words have frequencies here, so it needs their token ids; use Transformer")
        most = 0 if not tokens.numel() or tokens.is_meta or torch.compiler.is_compiling() else int(tokens.max())
        if most >= self.vocab:
            raise SpecError(f"complex_order: token id {most} has no frequency; build it with vocab={most + 1}")
        return wide[tokens]
