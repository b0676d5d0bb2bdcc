"""Mixers with heads of their own tell the weights and the scores that they computed with."""

import re

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.mixer.base import Mixer
from anyformer.model.explain import Call, calls_of, terms, weights
from anyformer.testing.largest import Largest

KEEP = torch.ones(2, 13, dtype=torch.bool)
KEEP[0, :4] = False
KEEP[1, 5] = False
FLAGS = torch.zeros(2, 13, dtype=torch.bool)
FLAGS[0, [2, 6]] = True  # of the first row one is padding
FLAGS[1, 12] = True
ROWS = [12, 4, 7, 6, 3]  # the last is padding in the first row of the batch
WINDOW = 2

LAYERS = [
    ("mla(latent=10, content=6)", ("none", "rope", "alibi", "t5")),
    ("mla(content=10, q_latent=5)", ("rope",)),
    (f"longformer(window={WINDOW})", ("none", "rope", "alibi", "t5")),
    ("synthesizer", ("none",)),
    ("synthesizer(dense=factorised, random=factorised, dot=True)", ("none",)),
    ("synthesizer(dense=none, random=fixed)", ("none",)),
    ("complex", ("none", "rope", "alibi", "t5")),
    ("complex(conjugate=False)", ("rope",)),
]
CASES = [(attention, position) for attention, positions in LAYERS for position in positions]


def called(attention: str, position: str, causal: bool, flags: bool = False) -> Call:
    """The call of the second layer on rows with padding."""
    config = af.ModelConfig(
        vocab=20,
        dim=32,
        depth=2,
        heads=4,
        kv_heads=None if attention.startswith("mla") else 2,
        max_length=16,
        attention=attention,
        position=position,
        causal=causal,
    )
    model = af.Transformer(config).double()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.4)
    facts = {"attention_mask": KEEP} | ({"global_mask": FLAGS} if flags else {})
    ids = torch.randint(0, 20, (2, 13))
    return calls_of(model, lambda: model(ids, **facts))[1]


def heads_of(x: Tensor, count: int) -> Tensor:
    """[b h n d], each key head repeated up to four heads."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2).repeat_interleave(4 // count, dim=1)


def values(mixer: Mixer, x: Tensor) -> Tensor:
    """v of the mixer's equation."""
    if mixer.name == "mla":
        return heads_of(mixer.up(mixer.norm(mixer.down(x)[..., : mixer.latent])), 4)[..., mixer.content :]
    if mixer.name == "complex":
        return torch.cat([heads_of(mixer.v(part), 2) for part in x.chunk(2, dim=-1)], dim=-1)
    return heads_of(mixer.v(x), 2)


def before_the_projection(call: Call) -> Tensor:
    """What the layer hands to its last projection, [b h n v], in the order of the tokens."""
    handed: list[Tensor] = []
    hook = call.mixer.o.register_forward_pre_hook(lambda module, given: handed.append(given[0]))
    with torch.no_grad():
        call.mixer.eval()(call.x, **call.facts)
    hook.remove()
    out = handed[0]
    if call.mixer.name == "complex":  # real and imaginary parts in turn
        out = torch.cat([heads_of(part, 4) for part in out.unflatten(1, (-1, 2)).unbind(2)], dim=-1)
    else:
        out = heads_of(out, 4)
    if not call.mixer.ordered:
        return out
    back = torch.stack([torch.cat([row.nonzero()[:, 0], (~row).nonzero()[:, 0]]).argsort() for row in KEEP])
    return out.gather(2, back[:, None, :, None].expand_as(out))


def allowed(call: Call, causal: bool, flags: bool = False) -> Tensor:
    """Which tokens the asked rows may meet, [b 1 r m], by the rules of the equations."""
    place = KEEP.cumsum(dim=1) - 1
    ahead = place[:, None, :] - place[:, ROWS, None]
    known, asked = FLAGS & KEEP & flags, (FLAGS & KEEP & flags)[:, ROWS, None]
    may = torch.ones_like(ahead, dtype=torch.bool)
    if call.mixer.name == "longformer":
        may = (ahead.abs() <= WINDOW) | known[:, None]
        may = may if causal else may | asked
    if causal:
        may = may & (ahead <= 0)
    return (may & KEEP[:, None] & KEEP[:, ROWS, None])[:, None]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def real_input(call: Call) -> Tensor:
    return torch.where(KEEP[..., None], call.x, 0.0)


REAL = KEEP[:, None, ROWS, None].double()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("attention", "position"), CASES)
def test_weights_times_values_are_what_is_projected(attention: str, position: str, causal: bool) -> None:
    call = called(attention, position, causal)
    found = weights(call, ROWS, None)
    assert found.shape == (2, 4, 5, 13)
    close(found.sum(dim=-1, keepdim=True), REAL.expand(2, 4, 5, 1))
    assert not found.masked_select(~allowed(call, causal)).any()
    close(found @ values(call.mixer, real_input(call)), before_the_projection(call)[:, :, ROWS] * REAL)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("attention", "position"), [*CASES, *((f"longformer(window={WINDOW})", each) for each in ("shaw", "rope_value"))]
)
def test_weights_are_the_softmax_of_the_sum_of_the_terms(attention: str, position: str, causal: bool) -> None:
    call = called(attention, position, causal)
    found = terms(call, ROWS, None)
    logits = sum(found.values()).masked_fill(~allowed(call, causal), -torch.inf)
    close(weights(call, ROWS, None), torch.softmax(logits, dim=-1).nan_to_num())
    assert ("rotation" in found) == (position == "rope")
    assert ("bias" in found) == (position in ("alibi", "t5", "shaw"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
def test_flagged_rows_of_a_longformer_have_their_own_projections(position: str, causal: bool) -> None:
    call = called(f"longformer(window={WINDOW})", position, causal, flags=True)
    mixer, x, found = call.mixer, real_input(call), weights(call, ROWS, None)
    close(found.sum(dim=-1, keepdim=True), REAL.expand(2, 4, 5, 1))
    expected, told = before_the_projection(call)[:, :, ROWS] * REAL, found @ heads_of(mixer.v(x), 2)
    logits = sum(terms(call, ROWS, None).values()).masked_fill(~allowed(call, causal, True), -torch.inf)
    close(found, torch.softmax(logits, dim=-1).nan_to_num())
    if not causal:
        own = found @ heads_of(mixer.for_globals["v"](x), 2)
        told = torch.where((FLAGS & KEEP)[:, None, ROWS, None], own, told)
        q, k = (heads_of(mixer.for_globals[name](x), heads) for name, heads in (("q", 4), ("k", 2)))
        content = q[1, :, [12]] @ k[1].mT * q.shape[-1] ** -0.5
        close(terms(call, [12], None)["content"][1], content)
    close(told, expected)


def test_a_dilation_for_each_head_shows_in_the_weights() -> None:
    call = called("longformer(window=1, dilation=[1, 1, 2, 3])", "none", True)
    found = weights(call, [12], None)[1]  # one token of padding, more than three before
    met = [each.nonzero()[:, 0].tolist() for each in found[:, 0]]
    assert met == [[11, 12], [11, 12], [10, 12], [9, 12]]


def test_content_of_mla_is_of_both_parts_of_the_key() -> None:
    call = called("mla(latent=10, content=6)", "rope", False)
    mixer, x = call.mixer, real_input(call)
    latents, shared = mixer.down(x).split([10, 8], dim=-1)
    q, q_shared = heads_of(mixer.q(x), 4).split([6, 8], dim=-1)
    k = heads_of(mixer.up(mixer.norm(latents)), 4)[..., :6]
    expected = (q @ k.mT + q_shared @ shared[:, None].mT) * 14**-0.5
    close(terms(call, ROWS, None)["content"], expected[:, :, ROWS])


@pytest.mark.parametrize("conjugate", [True, False])
def test_content_of_complex_is_the_length_of_a_product(conjugate: bool) -> None:
    call = called(f"complex(conjugate={conjugate})", "rope", False)
    parts = {
        name: [heads_of(getattr(call.mixer, name)(part), count) for part in real_input(call).chunk(2, dim=-1)]
        for name, count in (("q", 4), ("k", 2))
    }
    q, k = (torch.complex(*parts[name]) for name in ("q", "k"))
    expected = ((q.conj() if conjugate else q) @ k.mT).abs() * 8**-0.5
    close(terms(call, ROWS, None)["content"], expected[:, :, ROWS])


def test_parts_of_a_synthesizer_are_its_terms() -> None:
    call = called("synthesizer(random=full, dot=True)", "none", True)
    found, mixer, x = terms(call, [12], None), call.mixer, real_input(call)
    assert list(found) == ["dense", "random", "content"]
    shares = torch.softmax(mixer.shares, dim=0)
    place = KEEP.cumsum(dim=1) - 1
    for row in range(2):
        table = mixer.random.table[0][:, place[row, 12]][:, place[row]]  # columns in the order of the tokens
        close(found["random"][row, :, 0][:, KEEP[row]], shares[1] * table[:, KEEP[row]])
    products = heads_of(mixer.q(x), 4)[:, :, [12]] @ heads_of(mixer.k(x), 2).mT * 8**-0.5
    close(found["content"], shares[2] * products)


@pytest.mark.parametrize("attention", ["mla", "longformer", "synthesizer", "complex"])
def test_heads_are_chosen_and_checked(attention: str) -> None:
    call = called(attention, "none", True)
    for ask in (weights, lambda *asked: sum(terms(*asked).values())):
        torch.testing.assert_close(ask(call, ROWS, [3, 0]), ask(call, ROWS, None)[:, [3, 0]], rtol=0, atol=0)
        with pytest.raises(SpecError, match=re.escape("explain: expected heads from 0 to 3, got 4")):
            ask(call, [1], [4])
        with pytest.raises(SpecError, match=re.escape("explain: expected rows from 0 to 12, got 13")):
            ask(call, [13], None)


def test_one_influence_where_there_are_no_weights_by_head() -> None:
    call = called("amlp(tiny=8)", "none", True)
    assert weights(call, ROWS, [0]).shape == (2, 1, 5, 13)
    with pytest.raises(SpecError, match=re.escape("explain: expected heads from 0 to 0, got 2")):
        weights(call, ROWS, [2])


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (
            "sinkhorn(block=4)",
            "sinkhorn scores mixtures of keys beside the keys of a query's own block, so a pair may have no",
        ),
        ("fnet", "fnet scores no pairs of query and key; explain() shows what it takes from each token"),
        ("complex(attention=linformer)", "complex scores no pairs of query and key; explain() shows"),
        (
            "amlp(tiny=8)",
            "amlp adds what one small head reads to a gate over places, so no pair has one score; explain() shows",
        ),
    ],
)
def test_why_no_score_belongs_to_a_pair(attention: str, why: str) -> None:
    config = af.ModelConfig(
        vocab=20, dim=32, depth=1, heads=4, max_length=16, attention=attention, position="none", causal=False
    )
    with pytest.raises(IncompatibleError, match=re.escape(why)):
        af.Transformer(config).explain_terms(torch.randint(0, 20, (2, 13)), [3])


def test_a_layer_is_left_as_it_was() -> None:
    call = called("mla", "rope", True)
    weights(call, [3], None)
    terms(call, [3], None)
    assert "mix" not in vars(call.mixer)


@pytest.mark.parametrize("attention", ["mla", "longformer(window=2)", "complex", "softmax", "synthesizer(dot=True)"])
def test_terms_are_made_of_the_asked_rows_only(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    position = "none" if attention.startswith("synthesizer") else "t5"
    config = af.ModelConfig(vocab=20, dim=16, depth=1, heads=4, max_length=96, attention=attention, position=position)
    model = af.Transformer(config)
    mixer, watch = model.blocks[0].mixer, Largest()
    own = mixer.pair_terms

    def watched(*asked: object) -> dict[str, Tensor]:
        with watch:
            return own(*asked)

    monkeypatch.setattr(mixer, "pair_terms", watched)
    found = model.explain_terms(torch.randint(0, 20, (1, 96)), [95])[0]
    assert ("bias" in found) == (position == "t5")
    assert 0 < watch.most < 96 * 96
