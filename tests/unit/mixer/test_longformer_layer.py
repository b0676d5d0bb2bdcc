"""Longformer: what its equation says beyond the parity test."""

import re
from itertools import pairwise

import pytest
import torch

from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.mixer.longformer import Longformer
from anyformer.model.build import build_mixer, build_position
from anyformer.position.base import Position
from anyformer.registry import canonical, find
from anyformer.site import Site
from anyformer.spec import parse

FLAGS = torch.tensor([[1, 0, 0, 0, 0, 0, 1, 0, 0, 0], [0] * 9 + [1], [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]]).bool()
KEEP = torch.tensor([[1] * 10, [1] * 7 + [0] * 3, [0, 0, 1, 0, 1, 1, 1, 1, 1, 1]]).bool()


def built(
    position: str = "none", *, causal: bool = False, kv_heads: int | None = None, **knobs: int | tuple[int, ...]
) -> Longformer:
    site = Site(8, 4, causal=causal, max_length=32, kv_heads=kv_heads)
    mixer = Longformer(site, build_position(position, site), **knobs).double()
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return mixer.eval()


def tie(mixer: Longformer) -> None:
    assert mixer.for_globals is not None
    for name, part in mixer.for_globals.items():
        part.load_state_dict(mixer.get_submodule(name).state_dict())


def show_readers(mixer: Longformer) -> None:
    """Queries of zero, values of one channel a token, no projection behind: the output shows who is read."""
    for linear in (
        mixer.q,
        mixer.k,
        mixer.v,
        mixer.o,
        *([] if mixer.for_globals is None else mixer.for_globals.children()),
    ):
        for weight in linear.parameters():
            torch.nn.init.zeros_(weight)
    for eye in (mixer.v, mixer.o, *([] if mixer.for_globals is None else [mixer.for_globals["v"]])):
        torch.nn.init.eye_(eye.get_parameter("weight"))


def probe(*, causal: bool = False, **knobs: int) -> Longformer:
    site = Site(10, 1, causal=causal)
    mixer = Longformer(site, build_position("none", site), **knobs).double()
    show_readers(mixer)
    return mixer


EYE = torch.eye(10, dtype=torch.float64).expand(2, 10, 10)


def test_each_token_reads_its_window_and_the_global_tokens_each_once() -> None:
    keep = torch.tensor([[1] * 10, [1] * 7 + [0] * 3]).bool()
    out = probe(window=1, max_globals=2)(EYE, attention_mask=keep, global_mask=FLAGS[:2])
    assert (out[0] > 0).sum(dim=-1).tolist() == [10, 4, 5, 5, 5, 4, 10, 4, 5, 4]
    assert (out[1] > 0).sum(dim=-1).tolist() == [2, 3, 3, 3, 3, 3, 2, 0, 0, 0]
    assert torch.allclose(out[0].sum(dim=-1), torch.ones(10, dtype=torch.float64))
    assert torch.allclose(out[0, 1], EYE[0, [0, 1, 2, 6]].mean(dim=0))


def test_the_window_counts_tokens_on_each_side() -> None:
    assert ((probe(window=2)(EYE)[0] > 0).sum(dim=-1)).tolist() == [3, 4, 5, 5, 5, 5, 5, 5, 4, 3]
    assert ((probe(window=2, causal=True)(EYE)[0] > 0).sum(dim=-1)).tolist() == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    assert torch.equal(probe(window=0)(EYE), EYE)


def test_dilation_spaces_the_window() -> None:
    out = probe(window=2, dilation=3)(EYE)
    assert (out[0, 5] > 0).nonzero()[:, 0].tolist() == [2, 5, 8]
    assert (out[0, 6] > 0).nonzero()[:, 0].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("causal", [False, True])
def test_heads_may_have_dilations_of_their_own(causal: bool) -> None:
    mixer = built(causal=causal, window=2, max_globals=2, dilation=(1, 1, 3, 2))
    torch.nn.init.eye_(mixer.o.weight)
    x = torch.randn(3, 10, 8, dtype=torch.float64)
    facts = {"attention_mask": KEEP, "global_mask": FLAGS}
    together = mixer(x, **facts).unflatten(-1, (4, 2))
    for head, dilation in enumerate((1, 1, 3, 2)):
        alike = built(causal=causal, window=2, max_globals=2, dilation=dilation)
        alike.load_state_dict(mixer.state_dict())
        alone = alike(x, **facts).unflatten(-1, (4, 2))
        torch.testing.assert_close(together[:, :, head], alone[:, :, head], rtol=1e-10, atol=1e-12)
    assert mixer.cost().multiply_adds(10) < built(causal=causal, window=2, max_globals=2).cost().multiply_adds(10)


def test_dilations_of_heads_in_a_spec() -> None:
    spec = parse("longformer(window=2, dilation=[1, 3])")
    assert canonical(find("mixer", "longformer"), spec) == parse("longformer(window=2, dilation=[1, 3])")
    site = Site(8, 2)
    assert build_mixer(spec, "rope", site)(torch.randn(1, 9, 8)).shape == (1, 9, 8)
    message = (
        "longformer: expected one dilation, or one for each of the 4 heads, got 2; for example dilation=[1, 1, 1, 2]"
    )
    with pytest.raises(SpecError, match=re.escape(message)):
        build_mixer(spec, "none", Site(8, 4))
    with pytest.raises(SpecError, match="greater than or equal to 1"):
        build_mixer("longformer(dilation=[1, 0])", "none", site)


def test_a_causal_layer_reads_flagged_tokens_from_later_ones_only() -> None:
    mixer = probe(window=1, causal=True)
    out = mixer(EYE, global_mask=FLAGS[:2])
    assert mixer.for_globals is None
    assert [(row > 0).nonzero()[:, 0].tolist() for row in out[0]] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 2, 3],
        [0, 3, 4],
        [0, 4, 5],
        [0, 5, 6],
        [0, 6, 7],
        [0, 6, 7, 8],
        [0, 6, 8, 9],
    ]


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("position", ["none", "rope", "alibi", "t5", "shaw", "transformer_xl"])
def test_with_tied_projections_it_is_softmax_over_the_pattern(position: str, kv_heads: int | None) -> None:
    mixer = built(position, window=2, max_globals=3, kv_heads=kv_heads)
    tie(mixer)
    plain = build_mixer("softmax(pattern=Local(2) | Flagged())", position, mixer.site).double()
    weights = {name: part for name, part in mixer.state_dict().items() if not name.startswith("for_globals")}
    plain.load_state_dict(weights)
    x = torch.randn(3, 10, 8, dtype=torch.float64)
    for keep in (None, KEEP):
        got = mixer(x, attention_mask=keep, global_mask=FLAGS)
        assert torch.allclose(got, plain(x, attention_mask=keep, global_mask=FLAGS), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_with_flags_equal_themselves_alone_and_flags_on_padding_count_for_nothing(causal: bool) -> None:
    mixer, x = built("alibi", causal=causal, window=1, max_globals=2), torch.randn(3, 10, 8, dtype=torch.float64)
    out = mixer(x, attention_mask=KEEP, global_mask=FLAGS)
    assert torch.equal(out, mixer(x, attention_mask=KEEP, global_mask=FLAGS & KEEP))
    assert torch.equal(out, mixer(x, attention_mask=KEEP, global_mask=FLAGS | ~KEEP))
    for row in range(3):
        real = KEEP[row]
        alone = mixer(x[row : row + 1, real], global_mask=FLAGS[row : row + 1, real])
        assert torch.allclose(out[row, real], alone[0], rtol=1e-10, atol=1e-12)


def test_every_token_global_is_full_attention_with_the_global_projections() -> None:
    mixer, x = built(window=0, max_globals=10), torch.randn(2, 10, 8, dtype=torch.float64)
    full = build_mixer("softmax", "none", mixer.site).double()
    assert mixer.for_globals is not None
    full.load_state_dict(
        mixer.for_globals.state_dict() | {f"o.{name}": part for name, part in mixer.o.state_dict().items()}
    )
    out = mixer(x, global_mask=torch.ones(2, 10, dtype=torch.bool))
    assert torch.allclose(out, full(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("prefill", [0, 1, 5])
@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
def test_flags_through_a_cache_equal_all_at_once(position: str, prefill: int) -> None:
    mixer, x = built(position, causal=True, window=1, max_globals=2), torch.randn(3, 10, 8, dtype=torch.float64)
    for keep in (None, KEEP):
        cache, cuts, parts = mixer.new_cache(3), [0, prefill, *range(prefill + 3, 10, 3), 10], []
        for start, stop in pairwise(cuts):
            mask = None if keep is None else keep[:, :stop]
            parts.append(mixer(x[:, start:stop], attention_mask=mask, global_mask=FLAGS[:, start:stop], cache=cache))
        whole = mixer(x, attention_mask=keep, global_mask=FLAGS)
        assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_documents_stay_apart(causal: bool) -> None:
    mixer, x = built("rope", causal=causal, window=2, max_globals=2), torch.randn(1, 10, 8, dtype=torch.float64)
    out = mixer(x, document_ids=torch.tensor([[4] * 6 + [7] * 4]), global_mask=FLAGS[:1])
    first, second = mixer(x[:, :6], global_mask=FLAGS[:1, :6]), mixer(x[:, 6:], global_mask=FLAGS[:1, 6:])
    assert torch.allclose(out, torch.cat([first, second], dim=1), rtol=1e-10, atol=1e-12)


def test_no_gradient_reaches_a_later_token_through_a_flagged_one() -> None:
    mixer = built(causal=True, window=1, max_globals=2)
    x = torch.randn(3, 10, 8, dtype=torch.float64, requires_grad=True)
    mixer(x, global_mask=FLAGS)[:, 4].square().sum().backward()
    assert x.grad is not None
    assert (x.grad[:, 5:] == 0).all()


def test_only_max_globals_rows_are_computed() -> None:
    mixer, rows = built(window=1, max_globals=2), []
    assert mixer.for_globals is not None
    mixer.for_globals["q"].register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
    mixer(torch.randn(3, 10, 8, dtype=torch.float64), global_mask=FLAGS)
    assert rows == [2]


@pytest.mark.parametrize("causal", [False, True])
def test_too_many_flags_are_refused(causal: bool) -> None:
    mixer, x = built(causal=causal, window=1, max_globals=1), torch.randn(3, 10, 8, dtype=torch.float64)
    text = r"at most 1 global tokens a row, got 2; flag fewer in global_mask or use longformer\(max_globals=2\)"
    with pytest.raises(SpecError, match=text):
        mixer(x, global_mask=FLAGS)
    assert mixer(x[1:], attention_mask=KEEP[1:], global_mask=FLAGS[1:]).shape == (2, 10, 8)
    with pytest.raises(SpecError, match="at most 0 global tokens a row, got 2"):
        built(causal=causal, max_globals=0)(x, global_mask=FLAGS)


def test_a_form_without_a_reader_is_refused() -> None:
    class Counting(Position):
        name = "counting"

        def __init__(self, site: Site) -> None:
            super().__init__(site)
            self.forms = ((Form.ROW,),)

    site = Site(8, 4)
    with pytest.raises(
        IncompatibleError,
        match=r"longformer cannot use counting \(row\): it reads chosen pairs .* such as rope or alibi",
    ):
        Longformer(site, Counting(site))


def test_the_layer_supplies_bias_norms_dropout_and_encoding_and_the_spec_the_rest() -> None:
    mixer = build_mixer("longformer(window=8)", "t5", Site(8, 4), bias=False, qk_norm=True, dropout=0.25)
    assert not any(name.endswith(".bias") for name in mixer.state_dict())
    assert {"q_norm.weight", "for_globals.k_norm.weight"} < set(mixer.state_dict())
    assert any(name.startswith("position.") for name in mixer.state_dict())
    method = find("mixer", "longformer")
    assert list(method.knobs) == ["window", "max_globals", "dilation", "ids"]
    assert str(canonical(method, parse("longformer(8, 16)"))) == "longformer(window=8)"
    with pytest.raises(SpecError, match="unknown knob 'dropout'"):
        build_mixer("longformer(dropout=0.1)", "none", Site(8, 4))
