"""Randomized positions against the base with those positions given, and what is drawn, when, and for whom."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.position.bind import bind
from anyformer.side import side

BASES = ["rope", "t5", "shaw(left=3)", "alibi", "floater", "rope_value", "transformer_xl", "kerple"]


@pytest.mark.parametrize("attention", ["softmax", "local(3)"])
@pytest.mark.parametrize("base", BASES)
def test_it_is_the_base_at_the_drawn_positions(base: str, attention: str) -> None:
    site = af.Site(12, 3, max_length=16)
    layer = af.build_mixer(attention, f"randomized(base={base}, longest=50)", site).double().eval()
    plain = af.build_mixer(attention, base, af.Site(12, 3, max_length=50)).double().eval()
    state = {name.replace("position.base.", "position."): each for name, each in layer.state_dict().items()}
    places = state.pop("position.places")
    plain.load_state_dict(state)
    x, probe = torch.randn(2, 2, 9, 12, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = layer(inputs[0]), plain(inputs[1], positions=places[None, :9])
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad((out * probe).sum(), [x, module.q.weight])
        for x, out, module in zip(inputs, outs, (layer, plain), strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)


def test_embedded_bases_too() -> None:
    site = af.Site(12, 3, max_length=16)
    position = af.build_position("randomized(base=learned, longest=50)", site).double().eval()
    assert position.base.table.weight.shape == (50, 12)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    expected = x + position.base.table.weight[position.places[:5]]
    torch.testing.assert_close(position.embed(x, torch.arange(5)[None], None), expected, rtol=0, atol=0)


def test_what_is_drawn_in_training() -> None:
    position = af.build_position("randomized(longest=40)", af.Site(8, 2, max_length=16))
    draws = torch.stack([position.draw(8) for _ in range(4000)])
    assert bool((draws[:, 1:] > draws[:, :-1]).all())
    assert int(draws.min()) == 0
    assert int(draws.max()) == 39
    # order statistics of 8 out of 40 without repeats: the mean of number i is 41 (i + 1) / 9 - 1
    expected = 41 * torch.arange(1, 9) / 9 - 1
    assert float((draws.double().mean(0) - expected).abs().max()) < 0.4
    everything = af.build_position("randomized(longest=16)", af.Site(8, 2, max_length=16))
    assert torch.equal(everything.draw(16), torch.arange(16))


def test_what_is_drawn_in_eval() -> None:
    def draw(seed: int, spec: str = "randomized(longest=400)") -> Tensor:
        return af.build_position(spec, af.Site(8, 2, max_length=16, seed=seed)).eval().draw(3)

    before = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert draw(1).shape == (16,)
    assert bool((draw(1).diff() > 0).all())
    assert torch.equal(draw(1, "randomized(longest=16)"), torch.arange(16))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_draw_a_step_for_all_blocks_and_rows(checkpointing: bool) -> None:
    sizes = {"vocab": 9, "dim": 12, "depth": 3, "heads": 3, "max_length": 16, "checkpointing": checkpointing}
    model = af.Transformer(af.ModelConfig(position="randomized(base=rope, longest=50)", **sizes)).double().train()
    plain = af.Transformer(af.ModelConfig(position="rope", **sizes)).double().train()
    tokens = torch.randint(9, (2, 7))
    torch.manual_seed(5)
    places = torch.randperm(50)[:7].sort().values[None]
    expected = plain(tokens, positions=places)
    torch.manual_seed(5)
    out = model(tokens)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert not torch.allclose(model(tokens), out)
    for each in (out, expected):
        each.sin().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-11)


def test_each_encoding_of_its_own_length_draws_once() -> None:
    mixed = ("randomized(base=t5, longest=50)", "none", "randomized(base=rope, longest=50)", "randomized(longest=99)")
    model = af.Transformer(af.ModelConfig(vocab=9, dim=12, depth=4, heads=3, max_length=16, position=mixed)).train()
    seen: list[Tensor | None] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args, given: seen.append(given["drawn"]), with_kwargs=True)
    model(torch.randint(9, (1, 7)))
    assert seen[0] is seen[2]
    assert seen[1] is None
    assert int(seen[3].max()) < 99
    assert not torch.equal(seen[0], seen[3])
    model.eval()(torch.randint(9, (1, 7)))
    assert seen[4:] == [None] * 4


REFUSED = {
    "randomized(longest=15)": "expected longest to be at least max_length=16, so that every token has a position.*got 15",
    "randomized(base=none)": "randomized: none reads no single positions; use a base such as rope, t5 or learned",
    "randomized(base=rnn_front)": "expected a base that reads one position a token, such as rope.*got rnn_front",
    "randomized(base=randomized)": "expected a base that reads one position a token, such as rope.*got randomized",
    "randomized(base=sinusoidal_2d)": "expected a base that reads one position a token, such as rope.*got sinusoidal_2d",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_bases_that_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=REFUSED[spec]):
        af.build_position(spec, af.Site(16, 2, max_length=16))


def test_what_the_base_refuses_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="randomized is defined for causal attention only"):
        af.check("softmax", "randomized(base=xpos)")
    with pytest.raises(
        IncompatibleError,
        match=r"linear cannot use randomized \(bias\), which draws positions, so that offsets are no distances",
    ):
        af.check("linear", "randomized(base=alibi)")
    with pytest.raises(SpecError, match="randomized: position 16 needs a table of at least 17 rows"):
        af.MultiHead(16, 2, position="randomized", max_length=16)(torch.zeros(1, 17, 16))


def test_drawn_positions_are_never_taken_for_places() -> None:
    position = af.build_position("randomized(base=alibi)", af.Site(8, 2, max_length=16)).eval()
    tokens = side(5, torch.device("cpu"))
    bound = bind(position, [Form.BIAS], tokens, tokens)
    assert not bound.arithmetic
    assert bound.rebind is not None
    again = bound.rebind(tokens.part(2, 4), tokens)
    q = torch.randn(1, 2, 5, 4)
    torch.testing.assert_close(again.logits(q[:, :, 2:4], q), bound.logits(q, q)[:, :, 2:4])
