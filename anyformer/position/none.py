"""No position encoding.

Paper: Haviv et al. 2022, 2203.16634; Kazemnejad et al. 2023, 2305.19466 (a causal model can count by itself).
"""

from anyformer.position.base import Position
from anyformer.site import Site


class NoPosition(Position):
    """Tokens know nothing about where they are; bidirectional attention is then permutation-equivariant."""

    name = "none"
    summary = "no position; order reaches a causal model through its mask only"
    paper = "Haviv et al. 2022, 2203.16634"
    family = ("none",)
    scope = "model"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.forms = ()
