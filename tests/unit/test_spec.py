"""Specs: reading, writing, and every way to get one wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyformer.errors import SpecError
from anyformer.spec import Items, Spec, expand, parse, walk

NAMES = st.sampled_from(["softmax", "rope", "bigbird", "yarn"])
LEAVES = st.sampled_from(["Local", "Global", "Full"])
PLAIN = st.one_of(
    st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.text(max_size=6)
)


def _specs(names: st.SearchStrategy[str]) -> st.SearchStrategy[Spec]:
    knobs = st.dictionaries(st.sampled_from(["a", "b", "c"]), PLAIN, max_size=2).map(lambda each: tuple(each.items()))
    return st.builds(Spec, names, st.lists(PLAIN, max_size=2).map(tuple), knobs)


PATTERNS = st.recursive(
    _specs(LEAVES),
    lambda inner: st.one_of(
        st.builds(lambda a, b: Spec("|", (a, b)), inner, inner),
        st.builds(lambda a, b: Spec("&", (a, b)), inner, inner),
        st.builds(lambda a: Spec("~", (a,)), inner),
    ),
    max_leaves=6,
)
SPECS = st.one_of(_specs(NAMES), PATTERNS, st.builds(lambda p: Spec("softmax", (), (("pattern", p),)), PATTERNS))


@given(SPECS)
def test_text_parses_back(spec: Spec) -> None:
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("bigbird( block = 64 )", "bigbird(block=64)"),
        ("Local(128)|Strided(64)&~Global([0,-1])", "Local(128) | Strided(64) & ~Global([0, -1])"),
        ("(Local(1) | Full()) & Causal()", "(Local(1) | Full()) & Causal()"),
        ("rope(scaling=yarn(factor=4))", "rope(scaling=yarn(factor=4))"),
        ("PerHead((Local(64), 4), (bigbird(), 4))", "PerHead((Local(64), 4), (bigbird, 4))"),
        ("text(data=('a',))", "text(data=('a',))"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty text"),
        ("   ", "an empty text"),
        ("3", "the bare value '3'"),
        ("a.b()", "is not allowed; a knob is a number"),
        ("f(**x)", r"'\*\*' is not allowed"),
        ("f(x=1, x=2)", "'x' is given twice|keyword argument repeated"),
        ("__import__('os').system('true')", "is not allowed"),
        ("1 + 2", "is not allowed"),
        ("f(lambda: 0)", "is not allowed"),
        ("f(x=[y for y in z])", "is not allowed"),
        ("global(3)", "invalid syntax"),
        ("Local(1) | 3", "'3' is not a pattern"),
        ("f(-True)", "is not allowed"),
        ("f(" * 400 + ")" * 400, "nested too deeply|too many nested"),
        ("f(" + "1," * 4000 + ")", "at most 4000 characters"),
        ("f(\x00)", "expected a spec"),
    ],
)
def test_what_is_no_spec_says_so(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(text)


@pytest.mark.plain
def test_a_value_that_is_no_text() -> None:
    with pytest.raises(SpecError, match="got 3 \\(int\\)"):
        parse(3)  # type: ignore[arg-type]  # what a user may do


def test_the_message_points_at_the_place() -> None:
    with pytest.raises(SpecError) as error:
        parse("rope(base=)")
    assert "\n" in str(error.value)
    assert "^" in str(error.value)


def test_lists_in_knobs_make_a_grid() -> None:
    grid = expand(parse("bigbird(block=[32, 64], random=[1, 2])"))
    assert [str(each) for each in grid] == [
        "bigbird(block=32, random=1)",
        "bigbird(block=32, random=2)",
        "bigbird(block=64, random=1)",
        "bigbird(block=64, random=2)",
    ]


def test_a_knob_that_is_a_list_makes_no_grid() -> None:
    spec = parse("global_tokens(tokens=[0, 5])")
    assert expand(spec, frozenset({"tokens"})) == [spec]
    assert spec.knobs == (("tokens", Items((0, 5))),)


def test_walk_visits_every_spec() -> None:
    found = {each.name for each in walk(parse("softmax(pattern=Local(1) | ~Global([0]), x=(f, 3))"))}
    assert found == {"softmax", "|", "Local", "~", "Global", "f"}
