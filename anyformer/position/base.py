"""The base of every position encoding."""

from collections.abc import Mapping
from math import isqrt
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Boxes, Offsets
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.side import Side
from anyformer.site import Site
from anyformer.spec import Spec


class Position(nn.Module):
    """What a token knows about where it is.

    A subclass is one file `position/<name>.py` with one class. It sets `name`, `summary`, `paper`, `family`, takes
    `(self, site, *, knobs...)`, calls `super().__init__(site)`, sets `forms` and writes one method for each form it offers:

        EMBED      embed(x, positions, tokens) -> x, or read(x, queries, state) -> x where other tokens are read too
        SHIFT      shift(q_pos, k_pos, layer, tables) -> (q_shift, k_shift, v_shift)
        ROTATE     rotate(q, k, q_pos, k_pos) -> (q, k)
        TURN       turn(v, k_pos), turn_back(out, q_pos)     BIAS      bias(head, q_pos, k_pos)
        TOEPLITZ   offsets(low, high) -> [h r]               SCORE     score(q, k, q_pos, k_pos)
        TABLE      tables(low, high) -> Offsets              AUGMENT   augment(q, k, q_pos, k_pos) -> (q, k)
        VALUE      value(weights, q_pos, k_pos)              ROW       row(q, k, logits, facts)
        GATES      prepare(x, tokens, state)                 DECAY     rates(device)
        CLIPPED    clip, and tables(low, high)               GRID      bias(head, q_pos, k_pos)
        BOXES      boxes()                                   APART     score, which reads only the shapes of q and k

    Positions are integers `[b|1 n]` (`[b|1 n 2]`, row and column, where `axes` is 2), passed in; no encoding counts for itself.
    BIAS and SCORE are the reference of every faster form of the same term.
    """

    kind: ClassVar[str] = "position"
    name: str
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[tuple[str, ...]]
    """Trunk to twig: ("absolute" | "relative" | "other", branch)."""
    scope: Literal["model", "layer"] = "layer"
    """Whether one object serves every layer, or each layer has its own."""
    axes: int = 1
    """Numbers in a position: 1, or 2 for a row and a column on a grid."""
    reads_neighbours: ClassVar[bool] = False
    """Whether EMBED reads other tokens than the one it changes: `read` is then written in place of `embed`."""
    reads_tokens: ClassVar[bool] = False
    """Whether terms within attention read more of a token than its position: what `prepare` makes of it, kept beside its key."""
    additive: ClassVar[bool] = False
    """Whether EMBED adds `code(positions)`, so that others may use these vectors in another way."""
    draws: int = 0
    """Out of how many positions it draws those that it then reads; 0: it reads those that are given."""
    digits: int = 1
    """How many rows of its table make one position: of r rows, `limit` is r ** digits."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.forms: tuple[tuple[Form, ...], ...] = ()
        self.relative = True
        """Whether outputs are unchanged when all positions shift by the same amount."""
        self.widens = False
        """Whether ROTATE gives wider queries and keys."""
        self.long_columns = False
        """Whether what AUGMENT appends is so long that random features cannot estimate its products."""
        self.lacks: Mapping[Form, str] = {}
        """Why it has no such form, said after its name where an attention could have used it."""
        self.causal_only = False
        self.limit: int | tuple[int, int] | None = None
        """Positions 0..limit-1 exist, on a grid these rows and these columns; None: any."""
        self.clip: tuple[int, int] | None = None
        """CLIPPED: how far before and after a query the offsets go that have vectors of their own; None: all have."""
        self.extensions: tuple[str, ...] = ("plain",)
        """Ways to take a trained one to longer inputs (`anyformer.extend`); "plain" changes nothing but max_length."""

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The spec of the encoding that takes over for inputs of `to` tokens.

        Args:
            spec: of this encoding.
            way: one of `extensions`, with knobs.
        """
        return spec

    def carry(self, way: Spec, to: int) -> dict[str, Tensor]:
        """Weights and buffers of the encoding that takes over, by the names it has for them."""
        return self.state_dict()

    def scale(self, head_dim: int) -> float:
        """Factor on the product of query and key, from the width the site gives a head."""
        return head_dim**-0.5

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """The token vectors with the position in them."""
        raise NotImplementedError

    def code(self, positions: Int[Tensor, "#b n *a"]) -> Float[Tensor, "#b n c"]:
        """The vectors that EMBED adds, in the wider of float32 and the weights' dtype."""
        raise NotImplementedError

    def read(self, x: Float[Tensor, "b n c"], queries: Side, state: dict[str, Tensor] | None) -> Float[Tensor, "b n c"]:
        """The token vectors with what their neighbours tell about the position in them.

        Args:
            x: real tokens first in each row, padding as zeros behind them; what is returned for padding counts for nothing.
            queries: the facts of these tokens; never of more than one document.
            state: named tensors `[b ...]` of a fixed size that a causal encoding keeps of the tokens before x, to be
                replaced in place; empty at the start, None where nothing is remembered.
        """
        raise NotImplementedError

    def shift(
        self, q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"], layer: int, tables: dict[str, Tensor] | None
    ) -> tuple[Float[Tensor, "#b n w"], Float[Tensor, "#b m u"], Float[Tensor, "#b m u"]]:
        """What is added to the projected queries, keys and values of a layer, heads side by side.

        Args:
            tables: tensors without a batch axis that were worked out for this layer before, to be replaced in place; None
                where nothing is remembered.
        """
        raise NotImplementedError

    def prepare(
        self, x: Float[Tensor, "b m c"], tokens: Side, state: dict[str, Tensor] | None
    ) -> Float[Tensor, "b m w"]:
        """What terms read of each token that keys are made of, in at least float32: GATES the log of its factor `[b m h]`, at
        most 0. Arguments are those of `read`."""
        raise NotImplementedError

    def draw(self, count: int) -> Int[Tensor, "p"]:
        """Where `draws`: the position that stands for each of 0..count-1 or more, ascending; drawn anew in training, else always
        the same."""
        raise NotImplementedError

    def drawn_for(self) -> "Position":
        """Where `draws`: the encoding that reads the drawn positions."""
        raise NotImplementedError

    def rotate(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """Queries and keys with their own position in them; may widen them."""
        raise NotImplementedError

    def augment(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b k m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> tuple[Float[Tensor, "b h n e"], Float[Tensor, "b k m e"]]:
        """Wider queries and keys whose product, times `scale(d)`, is the whole scaled logit."""
        raise NotImplementedError

    def turn(self, v: Float[Tensor, "b k m v"], k_pos: Int[Tensor, "#b m"]) -> Float[Tensor, "b k m v"]:
        """Values with their own position in them."""
        raise NotImplementedError

    def turn_back(self, out: Float[Tensor, "b h n v"], q_pos: Int[Tensor, "#b n"]) -> Float[Tensor, "b h n v"]:
        """Outputs seen from the query's position."""
        raise NotImplementedError

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """Term b[head](q_pos, k_pos) on the scaled logits; the three tensors broadcast."""
        raise NotImplementedError

    def offsets(self, low: int, high: int) -> Float[Tensor, "h r"]:
        """Term on the scaled logits for offsets low..high of key minus query, both included."""
        raise NotImplementedError

    def rates(self, device: torch.device | None = None) -> Float[Tensor, " h"]:
        """DECAY: what each head's log weight loses a token of distance."""
        raise NotImplementedError

    def tables(self, low: int, high: int) -> Offsets:
        """Every term on logits and values as tables over offsets low..high of key minus query, both included."""
        raise NotImplementedError

    def boxes(self) -> Boxes:
        """Every term on logits and values as tables over rectangles of offsets on the grid."""
        raise NotImplementedError

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n"],
        k_pos: Int[Tensor, "#b m"],
    ) -> Float[Tensor, "b h n m"]:
        """Term of query, key and both positions on the scaled logits, its own scale included."""
        raise NotImplementedError

    def row(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        logits: Float[Tensor, "b h n m"],
        facts: Float[Tensor, "b m w"] | None,
    ) -> Float[Tensor, "b h n m"]:
        """The scaled logits with the term in them, -inf where a pair may not meet; the last query stands at the last key.

        Args:
            facts: what `prepare` made of the keys' tokens, 0 for padding.
        """
        raise NotImplementedError

    def value(
        self, weights: Float[Tensor, "b h n m"], q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"]
    ) -> Float[Tensor, "b h n v"]:
        """Term on the output: a sum over the attention weights and both positions."""
        raise NotImplementedError

    def admit(self, positions: Int[Tensor, "#b n *a"]) -> None:
        """Refuse positions that do not exist, before anything is looked up.

        Raises:
            SpecError: positions have another number of axes; one is negative or at or beyond the limit.
        """
        self._admit_axes(positions)
        if self.limit is None or positions.numel() == 0 or torch.compiler.is_compiling() or positions.is_meta:
            return
        least = int(positions.min())
        if least < 0:
            raise SpecError(f"{self.name}: expected positions from 0, got {least}")
        if not isinstance(self.limit, int):
            rows, columns = (int(each) for each in positions.flatten(0, -2).max(dim=0).values)
            if rows >= self.limit[0] or columns >= self.limit[1]:
                raise SpecError(
                    f"{self.name}: row {rows} and column {columns} were read, the grid has {self.limit[0]} x {self.limit[1]}; "
                    "build it for a larger grid, or use an encoding without a limit such as sinusoidal_2d or rope_2d"
                )
            return
        if (most := int(positions.max())) >= self.limit:
            two = self.digits == 2
            needed, held = (isqrt(most) + 1, isqrt(self.limit)) if two else (most + 1, self.limit)
            raise SpecError(
                f"{self.name}: position {most} needs a table of at least {needed} rows, this one has {held}; "
                f"build with {'rows' if two else 'max_length'}={needed}, or use an encoding without a limit such as rope, "
                "alibi or sinusoidal"
            )

    def _admit_axes(self, positions: Tensor) -> None:
        axes = 1 if positions.dim() == 2 else positions.shape[-1]
        if not self.forms or axes == self.axes:
            return
        if self.axes == 2:
            raise SpecError(
                f"{self.name} reads a row and a column for each token, and these positions have {axes} number each; "
                "give positions[b n 2], for example positions=af.grid(rows, columns)"
            )
        raise SpecError(
            f"{self.name} reads one number for each token, and these positions have {axes}; leave positions out, "
            "or use an encoding on a grid such as sinusoidal_2d, rope_2d or swin_bias"
        )
