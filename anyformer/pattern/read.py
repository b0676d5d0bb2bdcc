"""Patterns from specs: `Local(64) | Global([0])`, `local(64)`, `bigbird(block=64)`."""

import inspect

from anyformer.errors import SpecError
from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern.base import Pattern
from anyformer.pattern.leaves import LEAVES, SLOT_NAMES
from anyformer.registry import Maker, bind, find, names, unknown
from anyformer.spec import Spec, parse


def reads_as_pattern(spec: Spec) -> bool:
    """Whether a spec in the attention slot is a pattern: an expression, a leaf's name, or a scheme's."""
    return spec.is_pattern or spec.name in SLOT_NAMES or spec.name in names("pattern")


def pattern_of(value: Pattern | Spec | str) -> Pattern:
    """The pattern that a spec or its text stands for; a Pattern is returned as it is.

    >>> pattern_of("local(64) | bigbird(block=32) & ~Causal()")
    Local(64) | bigbird(block=32, random=3) & ~Causal()

    Raises:
        SpecError: an unknown leaf or scheme, or a knob that is missing or wrong.
    """
    if isinstance(value, Pattern):
        return value
    spec = parse(value)
    match spec:
        case Spec(name="|", args=(left, right)):
            return pattern_of(left) | pattern_of(right)
        case Spec(name="&", args=(left, right)):
            return pattern_of(left) & pattern_of(right)
        case Spec(name="~", args=(part,)):
            return ~pattern_of(part)
    leaf = LEAVES.get(spec.name) or SLOT_NAMES.get(spec.name)
    if leaf is PerHead or leaf is PerLayer:
        if spec.knobs:
            raise SpecError(
                f"{spec}: expected no knobs by name, got {spec.knobs[0][0]}; write its parts one after the other"
            )
        return PerHead(*map(_group, spec.args)) if leaf is PerHead else PerLayer(*map(_part, spec.args))
    if leaf is not None:
        return _called(Maker(spec.name, leaf), spec)
    if spec.name in names("pattern"):
        return _called(find("pattern", spec.name), spec)
    raise SpecError(unknown("pattern", spec.name, sorted([*LEAVES, *SLOT_NAMES, *names("pattern")])))


def _called(method: Maker, spec: Spec) -> Pattern:
    given, knobs = bind(method, spec), method.knobs
    missing = [name for name in knobs if name not in given and knobs[name].default is inspect.Parameter.empty]
    if missing:
        raise SpecError(
            f"{spec}: expected {' and '.join(missing)}, got nothing; write {spec.name}({', '.join(knobs)}) with values"
        )
    return method.target(**given)


def _group(value: object) -> tuple[Pattern, int]:
    match value:
        case (part, int() as heads):
            return _part(part), heads
    raise SpecError(
        f"expected a pair such as (Local(64), 4), a pattern and the number of heads it serves, got {_shown(value)}"
    )


def _part(value: object) -> Pattern:
    if isinstance(value, Spec):
        return pattern_of(value)
    raise SpecError(f"expected a pattern such as Local(64), got {_shown(value)}")


def _shown(value: object) -> str:
    return str(value) if isinstance(value, Spec) else repr(value)
