"""An encoding as a module: what it stores, how it is built, its gradients, sizes at the edge, and what it refuses."""

import copy
import re

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.position.base import Position

INSIDE = [
    "none",
    "rope",
    "alibi",
    "t5",
    "shaw",
    "shaw(left=1, right=0, keys=False)",
    "transformer_xl",
    "nezha",
    "xlnet",
    "xlnet(clamp=2)",
    "tupe(relative=True)",
    "deberta(span=4)",
    "kerple",
    "kerple(kind=power)",
    "sandwich",
    "rope_value(inverse=True, scores=True)",
    "rope(scaling=yarn(factor=4.0, original=16), partial=0.5, kept=0.5)",
    "rope(scaling=dynamic_ntk(factor=2.0, original=16))",
    "fire",
]
EMBEDDED = ["sinusoidal", "learned", "hierarchical", "rnn", "multiplicative", "concatenated"]
WEIGHTS = {
    "none": {},
    "rope": {},
    "alibi": {},
    "sinusoidal": {},
    "learned": {"table.weight": (64, 32)},
    "learned(offset=2)": {"table.weight": (66, 32)},
    "t5": {"table": (32, 4)},
    "shaw": {"key_table": (33, 8), "value_table": (33, 8)},
    "shaw(left=2, right=0, values=False)": {"key_table": (3, 8)},
    "transformer_xl": {"u": (4, 8), "v": (4, 8), "w.weight": (32, 32)},
    "xlnet": {"u": (4, 8), "v": (4, 8), "w.weight": (32, 32)},
    "nezha": {},
    "deberta(span=4, terms=['p2c'])": {"table": (8, 32), "query.weight": (32, 32), "query.bias": (32,)},
    "deberta(buckets=6)": {
        "table": (12, 32),
        "key.weight": (32, 32),
        "key.bias": (32,),
        "query.weight": (32, 32),
        "query.bias": (32,),
    },
    "tupe(cls=False)": {
        "table": (64, 32),
        "norm.weight": (32,),
        "norm.bias": (32,),
        "query.weight": (32, 32),
        "query.bias": (32,),
        "key.weight": (32, 32),
        "key.bias": (32,),
    },
    "kerple": {"r1": (4,), "r2": (4,)},
    "sandwich": {},
    "rope_value": {},
    "rope(frequencies=learned)": {"learned": (4,)},
    "hierarchical(rows=5)": {"table": (5, 32)},
    "multiplicative": {"source.table.weight": (64, 32)},
    "concatenated(width=8)": {"weight": (32, 40), "source.table.weight": (64, 8)},
    "fire(width=5)": {
        "rate": (),
        "stretch": (),
        "inner.weight": (5, 1),
        "inner.bias": (5,),
        "outer.weight": (4, 5),
        "outer.bias": (4,),
    },
}


@pytest.mark.parametrize("spec", WEIGHTS)
def test_weights_are_saved_and_nothing_else_is_kept(spec: str) -> None:
    position = af.build_position(spec, af.Site(32, 4, max_length=64))
    assert {name: tuple(tensor.shape) for name, tensor in position.state_dict().items()} == WEIGHTS[spec]
    assert not list(position.buffers())


def test_one_object_or_one_a_layer() -> None:
    scopes = {name: af.build_position(name, af.Site(32, 4)).scope for name in (*INSIDE, *EMBEDDED)}
    assert {name for name, scope in scopes.items() if scope == "layer"} == {
        "shaw",
        "shaw(left=1, right=0, keys=False)",
        "transformer_xl",
        "xlnet",
        "xlnet(clamp=2)",
        "deberta(span=4)",
        "fire",
    }


def run(position: Position, x: Tensor) -> Tensor:
    site = position.site
    if position.name in EMBEDDED:
        return position.embed(x, torch.arange(x.shape[1], device=x.device)[None], None)
    q = x.unflatten(-1, (site.heads, -1)).transpose(1, 2)
    return af.attend(q, q, q, position=position)


@pytest.mark.parametrize("spec", INSIDE + EMBEDDED)
def test_a_forward_leaves_no_trace(spec: str) -> None:
    position = af.build_position(spec, af.Site(32, 4, max_length=64)).eval()
    weights, facts = copy.deepcopy(position.state_dict()), {k: repr(v) for k, v in vars(position).items()}
    x, generator = torch.randn(2, 40, 32), torch.get_rng_state()
    first = run(position, x)
    run(position, x[:, :3])
    with torch.no_grad():
        assert torch.equal(run(position, x), first)
    assert torch.equal(torch.get_rng_state(), generator)
    assert {k: repr(v) for k, v in vars(position).items()} == facts
    assert all(torch.equal(tensor, weights[name]) for name, tensor in position.state_dict().items())


@pytest.mark.parametrize("spec", INSIDE + EMBEDDED)
def test_built_without_memory_then_loaded(spec: str) -> None:
    site = af.Site(32, 4, max_length=64)
    real = af.build_position(spec, site)
    with torch.device("meta"):
        empty = af.build_position(spec, site)
    assert all(parameter.is_meta for parameter in empty.parameters())
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(real.state_dict())
    x = torch.randn(2, 9, 32)
    assert torch.equal(run(loaded, x), run(real, x))


@pytest.mark.parametrize("spec", INSIDE + EMBEDDED)
def test_makes_its_tensors_where_its_inputs_are(spec: str) -> None:
    position = af.build_position(spec, af.Site(32, 4, max_length=64)).to("meta")
    out = run(position, torch.randn(2, 9, 32, device="meta"))
    assert out.is_meta
    assert out.shape[0] == 2


@pytest.mark.parametrize("n, m", [(0, 0), (0, 3), (1, 1), (3, 1), (1, 5)])
@pytest.mark.parametrize("spec", [spec for spec in INSIDE if "tupe" not in spec])  # no rows before position 0
def test_sizes_at_the_edge(spec: str, n: int, m: int) -> None:
    position = af.build_position(spec, af.Site(32, 4))
    q, k, v = torch.randn(2, 4, n, 8), torch.randn(2, 4, m, 8), torch.randn(2, 4, m, 8)
    out = af.attend(q, k, v, position=position)
    assert out.shape == (2, 4, n, 8)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("spec", EMBEDDED)
def test_no_token_at_all(spec: str) -> None:
    position = af.build_position(spec, af.Site(32, 4))
    assert position.embed(torch.randn(2, 0, 32), torch.zeros(1, 0, dtype=torch.int64), None).shape == (2, 0, 32)


@pytest.mark.parametrize("spec", ["rope", "t5", "shaw(left=2)", "transformer_xl", "alibi", *INSIDE[7:]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_either_integer_width(spec: str, dtype: torch.dtype) -> None:
    position = af.build_position(spec, af.Site(32, 4))
    q = torch.randn(2, 4, 9, 8)
    places = torch.arange(9, dtype=dtype)[None]
    given = af.attend(q, q, q, position=position, q_positions=places, k_positions=places)
    assert torch.equal(given, af.attend(q, q, q, position=position))


class Placed(nn.Module):
    """An encoding at work, so that its weights can be swapped for others."""

    def __init__(self, position: Position) -> None:
        super().__init__()
        self.position = position

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        if self.position.name == "learned":
            return self.position.embed(x, places, None).sin()
        q, causal = x.unflatten(-1, (2, -1)).transpose(1, 2), self.position.site.causal
        return af.attend(q, q, q, causal=causal, position=self.position, q_positions=places, k_positions=places)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        "learned",
        "t5",
        "shaw(left=2, right=1)",
        "transformer_xl",
        "xlnet(clamp=2)",
        "deberta(span=2, terms=['c2p', 'p2c', 'p2p'], index=paper)",
        "tupe(relative=True)",
    ],
)
def test_gradients_of_the_weights(spec: str, causal: bool) -> None:
    placed = Placed(af.build_position(spec, af.Site(4, 2, causal=causal, max_length=8))).double()
    names, weights = zip(*placed.named_parameters(), strict=True)
    places = torch.tensor([[0, 1, 2, 3, 4], [7, 5, 4, 2, 0]])

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(placed, dict(zip(names, values, strict=True)), (x, places))

    x = torch.randn(2, 5, 4, dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (x, *(torch.randn_like(weight) for weight in weights))]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_a_bucket_that_no_pair_reads_has_no_gradient() -> None:
    position = af.build_position("t5", af.Site(8, 2))
    q = torch.randn(1, 2, 5, 4)
    af.attend(q, q, q, position=position).sin().sum().backward()
    read = position.bucket(torch.arange(-4, 5))
    assert set(position.table.grad.abs().sum(1).nonzero()[:, 0].tolist()) == set(read.tolist())


REFUSED = {
    "rope(partial=0.625)": "rope: channels turn in pairs, expected an even number of them, got 5; choose an even head_dim",
    "rope(partial=0.1)": "rope: channels turn in pairs, expected an even number of them, got 0; choose",
    "rope(partial=1.5)": "partial=1.5: expected less than or equal to 1",
    "t5(buckets=7)": "t5: a bidirectional site needs an even number of at least 4 buckets, got buckets=7",
    "t5(buckets=2)": "t5: a bidirectional site needs an even number of at least 4 buckets, got buckets=2",
    "t5(max_distance=8)": "t5: distances up to 8 have a bucket each; expected a max_distance above that, got 8",
    "shaw(keys=False, values=False)": "shaw: expected a term on keys, on values or on both, got neither",
    "shaw(left=-1)": "left=-1: expected greater than or equal to 0",
    "alibi(slope=2)": "unknown knob 'slope'; it has: both",
    "sinusoidal(layout=fairseq)": "layout='fairseq': expected 'paper', 'concat' or 't2t'",
    "learned(std=0.0)": "std=0.0: expected greater than 0",
    "nezha(phase=books)": "phase='books': expected 'code' or 'paper'",
    "xlnet(clamp=0)": "clamp=0: expected greater than or equal to 1",
    "deberta(terms=[])": "deberta: expected terms to hold each of 'c2p', 'p2c' and 'p2p' at most once and one at least, got []",
    "deberta(terms=['c2p', 'c2p'])": "at most once and one at least, got ['c2p', 'c2p']; for no position use \"none\"",
    "deberta(terms=['p2q'])": "expected 'c2p', 'p2c' or 'p2p'",
    "deberta(buckets=3)": "deberta: expected at least 4 buckets, and a span of at least 3 for 3 of them, got span=512",
    "deberta(span=9, buckets=16)": "a span of at least 10 for 16 of them, got span=9; leave buckets out for a row for each",
    "tupe(buckets=7)": "tupe: expected at least 4 buckets, an even number of them, and a max_distance above the 1 distances",
    "tupe(max_distance=8)": "above the 8 distances with a bucket each, got buckets=32 and max_distance=8",
    "kerple(kind=sqrt)": "kind='sqrt': expected 'log' or 'power'",
    "sandwich(width=3)": "width=3: expected a multiple of 2",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refusals_at_build(spec: str) -> None:
    with pytest.raises(SpecError, match=re.escape(REFUSED[spec])):
        af.build_position(spec, af.Site(32, 4))


def test_refusals_that_depend_on_the_site() -> None:
    with pytest.raises(SpecError, match="expected an even number of them, got 7; choose an even head_dim"):
        af.build_position("rope", af.Site(7, 1))
    with pytest.raises(SpecError, match=r"transformer_xl: .* expected an even dim, got 7"):
        af.build_position("transformer_xl", af.Site(7, 1))
    with pytest.raises(SpecError, match=r"xlnet: .* expected an even dim, got 7"):
        af.build_position("xlnet", af.Site(7, 1))
    with pytest.raises(SpecError, match="tupe: expected at least 2 buckets and a max_distance above the 0 distances"):
        af.build_position("tupe(buckets=1)", af.Site(8, 1, causal=True))
    with pytest.raises(SpecError, match="t5: a causal site needs at least 2 buckets, got buckets=1"):
        af.build_position("t5(buckets=1)", af.Site(8, 1, causal=True))


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions_end(offset: int) -> None:
    position = af.build_position(f"learned(offset={offset})", af.Site(8, 2, max_length=6))
    x = torch.randn(1, 1, 8)
    position.embed(x, torch.tensor([[5]]), None)
    with pytest.raises(SpecError, match=r"learned: position 6 needs a table of at least 7 rows, this one has 6"):
        position.embed(x, torch.tensor([[6]]), None)
    with pytest.raises(SpecError, match="learned: expected positions from 0, got -1"):
        position.embed(x, torch.tensor([[-1]]), None)


@pytest.mark.parametrize("spec", EMBEDDED)
def test_embeddings_are_refused_inside_attention(spec: str) -> None:
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(IncompatibleError, match="is added to token vectors before attention"):
        af.attend(q, q, q, position=af.build_position(spec, af.Site(32, 4)))
