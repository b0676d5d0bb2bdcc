import pytest
import torch
from tiny_models import config

from anyformer.model.transformer import Transformer

SHARED = (
    "embedding.tokens.weight",
    *(f"blocks.{layer}.mixer.{name}.weight" for layer in (0, 1) for name in "qkvo"),
    *(f"blocks.{layer}.feed_forward.{name}.weight" for layer in (0, 1) for name in ("gate", "up", "down")),
    "head.out.weight",
)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "local(3)"},
        {"position": "alibi"},
        {"position": "learned"},
        {"position": "shaw"},
        {"attention": ("softmax", "local(3)"), "position": ("rope", "transformer_xl")},
        {"attention": "linformer(rank=4)", "causal": False},
    ],
)
def test_shared_weights_start_equal_for_every_method(changes):
    plain, other = (
        Transformer(config(position="none")).state_dict(),
        Transformer(
            config(position="none", **changes) if "position" not in changes else config(**changes)
        ).state_dict(),
    )
    for name in SHARED:
        assert torch.equal(plain[name], other[name]), name


def test_blocks_of_another_kind_leave_the_rest_equal():
    plain, other = (
        Transformer(config(position="none")),
        Transformer(config(position="none", attention=("gru", "softmax"))),
    )
    for name in SHARED:
        if not name.startswith("blocks.0.mixer"):
            assert torch.equal(plain.state_dict()[name], other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("one", "other", "part"),
    [
        ({"position": "shaw"}, {"position": "shaw", "attention": "local(3)"}, ".position."),
        ({"position": ("shaw", "t5")}, {"position": ("rope", "t5")}, "blocks.1.mixer.position."),
        ({"attention": "gru"}, {"attention": ("softmax", "gru")}, "blocks.1.mixer."),
        ({"attention": "gru"}, {"attention": "gru", "position": "learned"}, ".mixer."),
    ],
)
def test_a_method_s_own_weights_depend_on_no_other(one, other, part):
    first, second = (Transformer(config(**{"position": "none", **changes})).state_dict() for changes in (one, other))
    names = [name for name in first if part in name]
    assert names
    assert all(torch.equal(first[name], second[name]) for name in names)


def test_no_two_weights_are_drawn_alike():
    state = Transformer(config(position="shaw", kv_heads=4, feed_forward="gelu")).state_dict()
    drawn = [weight.flatten()[:32] for name, weight in state.items() if "norm" not in name]
    assert len({tuple(each.div(each.std()).tolist()) for each in drawn}) == len(drawn)


def test_seeds_differ_and_repeat():
    first, again, other = (Transformer(config(position="t5", seed=seed)).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "norm" not in name)


def test_spread_keeps_unit_inputs_at_unit_size():
    made = Transformer(config(dim=256, depth=8, heads=4, head="mlm"))
    weights = made.state_dict()
    assert weights["embedding.tokens.weight"].std().item() == pytest.approx(1 / 16, rel=0.1)
    assert weights["blocks.3.mixer.q.weight"].std().item() == pytest.approx(1 / 16, rel=0.1)
    assert weights["blocks.3.mixer.o.weight"].std().item() == pytest.approx(1 / 16 / 4, rel=0.1)
    down = weights["blocks.3.feed_forward.down.weight"]
    assert down.std().item() == pytest.approx(down.shape[1] ** -0.5 / 4, rel=0.1)
    assert weights["head.out.bias"].abs().max() == 0
    assert weights["head.hidden.bias"].abs().max() == 0


def test_an_encoding_without_the_usual_factor_gets_smaller_queries():
    plain, t5 = (Transformer(config(position=name)).state_dict() for name in ("none", "t5"))
    torch.testing.assert_close(t5["blocks.1.mixer.q.weight"], plain["blocks.1.mixer.q.weight"] * 4**-0.5)
    assert torch.equal(t5["blocks.1.mixer.k.weight"], plain["blocks.1.mixer.k.weight"])


def test_with_a_norm_on_queries_the_norm_makes_them_smaller():
    plain, t5 = (Transformer(config(position=name, qk_norm=True)).state_dict() for name in ("none", "t5"))
    assert torch.equal(t5["blocks.0.mixer.q.weight"], plain["blocks.0.mixer.q.weight"])
    assert torch.equal(t5["blocks.0.mixer.q_norm.weight"], torch.full((4,), 0.5))
    assert torch.equal(t5["blocks.0.mixer.k_norm.weight"], torch.ones(4))


def test_building_moves_no_global_generator():
    before = torch.get_rng_state()
    Transformer(config(position=("t5", "none"), attention=("softmax", "gru")))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_draws_do_not_depend_on_the_global_generator_or_the_default_dtype():
    torch.manual_seed(5)
    narrow = Transformer(config(position="none")).state_dict()
    torch.set_default_dtype(torch.float64)
    try:
        wide = Transformer(config(position="none")).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for name, weight in narrow.items():
        assert wide[name].dtype == torch.float64
        assert torch.equal(weight.double(), wide[name]), name


def test_on_the_meta_device_nothing_is_drawn():
    with torch.device("meta"):
        made = Transformer(config(position="t5", qk_norm=True))
    assert all(weight.is_meta for weight in made.parameters())
