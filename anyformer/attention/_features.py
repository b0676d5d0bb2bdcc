"""What attentions share whose weights are products of features: the call of the operator, and the positions still to come."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.context import Context
from anyformer.forms import Form
from anyformer.ops.draws import generator
from anyformer.ops.linear import LinearState, linear_attention, linear_attention_with_state

LATER = {
    Form.DECAY: "a running sum that fades with distance",
    Form.TOEPLITZ: "a fast Fourier transform over offsets",
    Form.GRID: "a fast Fourier transform over rows and columns of a full grid",
    Form.BOXES: "sums over rectangles of the grid, from running sums over rows and columns",
    Form.AUGMENT: "random features of the widened queries and keys",
    Form.TABLE: "a band of exact pairs and prefix sums beyond the clip",
    Form.VALUE: "the same band and prefix sums on values",
}
"""Exact forms that no attention of this family has yet."""

REFUSAL = (
    "it compares no pair of query and key, so there is no score to change; use an encoding that is added at the embedding or "
    "rotates, such as sinusoidal or rope"
)


def attend(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    context: Context,
    *,
    log_decay: Float[Tensor, " h"] | Float[Tensor, "#b #h m"] | None = None,
    q_den: Float[Tensor, "b h n e"] | None = None,
    k_den: Float[Tensor, "b k m e"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
    signed: bool = False,
    elu1: bool = False,
) -> Float[Tensor, "b h n v"]:
    """`linear_attention` over the pairs of the context, from its cache where it has one, between TURN and its way back.

    Args:
        elu1: whether q and k are still to be mapped to elu(x) + 1.
    """
    encoding, cache, keys = context.encoding, context.cache, context.keys
    v = v if encoding.turn is None else encoding.turn(v)
    facts = {
        "keep": keys.keep,
        "documents": keys.documents,
        "log_decay": encoding.gates if log_decay is None else log_decay,
        "q_den": q_den,
        "k_den": k_den,
        "normalise": normalise,
        "eps": eps,
        "signed": signed,
        "features": "elu1" if elu1 else "given",
    }
    if cache is None:
        out = linear_attention(q, k, v, causal=context.causal, **facts)
    else:
        state = LinearState(cache.state["s"], cache.state["z"]) if cache.state else None
        out, state = linear_attention_with_state(q, k, v, state=state, **facts)
        cache.state |= state._asdict()
    return out if encoding.turn_back is None else encoding.turn_back(out)


@torch.no_grad()
def draw(
    rows: Float[Tensor, "k r d"], make: Callable[[int, int, torch.Generator], Tensor], seed: int, *role: object
) -> None:
    """Draw the random rows of each head in place; on the meta device there is nothing to draw."""
    if not rows.is_meta:
        for head, own in enumerate(rows):
            own.copy_(make(own.shape[0], own.shape[1], generator(seed, *role, head)))


def fresh_seed() -> int:
    """A seed from the global generator, for rows that training wants to draw anew."""
    return int(torch.randint(2**62, ()))
