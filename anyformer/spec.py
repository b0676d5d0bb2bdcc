"""A Spec is a method's name with its knobs, as a value and as text: `bigbird(block=64)`.

Grammar: methods are lower-case names, pattern leaves are CapWords. A knob is a number, a text, True, False, None, a list,
another spec, or patterns joined by `|`, `&` and `~`. Texts are parsed, never evaluated. `str(spec)` parses back.

    >>> spec = parse("softmax(pattern=Local(128) | Global([0]))")
    >>> spec.name, str(spec)
    ('softmax', 'softmax(pattern=Local(128) | Global([0]))')
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from anyformer.errors import SpecError

_MOST_TEXT = 4000  # characters; a longer text is a mistake, and deep nesting would exhaust the parser


class Items(tuple):
    """A list in a spec, printed with square brackets; a tuple so that specs stay hashable."""

    __slots__ = ()


@dataclass(frozen=True)
class Spec:
    """A name and its knobs.

    Args:
        name: the method, the pattern leaf, or one of the operators `|`, `&`, `~`.
        args: values given by place; they bind to knobs in declaration order.
        knobs: pairs of a knob's name and its value, in the order they were written.
    """

    name: str
    args: tuple = ()
    knobs: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return _text(self, 0)

    @property
    def is_pattern(self) -> bool:
        """Whether this is a pattern expression: an operator, or a CapWords leaf."""
        return not self.name[:1].islower()


def parse(text: "str | Spec") -> Spec:
    """Read one spec.

    Args:
        text: `name`, `name(knob=value, ...)` or a pattern expression; a Spec is returned as it is.

    Raises:
        SpecError: the text is not a spec; the message shows where.
    """
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str):
        raise SpecError(f"expected a spec such as 'local(128)', got {text!r} ({type(text).__name__})")
    source = text.strip()
    if not source:
        raise SpecError("expected a spec such as 'softmax' or 'local(128)', got an empty text")
    if len(source) > _MOST_TEXT:
        raise SpecError(f"expected a spec of at most {_MOST_TEXT} characters, got {len(source)}")
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise SpecError(
            _not_a_spec(source, getattr(error, "msg", str(error)), getattr(error, "offset", None))
        ) from None
    try:
        value = _value(tree.body, source)
    except RecursionError:
        raise SpecError(f"expected a spec, got {source[:60]!r}...: it is nested too deeply") from None
    if not isinstance(value, Spec):
        raise SpecError(f"expected a spec such as 'local(128)', got the bare value {source!r}")
    return value


def expand(spec: Spec, sequence_knobs: "frozenset[str]" = frozenset()) -> list[Spec]:
    """The grid of specs that lists in knobs stand for: `bigbird(block=[32, 64])` is two specs.

    Args:
        spec: a method's spec.
        sequence_knobs: names of knobs whose own value is a list; they are left as they are.
    """
    choices: list[tuple[tuple[str, object], ...]] = [
        tuple((name, item) for item in value)
        if isinstance(value, Items) and name not in sequence_knobs
        else ((name, value),)
        for name, value in spec.knobs
    ]
    return [Spec(spec.name, spec.args, picked) for picked in product(*choices)]


def walk(spec: Spec) -> Iterator[Spec]:
    """The spec and every spec inside it."""
    yield spec
    for value in (*spec.args, *(value for _, value in spec.knobs)):
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Spec):
                yield from walk(item)


def _not_a_spec(source: str, why: str, offset: int | None) -> str:
    lines = [f"expected a spec such as 'local(128)' or 'rope(base=1e4)', got {source!r}: {why}"]
    if offset and "\n" not in source:
        lines += ["  " + source, "  " + " " * (offset - 1) + "^"]
    return "\n".join(lines)


def _value(node: ast.AST, source: str) -> object:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(
            value, bool
        ):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            values = tuple(_value(item, source) for item in items)
            return Items(values) if isinstance(node, ast.List) else values
        case ast.Name(id=name):
            return Spec(name)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _call(name, args, keywords, source)
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() as op, right=right):
            sign = "|" if isinstance(op, ast.BitOr) else "&"
            return Spec(sign, (_pattern(left, source), _pattern(right, source)))
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return Spec("~", (_pattern(operand, source),))
    part = ast.get_source_segment(source, node) if isinstance(node, ast.expr) else None
    raise SpecError(
        f"in {source!r}: {part or 'this'!r} is not allowed; a knob is a number, a text, True, False, None, a list, "
        "another spec, or patterns joined by | & ~"
    )


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword], source: str) -> Spec:
    knobs: list[tuple[str, object]] = []
    for keyword in keywords:
        if keyword.arg is None:
            raise SpecError(f"in {source!r}: '**' is not allowed; write knob=value")
        if any(keyword.arg == seen for seen, _ in knobs):
            raise SpecError(f"in {source!r}: the knob {keyword.arg!r} is given twice")
        knobs.append((keyword.arg, _value(keyword.value, source)))
    return Spec(name, tuple(_value(arg, source) for arg in args), tuple(knobs))


def _pattern(node: ast.expr, source: str) -> Spec:
    value = _value(node, source)
    if isinstance(value, Spec):
        return value
    raise SpecError(f"in {source!r}: {ast.get_source_segment(source, node)!r} is not a pattern; | & ~ join patterns")


_STRENGTH = {"|": 1, "&": 2, "~": 3}


def _text(value: object, around: int) -> str:
    if isinstance(value, Items):
        return "[" + ", ".join(_text(item, 0) for item in value) + "]"
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(item, 0) for item in value) + ("," if len(value) == 1 else "") + ")"
    if not isinstance(value, Spec):
        return repr(value)
    strength = _STRENGTH.get(value.name)
    if strength is None:
        inside = [_text(arg, 0) for arg in value.args] + [f"{name}={_text(knob, 0)}" for name, knob in value.knobs]
        return f"{value.name}({', '.join(inside)})" if inside or value.is_pattern else value.name
    if value.name == "~":
        text = "~" + _text(value.args[0], strength)
    else:  # left-associative: an equal operator on the right keeps its brackets
        text = f"{_text(value.args[0], strength - 1)} {value.name} {_text(value.args[1], strength)}"
    return f"({text})" if strength <= around else text
