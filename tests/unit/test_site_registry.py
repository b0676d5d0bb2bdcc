"""Sites, the registry, and knobs checked against signatures."""

from typing import Annotated, Literal

import annotated_types as at
import pytest

import anyformer as af
from anyformer import registry
from anyformer.attention.base import Attention
from anyformer.errors import SpecError
from anyformer.registry import Maker, bind, canonical, describe, find, list_methods, names, sequence_knobs
from anyformer.site import Site
from anyformer.spec import Spec, parse


def _target(
    *,
    size: Annotated[int, at.Ge(1)] = 4,
    rate: float = 1.0,
    kind: Literal["a", "b"] = "a",
    tokens: tuple[int, ...] = (0,),
    inner: Spec | None = None,
) -> None: ...


METHOD = Maker("toy", _target)


def test_site_resolves_heads() -> None:
    site = Site(64, 8, kv_heads=2)
    assert (site.head_dim, site.kv_heads, site.groups) == (8, 2, 4)
    assert site.at_layer(3).layer == 3
    assert Site(10, 4, head_dim=3).head_dim == 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 0, "heads": 4}, "expected dim to be a whole number of at least 1, got 0"),
        ({"dim": 8, "heads": 0, "kv_heads": 0}, "heads to be.*got 0; expected kv_heads"),
        ({"dim": 10, "heads": 4}, "not a multiple of heads=4; choose heads that divide it, or give head_dim"),
        ({"dim": 8, "heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"dim": 8, "heads": 4, "layer": -1}, "layer to be a whole number of at least 0"),
    ],
)
def test_site_refuses(sizes: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Site(**sizes)


@pytest.mark.plain
def test_site_refuses_types() -> None:
    with pytest.raises(SpecError, match=r"expected dim .* got True; expected seed to be a whole number, got 'x'"):
        Site(True, 4, seed="x")


def test_every_name_is_found_and_described() -> None:
    for kind in registry.KINDS:
        for name in names(kind):
            assert find(kind, name).name == name
            assert describe(name).name == name


def test_wildcards_cover_the_attention_slot() -> None:
    found = {method.name for method in list_methods("attention", "*")}
    assert {"softmax", "fnet", "bigbird"} <= found
    assert {method.name for method in list_methods("attention", "big*")} == {"bigbird"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("toy(sise=3)", "unknown knob 'sise'; did you mean 'size'"),
        ("toy(zzz=3)", "unknown knob 'zzz'; it has: size, rate, kind, tokens, inner"),
        ("toy(size=0)", "size=0: expected greater than or equal to 1"),
        ("toy(size=1.5)", "size=1.5: expected a valid integer"),
        ("toy(size=True)", "size=True: expected a valid integer"),
        ("toy(kind=c)", "kind='c': expected 'a' or 'b'"),
        ("toy(1, 2.0, a, [0], f, 6)", "takes at most 5 knobs, got 6 values"),
        ("toy(3, size=4)", "knob 'size' is given by place and by name"),
        ("toy(size=0, rate='x', zzz=1)", "size=0.*rate='x'.*unknown knob 'zzz'"),
    ],
)
def test_all_faults_of_a_spec_at_once(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        bind(METHOD, parse(text))


def test_what_to_type_instead_of_a_word_or_a_wrong_entry() -> None:
    with pytest.raises(SpecError, match="sink=false: expected one of True and False"):
        bind(describe("softmax"), parse("softmax(sink=false)"))
    with pytest.raises(SpecError, match=r"dilation=\[1, 0\]: expected greater than or equal to 1"):
        bind(describe("longformer"), parse("longformer(dilation=[1, 0])"))


def test_knobs_bind_in_declaration_order_and_canonically() -> None:
    assert bind(METHOD, parse("toy(8, 2, kind=b)")) == {"size": 8, "rate": 2.0, "kind": "b"}
    assert str(canonical(METHOD, parse("toy(kind=b, rate=2, size=4)"))) == "toy(rate=2.0, kind='b')"
    assert (
        str(canonical(METHOD, parse("toy(tokens=[0, 3], inner=yarn(factor=4))")))
        == "toy(tokens=[0, 3], inner=yarn(factor=4))"
    )
    assert canonical(METHOD, canonical(METHOD, parse("toy(9)"))) == canonical(METHOD, parse("toy(size=9)"))
    assert sequence_knobs(METHOD) == {"tokens"}


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(SpecError, match="there is no position named 'rop'; did you mean 'rope'"):
        find("position", "rop")
    with pytest.raises(SpecError, match="there is no method named 'bigbrd'; did you mean 'bigbird'"):
        describe("bigbrd")
    with pytest.raises(SpecError, match="there are: "):
        find("position", "qqqqqqqq")


def test_a_class_of_your_own_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    class Mine(Attention):
        name = "mine"
        summary, paper, family = "a test", "none", ("full",)
        forms = ()

    af.register(Mine)
    af.register(Mine)  # again is no conflict
    assert find("attention", "mine").target is Mine
    assert "mine" in names("attention")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "softmax"}, "the attention name 'softmax' is taken"),
        ({"name": "Loud"}, "name \\(a lower-case identifier\\)"),
        ({"name": "fine", "kind": "thing"}, "kind \\(one of attention, "),
    ],
)
def test_a_class_that_cannot_join(attributes: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        af.register(type("Other", (Attention,), attributes))
