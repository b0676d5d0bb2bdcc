"""The folder is the registry: `attention/performer.py` holds the attention named `performer`.

Looking a name up imports that one file. The constructor (or, for a pattern scheme, the function) is the schema of its spec.
Classes of your own join through `register`.
"""

import importlib.util
import inspect
import pkgutil
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MappingProxyType, ModuleType, UnionType
from typing import Any, Literal

from anyformer.errors import SpecError
from anyformer.spec import Items, Spec, parse

Kind = Literal["attention", "mixer", "position", "pattern", "task"]
KINDS: tuple[Kind, ...] = typing.get_args(Kind)
_NOT_METHODS = {"base", "multihead", "leaves", "layout", "pairs", "read", "draw", "bind"}
_IN_SPECS = {
    "a valid tuple": "a list, in square brackets",
    "a valid boolean": "one of True and False",
}  # pydantic's words
_registered: dict[tuple[Kind, str], Callable] = {}  # user classes only; filled by `register`


@dataclass(frozen=True)
class Maker:
    """What a spec calls.

    Args:
        name: what specs call it.
        target: the class, or for a pattern scheme the function, that the knobs of a spec are arguments of.
    """

    name: str
    target: Callable

    @property
    def knobs(self) -> Mapping[str, inspect.Parameter]:
        """Its knobs in declaration order."""
        parameters = inspect.signature(self.target).parameters
        others = {"self", "site", *self.supplied}
        return MappingProxyType({name: each for name, each in parameters.items() if name not in others})

    @property
    def supplied(self) -> frozenset[str]:
        """Arguments that come from elsewhere than a spec."""
        return frozenset()


@dataclass(frozen=True)
class Method(Maker):
    """One registered method.

    Args:
        kind: the noun it belongs to.
        summary: one line.
        paper: authors, year and arXiv id.
        family: its place in the surveys' trees, from the trunk to the twig.
    """

    kind: Kind
    summary: str
    paper: str
    family: tuple[str, ...]

    @property
    def supplied(self) -> frozenset[str]:
        """Arguments of a mixer's constructor that come from the layer it is built for, not from its spec."""
        offered = ("position", "bias", "qk_norm", "dropout") if self.kind == "mixer" else ()
        return frozenset(offered) & frozenset(inspect.signature(self.target).parameters)


def names(kind: Kind) -> list[str]:
    """Every name of this kind, without importing a method."""
    package = importlib.util.find_spec(f"anyformer.{kind}")
    found = pkgutil.iter_modules(package.submodule_search_locations) if package else []
    own = {module.name for module in found if module.name not in _NOT_METHODS and not module.name.startswith("_")}
    return sorted(own | {name for where, name in _registered if where == kind})


def find(kind: Kind, name: str) -> Method:
    """The method of this kind and name.

    Raises:
        SpecError: there is none; the message names the nearest ones.
    """
    if (kind, name) in _registered:
        target = _registered[kind, name]
        return _describe(kind, name, target, target)
    known = names(kind)
    if name not in known:
        raise SpecError(unknown(f"{kind}", name, known))
    module = importlib.import_module(f"anyformer.{kind}.{name}")
    target = getattr(module, name, None) if kind == "pattern" else _class_of(module, name)
    if target is None:
        raise ImportError(
            f"anyformer/{kind}/{name}.py must define one class (a pattern scheme: a function) named {name!r}"
        )
    return _describe(kind, name, target, module if kind == "pattern" else target)


def list_methods(kind: Kind, wildcard: str = "*") -> list[Method]:
    """The methods of this kind whose names match a wildcard such as `big*`. The kind `attention` covers every name of the
    attention slot: attentions, mixers and pattern schemes."""
    kinds: tuple[Kind, ...] = ("attention", "mixer", "pattern") if kind == "attention" else (kind,)
    return [find(each, name) for each in kinds for name in names(each) if fnmatchcase(name, wildcard)]


def describe(name: str) -> Method:
    """The one method of this name, of whatever kind.

    Raises:
        SpecError: there is none; the message names the nearest ones.
    """
    for kind in KINDS:
        if name in names(kind):
            return find(kind, name)
    raise SpecError(unknown("method", name, sorted({each for kind in KINDS for each in names(kind)})))


def register(cls: type) -> type:
    """Add a class of your own; usable as a decorator. Its `name` and `kind` say where it belongs.

    Raises:
        SpecError: the class declares no kind or name, or the name is taken by another class.
    """
    kind, name = getattr(cls, "kind", None), getattr(cls, "name", None)
    if kind not in KINDS or not isinstance(name, str) or not name.isidentifier() or not name.islower():
        raise SpecError(
            f"{cls.__qualname__}: expected class attributes kind (one of {', '.join(KINDS)}) and name (a lower-case identifier), "
            f"got kind={kind!r} and name={name!r}; derive from Attention, Mixer, Position or Task and set name"
        )
    taken = _registered.get((kind, name))
    again = taken is not None and taken.__module__ == cls.__module__ and taken.__qualname__ == cls.__qualname__
    if not again and name in names(kind):
        raise SpecError(f"the {kind} name {name!r} is taken; choose another name")
    _registered[kind, name] = cls
    return cls


def unknown(what: str, name: str, known: "list[str]") -> str:
    """The message for a name that does not exist, with the kind that has it or the nearest ones."""
    elsewhere = next((kind for kind in KINDS if kind != what and name in names(kind)), None)
    if elsewhere is not None:
        return f"there is no {what} named {name!r}; {name} is {'an' if elsewhere[0] in 'aeiou' else 'a'} {elsewhere}"
    near = get_close_matches(name, known, n=3, cutoff=0.5) or [each for each in known if name and name in each][:3]
    hint = f"did you mean {' or '.join(repr(each) for each in near)}?" if near else f"there are: {', '.join(known)}"
    return f"there is no {what} named {name!r}; {hint}"


def bind(method: Maker, spec: Spec) -> dict[str, object]:
    """The knobs a spec gives to a method, checked against its signature. A bare name given to a text knob is
    that text; a Pattern knob reads pattern expressions.

    Raises:
        SpecError: unknown knobs, wrong types, values out of range; all faults in one message.
    """
    knobs = method.knobs
    faults: list[str] = []
    given: dict[str, object] = {}
    if len(spec.args) > len(knobs):
        faults.append(f"takes at most {len(knobs)} knobs, got {len(spec.args)} values")
    for name, value in (*zip(knobs, spec.args, strict=False), *spec.knobs):
        if name not in knobs:
            near = get_close_matches(name, list(knobs), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(knobs) or 'no knobs'}"
            faults.append(f"unknown knob {name!r}; {hint}")
        elif name in given:
            faults.append(f"knob {name!r} is given by place and by name")
        else:
            given[name] = _checked(name, value, knobs[name], faults)
    if faults:
        raise SpecError(f"{spec}: " + "; ".join(faults))
    return given


def canonical(method: Maker, spec: Spec) -> Spec:
    """The one way to write this spec: knobs by name, in declaration order, only those that differ from the default."""
    given = bind(method, spec)
    kept = [(name, given[name]) for name, knob in method.knobs.items() if name in given and given[name] != knob.default]
    return Spec(method.name, (), tuple((name, _as_spec_value(value)) for name, value in kept))


def sequence_knobs(method: Maker) -> frozenset[str]:
    """Names of knobs whose value is itself a list, so that a list there is no grid."""
    return frozenset(name for name, knob in method.knobs.items() if _takes_sequence(knob.annotation))


def _class_of(module: ModuleType, name: str) -> type | None:
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return next((each for each in classes if each.__dict__.get("name") == name), None)


def _describe(kind: Kind, name: str, target: Callable, about: Any) -> Method:
    return Method(name, target, kind, about.summary, about.paper, about.family)


def _checked(name: str, value: object, knob: inspect.Parameter, faults: list[str]) -> object:
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError  # not needed to print help

    value = _resolved(value, knob.annotation)
    try:
        try:
            adapter = TypeAdapter(knob.annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        except PydanticUserError:  # types that carry their own config
            adapter = TypeAdapter(knob.annotation)
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))  # of a list, its wrong entry
        if fault["type"] == "value_error":  # a nested spec says itself what is wrong
            faults.append(fault["msg"].removeprefix("Value error, "))
        else:
            why = fault["msg"].removeprefix("Input should be ")
            for theirs, ours in _IN_SPECS.items():
                why = why.replace(theirs, ours)
            why += " or None" if type(None) in _members(knob.annotation) and "None" not in why else ""
            faults.append(f"{name}={_shown(value)}: expected {why[:1].lower()}{why[1:]}")
        return value


def _resolved(value: object, annotation: object) -> object:
    """A bare name given to a knob that takes text, or a list of texts, is that text; every other spec is for the knob's own type
    to read."""
    if isinstance(value, Items):
        kinds = [typing.get_args(each)[0] for each in _members(annotation) if typing.get_origin(each) in (tuple, list)]
        return Items(_resolved(each, kinds[0]) for each in value) if len(kinds) == 1 else value
    if not isinstance(value, Spec):
        return value
    takes_text = any(each is str or typing.get_origin(each) is Literal for each in _members(annotation))
    bare = not value.args and not value.knobs
    return value.name if takes_text and bare and Spec not in _members(annotation) else value


def _members(annotation: object) -> tuple[object, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        return tuple(member for each in typing.get_args(annotation) for member in _members(each))
    return (annotation,)


def _takes_sequence(annotation: object) -> bool:
    return any(typing.get_origin(each) in (tuple, list) or each in (tuple, list) for each in _members(annotation))


def _as_spec_value(value: object) -> object:
    if isinstance(value, tuple):
        return Items(_as_spec_value(each) for each in value)
    plain = isinstance(value, bool | int | float | str | Spec) or value is None
    return value if plain else parse(str(value))


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, Spec) else repr(value)
