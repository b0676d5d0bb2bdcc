"""What a Transformer is made of, as one frozen value that is checked as a whole and survives JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from anyformer.errors import SpecError
from anyformer.model.build import AnySpec, position_slot, slot
from anyformer.site import Site
from anyformer.typing import Count, Fraction, Size

FORMAT = "anyformer-model"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The sizes and methods of a Transformer.

    Args:
        vocab: number of token ids.
        dim: width of the model.
        depth: number of blocks.
        heads: query heads of a block.  kv_heads: key and value heads, a divisor of heads; None: heads.
        head_dim: width of a head; None: dim / heads.
        attention: spec of an attention, a mixer or a pattern; a tuple gives one a block, repeated over the depth.
        position: spec of a position encoding; a tuple likewise.
        head: "lm" scores the next token, "mlm" the token itself, "classifier" the whole sequence.
        outputs: width of the head; None: vocab. A classifier needs its number of classes here.
        causal: whether a token may look at earlier tokens only; None: True for the head "lm", else False.
        max_length: longest sequence in tokens that tables and projections are made for.
        norm: "rms" or "layer", before every branch and before the head.
        feed_forward: "swiglu" or "gelu"; both have 8 dim^2 weights (rounded up to a hidden width of whole eights).
        qk_norm: whether queries and keys are RMS-normalised per head.
        dropout: probability, in training, of dropping an attention weight, a channel of the embedded tokens, or a channel
            that a branch adds.
        checkpointing: whether a block is computed again in the backward instead of being kept.
        seed: root of the initial weights and of every random structure.

    After construction `attention` and `position` hold the canonical text of their specs.

    Raises:
        SpecError: whatever is wrong, all faults in one message.
    """

    vocab: Size = 256
    dim: Size = 256
    depth: Size = 4
    heads: Size = 8
    kv_heads: Size | None = None
    head_dim: Size | None = None
    attention: AnySpec | tuple[AnySpec, ...] = "softmax"
    position: AnySpec | tuple[AnySpec, ...] = "rope"
    head: Literal["lm", "mlm", "classifier"] = "lm"
    outputs: Size | None = None
    causal: bool | None = None
    max_length: Size = 2048
    norm: Literal["rms", "layer"] = "rms"
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    qk_norm: bool = False
    dropout: Fraction = 0.0
    checkpointing: bool = False
    seed: Count = 0

    def __post_init__(self) -> None:
        faults = [
            fault for each in fields(self) if (fault := _type_fault(each.name, each.type, getattr(self, each.name)))
        ]
        if not faults:
            faults += self._set_specs("attention", slot) + self._set_specs("position", position_slot)
            faults += self._size_faults()
        if faults:
            raise SpecError("ModelConfig: " + "; ".join(faults))

    @property
    def is_causal(self) -> bool:
        """Whether a token may look at earlier tokens only."""
        return self.head == "lm" if self.causal is None else self.causal

    @property
    def width(self) -> int:
        """Number of outputs of the head."""
        return self.vocab if self.outputs is None else self.outputs

    @property
    def layers(self) -> tuple[tuple[str, str], ...]:
        """The attention and the position encoding of every block, as canonical texts."""
        attention, position = _texts(self.attention), _texts(self.position)
        return tuple((attention[i % len(attention)], position[i % len(position)]) for i in range(self.depth))

    def site(self, layer: int = 0) -> Site:
        """Where the mixer of a block is built."""
        return Site(
            self.dim,
            self.heads,
            causal=self.is_causal,
            max_length=self.max_length,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layer=layer,
            depth=self.depth,
            seed=self.seed,
        )

    def changed(self) -> dict[str, object]:
        """The fields that differ from their default."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def to_json(self) -> str:
        """This configuration as JSON text; `from_json` reads it back to an equal one."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({"format": FORMAT, "version": VERSION, **values}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """The configuration that `to_json` wrote.

        Raises:
            SpecError: the text is no such JSON, is of another version, or holds unknown or wrong fields.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"expected the JSON of a ModelConfig, got {text[:60]!r}: {error}") from None
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise SpecError(
                f'expected JSON with "format": "{FORMAT}", as ModelConfig.to_json writes it, got {text[:60]!r}'
            )
        if values.get("version") != VERSION:
            raise SpecError(
                f"expected version {VERSION} of {FORMAT}, got {values.get('version')!r}; "
                "read it with the release of anyformer that wrote it"
            )
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name not in ("format", "version")
        }
        _refuse_unknown(given, [each.name for each in fields(cls)])
        return cls(**given)

    def _set_specs(self, name: str, read: Callable[[AnySpec], tuple[object, object]]) -> list[str]:
        """Put canonical texts into the field `name` and return what was wrong."""
        given = getattr(self, name)
        each = given if isinstance(given, tuple) else (given,)
        if not 1 <= len(each) <= self.depth:
            return [f"{name}: expected one spec, or a tuple of 1 to depth={self.depth} of them, got {len(each)}"]
        texts, faults = [], []
        for spec in each:
            try:
                texts.append(str(read(spec)[1]))
            except SpecError as error:
                faults.append(f"{name}: {error}")
        if not faults:
            object.__setattr__(self, name, texts[0] if len(texts) == 1 else tuple(texts))
        return faults

    def _size_faults(self) -> list[str]:
        faults = []
        try:
            self.site()
        except SpecError as error:
            faults.append(str(error).removeprefix("Site: "))
        if self.head == "classifier" and self.outputs is None:
            faults.append("outputs=None: a classifier needs its number of classes, for example outputs=10")
        return faults


def _texts(specs: object) -> tuple[str, ...]:
    return tuple(str(spec) for spec in (specs if isinstance(specs, tuple) else (specs,)))


def _type_fault(name: str, annotation: Any, value: object) -> str:
    adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        whys = dict.fromkeys(_why(each["msg"]) for each in error.errors(include_url=False))
        return f"{name}={value!r}: expected {' or '.join(whys)}"
    return ""


def _why(message: str) -> str:
    return (message[:1].lower() + message[1:]).removeprefix("input should be ")


def _refuse_unknown(given: Mapping[str, object], known: list[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        near = {name: get_close_matches(name, known, n=1, cutoff=0.5) for name in unknown}
        hints = [f"{name!r} (did you mean {match[0]!r}?)" if match else repr(name) for name, match in near.items()]
        raise SpecError(f"ModelConfig has no field {', '.join(hints)}; it has: {', '.join(known)}")
