"""`attend`: one correct softmax attention over tensors, any pattern and any position encoding."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.attention import softmax
from anyformer.context import Context, Encoding, truths
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form, check
from anyformer.model.build import build_position
from anyformer.pattern import flag_ids
from anyformer.pattern.base import Pattern
from anyformer.pattern.read import pattern_of
from anyformer.position.base import Position
from anyformer.position.bind import bind
from anyformer.side import Side, whole
from anyformer.site import Site


def attend(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    pattern: Pattern | str | None = None,
    causal: bool = False,
    attention_mask: Bool[Tensor, "b m"] | Int[Tensor, "b m"] | None = None,
    document_ids: Int[Tensor, "b m"] | None = None,
    global_mask: Bool[Tensor, "b m"] | None = None,
    mask: Bool[Tensor, "#b #h n m"] | None = None,
    bias: Float[Tensor, "#b #h n m"] | None = None,
    position: str | Position | None = None,
    q_positions: Int[Tensor, "#b n *a"] | None = None,
    k_positions: Int[Tensor, "#b m *a"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " h"] | None = None,
    dropout: float = 0.0,
    impl: softmax.Impl = "auto",
) -> Float[Tensor, "b h n v"]:
    """Softmax attention of queries over keys and values.

        out_i = sum_j softmax_j(scale * q_i . k_j + bias_ij) v_j    over the pairs that may meet

    Places are indices, the last query at the last key (so for n < m the queries are the newest tokens). Query head h reads key head
    h // (h / k). A query that may look nowhere gives exactly 0.

    Args:
        pattern: which pairs may meet, for example `af.Local(128) | af.Global([0])`, or a text such as "local(128)"; None: all.
        causal: whether a query sees only keys of its own place or before.
        attention_mask: which keys are real tokens (True or 1).
        document_ids: document of each key; the queries are the last n. Different documents never meet.
        global_mask: keys (and the queries at their places) that a `Flagged()` pattern treats as global; `Flagged([13, 14])` needs
            it here, where token ids are not known.
        mask: your own pairs, True where they may meet; read densely.
        bias: your own term on the scaled logits; read densely, with gradient.
        position: an encoding: a spec without weights such as "rope" or "alibi", or a module from `af.build_position`.
        q_positions: what the encoding reads of the queries; None: their places.
        k_positions: the same of the keys.
        scale: factor on q . k; None: the encoding's own, or d ** -0.5.
        softcap: c in `c * tanh(logits / c)`, before bias and mask; None: none.
        sink: for each head the logit of one more key, which every query meets and which holds no value; with gradient. None: none.
        dropout: probability of dropping a weight.
        impl: "reference" writes the softmax out, "torch" calls the fused dense kernel, "tiles" computes the pattern's pairs only,
            "flex" the same through FlexAttention (no gradient on a CPU); "auto" takes what is cheapest and can do it.

    Raises:
        SpecError: a wrong spec, a spec of an encoding with weights, or an impl that cannot do what was asked.
        ValueError: an argument whose shape or kind of numbers does not fit.
        IncompatibleError: an encoding that does not act inside attention.
    """
    keys = _keys(k, attention_mask, document_ids, global_mask, k_positions)
    own = {"mask": mask, "bias": bias, "softcap": softcap, "sink": _sink(sink, q), "dropout": dropout}
    context = _context(q, keys, q_positions, causal=causal, pattern=pattern, **own)
    q, k, context = _place(q, k, context, position)
    return softmax.attend(q, k, v, context, scale, impl)


def attend_with_lse(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b k m d"],
    v: Float[Tensor, "b k m v"],
    *,
    pattern: Pattern | str | None = None,
    causal: bool = False,
    attention_mask: Bool[Tensor, "b m"] | Int[Tensor, "b m"] | None = None,
    document_ids: Int[Tensor, "b m"] | None = None,
    global_mask: Bool[Tensor, "b m"] | None = None,
    mask: Bool[Tensor, "#b #h n m"] | None = None,
    bias: Float[Tensor, "#b #h n m"] | None = None,
    position: str | Position | None = None,
    q_positions: Int[Tensor, "#b n *a"] | None = None,
    k_positions: Int[Tensor, "#b m *a"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h n v"], Float[Tensor, "b h n"]]:
    """`attend`, with the log of every row's normaliser (-inf where a query may look nowhere), to merge exact unions of keys.

    Args and errors are those of `attend`.
    """
    keys = _keys(k, attention_mask, document_ids, global_mask, k_positions)
    context = _context(
        q, keys, q_positions, causal=causal, pattern=pattern, mask=mask, bias=bias, softcap=softcap, dropout=dropout
    )
    q, k, context = _place(q, k, context, position)
    return softmax.attend_with_lse(q, k, v, context, scale)


def _sink(sink: Tensor | None, q: Tensor) -> Tensor | None:
    heads = q.shape[1]
    if sink is not None and not (isinstance(sink, Tensor) and sink.shape == (heads,) and sink.is_floating_point()):
        kind = f"shape {list(sink.shape)} of {sink.dtype}" if isinstance(sink, Tensor) else repr(sink)
        raise ValueError(f"sink: expected a floating number for each of the {heads} query heads, got {kind}")
    return sink


def _keys(
    k: Tensor,
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    global_mask: Tensor | None,
    k_positions: Tensor | None,
) -> Side:
    m = k.shape[2]
    given = {
        "attention_mask": attention_mask,
        "document_ids": document_ids,
        "global_mask": global_mask,
        "k_positions": k_positions,
    }
    for name, part in given.items():
        if part is not None and part.shape[1] != m:
            raise ValueError(f"{name}: expected one entry for each of the {m} keys, got shape {list(part.shape)}")
    indices = torch.arange(m, device=k.device)[None]  # nothing is moved here: places are indices
    return Side(
        places=indices,
        positions=indices if k_positions is None else whole("k_positions", k_positions),
        keep=truths("attention_mask", attention_mask),
        documents=document_ids,
        flags=truths("global_mask", global_mask),
        arithmetic=k_positions is None,
    )


def _context(
    q: Tensor,
    keys: Side,
    q_positions: Tensor | None,
    *,
    causal: bool,
    pattern: Pattern | str | None,
    **facts: Any,
) -> Context:
    n, m = q.shape[2], keys.length
    places = torch.arange(m - n, m, device=q.device)[None]  # the last query sees the last key
    documents = keys.documents
    if documents is not None and n > m:
        raise ValueError(
            f"document_ids: the queries are the last of the {m} keys, so there can be at most {m} of them, got {n}"
        )
    queries = Side(
        places=places,
        positions=places if q_positions is None else whole("q_positions", q_positions),
        documents=None if documents is None else documents[:, m - n :],
        arithmetic=q_positions is None,
    )
    facts["pattern"] = None if pattern is None else pattern_of(pattern)
    ids = [] if facts["pattern"] is None else list(flag_ids(facts["pattern"]))
    if ids and keys.flags is None:
        raise ValueError(
            f"the pattern flags tokens of ids {ids}, which attend does not know: pass "
            f"global_mask=torch.isin(tokens, torch.tensor({ids}))"
        )
    # torch.compile cannot call a field's factory
    return Context(causal=causal, queries=queries, keys=keys, encoding=Encoding(), **facts)


def _place(q: Tensor, k: Tensor, context: Context, position: str | Position | None) -> tuple[Tensor, Tensor, Context]:
    if position is None:
        return q, k, context
    h, hk, d = q.shape[1], k.shape[1], q.shape[3]
    site = Site(h * d, h, kv_heads=hk, head_dim=d, causal=context.causal, max_length=max(context.keys.length, 1))
    if not isinstance(position, Position):
        spec, position = position, build_position(position, site)
        if any(True for _ in position.parameters()):
            raise SpecError(
                f"position={spec!r} has weights, which a function cannot keep: build it once with "
                f"af.build_position({spec!r}, site) and pass the module"
            )
    if all(offered == (Form.EMBED,) for offered in position.forms) and position.forms:
        raise IncompatibleError(
            f"{position.name} is added to token vectors before attention: use Transformer, or add it yourself"
        )
    if position.reads_tokens:
        raise IncompatibleError(
            f"{position.name} reads the tokens that keys are made of, which a function does not have: use MultiHead or Transformer"
        )
    if (Form.SHIFT,) in position.forms:
        raise IncompatibleError(
            f"{position.name} is added to the projections of a layer, which a function does not have: use MultiHead or Transformer"
        )
    pattern = context.pattern if (Form.ROW,) in position.forms else None
    assert pattern is None or isinstance(pattern, Pattern)
    attention = softmax.Softmax(site, pattern=pattern)
    verdict = check(attention, position, site)
    encoding = bind(position, verdict.forms, context.queries, context.keys)
    if encoding.rotate is not None:
        q, k = encoding.rotate(q, k)
    return q, k, replace(context, encoding=encoding)
