"""`anyformer show`: what a method is, or what a pattern looks like."""

import inspect
from pathlib import Path

from rich.console import Console

from anyformer.errors import SpecError
from anyformer.registry import Method, describe, names
from anyformer.spec import parse

_PNG = b"\x89PNG\r\n\x1a\n"  # how every PNG begins


def run(text: str, length: int, causal: bool, heads: int, out: str) -> int | None:
    """Print a method's page; draw a pattern on the terminal and into `out`."""
    from anyformer.pattern.read import pattern_of, reads_as_pattern

    spec, console = parse(text), Console()
    pattern = pattern_of(spec) if reads_as_pattern(spec) else None
    if pattern is None or spec.name in names("pattern"):
        _method(console, describe(spec.name))
    if pattern is not None:
        from anyformer.pattern.draw import draw

        path = Path(out)
        _admit(path)
        console.print(f"{pattern}, {length} tokens, {'causal' if causal else 'both directions'}", markup=False)
        console.print(pattern.text(length, min(console.width, 64), causal=causal), markup=False, highlight=False)
        try:
            draw(pattern, path, length, heads=heads, causal=causal)
        except OSError as error:
            raise SpecError(f"--out: cannot write {out!r}: {error.strerror}; give another place") from None
        kept = pattern.density(length, heads=heads, causal=causal)
        console.print(f"{kept:.1%} of all pairs meet; picture: {path}", markup=False)
    return 0


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
    for name, knob in method.knobs.items():
        default = "" if knob.default is inspect.Parameter.empty else f" = {knob.default!r}"
        console.print(f"  {name}: {inspect.formatannotation(knob.annotation)}{default}", markup=False)
    console.print(inspect.cleandoc(method.target.__doc__ or ""), markup=False)
    module = inspect.getmodule(method.target)
    if module is not None and module.__doc__:
        console.print(inspect.cleandoc(module.__doc__), markup=False)
