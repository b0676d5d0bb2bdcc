"""Patterns from specs."""

import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError
from random_patterns import both_ways, joined

from anyformer.errors import SpecError
from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern.base import Pattern
from anyformer.pattern.bigbird import BigBird, bigbird
from anyformer.pattern.leaves import SLOT_NAMES, Block, Causal, Dilated, Flagged, Full, Global, Local, Random, Strided
from anyformer.pattern.read import pattern_of, reads_as_pattern
from anyformer.pattern.sparse_transformer import sparse_transformer
from anyformer.registry import find, list_methods
from anyformer.spec import parse


@settings(max_examples=100, deadline=None)
@given(pattern=joined(both_ways))
def test_a_text_reads_back(pattern):
    assert pattern_of(repr(pattern)) == pattern
    assert pattern_of(str(parse(repr(pattern)))) == pattern


@pytest.mark.parametrize(
    "text, pattern",
    [
        ("local(64)", Local(64)),
        ("local(right=0, left=3)", Local(3, 0)),
        ("strided(4)", Strided(4)),
        ("dilated(4, 4, 2)", Dilated(4, 4, 2)),
        ("block_local(8)", Block(8)),
        ("global_tokens([0, -1])", Global([0, -1])),
        ("random(3)", Random(3)),
        ("per_head((Local(3), 4), (local(5), 2))", PerHead((Local(3), 4), (Local(5), 2))),
        ("PerLayer(Local(3), bigbird)", PerLayer(Local(3), bigbird())),
        ("bigbird", bigbird()),
        ("bigbird(32, plan=google)", bigbird(32, plan="google")),
        ("sparse_transformer(kind=strided, length=8)", sparse_transformer("strided", 8)),
        ("Local(64) | Global([0]) & ~Causal()", Local(64) | Global([0]) & ~Causal()),
        ("global_tokens(ids=[7, 3])", Global([0]) | Flagged([3, 7])),
        ("global_tokens([], ids=[3])", Flagged([3])),
        ("global_tokens([2], [3])", Global([2]) | Flagged([3])),
        ("Local(2) | Flagged(ids=[3])", Local(2) | Flagged([3])),
    ],
)
def test_spellings(text, pattern):
    assert pattern_of(text) == pattern
    assert pattern_of(parse(text)) == pattern
    assert reads_as_pattern(parse(text))
    assert pattern_of(pattern) is pattern
    assert not reads_as_pattern(parse("softmax"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("Lokal(3)", r"there is no pattern named 'Lokal'; did you mean 'Local'"),
        ("Columns(3)", r"Columns\(3\): expected count, got nothing; write Columns\(period, count\) with values"),
        (
            "RandomBlocks",
            r"RandomBlocks\(\): expected block and count, got nothing; write RandomBlocks\(block, count, seed",
        ),
        (
            "per_head",
            r"expected pairs of a pattern and a number of heads, got \(\); for example PerHead\(\(Local\(64\), 4\)",
        ),
        ("global_tokens([])", r"Global: expected a list of at least one place, got \(\); for example Global\(\[0\]\)"),
        (
            "Flagged([-1])",
            r"Flagged: expected each token id as a whole number of at least 0, got -1; for example Flagged",
        ),
        ("Flagged(3)", r"ids=3: expected a list, in square brackets"),
        ("Local(-1)", r"left=-1: expected greater than or equal to 0"),
        ("Local(3, size=4)", r"unknown knob 'size'; it has: left, right"),
        ("bigbird(plan=fast)", r"plan='fast': expected 'uniform' or 'google'"),
        ("bigbird(window=4)", r"bigbird: expected window as an odd number of blocks, got 4"),
        ("PerHead(groups=3)", r"PerHead\(groups=3\): expected no knobs by name, got groups"),
        ("PerHead(Local(3))", r"expected a pair such as \(Local\(64\), 4\).* got Local\(3\)"),
        ("PerHead((3, 4))", r"expected a pattern such as Local\(64\), got 3"),
        ("PerLayer(3)", r"expected a pattern such as Local\(64\), got 3"),
    ],
)
def test_what_cannot_be_read(text, message):
    with pytest.raises(SpecError, match=message):
        pattern_of(text)


@pytest.mark.parametrize(
    "name, text",
    [
        ("local", "Local(128)"),
        ("strided", "Strided(64)"),
        ("dilated", "Dilated(64, 64, 4)"),
        ("block_local", "Block(128)"),
        ("global_tokens", "Global([0])"),
        ("random", "Random(16, seed=0)"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_leaf_has_defaults_from_one_token_on(name, text, causal):
    pattern = pattern_of(name)
    assert repr(pattern) == text
    assert pattern_of(f"{name}()") == pattern_of(text) == pattern
    for n in (1, 2, 9):
        mask = pattern.dense(n, causal=causal)[0]
        assert mask[0, 0]
        assert not causal or not mask.triu(1).any()
    assert {*SLOT_NAMES} == {"local", "strided", "dilated", "block_local", "global_tokens", "random", "per_head"}


def test_what_is_left_out_on_the_right_is_as_on_the_left():
    assert pattern_of("Dilated(3)") == Dilated(3, 3, 4)
    assert pattern_of("dilated(3, dilation=2)") == Dilated(3, 3, 2)
    assert pattern_of("Dilated(3, 0, 2)") == Dilated(3, 0, 2)


def test_a_knob_of_this_type_reads_texts():
    adapter = TypeAdapter(Pattern | None)
    assert adapter.validate_python(parse("Local(3) | bigbird")) == Local(3) | bigbird()
    assert adapter.validate_python(Local(3)) == Local(3)
    assert adapter.validate_python(None) is None
    with pytest.raises(ValidationError, match="there is no pattern named 'Lokal'"):
        adapter.validate_python(parse("Lokal(3)"))


def test_schemes_are_registered():
    assert {"bigbird", "sparse_transformer"} <= {method.name for method in list_methods("pattern")}
    method = find("pattern", "bigbird")
    assert list(method.knobs) == ["block", "random", "window", "globals", "plan", "seed"]
    assert isinstance(method.target(), BigBird)
    assert method.family[0] == "human-made pattern"
    assert "2007.14062" in method.paper
    assert Full() == pattern_of("Full()")
