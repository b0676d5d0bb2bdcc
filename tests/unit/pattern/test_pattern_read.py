"""Patterns from specs."""

import pytest
from hypothesis import given, settings
from pydantic import TypeAdapter, ValidationError
from random_patterns import both_ways, joined

from anyformer.errors import SpecError
from anyformer.pattern._algebra import PerHead, PerLayer
from anyformer.pattern.base import Pattern
from anyformer.pattern.bigbird import BigBird, bigbird
from anyformer.pattern.leaves import Block, Causal, Dilated, Full, Global, Local, Random, Strided
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
        ("local()", r"local: expected left, got nothing; write local\(left, right\) with values"),
        (
            "Dilated(3)",
            r"Dilated\(3\): expected right and dilation, got nothing; write Dilated\(left, right, dilation\)",
        ),
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
