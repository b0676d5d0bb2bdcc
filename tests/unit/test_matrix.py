"""The composition matrix, cell by cell, against the table kept as data, and a reason for every cell that does not run."""

import csv
from pathlib import Path

import pytest

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import family_of, matrix, short_name, slot

with (Path(__file__).parents[1] / "data" / "matrix.csv").open() as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("direction", ["both", "causal"])
def test_the_matrix(direction: str) -> None:
    found = matrix(causal=direction == "causal")
    expected = {
        (attention, row["position"]): cell
        for row in ROWS
        if row["direction"] == direction
        for attention, cell in row.items()
        if attention not in ("direction", "position")
    }
    assert {pair: verdict.kind for pair, verdict in found.items()} == expected
    assert all(verdict.reason for verdict in found.values() if verdict.kind != "ok")


@pytest.mark.parametrize(
    ("attention", "position", "causal", "message"),
    [
        ("linformer(rank=8)", "alibi", False, "linformer cannot use alibi.*no .*pair"),
        ("linformer(rank=8)", "none", True, "linformer cannot be causal.*use linear"),
        ("fnet", "rope", False, "fnet cannot use rope.*use an encoding added at the embedding"),
        ("linear", "tupe", False, "linear cannot use tupe.*fall apart into few factors of query, key and offset"),
    ],
)
def test_refusals_name_their_reason(attention: str, position: str, causal: bool, message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        af.check(attention, position, causal=causal)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("Global([-1])", "a causal layer does not know its last token"), ("PerHead((Local(2), 3))", "3.*heads.*4|4.*3")],
)
def test_a_pattern_that_cannot_serve_is_refused_when_built(pattern: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        af.MultiHead(32, 4, attention=pattern, causal=True)


def test_a_wrong_spec_is_no_refusal() -> None:
    with pytest.raises(SpecError, match="did you mean 'linformer'"):
        af.check("linfomer", "alibi")


def test_names_are_looked_up_before_the_site() -> None:
    with pytest.raises(SpecError, match="no attention named 'sofmax'"):
        af.MultiHead(7, 3, attention="sofmax", head_dim=2)


@pytest.mark.parametrize(
    ("text", "canonical", "short", "family"),
    [
        ("softmax", "softmax", "softmax", ("full",)),
        ("local(128)", "softmax(pattern=Local(128))", "Local(128)", ("human-made pattern", "local")),
        ("Local(4, 0) | Global([0])", "softmax(pattern=Local(4, 0) | Global([0]))", "Local(4, 0) | Global([0])", None),
        ("bigbird(block=32)", "softmax(pattern=bigbird(block=32, random=3))", "bigbird(block=32, random=3)", None),
        ("softmax(softcap=30)", "softmax(softcap=30.0)", "softmax(softcap=30.0)", ("full",)),
    ],
)
def test_patterns_mean_softmax_over_them(text: str, canonical: str, short: str, family: tuple | None) -> None:
    assert str(slot(text)[1]) == canonical
    assert str(slot(canonical)[1]) == canonical
    assert short_name(text) == short
    assert family_of(text) == family if family else family_of(text)[0] == "human-made pattern"
