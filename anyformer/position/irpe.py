"""iRPE: offsets on a grid fall into few buckets; each has a bias, or a vector that queries, keys or outputs meet.

Paper: Wu, Peng, Chen, Fu and Chao 2021, 2107.14222.
Equation: with the steps g(t) = t for |t| <= a, else sign(t) trunc(min(b, round(a + (b - a) ln(|t| / a) / ln(c / a)))) and a, b, c
    = ratio, 2 ratio, 8 ratio, and with y, x the row and column of query minus key, the bucket is
        product:    the pair (g(y), g(x))        euclidean:  g(round(sqrt(y^2 + x^2)))
        cross:      g(y) and g(x), two terms     quant:      g(y^2 + x^2)
    k:  s_ij = (q_i . k_j + q_i . W[bucket(i - j)]) / sqrt(d)      bias: T[bucket] in place of a product
    q:  s_ij = (q_i . k_j + k_j . W[bucket(j - i)]) / sqrt(d)      v:    o_i = sum_j w_ij (v_j + W[bucket(i - j)])
Cost: n h r d for r buckets and each term, and one look-up a pair (cross: two); no [n m d] tensor.
Deviations: pairs with a token without a position have no term, where the authors' code has one more bucket for them. Euclidean and
    quant have a row for each bucket that occurs; the authors' tables have as many more, which nothing reads.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.context import Boxes
from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.ops.lookup import row_products, row_sums
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.typing import PositiveFloat

_EVERYWHERE = 1 << 31  # farther than any token

Method = Literal["product", "cross", "euclidean", "quant"]


class Irpe(Position):
    """Tells pairs apart by a bucket of their offset: near ones by exact offset, far ones only by direction, or by distance.

    Args:
        kind: "contextual", a vector for each bucket; "bias", a number.
        method: what a bucket is: "product" of row and column; "cross", one for the row and one for the column, added;
            "euclidean" distance; "quant", squared distance.
        on: which of "q", "k" and "v" have a term of their own; the authors recommend k alone. "v" needs a vector.
        shared: whether the heads of a layer share one table.
        ratio: distance in tokens up to which offsets are exact; from 8 times that on they are alike.

    Raises:
        SpecError: `on` is empty, holds an entry twice, or "v" with numbers; a ratio below 0.5, which leaves one bucket.
    """

    name = "irpe"
    summary = "a bias, or vectors met by queries, keys or outputs, for few buckets of offsets on a grid"
    paper = "Wu et al. 2021, 2107.14222"
    family = ("vision", "contextual")
    axes = 2

    def __init__(
        self,
        site: Site,
        *,
        kind: Literal["contextual", "bias"] = "contextual",
        method: Method = "product",
        on: tuple[Literal["q", "k", "v"], ...] = ("k",),
        shared: bool = True,
        ratio: PositiveFloat = 1.9,
    ) -> None:
        super().__init__(site)
        if not on or len(set(on)) < len(on):
            raise SpecError(
                f"irpe: expected each of 'q', 'k' and 'v' at most once and one at least, got on={list(on)}; "
                'for no position use "none"'
            )
        if kind == "bias" and "v" in on:
            raise SpecError("irpe: a bias acts on logits, not on values; leave 'v' out of on, or use kind=contextual")
        if ratio < 0.5:
            raise SpecError(f"irpe: expected a ratio of at least 0.5, got {ratio}; below it all offsets are alike")
        self.on = on
        self.method = method
        self.levels = levels(ratio)
        boxes = method in ("product", "cross")
        on_logits = (Form.GRID, Form.BIAS) if kind == "bias" else (Form.BOXES, Form.SCORE) if boxes else (Form.SCORE,)
        on_values = (Form.BOXES, Form.VALUE) if boxes else (Form.VALUE,)
        self.forms = (on_logits,) * bool({"q", "k"} & set(on)) + (on_values,) * ("v" in on)
        self.lacks = {} if boxes else {Form.BOXES: "has rings for buckets, over which no few running sums reach"}
        far = self.levels[-1]
        rows = {"product": (2 * far + 1) ** 2, "cross": 2 * far + 1}.get(method, far + 1)
        shape = ((1 + (method == "cross"),) if shared else (1 + (method == "cross"), site.heads)) + (rows,)
        self.entries = nn.ParameterDict(
            {
                each: nn.Parameter(torch.zeros(*shape) if kind == "bias" else torch.zeros(*shape, site.head_dim))
                for each in on
            }
        )

    def bias(
        self, head: Int[Tensor, "..."], q_pos: Int[Tensor, "..."], k_pos: Int[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """`T[bucket(q_pos - k_pos)]` of k, and `T[bucket(k_pos - q_pos)]` of q."""
        offsets = q_pos - k_pos
        terms = [
            table[rows] + 0.0 * head if table.dim() == 1 else table[head, rows]
            for each in self.on
            for table, rows in self._looked_up(each, -offsets if each == "q" else offsets)
        ]
        return sum(terms[1:], terms[0])

    def boxes(self) -> Boxes:
        """BOXES: a rectangle for each pair of a step of rows and a step of columns."""
        far = self.levels[-1]
        occurring = [step for step in range(far + 1) if step in self.levels]
        first = {step: self.levels.index(step) for step in occurring}
        last = {step: self.levels.index(after) - 1 for step, after in pairwise(occurring)} | {far: _EVERYWHERE}
        behind = [
            (step, first[step], last[step]) for step in occurring
        ]  # steps of query minus key, and their distances
        ahead = [(-step, -end, -start) for step, start, end in reversed(behind[1:])]
        steps, starts, stops = torch.tensor([*ahead, *behind]).unbind(1)
        index = torch.arange(len(steps))
        i, j = (each.flatten() for each in torch.meshgrid(index, index, indexing="ij"))
        edges = torch.stack([-stops[i], -starts[i], -stops[j], -starts[j]], dim=1)
        rows, columns = steps[i] + far, steps[j] + far
        tables = {}
        for term, name, sign in (("k", "keys", 1), ("q", "queries", -1), ("v", "values", 1)):
            if term in self.on:
                tables[name] = self._of_boxes(self.entries[term], rows, columns, sign)
        return Boxes(edges, **tables)

    def _of_boxes(self, entries: Tensor, rows: Tensor, columns: Tensor, sign: int) -> Float[Tensor, "h r d"]:
        """The vector of each rectangle, of offsets turned around where the sign is negative."""
        if sign < 0:
            rows, columns = 2 * self.levels[-1] - rows, 2 * self.levels[-1] - columns
        if self.method == "cross":
            vectors = entries[0][..., rows, :] + entries[1][..., columns, :]
        else:
            vectors = entries[0][..., rows * (2 * self.levels[-1] + 1) + columns, :]
        return vectors.expand(self.site.heads, -1, -1)

    def score(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h m d"],
        q_pos: Int[Tensor, "#b n 2"],
        k_pos: Int[Tensor, "#b m 2"],
    ) -> Float[Tensor, "b h n m"]:
        """`scale(d)` times the products of queries and keys with the vectors of their buckets."""
        offsets = q_pos[:, None, :, None] - k_pos[:, None, None]
        terms = []
        if "k" in self.on:
            terms += [row_products(q, table, rows) for table, rows in self._looked_up("k", offsets)]
        if "q" in self.on:
            mirrored = self._looked_up("q", -offsets.transpose(2, 3))
            terms += [row_products(k, table, rows).mT for table, rows in mirrored]
        return self.scale(self.site.head_dim) * sum(terms[1:], terms[0])

    def value(
        self, weights: Float[Tensor, "b h n m"], q_pos: Int[Tensor, "#b n 2"], k_pos: Int[Tensor, "#b m 2"]
    ) -> Float[Tensor, "b h n v"]:
        """`sum_j w_ij W[bucket(i - j)]`: the weights are summed by bucket first."""
        offsets = q_pos[:, None, :, None] - k_pos[:, None, None]
        terms = [row_sums(weights, table, rows) for table, rows in self._looked_up("v", offsets)]
        return sum(terms[1:], terms[0])

    def buckets(self, offsets: Int[Tensor, "*p 2"]) -> tuple[Int[Tensor, "*p"], ...]:
        """Row of each table for an offset of row and column; the row of offset 0 is the middle one where signs count."""
        row, column = offsets.unbind(-1)
        far = self.levels[-1]
        if self.method == "product":
            return ((self._step(row) + far) * (2 * far + 1) + self._step(column) + far,)
        if self.method == "cross":
            return self._step(row) + far, self._step(column) + far
        squared = row.square() + column.square()
        return (self._step(squared if self.method == "quant" else squared.double().sqrt().round().to(row.dtype)),)

    def _step(self, offsets: Tensor) -> Tensor:
        steps = torch.tensor(self.levels, device=offsets.device)
        return steps[offsets.abs().clamp(max=len(self.levels) - 1)] * offsets.sign()

    def _looked_up(self, term: str, offsets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The tables of a term, each with its row for every pair."""
        return zip(self.entries[term], self.buckets(offsets), strict=True)


def levels(ratio: float) -> list[int]:
    """g(t) for the whole numbers t from 0 on; the last value holds for all that follow."""
    a, b, c = ratio, 2 * ratio, 8 * ratio

    def step(t: int) -> int:
        return t if t <= a else int(min(b, round(a + (b - a) * math.log(t / a) / math.log(c / a))))

    return [step(t) for t in range(math.ceil(c) + 1)]
