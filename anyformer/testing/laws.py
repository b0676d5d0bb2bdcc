"""The laws that every admitted pair of attention and position encoding must obey, and how to ask for them.

    from anyformer.testing import laws
    for result in laws.examine(laws.Case("bigbird(block=4)", "rope", causal=True)):
        print(result.law.name, result.status, result.worst)

A method of your own is examined the same way once it is registered (`anyformer.register`).
"""

from collections.abc import Iterator

from anyformer.testing import hidden, numbers, state
from anyformer.testing.case import Case
from anyformer.testing.finding import Finding, Law, Result, apply

ALL: tuple[Law, ...] = tuple(sorted((*hidden.LAWS, *state.LAWS, *numbers.LAWS), key=lambda law: law.name))


def examine(case: Case) -> Iterator[Result]:
    """Every law on one case, one after the other.

    Raises:
        IncompatibleError: the pair does not compose.
    """
    case.mixer  # noqa: B018  # builds the pair, so that a refusal is raised and not measured
    return (apply(law, case) for law in ALL)


__all__ = ["ALL", "Case", "Finding", "Law", "Result", "apply", "examine"]
