"""An encoding inside another's spec: `multiplicative(source=learned)`."""

from typing import Annotated

from pydantic import PlainValidator

from anyformer.errors import SpecError
from anyformer.position.base import Position
from anyformer.registry import bind, canonical, find
from anyformer.site import Site
from anyformer.spec import Spec, parse


def _canonical(value: object) -> Spec:
    if not isinstance(value, str | Spec):
        raise SpecError(f"expected an encoding such as learned or rope(base=1e5), got {value!r}")
    spec = parse(value)
    return canonical(find("position", spec.name), spec)


PositionSpec = Annotated[Spec, PlainValidator(_canonical)]
"""A knob that takes the spec of another encoding."""

LEARNED, ROPE = Spec("learned"), Spec("rope")


def build(spec: str | Spec, site: Site) -> Position:
    """The encoding of a spec, built for `site`.

    Raises:
        SpecError: the spec is wrong.
    """
    spec = parse(spec)
    method = find("position", spec.name)
    return method.target(site, **bind(method, spec))


def additive(name: str, spec: Spec, site: Site) -> Position:
    """The source of an encoding `name` that uses the vectors of another one.

    Raises:
        SpecError: the other adds no vectors.
    """
    source = build(spec, site)
    if not source.additive:
        raise SpecError(
            f"{name}: expected a source that adds one vector a position, such as learned, sinusoidal, hierarchical or rnn, "
            f"got {source.name}"
        )
    return source
