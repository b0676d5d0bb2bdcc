"""A vision Transformer: an image as a sequence of patches, read by the blocks of a Transformer.

Paper: Dosovitskiy et al. 2020, 2010.11929; register tokens: Darcet et al. 2023, 2309.16588.
Deviations: projections within blocks have no bias, as in Transformer, and the class token has no position (in the paper it has
    a row of the table of its own, which is a second vector added to it). Initial weights are those of Transformer.
Beyond the paper: any attention and any encoding; the mean of the patches as the default pooling; register tokens.
"""

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import sides
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.mixer.base import Mixer
from anyformer.model import storage
from anyformer.model.arguments import check_loading
from anyformer.model.block import Block, build_norm
from anyformer.model.embedding import placed
from anyformer.model.explain import calls_of, weights
from anyformer.model.head import Head
from anyformer.model.initial import draw_shared, query_gain, seeded
from anyformer.model.parts import (
    admit_flag_ids,
    admit_shortening,
    build_block,
    build_positions,
    draw_positions,
    share_parts,
    steps,
)
from anyformer.model.vit_config import VitConfig
from anyformer.position.base import Position
from anyformer.side import Side, grid


class Patches(nn.Module):
    """The embedding of a Vit: class and register tokens, then x_t = W p_t + b for each patch p_t, with the encodings that are added
    there.

    W starts with a standard deviation of 1 / sqrt(pixels c): patches of unit variance become vectors of length about 1, as
    encodings expect them.

    Args:
        config: sizes of patch and model.
        encodings: those that offer EMBED, applied in turn.
    """

    def __init__(self, config: VitConfig, encodings: Iterable[Position]) -> None:
        super().__init__()
        self.size = config.patch_size
        pixels = config.channels * self.size[0] * self.size[1]
        self.patches = nn.Linear(pixels, config.dim)
        nn.init.normal_(self.patches.weight, std=(pixels * config.dim) ** -0.5)
        nn.init.zeros_(self.patches.bias)
        self.placeless = nn.Parameter(torch.empty(config.placeless, config.dim)) if config.placeless else None
        if self.placeless is not None:
            nn.init.normal_(self.placeless, std=config.dim**-0.5)
        self.encodings = nn.ModuleList(encodings)
        self.dropout = config.dropout

    def forward(self, images: Float[Tensor, "b p y x"], queries: Side) -> Float[Tensor, "b n c"]:
        """The vectors of the tokens, patches row by row; `queries` says where they are."""
        high, wide = self.size
        x = self.patches(rearrange(images, "b p (y h) (x w) -> b (y x) (p h w)", h=high, w=wide))
        if self.placeless is not None:
            x = torch.cat([self.placeless.to(x.dtype).expand(len(x), -1, -1), x], dim=1)
        x = placed(x, cast(Iterable[Position], self.encodings), queries)
        return F.dropout(x, self.dropout, self.training)


class Vit(nn.Module):
    """Images to classes: patches -> embedding -> blocks -> norm -> the class token or the mean of the patches -> W x + b.

        x_0 = [class; registers; W_p patch_1 + b_p, ..., W_p patch_n + b_p], with encodings
        x_l = x_(l-1) + mixer(norm(x_(l-1))), then + feed_forward(norm(.)), as in Transformer
        logits = W norm(x_L)[0] + b, or W mean_t norm(x_L)[t] + b over the patches

    Patches are read row by row. An encoding on a grid gets the row and the column of each patch, any other its number; class and
    register tokens have no position.

    Args:
        config: sizes and methods.

    Raises:
        SpecError: `config` is no VitConfig, or an encoding has no room for the grid of patches.
        IncompatibleError: an attention and a position encoding that cannot compose.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        if not isinstance(config, VitConfig):
            raise SpecError(f"Vit: expected a VitConfig, got {config!r}; write Vit(VitConfig(...))")
        self.config, body = config, config.body
        device = torch.get_default_device()
        # drawn on the CPU: the same weights on every device
        with torch.device(device if device.type == "meta" else "cpu"), seeded(config.seed, "model"):
            positions = build_positions(body)
            self.axes = max(each.axes for each in positions)
            embedded = {id(each): each for each in positions if (Form.EMBED,) in each.forms}
            self.embedding = Patches(config, embedded.values())
            self.blocks = nn.ModuleList(build_block(body, layer, each) for layer, each in enumerate(positions))
            share_parts(body, self._mixers())
            needing = f"class and register tokens ({config.placeless} here) are told by their place; use pool=mean, registers=0"
            admit_shortening(self._mixers(), positions, needing if config.placeless else None)
            admit_flag_ids(self._mixers(), None)
            self.norm = build_norm(config.norm, config.dim)
            self.head = Head("classifier", config.dim, config.classes, config.norm)
        for each in positions:
            each.admit(self._positions(*config.grid, torch.device("cpu")))
        draw_shared(
            self, config.seed, [query_gain(each.scale(each.site.head_dim), each.site.head_dim) for each in positions]
        )
        self.to(device)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.changed().items())

    def forward(self, images: Float[Tensor, "b p y x"]) -> Float[Tensor, "b o"]:
        """Logits of the classes.

        Args:
            images: floating pixels `[b, channels, height, width]`, height and width multiples of the patch's.

        Raises:
            ValueError: images of another shape or dtype.
            SpecError: more patches than a method was built for.
        """
        x = self.encode(images)
        pooled = x[:, :1] if self.config.pool == "class" else x[:, self.config.placeless :]
        return self.head(pooled, None)

    def encode(self, images: Float[Tensor, "b p y x"]) -> Float[Tensor, "b r c"]:
        """The normalised vectors that the head reads: class and register tokens, then the patches row by row, or what they were
        shortened to; errors are those
        of `forward`."""
        self._check(images)
        (height, width), (high, wide) = images.shape[2:], self.config.patch_size
        rows, columns = height // high, width // wide
        n = rows * columns + self.config.placeless
        without = self._without(len(images), n, images.device)
        positions = self._positions(rows, columns, images.device)
        if self.axes == 1 and without is None:
            positions = None  # they are places, and methods may compute with offsets
        parts = {"keep": None, "positions": positions, "documents": None, "without": without}
        queries, _ = sides(n, images.device, parts, None, None)
        x = self.embedding(images, queries)
        drawn = draw_positions(self._mixers(), queries)
        again = self.config.checkpointing and torch.is_grad_enabled()
        facts = {"positions": positions, "no_position": without}
        for step in steps(self.blocks, drawn, None, facts, again=again):
            x = step(x)
        return self.norm(x)

    def explain(
        self, images: Float[Tensor, "b p y x"], rows: Sequence[int], heads: Sequence[int] | None = None
    ) -> list[Float[Tensor, "b h r _"]]:
        """For each layer, what the asked tokens take from each token; see `Transformer.explain`.

        Args:
            rows: tokens asked for, class and register tokens first.  heads: heads asked for; None: all.

        Raises:
            SpecError: a row or head that does not exist.
        """
        return [weights(call, rows, heads) for call in calls_of(self, partial(self.encode, images))]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder; see `Transformer.save_pretrained`."""
        storage.write(Path(folder), self.config.to_json(), self, VitConfig.reads)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "Vit":
        """The model that `save_pretrained` wrote, in eval mode; see `Transformer.from_pretrained`."""
        check_loading(device, dtype)
        return storage.load(Path(folder), lambda config: cls(VitConfig.from_json(config)), device, dtype)

    def _mixers(self) -> list[Mixer]:
        return [cast(Block, block).mixer for block in self.blocks]

    def _without(self, b: int, n: int, device: torch.device) -> Bool[Tensor, "b n"] | None:
        """Which tokens have no position; None: all have."""
        if not self.config.placeless:
            return None
        return (torch.arange(n, device=device) < self.config.placeless).expand(b, -1)

    def _positions(self, rows: int, columns: int, device: torch.device) -> Int[Tensor, "1 n *a"]:
        """Row and column of each patch, or its number; zeros for tokens without a position."""
        if self.axes == 2:
            return F.pad(grid(rows, columns, device), (0, 0, self.config.placeless, 0))
        return F.pad(torch.arange(rows * columns, device=device)[None], (self.config.placeless, 0))

    def _check(self, images: Tensor) -> None:
        channels, (high, wide) = self.config.channels, self.config.patch_size
        expected = f"images: expected floating pixels [batch, {channels}, height, width]"
        got = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
        if images.dim() != 4:
            raise ValueError(f"{expected}, got {got}; images[None] adds a batch axis")
        if images.shape[1] != channels:
            last = images.shape[3] == channels
            hint = "images.permute(0, 3, 1, 2) moves the channels" if last else f"or channels={images.shape[1]}"
            raise ValueError(f"{expected}, got {got}; {hint}")
        if not images.is_floating_point():
            raise ValueError(f"{expected}, got {got}; images.float() / 255 makes them so")
        height, width = images.shape[2:]
        if height % high or width % wide:
            raise ValueError(
                f"images: {height} x {width} pixels are no whole number of patches of {high} x {wide}; pad them, for example "
                f"torch.nn.functional.pad(images, (0, {-width % wide}, 0, {-height % high}))"
            )
