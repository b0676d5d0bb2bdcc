"""The base of every position encoding, and how one is bound to a forward pass."""

from collections.abc import Callable, Collection
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import Encoding
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
        VALUE      value(weights, q_pos, k_pos)           AUGMENT   augment(q, k, q_pos, k_pos) -> (q, k)

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


def bind(
    position: Position,
    forms: Collection[Form],
    q_positions: Int[Tensor, "#b n *a"],
    k_positions: Int[Tensor, "#b m *a"],
    *,
    q_without: Bool[Tensor, "b n"] | None = None,
    k_without: Bool[Tensor, "b m"] | None = None,
    arithmetic: bool = True,
) -> Encoding:
    """Bind an encoding to the positions of one forward.

    Args:
        forms: the forms that were chosen for this pair of attention and encoding.
        q_without, k_without: tokens that have no position (class and register tokens): no rotation, no bias.
        arithmetic: whether positions are places.
    """
    position.admit(q_positions)
    position.admit(k_positions)
    chosen = frozenset(forms)

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if Form.AUGMENT in chosen and (q_without is not None or k_without is not None):
            raise IncompatibleError(f"{position.name} widens queries and keys here, so every token needs a position")
        place = position.augment if Form.AUGMENT in chosen else position.rotate
        placed_q, placed_k = place(q, k, q_positions, k_positions)
        return _unless(q_without, q, placed_q.to(q.dtype)), _unless(k_without, k, placed_k.to(k.dtype))

    def turn(v: Tensor) -> Tensor:
        return _unless(k_without, v, position.turn(v, k_positions))

    def turn_back(out: Tensor) -> Tensor:
        return _unless(q_without, out, position.turn_back(out, q_positions))

    def logits(q: Tensor, k: Tensor) -> Tensor:
        terms: list[Tensor] = []
        if chosen & {Form.BIAS, Form.TOEPLITZ}:
            head = torch.arange(position.site.heads, device=q.device)[:, None, None]
            terms.append(position.bias(head, q_positions[:, None, :, None], k_positions[:, None, None, :]))
        if Form.SCORE in chosen:
            terms.append(position.score(q, k, q_positions, k_positions))
        total = sum(terms[1:], terms[0])
        if q_without is not None:
            total = total.masked_fill(q_without[:, None, :, None], 0.0)
        return total if k_without is None else total.masked_fill(k_without[:, None, None, :], 0.0)

    def values(weights: Tensor) -> Tensor:
        if q_without is not None:
            weights = weights.masked_fill(q_without[:, None, :, None], 0.0)
        if k_without is not None:
            weights = weights.masked_fill(k_without[:, None, None, :], 0.0)
        return position.value(weights, q_positions, k_positions)

    def when(needed: set[Form], function: Callable) -> Callable | None:
        return function if chosen & needed else None

    return Encoding(
        forms=chosen,
        scale=position.scale(position.site.head_dim),
        rotate=when({Form.ROTATE, Form.AUGMENT}, rotate),
        turn=when({Form.TURN}, turn),
        turn_back=when({Form.TURN}, turn_back),
        logits=when({Form.BIAS, Form.TOEPLITZ, Form.SCORE}, logits),
        values=when({Form.VALUE}, values),
        offsets=when({Form.TOEPLITZ}, position.offsets),
        arithmetic=arithmetic and q_without is None and k_without is None,
        learned=bool(chosen & {Form.SCORE}) or any(True for _ in position.parameters()),
    )


def bind_sides(position: Position, forms: Collection[Form], queries: Side, keys: Side) -> Encoding:
    """`bind` to the two sides of one forward."""
    return bind(
        position,
        forms,
        queries.positions,
        keys.positions,
        q_without=queries.without,
        k_without=keys.without,
        arithmetic=queries.arithmetic and keys.arithmetic and queries.length == keys.length,
    )


def _unless(without: Tensor | None, plain: Tensor, placed: Tensor) -> Tensor:
    return placed if without is None else torch.where(without[:, None, :, None], plain, placed)
