"""Every law over the registry: in `make test` one position per form and one attention per family, in `make test-all` every pair.

Each attention without an encoding runs with the checks of types at run time; the other pairs without them, for they would take
three quarters of the time.
"""

import pytest

from anyformer.testing import laws
from anyformer.testing.every import admitted

CHOSEN_POSITIONS = ("none", "rope")  # what every attention meets
FORMS_OF_LINEAR = (
    "sinusoidal",
    "rope_value",
    "floater",
    "fox",
    "pope",
    "alibi",
    "t5",
    "shaw",
    "swin_bias",
    "irpe",
)  # one a form that it reads in its own way


def _chosen(case: laws.Case) -> bool:
    if case.attention == "softmax":
        return True
    return case.position in CHOSEN_POSITIONS or (case.attention == "linear" and case.position in FORMS_OF_LINEAR)


def _marks(case: laws.Case) -> list[pytest.MarkDecorator]:
    marks = [] if _chosen(case) else [pytest.mark.slow]
    return marks if case.position == "none" else [*marks, pytest.mark.plain]


def _marked() -> list:
    return [pytest.param(case, id=str(case), marks=_marks(case)) for case in admitted()]


@pytest.mark.parametrize("case", _marked())
def test_every_law(case: laws.Case) -> None:
    results = list(laws.examine(case))
    broken = [
        f"{each.law.name} {each.law.title}: {each.note} {each.worst}" for each in results if each.status == "broken"
    ]
    assert not broken, "\n".join(broken)
    assert sum(each.status == "holds" for each in results) >= 6
