"""What attentions share whose gates are projections of the tokens themselves."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention._fading import by_distance
from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.ops.softmax import repeat_heads

REFUSAL = (
    "what it keeps of a key fades with every token in between, as that token asks, so that a term of the pair must be a factor by "
    "token too; use an encoding that is added at the embedding, rotates or fades, such as sinusoidal, rope or alibi"
)


def tokens(name: str, context: Context) -> Float[Tensor, "b m c"]:
    """The tokens that keys and values are made of.

    Raises:
        SpecError: the call brought queries, keys and values only.
    """
    if context.x is None:
        raise SpecError(
            f"{name} reads its gates from the tokens, expected context.x [b m c], got None; "
            "use it inside MultiHead or Transformer, or give Context(x=...)"
        )
    return context.x


def by_head(x: Float[Tensor, "b m w"], heads: int) -> Float[Tensor, "b k m d"]:
    """A projection of all heads, cut into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def fading(
    name: str,
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    fade: Float[Tensor, "b k m d"],
    context: Context,
    heads: int,
) -> tuple[Float[Tensor, "b g m d"], Float[Tensor, "b g m v"], Float[Tensor, "b g m d"]]:
    """Keys, values and the log of the factor on each channel, with the encoding's factors of each query head on top.

    Raises:
        SpecError: positions that fall from one token to a later one.
    """
    terms = [] if context.encoding.gates is None else [context.encoding.gates[..., None]]
    if context.encoding.rates is not None:
        own = by_distance(context, k.shape[2])
        if own is None:
            raise SpecError(
                f"{name} fades from token to token, so each token needs a position that is not smaller than the one before it; "
                "leave positions out, or use softmax"
            )
        terms.append(own[:, None, None] if own.dim() == 1 else own[..., None])
    if terms:
        k, v, fade = (repeat_heads(x, heads) for x in (k, v, fade))
    for term in terms:
        fade = fade + term.to(fade.dtype)
    return k, v, fade


def finished(
    name: str, out: Float[Tensor, "b h n v"], norm: bool, gate: nn.Linear | None, context: Context
) -> Float[Tensor, "b h n v"]:
    """Outputs divided by their root mean square if `norm`, and times silu of the gate's projection of the tokens."""
    if norm:
        out = F.rms_norm(wide(out), out.shape[-1:], eps=1e-12).to(out.dtype)
    return out if gate is None else out * F.silu(by_head(gate(tokens(name, context)), out.shape[1]))


def wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """In the wider of float32 and its dtype."""
    return x.to(torch.promote_types(torch.float32, x.dtype))
