"""From the vectors of a Transformer to logits."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from anyformer.errors import SpecError
from anyformer.model.block import build_norm
from anyformer.model.build import AnySpec
from anyformer.model.mask_decoder import MaskDecoder
from anyformer.registry import Maker, bind, canonical, unknown
from anyformer.side import Side
from anyformer.site import Site
from anyformer.spec import Spec, parse

KINDS = ("lm", "mlm", "classifier", "enhanced_mlm")


class Head(nn.Module):
    """Reads the normalised vectors of the last block.

    Args:
        kind: "lm": W x for every token. "mlm": W norm(gelu(W_h x + b_h)) + b for every token (Devlin et al. 2018, 1810.04805).
            "classifier": W mean(x) + b, the mean over the real tokens of a row, 0 where there are none.
        dim: width of the model.
        outputs: number of logits.
        norm: "rms" or "layer", for "mlm".
        decoder: runs the last block in place of its ordinary forward; None: it runs as any other.

    No weight is shared with the embedding.
    """

    def __init__(
        self,
        kind: Literal["lm", "mlm", "classifier"],
        dim: int,
        outputs: int,
        norm: Literal["rms", "layer"],
        decoder: MaskDecoder | None = None,
    ) -> None:
        super().__init__()
        self.pools = kind == "classifier"
        self.hidden = nn.Linear(dim, dim) if kind == "mlm" else None
        self.norm = build_norm(norm, dim) if kind == "mlm" else None
        self.out = nn.Linear(dim, outputs, bias=kind != "lm")
        self.decoder = decoder

    @property
    def cacheless(self) -> str:
        """Why a sequence cannot be continued from a cache; "" where it can."""
        if self.pools:
            return "a classifier pools over the whole sequence"
        return (
            "" if self.decoder is None else "enhanced_mlm runs the last block several times, for tokens that are masked"
        )

    def finish(
        self, x: Float[Tensor, "b n c"], queries: Side, last: Callable[..., Float[Tensor, "b r c"]]
    ) -> Float[Tensor, "b r c"]:
        """What comes out of the last block, given what came out of the one before."""
        return last(x) if self.decoder is None else self.decoder(x, queries, last)

    def forward(self, x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b *n o"]:
        """Logits of every token `[b n o]`, or of every row `[b o]` for a classifier."""
        if self.pools:
            return self.out(mean(x, keep))
        if self.hidden is not None and self.norm is not None:
            x = self.norm(F.gelu(self.hidden(x)))
        return self.out(x)


def build_head(spec: AnySpec, dim: int, outputs: int, norm: Literal["rms", "layer"], site: Site) -> Head:
    """The head of a spec; see `head_slot`."""
    spec = head_slot(spec)
    if spec.name == "enhanced_mlm":
        knobs: dict[str, Any] = bind(_ENHANCED, spec)
        return Head("mlm", dim, outputs, norm, MaskDecoder(site, **knobs))
    kind: Any = spec.name
    return Head(kind, dim, outputs, norm)


def head_slot(spec: AnySpec) -> Spec:
    """The canonical spec of a head: lm, mlm, classifier, or enhanced_mlm with knobs of its own.

    Raises:
        SpecError: there is no such head, or a knob is wrong.
    """
    spec = parse(spec)
    if spec.name not in KINDS:
        raise SpecError(unknown("head", spec.name, list(KINDS)))
    return canonical(_ENHANCED if spec.name == "enhanced_mlm" else Maker(spec.name, lambda: None), spec)


_ENHANCED = Maker("enhanced_mlm", MaskDecoder)


def mean(x: Float[Tensor, "b n c"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b c"]:
    """The mean of each row's real tokens, summed in the wider of float32 and the input's dtype; 0 where there are none."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    if keep is None:
        return (wide.sum(dim=1) / max(x.shape[1], 1)).to(x.dtype)
    kept = torch.where(keep[:, :, None], wide, torch.zeros((), dtype=wide.dtype, device=x.device))
    return (kept.sum(dim=1) / keep.sum(dim=1, keepdim=True).clamp(min=1)).to(x.dtype)
