"""What a Transformer is made of, as one frozen value that is checked as a whole and survives JSON."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from anyformer.errors import SpecError
from anyformer.model.build import AnySpec, position_slot, slot
from anyformer.model.fields import Config
from anyformer.model.head import head_slot
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import Count, Fraction, Size


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The sizes and methods of a Transformer.

    Args:
        vocab: number of token ids.
        dim: width of the model.
        depth: number of blocks.
        heads: query heads of a block.  kv_heads: key and value heads, a divisor of heads; None: heads.
        head_dim: width of a head; None: dim / heads.
        attention: spec of an attention, a mixer or a pattern; a tuple gives one a block, repeated over the depth.
        position: spec of a position encoding; a tuple likewise.
        head: "lm" scores the next token, "mlm" the token itself, "classifier" the whole sequence; "enhanced_mlm" is "mlm" on a last
            block that runs twice with absolute positions in its queries, `enhanced_mlm(passes=2, position=learned)`.
        outputs: width of the head; None: vocab. A classifier needs its number of classes here.
        causal: whether a token may look at earlier tokens only; None: True for the head "lm", else False.
        max_length: longest sequence in tokens, registers included, that tables and projections are made for.
        registers: learned tokens before each row, at places 0 to registers - 1, without a position and dropped from the output:
            `Local(64) | Global([0, 1])` makes two of them global tokens that are no part of the text.
        norm: "rms" or "layer", before every branch and before the head.
        feed_forward: "swiglu" or "gelu"; both have 8 dim^2 weights (rounded up to a hidden width of whole eights).
        qk_norm: whether queries and keys are RMS-normalised per head.
        dropout: probability, in training, of dropping an attention weight, a channel of the embedded tokens, or a channel
            that a branch adds.
        checkpointing: whether a block is computed again in the backward instead of being kept.
        seed: root of the initial weights and of every random structure.

    After construction `attention`, `position` and `head` hold the canonical text of their specs.

    Raises:
        SpecError: whatever is wrong, all faults in one message.
    """

    form: ClassVar[str] = "anyformer-model"

    vocab: Size = 256
    dim: Size = 256
    depth: Size = 4
    heads: Size = 8
    kv_heads: Size | None = None
    head_dim: Size | None = None
    attention: AnySpec | tuple[AnySpec, ...] = "softmax"
    position: AnySpec | tuple[AnySpec, ...] = "rope"
    head: AnySpec = "lm"
    outputs: Size | None = None
    causal: bool | None = None
    max_length: Size = 2048
    registers: Count = 0
    norm: Literal["rms", "layer"] = "rms"
    feed_forward: Literal["swiglu", "gelu"] = "swiglu"
    qk_norm: bool = False
    dropout: Fraction = 0.0
    checkpointing: bool = False
    seed: Count = 0

    def __post_init__(self) -> None:
        faults = self.type_faults() + self._set_head()
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

    def _set_head(self) -> list[str]:
        if not isinstance(self.head, str | Spec):  # a fault of type
            return []
        try:
            object.__setattr__(self, "head", str(head_slot(self.head)))
        except SpecError as error:
            return [f"head: {error}"]
        return []

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
