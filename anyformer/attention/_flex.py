"""Softmax attention through FlexAttention: the path on a GPU, whose kernel skips the blocks that a pattern leaves out."""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Full
from anyformer.pattern.pairs import facts

_COMPILED = 256  # shapes, patterns and dtypes that one process may compile


def fits(q: Tensor, k: Tensor, context: Context) -> bool:
    """Whether FlexAttention can do it: pairs by index, and terms on logits that are a number for each head and offset."""
    encoding, pattern = context.encoding, context.pattern
    own = (context.cache, context.mask, context.bias, context.sink, encoding.values, encoding.row)
    if (
        any(part is not None for part in own)
        or context.dropout
        or not (pattern is None or isinstance(pattern, Pattern))
    ):
        return False
    if not q.numel() or not k.numel() or not context.aligned:
        return False
    if encoding.logits is None:
        return True
    if encoding.offsets is None or not encoding.arithmetic or (pattern is None and context.keys.keep is not None):
        return False
    tables = encoding.offsets(0, 0)
    return tables.keys is None and tables.queries is None


def pays(q: Tensor, k: Tensor, v: Tensor, context: Context) -> bool:
    """Whether "auto" takes it: for patterns on a GPU, at the widths that its kernels have."""
    if not q.is_cuda or context.pattern is None or torch.compiler.is_compiling():
        return False
    return min(q.shape[3], v.shape[3]) >= 16 and fits(q, k, context)


def run(q: Tensor, k: Tensor, v: Tensor, context: Context, scale: float) -> Float[Tensor, "b h n v"]:
    """The same as the dense reference, where it `fits`.

    Raises:
        SpecError: a gradient is needed on a CPU.
    """
    n, m = q.shape[2], k.shape[2]
    offsets = context.encoding.offsets
    bias = None if offsets is None else offsets(1 - m, n - 1).bias
    needing = [part for part in (q, k, v, bias) if part is not None and part.requires_grad]
    if needing and torch.is_grad_enabled() and not q.is_cuda:
        # refused before the call: one failed backward makes torch's compiled function slow for good, without a word
        raise SpecError('impl="flex" has no gradient on a CPU; call it under torch.no_grad(), or use impl="auto"')
    known = facts(context)
    pattern = Full() if context.pattern is None else context.pattern
    assert isinstance(pattern, Pattern)
    mask = pattern.block_mask(n, m, heads=q.shape[1], facts=known, device=q.device, also=_mask(context, m - n))
    # its limit would make torch leave the kernel for the slow form
    with torch._dynamo.config.patch(recompile_limit=_COMPILED, fail_on_recompile_limit_hit=True):
        return _compiled()(
            q,
            k,
            v,
            score_mod=_score(bias, n, context.softcap, q),
            block_mask=mask,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


@cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _score(bias: Tensor | None, n: int, softcap: float | None, q: Tensor) -> Callable[..., Tensor] | None:
    if bias is None and softcap is None:
        return None
    table = None if bias is None else bias.to(q.device, torch.promote_types(torch.float32, q.dtype))

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        return score if table is None else score + table[head, key - query + (n - 1)]

    return score_mod


def _mask(context: Context, shift: int) -> Callable[..., Tensor] | None:
    """Padding and documents, which no pattern knows."""
    keep, documents = context.keys.keep, context.keys.documents
    if keep is None and documents is None:
        return None

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= 0
        if keep is not None:
            allowed = allowed & keep[batch, key]
        if documents is not None:
            allowed = allowed & (documents[batch, query + shift] == documents[batch, key])
        return allowed

    return mask_mod
