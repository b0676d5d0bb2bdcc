"""`anyformer show`: what a method is, or what a pattern looks like."""

import inspect
from pathlib import Path

from rich.console import Console

from anyformer.errors import SpecError
from anyformer.registry import Method, describe, names
from anyformer.spec import parse


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
        if not path.parent.is_dir():
            raise SpecError(
                f"--out: there is no folder {str(path.parent)!r} to write {path.name!r} into; make it first"
            )
        console.print(f"{pattern}, {length} tokens, {'causal' if causal else 'both directions'}", markup=False)
        console.print(pattern.text(length, min(console.width, 64), causal=causal), markup=False, highlight=False)
        draw(pattern, path, length, heads=heads, causal=causal)
        kept = pattern.density(length, heads=heads, causal=causal)
        console.print(f"{kept:.1%} of all pairs meet; picture: {path}", markup=False)
    return 0


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
