"""What every configuration shares: its fields are checked as a whole, and it survives JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from anyformer.errors import SpecError

VERSION = 1
AnyConfig = TypeVar("AnyConfig", bound="Config")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base of configurations: a frozen dataclass that names its format and checks itself in `__post_init__`."""

    form: ClassVar[str]
    """What its JSON says it is."""

    def type_faults(self) -> list[str]:
        """What is wrong with the types and ranges of the fields, one text a field."""
        return [
            fault for each in fields(self) if (fault := _type_fault(each.name, each.type, getattr(self, each.name)))
        ]

    def changed(self) -> dict[str, object]:
        """The fields that differ from their default."""
        values = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def to_json(self) -> str:
        """This configuration as JSON text; `from_json` reads it back to an equal one."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({"format": self.form, "version": VERSION, **values}, indent=2) + "\n"

    @classmethod
    def from_json(cls: type[AnyConfig], text: str) -> AnyConfig:
        """The configuration that `to_json` wrote.

        Raises:
            SpecError: the text is no such JSON, is of another version, or holds unknown or wrong fields.
        """
        owner = cls.__name__
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise SpecError(f"expected the JSON of a {owner}, got {text[:60]!r}: {error}") from None
        if not isinstance(values, dict) or values.get("format") != cls.form:
            raise SpecError(
                f'expected JSON with "format": "{cls.form}", as {owner}.to_json writes it, got {text[:60]!r}'
            )
        if values.get("version") != VERSION:
            raise SpecError(
                f"expected version {VERSION} of {cls.form}, got {values.get('version')!r}; "
                "read it with the release of anyformer that wrote it"
            )
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name not in ("format", "version")
        }
        _refuse_unknown(owner, given, [each.name for each in fields(cls)])
        return cls(**given)

    @classmethod
    def reads(cls, text: str) -> bool:
        """Whether a text is the JSON of such a configuration."""
        try:
            cls.from_json(text)
        except SpecError:
            return False
        return True


def _type_fault(name: str, annotation: Any, value: object) -> str:
    adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        whys = dict.fromkeys(_why(each["msg"]) for each in error.errors(include_url=False))
        return f"{name}={value!r}: expected {' or '.join(whys)}"
    return ""


def _why(message: str) -> str:
    return (message[:1].lower() + message[1:]).removeprefix("input should be ")


def _refuse_unknown(owner: str, given: Mapping[str, object], known: list[str]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        near = {name: get_close_matches(name, known, n=1, cutoff=0.5) for name in unknown}
        hints = [f"{name!r} (did you mean {match[0]!r}?)" if match else repr(name) for name, match in near.items()]
        raise SpecError(f"{owner} has no field {', '.join(hints)}; it has: {', '.join(known)}")
