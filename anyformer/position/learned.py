"""Learned positions: one trainable vector a position, added to the token vectors.

Paper: Gehring et al. 2017, 1705.03122; Devlin et al. 2018, 1810.04805.
Equation: x_i <- x_i + P[i + offset].
Cost: n c; (max_length + offset) c weights.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from anyformer.forms import Form
from anyformer.position._tables import stretched, with_new_rows
from anyformer.position.base import Position
from anyformer.site import Site
from anyformer.spec import Spec
from anyformer.typing import Count, PositiveFloat


class Learned(Position):
    """Adds a row of a table; positions 0..max_length-1 exist, any other is refused before anything is looked up.

    Args:
        offset: row of position 0: 0 in BERT and GPT-2, 2 in RoBERTa, OPT and BART, whose tables start with rows that no
            token reads. The table has max_length + offset rows.
        std: standard deviation of the initial table; None: dim ** -0.5, which makes its rows as long as token vectors.

    Raises:
        SpecError: (in `embed`) a position is negative or at or beyond max_length.
    """

    name = "learned"
    summary = "one trainable vector a position, added to the token vectors"
    paper = "Gehring et al. 2017, 1705.03122"
    family = ("absolute", "learned")
    scope = "model"
    additive = True

    def __init__(self, site: Site, *, offset: Count = 0, std: PositiveFloat | None = None) -> None:
        super().__init__(site)
        self.forms = ((Form.EMBED,),)
        self.relative = False
        self.limit = site.max_length
        self.extensions = ("random_rows", "stretch", "hierarchical")
        self.offset = offset
        self.std = site.dim**-0.5 if std is None else std
        self.table = nn.Embedding(site.max_length + offset, site.dim)
        nn.init.normal_(self.table.weight, std=self.std)

    def extended(self, spec: Spec, way: Spec, to: int) -> Spec:
        """The same with more rows, or for "hierarchical" that encoding over the rows it has."""
        if way.name != "hierarchical":
            return spec
        kept = tuple(each for each in spec.knobs if each[0] == "std")
        return Spec("hierarchical", (), (("rows", self.site.max_length), *way.knobs, *kept))

    def carry(self, way: Spec, to: int) -> dict[str, Tensor]:
        """The table: rows drawn anew below it, its positions stretched, or only the rows that positions read."""
        table = self.table.weight.detach()
        match way.name:
            case "random_rows":
                return {"table.weight": with_new_rows(table, to - self.site.max_length, self.std, self.site.seed)}
            case "stretch":
                places = stretched(table[self.offset :], to)
                return {"table.weight": torch.cat([table[: self.offset], places])}
        return {"table": table[self.offset :]}

    def embed(
        self, x: Float[Tensor, "b n c"], positions: Int[Tensor, "#b n"], tokens: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "b n c"]:
        """`x + P[positions + offset]`."""
        self.admit(positions)
        return (x + self.table(positions + self.offset)).to(x.dtype)

    def code(self, positions: Int[Tensor, "#b n"]) -> Float[Tensor, "#b n c"]:
        """`P[positions + offset]`."""
        self.admit(positions)
        rows = self.table(positions + self.offset)
        return rows.to(torch.promote_types(torch.float32, rows.dtype))
