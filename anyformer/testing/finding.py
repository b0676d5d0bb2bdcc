"""What a law measures, and how a law is written down."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from anyformer.testing.case import Case


@dataclass(frozen=True)
class Finding:
    """One measured error against its limit.

    Args:
        error: what was measured; a law of equality with limit 0 demands the same bits.
        limit: what is allowed.
        note: which of the law's inputs this was.
    """

    error: float
    limit: float
    note: str = ""

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # False for NaN


Measure = Callable[[Case], list[Finding] | str]
"""Findings, or the reason why the law does not speak about this case."""


@dataclass(frozen=True)
class Law:
    """A property that every admitted pair must have.

    Args:
        name: short name, `D01`.
        title: what it says, in a line.
        measure: how it is measured.
        about: "encoding" where the attention has no part in it: one answer then serves every pair of that encoding.
    """

    name: str
    title: str
    measure: Measure
    about: Literal["pair", "encoding"] = "pair"


@dataclass(frozen=True)
class Result:
    """What one law says of one case.

    Args:
        law: the law.
        status: `holds`, `broken`, or `silent` where the law does not speak about the case.
        worst: the finding closest to or furthest beyond its limit; None where silent.
        note: why it is silent, or what broke.
    """

    law: Law
    status: Literal["holds", "broken", "silent"]
    worst: Finding | None
    note: str


def apply(law: Law, case: Case) -> Result:
    """Measure one law on one case; an exception inside is a broken law, told in the note."""
    try:
        found = law.measure(case)
    except Exception as error:  # whatever a method raises here is the finding
        return Result(law, "broken", None, f"{type(error).__name__}: {error}")
    if isinstance(found, str):
        return Result(law, "silent", None, found)
    worst = max(found, key=lambda each: (not each.holds, each.error / each.limit if each.limit else each.error))
    return Result(law, "holds" if worst.holds else "broken", worst, worst.note)
