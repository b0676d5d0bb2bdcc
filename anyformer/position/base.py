"""The base of every position encoding, and how one is bound to a forward pass."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Encoding, Offsets
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.side import Side
from anyformer.site import Site


class Position(nn.Module):
    """What a token knows about where it is.

    A subclass is one file `position/<name>.py` with one class. It sets `name`, `summary`, `paper`, `family`, takes
    `(self, site, *, knobs...)`, calls `super().__init__(site)`, sets `forms` and writes one method for each form it offers:

        EMBED      embed(x, positions, tokens) -> x          ROTATE    rotate(q, k, q_pos, k_pos) -> (q, k)
        TURN       turn(v, k_pos), turn_back(out, q_pos)     BIAS      bias(head, q_pos, k_pos)
        TOEPLITZ   offsets(low, high) -> [h r]               SCORE     score(q, k, q_pos, k_pos)
        TABLE      tables(low, high) -> Offsets              AUGMENT   augment(q, k, q_pos, k_pos) -> (q, k)
        VALUE      value(weights, q_pos, k_pos)

    Positions are integers `[b|1 n]` (`[b|1 n 2]` where `axes` is 2), passed in; no encoding counts for itself.
    BIAS and SCORE are the reference of every faster form of the same term.
    """

    kind: ClassVar[str] = "position"
    name: str
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[tuple[str, ...]]
    """Trunk to twig: ("absolute" | "relative" | "other", branch)."""
    scope: ClassVar[Literal["model", "layer"]] = "layer"
    """Whether one object serves every layer, or each layer has its own."""
    axes: ClassVar[int] = 1

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.forms: tuple[tuple[Form, ...], ...] = ()
        self.relative = True
        """Whether outputs are unchanged when all positions shift by the same amount."""
        self.causal_only = False
        self.limit: int | None = None
        """Positions 0..limit-1 exist; None: any."""

    def scale(self, head_dim: int) -> float:
        """Factor on the product of query and key, from the width the site gives a head."""
        return head_dim**-0.5

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """The token vectors with the position in them."""
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

    def tables(self, low: int, high: int) -> Offsets:
        """Every term on logits and values as tables over offsets low..high of key minus query, both included."""
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

    def value(
        self, weights: Float[Tensor, "b h n m"], q_pos: Int[Tensor, "#b n"], k_pos: Int[Tensor, "#b m"]
    ) -> Float[Tensor, "b h n v"]:
        """Term on the output: a sum over the attention weights and both positions."""
        raise NotImplementedError

    def admit(self, positions: Int[Tensor, "#b n *a"]) -> None:
        """Refuse positions that do not exist, before anything is looked up.

        Raises:
            SpecError: a position is negative or at or beyond the limit.
        """
        if self.limit is None or positions.numel() == 0 or torch.compiler.is_compiling() or positions.is_meta:
            return
        least, most = int(positions.min()), int(positions.max())
        if least < 0:
            raise SpecError(f"{self.name}: expected positions from 0, got {least}")
        if most >= self.limit:
            raise SpecError(
                f"{self.name}: position {most} needs a table of at least {most + 1} rows, this one has {self.limit}; "
                f"build with max_length={most + 1}, or use an encoding without a limit such as rope, alibi or sinusoidal"
            )


def bind(position: Position, forms: Collection[Form], queries: Side, keys: Side) -> Encoding:
    """Bind an encoding to the two sides of one forward.

    Args:
        forms: the forms that were chosen for this pair of attention and encoding.
    """
    position.admit(queries.positions)
    position.admit(keys.positions)
    bound = _Bound(position, frozenset(forms), queries, keys)

    def when(needed: set[Form], function: Callable) -> Callable | None:
        return function if bound.forms & needed else None

    everywhere = queries.without is None and keys.without is None
    return Encoding(
        forms=bound.forms,
        scale=position.scale(position.site.head_dim),
        rotate=when({Form.ROTATE, Form.AUGMENT}, bound.rotate),
        turn=when({Form.TURN}, bound.turn),
        turn_back=when({Form.TURN}, bound.turn_back),
        logits=when(_ON_LOGITS, bound.logits),
        values=when({Form.VALUE}, bound.values),
        offsets=when({Form.TOEPLITZ, Form.TABLE}, bound.offsets),
        rebind=lambda queries, keys: bind(position, forms, queries, keys),
        arithmetic=queries.arithmetic and keys.arithmetic and everywhere,
        learned=bool(bound.forms & {Form.SCORE, Form.TABLE}) or any(True for _ in position.parameters()),
    )


_ON_LOGITS = {Form.BIAS, Form.TOEPLITZ, Form.SCORE, Form.TABLE}


@dataclass(frozen=True)
class _Bound:
    """A position encoding with the sides it is bound to; tokens without a position are neither moved nor biased."""

    position: Position
    forms: frozenset[Form]
    queries: Side
    keys: Side

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        augmented = Form.AUGMENT in self.forms
        if augmented and (self.queries.without is not None or self.keys.without is not None):
            raise IncompatibleError(
                f"{self.position.name} widens queries and keys here, so every token needs a position"
            )
        place = self.position.augment if augmented else self.position.rotate
        placed_q, placed_k = place(q, k, self.queries.positions, self.keys.positions)
        return _unless(self.queries.without, q, placed_q.to(q.dtype)), _unless(
            self.keys.without, k, placed_k.to(k.dtype)
        )

    def turn(self, v: Tensor) -> Tensor:
        return _unless(self.keys.without, v, self.position.turn(v, self.keys.positions))

    def turn_back(self, out: Tensor) -> Tensor:
        return _unless(self.queries.without, out, self.position.turn_back(out, self.queries.positions))

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        q_pos, k_pos = self.queries.positions, self.keys.positions
        terms: list[Tensor] = []
        if self.forms & {Form.BIAS, Form.TOEPLITZ}:
            head = torch.arange(self.position.site.heads, device=q.device)[:, None, None]
            terms.append(self.position.bias(head, q_pos[:, None, :, None], k_pos[:, None, None, :]))
        if self.forms & {Form.SCORE, Form.TABLE}:
            terms.append(self.position.score(q, k, q_pos, k_pos))
        return self._without(sum(terms[1:], terms[0]))

    def values(self, weights: Tensor) -> Tensor:
        return self.position.value(self._without(weights), self.queries.positions, self.keys.positions)

    def offsets(self, low: int, high: int) -> Offsets:
        if Form.TOEPLITZ in self.forms:
            return Offsets(bias=self.position.offsets(low, high))
        return self.position.tables(low, high)

    def _without(self, pairs: Tensor) -> Tensor:
        if self.queries.without is not None:
            pairs = pairs.masked_fill(self.queries.without[:, None, :, None], 0.0)
        return pairs if self.keys.without is None else pairs.masked_fill(self.keys.without[:, None, None, :], 0.0)


def _unless(without: Tensor | None, plain: Tensor, placed: Tensor) -> Tensor:
    return placed if without is None else torch.where(without[:, None, :, None], plain, placed)
