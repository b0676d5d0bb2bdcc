"""What a vision Transformer is made of, as one frozen value that is checked as a whole and survives JSON."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from anyformer.errors import SpecError
from anyformer.model.build import AnySpec
from anyformer.model.config import ModelConfig
from anyformer.model.fields import Config
from anyformer.typing import Count, Fraction, Size


@dataclass(frozen=True, kw_only=True)
class VitConfig(Config):
    """The sizes and methods of a Vit.

    Args:
        image: height and width in pixels of the images it is made for, or one number for both; other sizes run where the
            methods allow it.
        patch: height and width of a patch in pixels, divisors of the image's; or one number for both.
        channels: of a pixel.
        classes: number of outputs.
        pool: "mean" reads the mean of the patches; "class" puts a class token in front and reads that.
        registers: tokens in front that are read by no one but the other tokens.
        max_length: longest sequence in tokens, class and register tokens included, that tables and projections are made for;
            None: that of an image.
        dim, depth, heads, kv_heads, head_dim, attention, position, norm, feed_forward, qk_norm, dropout, checkpointing, seed:
            as in `ModelConfig`.

    After construction `image` and `patch` hold pairs, `attention` and `position` the canonical text of their specs.

    Raises:
        SpecError: whatever is wrong, all faults in one message.
    """

    form: ClassVar[str] = "anyformer-vit"

    image: Size | tuple[Size, Size] = (32, 32)
    patch: Size | tuple[Size, Size] = (4, 4)
    channels: Size = 3
    classes: Size = 10
    pool: Literal["mean", "class"] = "mean"
    registers: Count = 0
    max_length: Size | None = None
    dim: Size = 64
    depth: Size = 4
    heads: Size = 4
    kv_heads: Size | None = None
    head_dim: Size | None = None
    attention: AnySpec | tuple[AnySpec, ...] = "softmax"
    position: AnySpec | tuple[AnySpec, ...] = "vit_learned"
    norm: Literal["rms", "layer"] = "layer"
    feed_forward: Literal["swiglu", "gelu"] = "gelu"
    qk_norm: bool = False
    dropout: Fraction = 0.0
    checkpointing: bool = False
    seed: Count = 0

    def __post_init__(self) -> None:
        faults = self.type_faults()
        if not faults:
            for name in ("image", "patch"):
                given = getattr(self, name)
                object.__setattr__(self, name, given if isinstance(given, tuple) else (given, given))
            faults += self._size_faults()
        if faults:
            raise SpecError("VitConfig: " + "; ".join(faults))

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        return _pair(self.image)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return _pair(self.patch)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def placeless(self) -> int:
        """Class and register tokens."""
        return (self.pool == "class") + self.registers

    @property
    def body(self) -> ModelConfig:
        """Its blocks, norm and head."""
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            attention=self.attention,
            position=self.position,
            head="classifier",
            outputs=self.classes,
            max_length=self.grid[0] * self.grid[1] + self.placeless if self.max_length is None else self.max_length,
            norm=self.norm,
            feed_forward=self.feed_forward,
            qk_norm=self.qk_norm,
            dropout=self.dropout,
            checkpointing=self.checkpointing,
            seed=self.seed,
        )

    def _size_faults(self) -> list[str]:
        faults = []
        (height, width), (high, wide) = self.image_size, self.patch_size
        if height % high or width % wide:
            faults.append(
                f"image={height} x {width} is no multiple of patch={high} x {wide}: expected sizes such as "
                f"image=({_up(height, high)}, {_up(width, wide)}), with images padded to it"
            )
        try:
            body = self.body
        except SpecError as error:
            return [*faults, str(error).removeprefix("ModelConfig: ")]
        object.__setattr__(self, "attention", body.attention)
        object.__setattr__(self, "position", body.position)
        return faults


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return size if isinstance(size, tuple) else (size, size)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
