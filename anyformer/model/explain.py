"""What a layer looked at: the weights of some rows, and what the scores behind them are made of."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anyformer.attention.softmax import Softmax
from anyformer.context import Context, Encoding, Offsets
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.mixer.base import Mixer
from anyformer.mixer.multihead import MultiHead
from anyformer.model.parts import kept
from anyformer.ops.softmax import repeat_heads
from anyformer.pattern.pairs import pairs
from anyformer.side import left_order

_PAIRS = {Form.BIAS, Form.SCORE}  # whoever reads these compares single pairs


@dataclass(frozen=True)
class Call:
    """What one forward hands to a mixer: its input, and the other arguments by name."""

    mixer: Mixer
    x: Float[Tensor, "b n c"]
    facts: dict[str, Any]

    @property
    def content(self) -> Float[Tensor, "b n c"] | None:
        """What keys and values were made of, where that was not x."""
        return self.facts.get("content")


@torch.no_grad()
def calls_of(model: nn.Module, forward: Callable[[], object]) -> list[Call]:
    """The calls of all mixers of a model in one forward, in eval mode."""
    calls: list[Call] = []

    def note(mixer: nn.Module, given: tuple, named: dict[str, Any]) -> None:
        calls.append(Call(cast(Mixer, mixer), given[0], named))

    mixers = [part for part in model.modules() if isinstance(part, Mixer)]
    with _hooked([mixer.register_forward_pre_hook(note, with_kwargs=True) for mixer in mixers]), evaluating(model):
        forward()
    return calls


@torch.no_grad()
def weights(call: Call, rows: Sequence[int], heads: Sequence[int] | None) -> Float[Tensor, "b h r m"]:
    """What each of the asked rows takes from each token.

    For an attention the weights w of out_i = sum_j w_ij v_j, explicit or implied: they are what it makes of values that name
    their key. Where there are none, as in a mixer without values or where channels are weighted differently, the influence
    |d out_i / d x_j| (Frobenius norm), each row scaled to the sum 1, as one head. Rows of padding are 0.

    Of a mixer that shortens the rows are its averages.

    Raises:
        SpecError: a row or head that does not exist.
    """
    mixer = call.mixer
    _exist("row", rows, call.x.shape[1] if mixer.shortening is None else mixer.shortening.count)
    if not isinstance(mixer, MultiHead):
        _exist("head", heads or (), 1)
        return _influence(call, rows)
    _exist("head", heads or (), mixer.site.heads)
    seen = _watch(mixer, call)
    chosen = list(range(mixer.site.heads)) if heads is None else list(heads)
    context = replace(seen.context, encoding=_without_values(seen.context.encoding))
    slots = seen.slots(rows)

    def attend(values: Tensor) -> Tensor:
        out = _rows(mixer.attention(seen.q, seen.k, values, context)[:, chosen], slots)
        keep = kept([mixer], context.queries.keep)
        return out if keep is None else out * keep.gather(1, slots)[:, None, :, None]

    b, kv_heads, m, width = seen.v.shape
    parts = []
    for start in range(0, m, width):
        names = seen.v.new_zeros(m, width)
        names[start : start + width] = torch.eye(width, dtype=names.dtype, device=names.device)[: m - start]
        parts.append(attend(names.expand(b, kv_heads, m, width))[..., : m - start])
    found = torch.cat(parts, dim=-1) if parts else seen.q.new_zeros(b, len(chosen), len(rows), 0)
    weighed, told = found @ repeat_heads(seen.v, mixer.site.heads)[:, chosen], attend(seen.v)
    if found.numel() and (weighed - told).abs().max() > 1e-3 * told.abs().max().clamp(min=1e-6):
        return _influence(call, rows)
    return seen.by_token(found)


@torch.no_grad()
def terms(call: Call, rows: Sequence[int], heads: Sequence[int] | None) -> dict[str, Float[Tensor, "b h r m"]]:
    """The terms of the scores of the asked rows, before any mask; they sum to the scores.

    "content" is scale * q . k of queries and keys without a position; "rotation" what rotating (or widening) them adds; "bias" what
    the encoding adds to the logits; "row" what it adds by the keys between.

    Raises:
        SpecError: a row or head that does not exist.
        IncompatibleError: the method scores no pair of query and key.
    """
    mixer = call.mixer
    if not isinstance(mixer, MultiHead) or not mixer.attention.compares or not _PAIRS & set(mixer.attention.forms):
        raise IncompatibleError(
            f"{mixer.name} scores no pairs of query and key; explain() shows what it takes from each token"
        )
    _exist("row", rows, call.x.shape[1])
    _exist("head", heads or (), mixer.site.heads)
    seen = _watch(mixer, call)
    encoding, slots = seen.context.encoding, seen.slots(rows)
    chosen = list(range(mixer.site.heads)) if heads is None else list(heads)
    scale = seen.bare_q.shape[-1] ** -0.5 if encoding.scale is None else encoding.scale
    q, k = seen.q, seen.k
    if encoding.rotate is not None and mixer.attention.rotates == "self":
        q, k = encoding.rotate(q, k)
    softmax = mixer.attention if isinstance(mixer.attention, Softmax) else None
    softcap = None if softmax is None else softmax.softcap

    def scores(q: Tensor, k: Tensor) -> Tensor:
        found = scale * _rows(q, slots) @ repeat_heads(k, q.shape[1]).mT
        return found if softcap is None else softcap * torch.tanh(found / softcap)

    found = {"content": scores(seen.bare_q, seen.bare_k)}
    total = scores(q, k)
    if encoding.rotate is not None:
        found["rotation"] = total - found["content"]
    wide = repeat_heads(k, q.shape[1])
    if encoding.logits is not None:
        found["bias"] = _rows(encoding.logits(q, wide).expand(*q.shape[:3], k.shape[2]), slots)
    if encoding.row is not None:
        context = replace(seen.context, pattern=None if softmax is None else softmax.pattern)
        allowed = pairs(context, q.shape[1])
        logits = scale * q @ wide.mT
        logits = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
        added = encoding.row(q, wide, logits) - logits  # of pairs that may not meet: infinity less infinity
        found["row"] = _rows(added.nan_to_num(nan=0.0), slots)
    return {name: seen.by_token(term[:, chosen]) for name, term in found.items()}


@dataclass
class _Seen:
    """What one forward of a layer handed to its attention, and the order of its slots where that is not the tokens'."""

    order: Int[Tensor, "b n"] | None
    bare_q: Tensor
    bare_k: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    context: Context
    shortened: bool

    def slots(self, rows: Sequence[int]) -> Int[Tensor, "b r"]:
        """The slots of the asked tokens, or of the asked averages."""
        asked = torch.tensor(list(rows), device=self.q.device, dtype=torch.int64).expand(len(self.q), -1)
        if self.order is None or self.shortened:
            return asked
        return self.order.argsort(dim=1).gather(1, asked)

    def by_token(self, pairs: Float[Tensor, "b h r m"]) -> Float[Tensor, "b h r m"]:
        """The columns in the order of the tokens."""
        if self.order is None:
            return pairs
        return pairs.gather(3, self.order.argsort(dim=1)[:, None, None].expand(pairs.shape))


def _watch(layer: MultiHead, call: Call) -> _Seen:
    bare: dict[nn.Module, Tensor] = {}
    handed: list[tuple[Tensor, Tensor, Tensor, Context]] = []

    def keep_output(module: nn.Module, given: Any, out: Tensor) -> None:
        bare[module] = out

    hooks = [each.register_forward_hook(keep_output) for each in (layer.q_norm, layer.k_norm)]
    hooks.append(layer.attention.register_forward_pre_hook(lambda module, given: handed.append(given)))
    with _hooked(hooks), evaluating(layer):
        layer(call.x, **call.facts)
    q, k, v, context = handed[0]
    keep = call.facts.get("attention_mask")
    order = left_order(keep.bool()) if layer.ordered and keep is not None else None
    bare_q = bare[layer.q_norm]
    shortened = layer.shortening is not None
    return _Seen(order, bare_q, bare.get(layer.k_norm, bare_q), q, k, v, replace(context, dropout=0.0), shortened)


def _influence(call: Call, rows: Sequence[int]) -> Tensor:
    found = call.x.new_zeros(len(call.x), 1, len(rows), call.x.shape[1])
    with torch.enable_grad(), evaluating(call.mixer):
        x = (call.x if call.content is None else call.content).detach().requires_grad_()
        out = call.mixer(x, **call.facts) if call.content is None else call.mixer(call.x, **call.facts | {"content": x})
        for number, row in enumerate(rows):
            for channel in range(out.shape[2]):
                (slope,) = torch.autograd.grad(out[:, row, channel].sum(), x, retain_graph=True)
                found[:, 0, number] += slope.square().sum(dim=-1)
    found = found.sqrt()
    total = found.sum(dim=-1, keepdim=True)
    return found / total.masked_fill(total == 0, 1.0)


def _without_values(encoding: Encoding) -> Encoding:
    """The encoding without what it does to values, which is no part of the weights."""
    offsets = encoding.offsets

    def logits_only(low: int, high: int) -> Offsets:
        assert offsets is not None
        return replace(offsets(low, high), values=None)

    forms = encoding.forms - {Form.VALUE, Form.TURN}
    return replace(
        encoding, forms=forms, turn=None, turn_back=None, values=None, offsets=None if offsets is None else logits_only
    )


def _rows(x: Float[Tensor, "b h n w"], slots: Int[Tensor, "b r"]) -> Float[Tensor, "b h r w"]:
    index = slots[:, None, :, None].expand(x.shape[0], x.shape[1], slots.shape[1], x.shape[3])
    return x.gather(2, index)


def _exist(what: str, asked: Sequence[int], count: int) -> None:
    wrong = [each for each in asked if not 0 <= each < count]
    if wrong:
        raise SpecError(f"explain: expected {what}s from 0 to {count - 1}, got {', '.join(map(str, wrong))}")


@contextmanager
def _hooked(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode, every part of it as before afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
