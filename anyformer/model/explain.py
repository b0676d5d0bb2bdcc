"""What a layer looked at: the weights of some rows, and what the scores behind them are made of."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from anyformer.context import Context
from anyformer.errors import SpecError
from anyformer.mixer.base import Mixer
from anyformer.model.parts import kept
from anyformer.side import left_order


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

    The weights w of out_i = sum_j w_ij v_j by head, explicit or implied (`Mixer.pair_weights`). Where there are none, as in a mixer
    without values or where channels are weighted differently, the influence |d out_i / d x_j| (Frobenius norm), each row scaled to
    the sum 1, as one head. Rows of padding are 0.

    Of a mixer that shortens the rows are its averages.

    Raises:
        SpecError: a row or head that does not exist.
    """
    mixer = call.mixer
    _exist_in(call, rows, heads)
    seen = _watch(call)
    slots = seen.slots(rows)
    with evaluating(mixer):
        found = mixer.pair_weights(seen.x, seen.context, slots)
    if found is None:
        _exist("head", heads or (), 1)
        return _influence(call, rows)
    keep = kept([mixer], seen.context.queries.keep)
    if keep is not None:
        found = found.masked_fill(~keep.gather(1, slots)[:, None, :, None], 0.0)
    return seen.by_token(found if heads is None else found[:, list(heads)])


@torch.no_grad()
def terms(call: Call, rows: Sequence[int], heads: Sequence[int] | None) -> dict[str, Float[Tensor, "b h r m"]]:
    """The terms of the scores of the asked rows, before any mask; they sum to the scores.

    "content" is what query and key score without a position, in most methods scale * q . k; "rotation" what rotating (or widening)
    them adds; "bias" what the encoding adds to the logits; "row" what it adds by the keys between. Of a synthesizer they are its
    parts: "dense", "random" and "content".

    Raises:
        SpecError: a row or head that does not exist.
        IncompatibleError: no score of the method belongs to a pair.
    """
    mixer = call.mixer
    _exist_in(call, rows, heads)
    seen = _watch(call)
    with evaluating(mixer):
        found = mixer.pair_terms(seen.x, seen.context, seen.slots(rows))
    return {name: seen.by_token(term if heads is None else term[:, list(heads)]) for name, term in found.items()}


@dataclass(frozen=True)
class _Seen:
    """What one forward of a layer handed to `mix`, and the order of its slots where that is not the tokens'."""

    order: Int[Tensor, "b n"] | None
    x: Float[Tensor, "b n c"]
    context: Context
    shortened: bool

    def slots(self, rows: Sequence[int]) -> Int[Tensor, "b r"]:
        """The slots of the asked tokens, or of the asked averages."""
        asked = torch.tensor(list(rows), device=self.x.device, dtype=torch.int64).expand(len(self.x), -1)
        if self.order is None or self.shortened:
            return asked
        return self.order.argsort(dim=1).gather(1, asked)

    def by_token(self, pairs: Float[Tensor, "b h r m"]) -> Float[Tensor, "b h r m"]:
        """The columns in the order of the tokens."""
        if self.order is None:
            return pairs
        return pairs.gather(3, self.order.argsort(dim=1)[:, None, None].expand(pairs.shape))


def _watch(call: Call) -> _Seen:
    mixer, keep = call.mixer, call.facts.get("attention_mask")
    handed: list[tuple[Tensor, Context]] = []
    mix = mixer.mix

    def noting(x: Tensor, context: Context) -> Tensor:
        handed.append((x, context))
        return mix(x, context)

    try:
        mixer.mix = noting
        with evaluating(mixer):
            mixer(call.x, **call.facts)
    finally:
        del mixer.mix
    order = left_order(keep.bool()) if mixer.ordered and keep is not None else None
    return _Seen(order, *handed[0], mixer.shortening is not None)


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


def _exist_in(call: Call, rows: Sequence[int], heads: Sequence[int] | None) -> None:
    shortening = call.mixer.shortening
    _exist("row", rows, call.x.shape[1] if shortening is None else shortening.count)
    _exist("head", heads or (), call.mixer.site.heads)


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
