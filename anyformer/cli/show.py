"""`anyformer show`: what a method is, what it costs and what it looks like."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar

import annotated_types as at
from rich.console import Console
from rich.table import Table

from anyformer.errors import SpecError
from anyformer.registry import Maker, Method, bind, describe, names
from anyformer.spec import Spec, parse

if TYPE_CHECKING:
    from anyformer.pattern.base import Pattern

_LENGTHS = (1024, 4096, 16384)
_HEADS = 4  # of a picture of an encoding
_KINDS = {int: "whole number", float: "number", bool: "True or False", str: "text"}
_BOUNDS: dict[type, str] = {
    at.Ge: "at least {}",
    at.Gt: "above {}",
    at.Le: "at most {}",
    at.Lt: "below {}",
    at.MultipleOf: "a multiple of {}",
}
_T = TypeVar("_T")
_PNG = b"\x89PNG\r\n\x1a\n"  # how every PNG begins


def run(text: str, length: int, causal: bool, heads: int | None, lengths: Sequence[int], out: str) -> int | None:
    """Print a method's page and what it costs, and draw it: the pattern, the weights of a sample, or the encoding."""
    from anyformer.pattern.leaves import SLOT_NAMES
    from anyformer.pattern.read import pattern_of, reads_as_pattern

    spec, console = parse(text), Console()
    pattern = pattern_of(spec) if reads_as_pattern(spec) else None
    method = describe(spec.name) if pattern is None or spec.name in names("pattern") else None
    kind = "pattern" if method is None else method.kind
    path = Path(out or ("pattern.png" if kind == "pattern" else f"{spec.name}.png"))
    if method is not None:
        bind(method, spec)  # before anything is printed
    if kind != "task":
        _admit(path)
    if method is not None:
        _method(console, method)
    elif spec.name in SLOT_NAMES:
        _maker(console, Maker(spec.name, SLOT_NAMES[spec.name]))
    if kind in ("attention", "mixer", "pattern"):
        _cost(console, spec, lengths or _LENGTHS, heads or 1, causal=causal)
    if pattern is not None:
        _pattern(console, pattern, path, length, heads or 1, causal=causal)
    elif kind in ("attention", "mixer"):
        _weights(console, spec, path, length, heads or 1, causal=causal)
    elif kind == "position":
        _position(console, spec, path, length, heads or _HEADS, causal=causal)
    return 0


def _cost(console: Console, spec: Spec, lengths: Sequence[int], heads: int, *, causal: bool) -> None:
    """The formulas, and a table of what they say."""
    from anyformer.compare.costing import COUNTED, WIDTH, costing, symbols_of
    from anyformer.compare.text import count, number

    found = [costing(spec, n, heads, causal=causal) for n in lengths]
    if found[0].cost is None:
        console.print("It does not say what it costs.")
        return
    what = "one forward of the layer, projections included" if found[0].layer else "queries, keys and values given"
    size = f"{heads} head{'s' * (heads > 1)} of {WIDTH} channels, one sample"
    console.print(f"\nCost ({what}; {size}):", markup=False)
    console.print(f"  FLOPs = 2 x ({found[0].cost.products})", markup=False, highlight=False)
    console.print(
        f"  memory = {found[0].cost.memory} numbers, made between inputs and outputs", markup=False, highlight=False
    )
    for symbol, meaning in symbols_of(found[0].cost).items():
        console.print(f"    {symbol}: {meaning}", markup=False, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("tokens", "FLOPs", "counted", "dense FLOPs", "of dense", "memory", "dense memory"):
        table.add_column(heading, justify="right")
    for n, each in zip(lengths, found, strict=True):
        flops, dense = each.operations, each.dense_operations
        counted = "" if each.counted is None else count(each.counted)
        share = f"{number(100 * flops / dense, 3)} %"
        table.add_row(
            str(n), count(flops), counted, count(dense), share, count(each.numbers), count(each.dense_numbers)
        )
    console.print(table)
    console.print(
        f"counted: products of matrices in a forward here, up to {COUNTED} tokens; tiles, chunks and masks take more than the "
        "formula, which is that of the equation, and a Fourier transform counts as nothing. dense: softmax over all pairs.\n",
        markup=False,
    )


def _pattern(console: Console, pattern: "Pattern", path: Path, length: int, heads: int, *, causal: bool) -> None:
    from anyformer.pattern.draw import draw

    console.print(f"{pattern}, {length} tokens, {'causal' if causal else 'both directions'}", markup=False)
    console.print(pattern.text(length, min(console.width, 64), causal=causal), markup=False, highlight=False)
    _written(path, lambda: draw(pattern, path, length, heads=heads, causal=causal))
    kept = pattern.density(length, heads=heads, causal=causal)
    console.print(f"{kept:.1%} of all pairs meet; picture: {path}", markup=False)


def _weights(console: Console, spec: Spec, path: Path, length: int, heads: int, *, causal: bool) -> None:
    from anyformer.compare.pictures import draw_weights

    tokens = _written(path, lambda: draw_weights(spec, path, length, heads, causal=causal))
    console.print(f"what each of {tokens} tokens takes from each; picture: {path}", markup=False)


def _position(console: Console, spec: Spec, path: Path, length: int, heads: int, *, causal: bool) -> None:
    from anyformer.compare.pictures import draw_position

    refused = _written(path, lambda: draw_position(spec, path, length, heads, causal=causal))
    beyond = f"refused: {refused}" if refused else "goes on"
    console.print(f"\nbuilt for {length} positions; beyond them it {'is ' * bool(refused)}{beyond}", markup=False)
    console.print(f"picture up to twice that length: {path}", markup=False)


def _written(path: Path, draw: Callable[[], _T]) -> _T:
    """What drawing gives.

    Raises:
        SpecError: the picture cannot be written there.
    """
    try:
        return draw()
    except OSError as error:
        raise SpecError(f"--out: cannot write {str(path)!r}: {error.strerror}; give another place") from None


def _admit(path: Path) -> None:
    """Refuse a place that is not for a picture, before anything is drawn.

    Raises:
        SpecError: another suffix than .png, a folder that does not exist, or something there that is no PNG.
    """
    if path.suffix.lower() != ".png":
        raise SpecError(
            f"--out: a picture is a PNG, got {str(path)!r}; type a name such as {path.stem or 'pattern'}.png"
        )
    try:
        if not path.parent.is_dir():
            raise SpecError(
                f"--out: there is no folder {str(path.parent)!r} to write {path.name!r} into; make it first"
            )
        if path.exists() and not (path.is_file() and _is_png(path)):
            raise SpecError(f"--out: {str(path)!r} exists and is no PNG, so it is left alone; give another name")
    except OSError as error:
        raise SpecError(f"--out: cannot use {str(path)!r}: {error.strerror}; give another place") from None


def _is_png(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_PNG)) == _PNG


def _method(console: Console, method: Method) -> None:
    console.print(f"[bold]{method.name}[/bold]: {method.summary}")
    console.print(f"{method.kind}: {' > '.join(method.family)}. {method.paper}", markup=False)
    _knobs(console, method)
    console.print(inspect.cleandoc(method.target.__doc__ or ""), markup=False)
    module = inspect.getmodule(method.target)
    if module is not None and module.__doc__:
        console.print(inspect.cleandoc(module.__doc__), markup=False)


def _maker(console: Console, leaf: Maker) -> None:
    """A leaf, under its name in the attention slot: its rule and its knobs."""
    from anyformer.pattern.leaves import SLOT_PAPERS

    console.print(f"[bold]{leaf.name}[/bold]: ", end="")
    console.print(inspect.cleandoc(leaf.target.__doc__ or ""), markup=False)
    console.print(f"pattern. {SLOT_PAPERS[leaf.name]}", markup=False)
    _knobs(console, leaf)


def _knobs(console: Console, maker: Maker) -> None:
    for name, knob in maker.knobs.items():
        default = str(knob.default) if isinstance(knob.default, Spec) else repr(knob.default)
        default = "" if knob.default is inspect.Parameter.empty else f" = {default}"
        console.print(f"  {name}: {_told(knob.annotation)}{default}", markup=False)


def _told(annotation: Any) -> str:
    """What values a knob takes, for people.

    >>> _told(Annotated[int, Ge(1)] | None)
    'whole number, at least 1, or None'
    """
    kind, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if kind is typing.Annotated:
        bounds = (_BOUNDS[type(each)].format(*dataclasses.astuple(each)) for each in parts[1:] if type(each) in _BOUNDS)
        return ", ".join([_told(parts[0]), *bounds])
    if kind in (typing.Union, UnionType):
        rest = [_told(part) for part in parts if part is not NoneType]
        return " or ".join(rest) + (", or None" if NoneType in parts else "")
    if kind is typing.Literal:
        return " | ".join(map(str, parts))
    if kind is tuple:
        return f"several of ({_told(parts[0])})"
    return _KINDS.get(annotation, getattr(annotation, "__name__", str(annotation)).lower())
