"""Linear attention: keys and values are summed before they meet the queries, in O(n) time and memory, forward and backward.

Since the weight of a pair is a product of features, sum_j (q_i . k_j) v_j = q_i . (sum_j k_j v_j^T), and the sum in brackets is a
state of fixed size that runs along the sequence. What this cannot do: any set of pairs but all, all earlier ones, or those of one
document. A sum holds its keys for every query that reads it, so an arbitrary mask, a window or a pattern has no such form, and
neither has a bias that is not a product of factors of query and key; a caller refuses them.
"""

import contextlib
import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.ops.linear_node import run_pass
from anyformer.ops.linear_tiles import CHUNK, GONE, Operands, Rule, bounded, mapped, working
from anyformer.ops.softmax import repeat_heads


class LinearState(NamedTuple):
    """What the tokens so far leave for the next, in float32 or wider.

    `s` [b g f v], the faded sum of k_j v_j^T, and `z` [b g e], that of the denominator's keys, which only calls with `normalise`
    move on. g is the number of key heads, or that of the query heads where each of these fades in its own way.
    """

    s: Tensor
    z: Tensor


def linear_attention(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    *,
    causal: bool,
    keep: Bool[Tensor, "b m"] | None = None,
    log_decay: Float[Tensor, " h"] | Float[Tensor, "#b #h m"] | None = None,
    documents: Int[Tensor, "b m"] | None = None,
    q_den: Float[Tensor, "b h n e"] | None = None,
    k_den: Float[Tensor, "b k m e"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
    signed: bool = False,
    features: Literal["given", "elu1"] = "given",
    chunk: int | None = None,
) -> Float[Tensor, "b h n v"]:
    """Attention whose weights are products of features, optionally faded with distance.

    q and k are features already: a feature map (`feature_maps`) comes before. Query i stands at place p = i + m - n, so that the
    last query sees the last key. Over the keys j it may see (when causal j <= p, with documents those of its own)

        w_ij = exp(-|g_p - g_j|), where -g is the running sum of log_decay (1 without log_decay)
        out_i = sum_j w_ij (q_i . k_j) v_j / max(sum_j w_ij (q'_i . k'_j), eps)

    with q' = q and k' = k unless q_den and k_den are given. Query head h reads key head h // (h / k). Sums run in the wider of
    float32 and the dtypes given; the output has v's dtype. A query without any key gives 0 and a gradient of 0.

    Args:
        causal: whether a query sees keys up to its own place only; if not, it sees those before it, its own and those after it.
        keep: True for keys that may be read. What the others hold, even NaN, moves nothing, and they do not fade the others.
        log_decay: at most 0; for each head, or for each token of the keys, where entry t is the log of the factor on everything
            before t that is read from t on (and, not causal, on everything from t on that is read before t). -inf cuts the
            sequence before t. Learnable.
        documents: a number for each key; queries (the last n of them) meet only keys of their own. The tokens of one document are
            next to each other, apart from hidden ones.
        q_den, k_den: features of their own for the denominator. Rotary positions turn q and k in the numerator only, for turned
            features can cancel (Su et al. 2021, 2104.09864, eq. 19).
        normalise: whether there is a denominator at all (retention has none).
        eps: bound of the denominator, for positive features.
        signed: features may be negative: the denominator keeps its sign, and eps bounds its magnitude.
        features: "elu1" maps q and k to elu(x) + 1 here, as `elu1` before the call would, but without keeping the features.
        chunk: tokens that are compared pair by pair; None: 64, less for short sequences. Changes speed and rounding only.

    Raises:
        ValueError: more queries than keys with a log_decay or documents and not causal; an argument that does not fit.
    """
    if causal:
        return linear_attention_with_state(
            q, k, v, keep=keep, log_decay=log_decay, documents=documents, q_den=q_den, k_den=k_den, normalise=normalise, eps=eps,
            signed=signed, features=features, chunk=chunk,
        )[0]  # fmt: skip
    rule = _rule(features, normalise, eps, signed, chunk)
    x = _operands(q, k, v, q_den, k_den, log_decay, documents, keep, rule)
    with _full_precision(q):
        return _both_directions(x, rule)


def linear_attention_with_state(
    q: Float[Tensor, "b h n f"],
    k: Float[Tensor, "b k m f"],
    v: Float[Tensor, "b k m v"],
    *,
    state: LinearState | None = None,
    keep: Bool[Tensor, "b kept"] | None = None,
    log_decay: Float[Tensor, " h"] | Float[Tensor, "#b #h m"] | None = None,
    documents: Int[Tensor, "b known"] | None = None,
    q_den: Float[Tensor, "b h n e"] | None = None,
    k_den: Float[Tensor, "b k m e"] | None = None,
    normalise: bool = True,
    eps: float = 1e-6,
    signed: bool = False,
    features: Literal["given", "elu1"] = "given",
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b h n v"], LinearState]:
    """`linear_attention` with causal=True that continues after `state`, and the state after the last key.

    Tokens given one by one, in pieces or at once give the same outputs and states. Gradients flow through the states; detach them
    to train segment by segment.

    Args:
        state: what came before the first key; None: nothing.
        keep, documents: may be longer than the keys: the tokens before the first key are those in the state. Documents of just the
            keys let the first key continue the state's document.

    Raises:
        ValueError: more queries than keys although there is a state; an argument that does not fit.
    """
    n, m = q.shape[2], k.shape[2]
    if state is not None and n > m:
        raise ValueError(
            f"a state continues a sequence, where every query has a key: expected at most {m} queries, got {n}"
        )
    rule = _rule(features, normalise, eps, signed, chunk)
    x = _operands(q, k, v, q_den, k_den, log_decay, documents, keep, rule)
    with _full_precision(q):
        state = _first_state(x) if state is None else _fitting(state, x)
        if n < m:
            state = _absorb(_tokens(x, 0, 0, m - n), state, rule)
        if n == m == 1:  # decoding: no chunk to cut
            state = _absorb(x, state, rule)
            return _divided(*_read(x, state, rule), rule).to(v.dtype), state
        out, _, s, z = run_pass(_tokens(x, max(n - m, 0), max(m - n, 0), m), *state, rule)
        # clones, for a view would keep the states of all segments alive
        return out if n <= m else F.pad(out, (0, 0, n - m, 0)), LinearState(s.clone(), z.clone())


def _full_precision(q: Tensor) -> contextlib.AbstractContextManager:
    """Autocast would take the sums in half precision."""
    return contextlib.nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False)


def _rule(features: str, normalise: bool, eps: float, signed: bool, chunk: int | None) -> Rule:
    if eps <= 0:
        raise ValueError(f"eps: expected a number above 0, which keeps the denominator away from it, got {eps}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk: expected at least 1 token, got {chunk}; leave it out to let it be chosen")
    return Rule(features, False, "divide" if normalise else "none", eps, signed, CHUNK if chunk is None else chunk)


def _operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_den: Tensor | None,
    k_den: Tensor | None,
    log_decay: Tensor | None,
    documents: Tensor | None,
    keep: Tensor | None,
    rule: Rule,
) -> Operands:
    """The arguments checked, decay and documents made one fade, and keys repeated for query heads that fade differently."""
    (batch, heads), (groups, m) = q.shape[:2], k.shape[1:3]
    if heads % groups:
        raise ValueError(f"expected query heads in groups of one size, got {heads} query heads over {groups} key heads")
    if (q_den is None) != (k_den is None) or (
        q_den is not None and (rule.denominator == "none" or rule.features != "given")
    ):
        raise ValueError(
            'expected q_den and k_den both or neither, and only with normalise=True and features="given"; '
            f"got q_den {_kind(q_den)}, k_den {_kind(k_den)}, normalise={rule.denominator != 'none'}, features={rule.features!r}"
        )
    for name, given in (("keep", keep), ("documents", documents)):
        if given is not None and (given.shape[0] != batch or given.shape[1] < m):
            raise ValueError(f"{name}: expected [{batch}, {m}], one entry a key, got {list(given.shape)}")
    hidden = None if keep is None else keep[:, keep.shape[1] - m :]
    fade = None if log_decay is None else _per_token(log_decay, hidden, batch, heads, m)
    if fade is not None and groups < heads and fade.shape[1] > 1:
        k, v, k_den = (
            repeat_heads(k, heads),
            repeat_heads(v, heads),
            None if k_den is None else repeat_heads(k_den, heads),
        )
    if documents is not None and m > 0:
        cut = starts(documents, keep)[:, None, documents.shape[1] - m :]
        fade = torch.where(cut, -math.inf, q.new_zeros((), dtype=torch.float32) if fade is None else fade)
    return Operands(q, k, v, q_den, k_den, fade, hidden)


def _kind(x: Tensor | None) -> str:
    return "None" if x is None else str(list(x.shape))


def _per_token(log_decay: Tensor, hidden: Tensor | None, batch: int, heads: int, m: int) -> Tensor:
    """The decay as a fade [b|1 h|1 m|1]; a hidden token does not fade what came before it."""
    if log_decay.shape == (heads,):
        fade = log_decay[None, :, None]
    elif (
        log_decay.dim() == 3
        and log_decay.shape[0] in (1, batch)
        and log_decay.shape[1] in (1, heads)
        and log_decay.shape[2] == m
    ):
        fade = log_decay
    else:
        raise ValueError(
            f"log_decay: expected [{heads}], one a head, or [{batch}, {heads}, {m}], one a head and key, "
            f"got {list(log_decay.shape)}"
        )
    fade = fade.to(torch.promote_types(fade.dtype, torch.float32))
    return fade if hidden is None else torch.where(hidden[:, None], fade, 0.0)


def starts(documents: Tensor, keep: Tensor | None) -> Tensor:
    """Bool[b t]: which tokens belong to another document than the last readable token before them."""
    if not documents.shape[1]:
        return torch.zeros_like(documents, dtype=torch.bool)
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    if keep is not None:
        index = torch.where(F.pad(keep, (documents.shape[1] - keep.shape[1], 0), value=True), index, -1).cummax(1)[0]
    before = F.pad(index[:, :-1], (1, 0), value=-1)
    other = documents.gather(1, before.clamp(min=0)) != documents
    other = other & (before >= 0)
    return other if keep is None else other & (index > before)


def _tokens(x: Operands, first_query: int, start: int, stop: int) -> Operands:
    """The queries from the first one on, and the keys from start to stop - 1."""
    q_den, k_den = x.q_den, x.k_den
    if q_den is not None and k_den is not None:
        q_den, k_den = q_den[:, :, first_query:], k_den[:, :, start:stop]
    fade = x.fade if x.fade is None or x.fade.shape[2] == 1 else x.fade[:, :, start:stop]
    keep = None if x.keep is None else x.keep[:, start:stop]
    return Operands(x.q[:, :, first_query:], x.k[:, :, start:stop], x.v[:, :, start:stop], q_den, k_den, fade, keep)


def _first_state(x: Operands) -> LinearState:
    shape = x.k.shape[:2]
    width = (x.k if x.k_den is None else x.k_den).shape[3]
    zeros = x.k.new_zeros(*shape, x.k.shape[3], x.v.shape[3], dtype=working(x))
    return LinearState(zeros, zeros.new_zeros(*shape, width))


def _fitting(state: LinearState, x: Operands) -> LinearState:
    """The state in the dtype of sums."""
    for name, given, fitting in zip(state._fields, state, _first_state(x), strict=True):
        if given.shape != fitting.shape:
            raise ValueError(
                f"state.{name}: expected {list(fitting.shape)}, got {list(given.shape)}; "
                "continue a state with the heads, features and kind of log_decay that made it"
            )
    return LinearState(*(y.to(working(x)) for y in state))


def _readable(x: Operands, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """The features of keys, the values and the denominator's features in the dtype of sums, with 0 for hidden tokens."""

    def shown(y: Tensor) -> Tensor:
        return y if x.keep is None else y.masked_fill(~x.keep[:, None, :, None], 0.0)

    k, v = shown(mapped(x.k.to(working(x)), rule.features)), shown(x.v.to(working(x)))
    return k, v, k if x.k_den is None else shown(x.k_den.to(working(x)))


def _absorb(x: Operands, state: LinearState, rule: Rule) -> LinearState:
    """The state after the keys of x, which no query reads."""
    k, v, k_den = _readable(x, rule)
    s, z = state
    if x.fade is not None:
        sums = x.fade.expand(-1, -1, k.shape[2]).double().clamp(min=GONE).cumsum(-1)
        onto = (sums[..., -1:] - sums).exp().to(k.dtype)[..., None]
        rest = sums[..., -1:].exp().to(k.dtype)
        shared = k_den is k
        k, s, z = k * onto, s * rest[..., None], z * rest
        k_den = k if shared else k_den * onto
    return LinearState(s + k.mT @ v, z + k_den.sum(2) if rule.denominator == "divide" else z)


def _both_directions(x: Operands, rule: Rule) -> Tensor:
    n, m, dtype, given = x.q.shape[2], x.k.shape[2], working(x), x.v.dtype
    if x.fade is None:
        num, den = _read(x, _absorb(x, _first_state(x), rule), rule)
    elif n > m:
        raise ValueError(
            f"with log_decay or documents every query needs a place among the keys: expected at most {m} queries, got {n}; "
            "leave both out for queries of another sequence"
        )
    else:
        q, q_den = F.pad(x.q, (0, 0, m - n, 0)), None if x.q_den is None else F.pad(x.q_den, (0, 0, m - n, 0))
        x = x._replace(q=q, q_den=q_den, v=x.v.to(dtype))
        apart = rule._replace(denominator="none" if rule.denominator == "none" else "apart")
        ahead = run_pass(x, *_first_state(x), apart)
        back = run_pass(x, *_first_state(x), apart._replace(reverse=True))
        num, den = ((ahead[i] + back[i])[:, :, m - n :] for i in (0, 1))
    return _divided(num, den, rule).to(given)


def _read(x: Operands, state: LinearState, rule: Rule) -> tuple[Tensor, Tensor]:
    """Numerator [b h n v] and denominator [b h n] of queries that all read one state."""
    groups, (heads, n) = state.z.shape[1], x.q.shape[1:3]

    def read(q: Tensor, sums: Tensor) -> Tensor:
        q = q.unflatten(1, (groups, heads // groups)).flatten(2, 3)
        return (q @ sums).unflatten(2, (heads // groups, n)).flatten(1, 2)

    q = mapped(x.q.to(working(x)), rule.features)
    return read(q, state.s), read(q if x.q_den is None else x.q_den.to(working(x)), state.z.unsqueeze(-1)).squeeze(-1)


def _divided(num: Tensor, den: Tensor, rule: Rule) -> Tensor:
    return num / bounded(den, rule).unsqueeze(-1) if rule.denominator == "divide" else num
