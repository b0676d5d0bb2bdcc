"""Weights that are products of features and fade from token to token: one running sum, and a state to continue from."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.attention._products import Products
from anyformer.context import Context, LayerCache
from anyformer.errors import SpecError
from anyformer.ops.linear import LinearState, linear_attention, linear_attention_with_state, starts


def running(x: Products, context: Context) -> Float[Tensor, "b h n v"]:
    """The outputs of the pairs of the context, from its cache where it has one."""
    q_den, k_den = (None, None) if x.counted is None else x.counted
    cache, keys, rule = context.cache, context.keys, x.rule
    facts = {
        "keep": keys.keep,
        "documents": keys.documents,
        "log_decay": x.log_decay,
        "q_den": q_den,
        "k_den": k_den,
        "normalise": rule.denominator != "none",
        "eps": rule.eps,
        "signed": rule.signed,
        "features": rule.features,
    }
    if cache is None:
        return linear_attention(x.q, x.k, x.v, causal=context.causal, **facts)
    state = LinearState(cache.state["s"], cache.state["z"]) if "s" in cache.state else None
    out, state = linear_attention_with_state(x.q, x.k, x.v, state=state, **facts)
    cache.state |= state._asdict()
    return out


def by_distance(context: Context, new: int) -> Float[Tensor, " h"] | Float[Tensor, "#b h m"] | None:
    """The log of the factor that DECAY puts between each of the `new` last keys and what comes before it; None where positions do
    not go with the order of tokens, so that no running sum has their distances.

    Raises:
        SpecError: such positions while a sequence is continued.
    """
    rates, queries, keys, cache = context.encoding.rates, context.queries, context.keys, context.cache
    assert rates is not None, "bound without DECAY"
    tokens = keys.part(keys.length - new, keys.length)
    if context.encoding.arithmetic:
        if cache is not None:
            _remember(cache, tokens.positions, tokens.keep, new)
        alike = queries is keys or cache is not None or (queries.keep is None and keys.keep is None)
        return -rates if alike and (context.causal or queries.length <= keys.length) else None
    ordered = queries.length <= new and (cache is not None or queries is keys)
    if not ordered or torch.compiler.is_compiling() or tokens.positions.is_meta:
        return None
    before = _before(tokens.positions, tokens.keep, None if cache is None else cache.state.get("at"))
    steps = tokens.positions - before
    if keys.documents is not None:
        cut = starts(keys.documents, keys.keep)[:, keys.length - new :]
        steps = steps.masked_fill(cut, 0)
    if tokens.keep is not None:
        steps = steps.masked_fill(~tokens.keep, 0)
    everywhere = queries.without is None and keys.without is None
    if everywhere and bool((steps >= 0).all()):
        if cache is not None:
            _remember(cache, tokens.positions, tokens.keep, new)
        return -rates[:, None] * steps[:, None]
    if cache is not None:
        raise SpecError(
            "a sequence that is continued from a running sum needs a position for every token, none smaller than the one before "
            "it; leave positions out, or use softmax"
        )
    return None


def _before(positions: Int[Tensor, "#b m"], keep: Bool[Tensor, "b m"] | None, at: Tensor | None) -> Int[Tensor, "#b m"]:
    """The position of the last real token before each; its own where there is none."""
    if not positions.shape[1]:
        return positions
    if keep is None:
        first = positions[:, :1] if at is None else at.to(positions.dtype).expand(len(positions), -1)
        return torch.cat([first, positions[:, :-1]], dim=1)
    positions = positions.expand(keep.shape)
    index = torch.arange(keep.shape[1], device=keep.device).expand(keep.shape)
    last = torch.where(keep, index, -1).cummax(dim=1).values
    last = F.pad(last[:, :-1], (1, 0), value=-1)
    first = positions if at is None else at.to(positions.dtype)
    return torch.where(last < 0, first, positions.gather(1, last.clamp(min=0)))


def _remember(cache: LayerCache, positions: Tensor, keep: Tensor | None, new: int) -> None:
    """Keep the position of the last real token of each row."""
    if not new:
        return
    positions = positions.expand(cache.batch_size, -1)
    at = cache.state.get("at")
    if keep is None:
        cache.state["at"] = positions[:, -1:].clone()
        return
    index = torch.arange(new, device=keep.device).expand(keep.shape)
    last = torch.where(keep, index, -1).amax(dim=1, keepdim=True)
    newest = positions.gather(1, last.clamp(min=0))
    cache.state["at"] = newest if at is None else torch.where(last < 0, at, newest)
