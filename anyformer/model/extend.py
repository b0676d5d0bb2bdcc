"""A trained model taken to longer inputs with the weights it has.

Papers: tables of Su 2020, https://kexue.fm/archives/7947; rotary scalings as named in `anyformer.position._scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import cast

import torch
from torch import Tensor, nn

from anyformer.attention.base import Attention
from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.base import Mixer
from anyformer.model.build import AnySpec, build_position
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.position.base import Position
from anyformer.spec import Spec, parse

METHODS = (
    "plain",
    "random_rows",
    "stretch",
    "hierarchical",
    "interpolate",
    "ntk",
    "dynamic_ntk",
    "yarn",
    "longrope",
    "llama3",
)
_WITHOUT_KNOBS = ("plain", "random_rows", "stretch")


def extend(model: Transformer, *, to: int, method: AnySpec) -> Transformer:
    """A model for inputs of `to` tokens with the weights of a model trained on `max_length` tokens, which stays as it is.

    Methods, with L for the model's max_length; each fits some encodings:
        plain         nothing changes but max_length: encodings without a table, or with one that is long enough.
        random_rows   rows L.. of a table are drawn as at the start of training; shorter inputs stay as they were.
        stretch       the rows of a table are interpolated to `to` rows, a grid resampled, a clock slowed down by to / L.
        hierarchical  `hierarchical(alpha=0.4)`: pairs of the L rows make the rows beyond, up to L^2 tokens; shorter inputs stay as
                      they were.
        interpolate, ntk, dynamic_ntk, yarn, longrope, llama3
                      the scalings of `rope` (interpolate: `linear`), with factor to / L and original L unless the spec says
                      otherwise: `yarn(beta_fast=16)`. With dynamic_ntk (factor 1) shorter inputs stay as they were, up to
                      rounding. longrope needs the factors it was searched for: `longrope(short=[...], long=[...])`.

    In a model with several encodings those that the method does not fit stay plain, where they can.

    Args:
        model: trained on inputs of up to its max_length.
        to: tokens, more than max_length.
        method: a name, or a spec with knobs.

    Returns:
        A model of its own, in the mode, with the dtype and on the device of the given one; `carried` says what became of
        every weight.

    Raises:
        SpecError: `to` is not above max_length, no such method, wrong knobs, or more tokens than the method can give places to.
        IncompatibleError: the method does not fit the encoding, or an attention cannot serve longer inputs without training.
    """
    if not isinstance(model, Transformer):
        raise SpecError(f"extend: expected a Transformer, got {type(model).__name__}; load one with from_pretrained")
    config, way = model.config, _method(method)
    if isinstance(to, bool) or not isinstance(to, int) or to <= config.max_length:
        raise SpecError(
            f"extend: expected `to` as a whole number of tokens above the model's max_length={config.max_length}, got {to!r}"
        )
    longer_config = replace(config, position=_positions(config, way, to), max_length=to)
    with torch.device("meta"):
        longer = Transformer(longer_config)
    _admit(longer, to)
    longer.load_state_dict(_state(model, longer, way, to), assign=True)
    return longer.train(model.training)


@dataclass(frozen=True)
class Carried:
    """What became of every weight and buffer of a model that was extended; printed, it says so.

    Args:
        fates: for each name in the model before, and for names that are new: "kept" (bit for bit), "kept as NAME", "kept with
            N more rows", "other values", "gone" or "new", with the shapes where they differ.
    """

    fates: Mapping[str, str]

    def __str__(self) -> str:
        changed = {name: fate for name, fate in self.fates.items() if fate != "kept"}
        lines = [f"{len(self.fates) - len(changed)} of {len(self.fates)} tensors kept bit for bit"]
        return "\n".join([*lines, *(f"{name}: {fate}" for name, fate in changed.items())])


def carried(before: Transformer, after: Transformer) -> Carried:
    """What became of the weights of `before` in `after`, found by comparing them.

    Raises:
        SpecError: one of them is no Transformer.
    """
    for name, model in (("before", before), ("after", after)):
        if not isinstance(model, Transformer):
            raise SpecError(
                f"carried: expected {name} to be a Transformer, got {type(model).__name__}; give the model that was extended "
                "and the one that `extend` returned"
            )
    old, new = before.state_dict(), after.state_dict()
    left = {name: tensor for name, tensor in new.items() if name not in old}
    fates: dict[str, str] = {}
    for name, tensor in old.items():
        if name in new:
            fates[name] = _fate(tensor, new[name])
            continue
        renamed = next((other for other, found in left.items() if _same(tensor[-len(found) :], found)), None)
        fates[name] = "gone" if renamed is None else f"kept as {renamed}"
        if renamed is not None:
            unread = len(tensor) - len(left.pop(renamed))
            fates[name] += f" but for the first {unread} rows, which no position read" if unread else ""
    return Carried(fates | dict.fromkeys(left, "new"))


def _method(method: AnySpec) -> Spec:
    way = parse(method)
    if way.name not in METHODS:
        near = get_close_matches(way.name, METHODS, n=2, cutoff=0.6)
        hint = f" did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise SpecError(f"extend: there is no method {way.name!r};{hint} there are: {', '.join(METHODS)}")
    if way.args:
        raise SpecError(
            f"extend: expected the knobs of {way.name} by name, as in hierarchical(alpha=0.3) and yarn(factor=8), got {way}"
        )
    taken = [name for name, _ in way.knobs]
    if taken and way.name in _WITHOUT_KNOBS:
        raise SpecError(f"extend: {way.name} has no knobs, got {', '.join(taken)}; write {way.name!r}")
    if way.name == "hierarchical" and set(taken) - {"alpha"}:
        raise SpecError(
            f"extend: hierarchical has one knob here, alpha, got {', '.join(taken)}; its rows are the model's"
        )
    return way


def _positions(config: ModelConfig, way: Spec, to: int) -> str | tuple[str, ...]:
    """The encodings of the longer model."""
    texts = config.position if isinstance(config.position, tuple) else (config.position,)
    with torch.device("meta"):
        built = [build_position(text, config.site()) for text in texts]
    if not any(way.name in each.extensions for each in built):
        offers = {f"{text} takes {', '.join(each.extensions)}": None for text, each in zip(texts, built, strict=True)}
        raise IncompatibleError(f"extend: {way.name} does not fit {' and '.join(map(str, texts))}; {'; '.join(offers)}")
    specs = []
    for text, each in zip(texts, built, strict=True):
        chosen = _way_of(each, way)
        if chosen is None:
            raise IncompatibleError(
                f"extend: {way.name} does not fit {text}, which takes {', '.join(each.extensions)}, "
                "and a model is extended in one way; use one encoding"
            )
        specs.append(str(each.extended(parse(text), chosen, to)))
    return specs[0] if len(specs) == 1 else tuple(specs)


def _way_of(position: Position, way: Spec) -> Spec | None:
    """How an encoding of a model goes along: in this way, or unchanged."""
    if way.name in position.extensions:
        return way
    return Spec("plain") if "plain" in position.extensions else None


def _admit(longer: Transformer, to: int) -> None:
    """Refuse encodings that end before `to` and attentions that would become others."""
    for part in longer.modules():
        if isinstance(part, Position) and isinstance(part.limit, int) and part.limit < to:
            raise SpecError(
                f"extend: {part.name} has {part.limit} positions here, got to={to}; use to={part.limit} or less"
            )
        if isinstance(part, Attention) and part.spans:
            raise IncompatibleError(
                f"extend: {part.name} measures distances by max_length, so that its outputs would change; "
                f"train it with max_length={to}, or use an attention such as softmax or linear"
            )


def _state(model: Transformer, longer: Transformer, way: Spec, to: int) -> dict[str, Tensor]:
    """The weights and buffers of the longer model."""
    old = model.state_dict()
    encodings = _encodings(model)
    found: dict[str, Tensor] = {}
    for path, part in encodings.items():
        chosen = _way_of(part, way)
        if chosen is None:  # encodings of blocks were refused before
            raise IncompatibleError(
                f"extend: the head's {part.name} ({path}) ends at max_length and {way.name} does not fit it; "
                'take the weights to head="mlm" with warm_start first, or train with enhanced_mlm(position=sinusoidal)'
            )
        found |= {f"{path}.{name}": tensor for name, tensor in part.carry(chosen, to).items()}
    inside = tuple(f"{path}." for path in encodings)
    found |= {name: tensor for name, tensor in old.items() if not name.startswith(inside)}
    for name, empty in longer.state_dict().items():
        if name not in found or found[name].shape != empty.shape:
            raise IncompatibleError(_why(longer, name, old.get(name), empty))
    return {name: found[name].detach().clone() for name in longer.state_dict()}


def _encodings(model: nn.Module) -> dict[str, Position]:
    """The encodings by where they are, those inside another left out."""
    found: dict[str, Position] = {}
    for path, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, Position) and not path.startswith(tuple(f"{outer}." for outer in found)):
            found[path] = part
    return found


def _why(longer: Transformer, name: str, held: Tensor | None, wanted: Tensor) -> str:
    path = name.rpartition(".")[0]
    while not isinstance(owner := longer.get_submodule(path), Attention | Mixer | Position) and path:
        path = path.rpartition(".")[0]
    method = cast(str, owner.name) if isinstance(owner, Attention | Mixer | Position) else "the model"
    shapes = f"{'none' if held is None else list(held.shape)} trained, {list(wanted.shape)} needed"
    return (
        f"extend: {method} holds numbers sized by max_length ({name}: {shapes}), and others cannot be had without training; "
        f"train it with max_length={longer.config.max_length}, or use a method without them such as softmax, local(128) or linear"
    )


def _fate(before: Tensor, after: Tensor) -> str:
    if _same(before, after):
        return "kept"
    if before.shape[1:] == after.shape[1:] and len(after) > len(before) and torch.equal(before, after[: len(before)]):
        return f"kept with {len(after) - len(before)} more rows"
    same_shape = before.shape == after.shape
    return "other values" if same_shape else f"other values, {list(before.shape)} -> {list(after.shape)}"


def _same(before: Tensor, after: Tensor) -> bool:
    return before.shape == after.shape and torch.equal(before, after)
