"""One block: mix the tokens, then work on each alone, both as a change added to the stream."""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import LayerCache, truths
from anyformer.mixer.base import Mixer
from anyformer.model.feed_forward import FeedForward


class Block(nn.Module):
    """x + drop(mixer(norm(x))), then x + drop(feed_forward(norm(x))); the second only where the mixer holds none of its own.

    Where a mixer gives fewer vectors than it gets, x is shortened as its queries are before they are added.

    Args:
        dim: width of the model.
        mixer: how tokens reach each other.
        norm: "rms" or "layer".
        feed_forward: "swiglu" or "gelu".
        dropout: probability of dropping a channel of what a branch adds, in training.
    """

    def __init__(
        self,
        dim: int,
        mixer: Mixer,
        *,
        norm: Literal["rms", "layer"],
        feed_forward: Literal["swiglu", "gelu"],
        dropout: float,
    ) -> None:
        super().__init__()
        self.mixer_norm = build_norm(norm, dim)
        self.mixer = mixer
        self.feed_forward_norm = None if mixer.feed_forward else build_norm(norm, dim)
        self.feed_forward = None if mixer.feed_forward else FeedForward(dim, feed_forward)
        self.dropout = dropout

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        content: Float[Tensor, "b n c"] | None = None,
        *,
        tokens: Int[Tensor, "b n"] | None = None,
        attention_mask: Bool[Tensor, "b t"] | Int[Tensor, "b t"] | None = None,
        document_ids: Int[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "#b n *a"] | None = None,
        no_position: Bool[Tensor, "b n"] | None = None,
        global_mask: Bool[Tensor, "b n"] | None = None,
        drawn: Int[Tensor, "p"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "b r c"]:
        """The stream after this block; the arguments are those of `Mixer.forward`, global_mask for mixers that read it, content
        as it is before its norm."""
        mixed = self.mixer(
            self.mixer_norm(x),
            content=None if content is None else self.mixer_norm(content),
            tokens=tokens,
            attention_mask=attention_mask,
            document_ids=document_ids,
            positions=positions,
            no_position=no_position,
            global_mask=global_mask if self.mixer.takes_flags else None,
            drawn=drawn,
            cache=cache,
        )
        if (shortening := self.mixer.shortening) is not None:
            x = shortening(x, truths("attention_mask", attention_mask))
        x = x + F.dropout(mixed, self.dropout, self.training)
        if self.feed_forward is None or self.feed_forward_norm is None:
            return x
        return x + F.dropout(self.feed_forward(self.feed_forward_norm(x)), self.dropout, self.training)


def build_norm(kind: Literal["rms", "layer"], dim: int) -> nn.Module:
    """A normalisation over channels; its epsilon does not depend on the dtype."""
    return nn.RMSNorm(dim, eps=1e-6) if kind == "rms" else nn.LayerNorm(dim, eps=1e-5)
