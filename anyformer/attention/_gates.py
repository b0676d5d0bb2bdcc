"""What attentions share whose gates are projections of the tokens themselves."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.forms import Form

LATER = {Form.DECAY: "a state that fades with distance too"}
"""Exact forms that no gated attention has yet."""

REFUSAL = (
    "what it keeps of a key changes with every token in between, so no score belongs to a pair; use an encoding that is added at "
    "the embedding or rotates, such as sinusoidal or rope"
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
