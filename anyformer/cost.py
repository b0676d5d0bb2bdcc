"""What a method costs, as formulas: the one text is printed for people and evaluated for numbers.

    >>> evaluate("2 h n m d + 3/2 n^2", {"h": 8, "n": 100, "m": 50, "d": 64})
    5135000.0

A product is written side by side, as on paper; `+ - /`, `^`, brackets and `log2(...)` mean what they say.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from anyformer.site import Site

LEGEND: Mapping[str, str] = {
    "n": "queries, in a mixer tokens",
    "m": "keys",
    "h": "heads",
    "k": "key heads",
    "d": "channels of a head",
    "c": "channels of the layer",
    "max_length": "longest sequence that it is built for",
    "pairs": "pairs of query and key that may meet, of all heads together",
    "features": "features of a query or a key",
    "rows": "random vectors that one round of hashing compares with",
}
"""What the symbols of formulas stand for; every other symbol is a knob of the method."""

_TOKEN = re.compile(r"\s*(?:(?P<name>[a-z_]\w*)|(?P<number>\d+)|(?P<sign>[-+*/^()]))")
_SIGNS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Cost:
    """What one forward takes for one sample, all heads together, to leading order in its lengths.

    Args:
        site: where the method is built.
        products: formula of its multiply-adds, as many floating point operations times one half: products of vectors and
            matrices that its equation asks for, whatever an implementation computes twice or masks away. What is done once for
            each number (exponentials, sums of a row) is left out.
        memory: formula of the numbers that its equation makes between its inputs and its outputs: weights, features, states.
        again: formula of the multiply-adds that a backward repeats: those of weights, of which there are too many to keep.
        sizes: value of each symbol that is the method's own.
        pairs: of n queries and m keys of all heads, how many pairs may meet; None: all, when causal all earlier ones.
    """

    site: Site
    products: str
    memory: str
    again: str = "0"
    sizes: Mapping[str, int | float] = field(default_factory=dict)
    pairs: Callable[[int, int], int] | None = None

    def multiply_adds(self, n: int, m: int | None = None) -> int:
        """`products` for n queries and m keys (None: n)."""
        return self._value(self.products, n, m)

    def numbers(self, n: int, m: int | None = None) -> int:
        """`memory` for n queries and m keys (None: n)."""
        return self._value(self.memory, n, m)

    def repeated(self, n: int, m: int | None = None) -> int:
        """`again` for n queries and m keys (None: n)."""
        return self._value(self.again, n, m)

    @property
    def values(self) -> dict[str, int | float]:
        """The value of each symbol that no length changes."""
        site = self.site
        shared = {"h": site.heads, "k": site.kv_heads, "d": site.head_dim, "c": site.dim, "max_length": site.max_length}
        return {**shared, **self.sizes}

    def _value(self, text: str, n: int, m: int | None) -> int:
        site, m = self.site, n if m is None else m
        values = {**self.values, "n": n, "m": m}
        if "pairs" in symbols(text):
            all_pairs = site.heads * meetings(n, m, causal=site.causal)
            values["pairs"] = all_pairs if self.pairs is None else self.pairs(n, m)
        return round(evaluate(text, values))


def meetings(n: int, m: int, *, causal: bool) -> int:
    """Pairs of n queries and m keys of one head; when causal the last query sees the last key."""
    if not causal:
        return n * m
    seeing = min(n, m)  # earlier queries stand before the first key
    return seeing * (2 * m - seeing + 1) // 2


def symbols(text: str) -> set[str]:
    """The symbols of a formula."""
    return {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)} - {"log2"}


def evaluate(text: str, values: Mapping[str, int | float]) -> float:
    """The value of a formula.

    Raises:
        ValueError: it is no formula, or a symbol has no value.
    """

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() as number):
                return float(number)
            case ast.Name(id=name) if name in values:
                return float(values[name])
            case ast.Name(id=name):
                raise ValueError(f"{text!r}: expected a value for {name!r}, got {', '.join(values) or 'none'}")
            case ast.BinOp(left=left, op=sign, right=right):
                return _SIGNS[type(sign)](value(left), value(right))
            case ast.Call(func=ast.Name(id="log2"), args=[part]):
                return math.log2(value(part))
        raise ValueError(f"{text!r} is no formula; write one such as '2 h n m d'")

    return value(_parsed(text))


def _parsed(text: str) -> ast.expr:
    found, before, at = "", "", 0
    while token := _TOKEN.match(text, at):
        word = token.group().strip()
        side_by_side = before and before not in ("+", "-", "*", "/", "^", "(", "log2") and word not in set("+-*/^)")
        found += (" * " if side_by_side else " ") + {"^": "**"}.get(word, word)
        before, at = word, token.end()
    try:
        if text[at:].strip():
            raise SyntaxError
        return ast.parse(found.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} is no formula; write one such as '2 h n m d'") from None
