"""Sparse Transformer: two sparse patterns that together reach any earlier token in two steps.

Paper: Child, Gray, Radford, Sutskever 2019, "Generating Long Sequences with Sparse Transformers", 1904.10509.
Rules for k <= q, with l the length and c the summary:
    strided: k > q - l (the last l tokens), and (q - k) % l == 0 (one token in every l);
    fixed:   k // l == q // l (the same stretch of l tokens), and k % l >= l - c (the last c tokens of every stretch).
Places count from 0, so that the summary of a stretch is its own end.
Not causal (not in the paper): the symmetric closure, a pair is allowed if the causal rule allows it in either order.
"""

from typing import Literal

from anyformer.errors import SpecError
from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern._facts import whole_number
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import Block, Columns, Local, Strided
from anyformer.typing import Size

summary = "near tokens and a sparse set of far ones, which reach any earlier token in two steps"
paper = "Child et al. 2019, 1904.10509"
family = ("human-made pattern", "combined")


def sparse_transformer(
    kind: Literal["fixed", "strided"] = "fixed",
    length: Size = 128,
    summary: Size = 32,
    usage: Literal["merged", "alternate", "heads"] = "merged",
    heads: Size | None = None,
) -> Pattern:
    """The patterns of the Sparse Transformer; see the module.

    Args:
        kind: "fixed" for text, "strided" for data with a period, such as images read row by row.
        length: l, about the square root of the sequence length, in tokens; it costs least there.
        summary: c, tokens that speak for each stretch; read by kind="fixed" only.
        usage: "merged": one softmax over both rules; "alternate": the near rule in even layers, the far rule in odd
            ones; "heads": the near rule for the first half of the heads, the far rule for the others.
        heads: number of query heads of the layer, even; read by usage="heads" only.

    Raises:
        SpecError: a size is out of range, the summary is longer than the length, there is no such kind or usage, or
            usage="heads" comes without an even number of heads.
    """
    whole_number("sparse_transformer", "length", length, 1, "length=128")
    match kind:
        case "fixed":
            near, far = Block(length), Columns(length, summary)
        case "strided":
            near, far = Local(length - 1), Strided(length)
        case _:
            raise SpecError(
                f"sparse_transformer: expected kind as 'fixed' or 'strided', got {kind!r}; for example kind='fixed'"
            )
    match usage:
        case "merged":
            return near | far
        case "alternate":
            return PerLayer(near, far)
        case "heads":
            if heads is None or heads < 2 or heads % 2:
                raise SpecError(
                    "sparse_transformer: usage='heads' splits the heads in two: expected heads as the layer's even "
                    f"number of query heads, got {heads!r}; for example usage='heads', heads=8"
                )
            return PerHead((near, heads // 2), (far, heads // 2))
    raise SpecError(
        f"sparse_transformer: expected usage as 'merged', 'alternate' or 'heads', got {usage!r}; "
        "for example usage='merged'"
    )
