"""The base of every attention: how pairs mix."""

from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from anyformer.attention._shortening import Shortening
from anyformer.context import Context
from anyformer.cost import Cost
from anyformer.errors import IncompatibleError
from anyformer.forms import Form
from anyformer.site import Site


class Attention(nn.Module):
    """How queries, keys and values become outputs.

    A subclass is one file `attention/<name>.py` with one class. It sets `name`, `summary`, `paper`, `family` and the declarations
    below, takes `(self, site, *, knobs...)`, calls `super().__init__(site)` and writes `forward`.
    """

    kind: ClassVar[str] = "attention"
    name: str
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[tuple[str, ...]]
    """Trunk to twig, the trunk one of "full", "human-made pattern", "large weights", "clustering", "learned pattern", "fewer keys",
    "order of the product", "new framework", "attention-free", "reference line"."""

    forms: tuple[Form, ...]
    """Forms of position it can use, best first."""
    outside: tuple[Form, ...] = (Form.SHIFT,)
    """Forms that whoever projects queries, keys and values deals with."""
    absolute: frozenset[Form] = frozenset()
    """Forms it can use that then lose the relative law."""
    refusal: str = ""
    """Why it can use no other form, and what to use instead."""
    fixed_width: bool = False
    """Whether it was built for queries and keys of head_dim channels, so that no encoding may widen them."""
    estimates: bool = False
    """Whether its weights are estimates from random features, which vary the more the longer queries and keys are."""
    causal: bool = True
    causal_refusal: str = ""
    """Why it cannot be causal, and what to use instead."""
    cross: bool = True
    """Whether queries and keys may come from different sequences."""
    documents: bool = True
    """Whether several documents may share a row."""
    documents_refusal: str = ""
    """Why they may not, said after "cannot keep documents of one row apart"."""
    takes_pattern: ClassVar[bool] = False
    """Whether it honours a Pattern."""
    takes_flags: bool = False
    """Whether it reads global_mask."""
    flag_ids: tuple[int, ...] = ()
    """Token ids whose tokens are flagged beside those of global_mask."""
    decodes: ClassVar[Literal["cache", "state"] | None] = None
    """What it needs to continue a sequence: all keys and values, a state of fixed size, or it cannot."""
    keyed: frozenset[Form] = frozenset()
    """Forms with which it continues a sequence from all keys and values, even where `decodes` says from a state."""
    rotates: ClassVar[Literal["before", "self"]] = "before"
    """Who applies ROTATE: the caller before forward, or forward itself through context.encoding.rotate."""
    reads: tuple[Literal["q", "k", "v", "x"], ...] = ("q", "k", "v")
    """What it reads of queries, keys, values and x, the tokens themselves: then a call without a mixer needs Context(x=...)."""
    shares: bool = False
    """Whether keys are the queries: there is no projection of keys then, and forward gets the queries of all tokens for k."""
    ordered: bool = False
    """Whether it indexes slots, so that slots must be places: the mixer then moves real tokens to the left."""
    compares: ClassVar[bool] = True
    """Whether a pair that it biases or scores is one query and one key, whose product is the rest of the score."""
    unscored: ClassVar[str] = "scores no pairs of query and key"
    """Why no score belongs to a pair, where none does; said after its name."""
    common: str | None = None
    """Its submodule that all layers of a model with the same spec hold as one object; None: layers have nothing in common."""
    spans: bool = False
    """Whether what it computes depends on max_length otherwise than by the sizes of its weights, so that a trained one cannot be
    built for longer inputs and stay the same."""
    weights: ClassVar[bool] = True
    """Whether it has explicit weights to drop out; if not, its output is dropped out instead."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        if site.causal and not self.causal:
            raise IncompatibleError(f"{self.name} cannot be causal: {self.causal_refusal}")
        self.site = site
        self.shortening: Shortening | None = None
        """What its queries are shortened by, so that its output is; None: it gives one vector for each query."""
        self.horizon: int | None = None
        """How many places back a key can still be seen; None: for ever. A cache drops the rest."""

    @property
    def scores_pairs(self) -> bool:
        """Whether each score belongs to one query and one key, so that it has terms to tell apart."""
        return self.compares and bool({Form.BIAS, Form.SCORE} & {*self.forms})

    def cost(self) -> Cost | None:
        """What a forward multiplies and makes, as formulas; None: it does not say."""
        return None

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b k m d"], v: Float[Tensor, "b k m v"], context: Context
    ) -> Float[Tensor, "b h n v"]:
        """Outputs of the queries, or of the averages that they are shortened to. A query that may look nowhere gives exactly 0."""
        raise NotImplementedError
