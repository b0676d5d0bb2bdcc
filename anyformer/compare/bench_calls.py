"""What is timed: the calls of one contender at one length, on inputs that all contenders share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anyformer.compare.bench_record import Contender, Measure, Setting
from anyformer.compare.trial import verdict_in_a_row
from anyformer.context import Context
from anyformer.forms import check
from anyformer.model.build import added_at_embedding, build_attention, build_mixer, build_position, slot
from anyformer.position.bind import bind
from anyformer.side import side

Call = Callable[[], object]


@dataclass(frozen=True)
class Calls:
    """The calls of a contender.

    Args:
        forward: without gradients, in evaluation.
        forward_backward: in training, the gradients of all inputs and weights.
        less: a part of the contender that is timed apart and subtracted.
    """

    forward: Call
    forward_backward: Call
    less: "Calls | None" = None

    def call(self, measure: Measure) -> Call:
        """The call of this kind."""
        return self.forward if measure == "forward" else self.forward_backward


class Inputs:
    """Random inputs by length and gradients by shape, each drawn once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.dtype: torch.dtype = getattr(torch, setting.dtype)
        self._drawn: dict[tuple, Tensor] = {}

    def heads(self, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b h n d]`."""
        shape = (self.setting.batch, self.setting.heads, length, self.setting.head_dim)
        q, k, v = (self._draw(name, shape, learned=True) for name in ("q", "k", "v"))
        return q, k, v

    def hidden(self, length: int) -> Tensor:
        """The input of a layer, `[b n c]`."""
        return self._draw("x", (self.setting.batch, length, self.setting.dim), learned=True)

    def gradient(self, like: Tensor) -> Tensor:
        """What a loss would send back."""
        return self._draw("gradient", tuple(like.shape), learned=False)

    def _draw(self, name: str, shape: tuple[int, ...], *, learned: bool) -> Tensor:
        key = (name, *shape)
        if key not in self._drawn:
            self._drawn[key] = torch.randn(shape).to(self.dtype).requires_grad_(learned)
        return self._drawn[key]


def refusal(contender: Contender, setting: Setting, length: int) -> str:
    """Why a pair of our own is not timed at all; "" where it is.

    Args:
        length: the longest.

    Raises:
        SpecError: a spec is wrong.
    """
    site = setting.site(length)
    judged = verdict_in_a_row(contender.attention, contender.position, site)
    if not judged.runs:
        return judged.reason
    with torch.device("meta"):
        placed = build_position(contender.position, site)
    if added_at_embedding(placed):
        return f"{placed.name} is added at the embedding and costs an attention nothing; time it with --position none"
    method = slot(contender.attention)[0]
    if setting.what == "attention" and method.kind != "attention":
        return f"{method.name} is a mixer, without queries and keys to hand over; time it with --what layer"
    return ""


def own_calls(contender: Contender, setting: Setting, length: int, inputs: Inputs) -> Calls:
    """The calls of dense attention or of a pair of our own."""
    if setting.what == "layer":
        attention = "softmax" if contender.role == "dense" else contender.attention
        position = "none" if contender.role == "dense" else contender.position
        x = inputs.hidden(length)
        layer = build_mixer(attention, position, setting.site(length)).to(inputs.dtype)
        made_for_them = type(layer).takes_flags or layer.flag_ids
        flags = first_token(setting, length) if made_for_them else None
        return calls_of(lambda: (layer(x, global_mask=flags),), (x, *layer.parameters()), inputs, (layer,))
    q, k, v = inputs.heads(length)
    if contender.role == "dense":
        causal = setting.causal
        return calls_of(lambda: (F.scaled_dot_product_attention(q, k, v, is_causal=causal),), (q, k, v), inputs)
    return _attention(contender, setting, length, inputs)


def _attention(contender: Contender, setting: Setting, length: int, inputs: Inputs) -> Calls:
    site = setting.site(length)
    attention = build_attention(contender.attention, site).to(inputs.dtype)
    position = build_position(contender.position, site).to(inputs.dtype)
    forms = check(attention, position, site).forms
    tokens = side(length, torch.device("cpu"), flags=first_token(setting, length) if attention.flag_ids else None)
    q, k, v = inputs.heads(length)
    x = inputs.hidden(length) if "x" in attention.reads else None

    def out() -> tuple[Tensor]:
        encoding = bind(position, forms, tokens, tokens)
        placed = (q, k)
        if encoding.rotate is not None and attention.rotates == "before":
            placed = encoding.rotate(q, k)
        return (attention(*placed, v, Context(setting.causal, tokens, tokens, x=x, encoding=encoding)),)

    leaves = (q, k, v, *(() if x is None else (x,)), *attention.parameters(), *position.parameters())
    return calls_of(out, leaves, inputs, (attention, position))


def first_token(setting: Setting, length: int) -> Tensor:
    """Bool[b n]: the first token of each row."""
    return (torch.arange(length) == 0).expand(setting.batch, -1)


def calls_of(
    out: Callable[[], Sequence[Tensor]],
    leaves: Iterable[Tensor],
    inputs: Inputs,
    modules: Sequence[nn.Module] = (),
    less: Calls | None = None,
) -> Calls:
    """The calls of a function of tensors.

    Args:
        out: what is timed.
        leaves: all that a gradient is asked for.
        modules: what is set to evaluation or training.
    """
    wanted = tuple(leaf for leaf in leaves if leaf.requires_grad)

    def forward() -> None:
        for module in modules:
            module.eval()
        with torch.no_grad():
            out()

    def forward_backward() -> None:
        for module in modules:
            module.train()
        made = out()
        torch.autograd.grad(made, wanted, [inputs.gradient(each) for each in made], allow_unused=True)

    return Calls(forward, forward_backward, less)
