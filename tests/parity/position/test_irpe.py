"""iRPE against its equations, written out pair by pair with Python numbers, and on a line against a stored BERT layer."""

import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position

METHODS = ("product", "cross", "euclidean", "quant")
SITE = af.Site(8, 2)
GOLDEN = Path(__file__).parents[2] / "golden"


def g(t: float, ratio: float = 1.9) -> int:
    a, b, c = ratio, 2 * ratio, 8 * ratio
    if abs(t) <= a:
        return round(t)
    return int(math.copysign(min(b, round(a + math.log(abs(t) / a) / math.log(c / a) * (b - a))), t))


def rows(method: str, y: int, x: int) -> list[int]:
    match method:
        case "product":
            return [(g(y) + 3) * 7 + g(x) + 3]
        case "cross":
            return [g(y) + 3, g(x) + 3]
        case "euclidean":
            return [g(round(math.sqrt(y * y + x * x)))]
    return [g(y * y + x * x)]


def drawn(spec: str) -> Position:
    position = af.build_position(spec, SITE).double()
    for table in position.parameters():
        nn.init.normal_(table)
    return position


def test_steps_of_the_authors_default() -> None:
    """2 and 3 share a step, as 4 and all beyond do: 3.8 cuts the fourth off."""
    assert [g(t) for t in range(7)] == [0, 1, 2, 2, 3, 3, 3]
    position = af.build_position("irpe(method=cross)", SITE)
    reach = torch.arange(-40, 41)
    found = position.buckets(torch.stack([reach, reach.flip(0)], dim=-1))
    assert found[0].tolist() == [g(t) + 3 for t in range(-40, 41)]
    assert found[1].tolist() == found[0].tolist()[::-1]


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.9, 3.3, 20.0])
def test_steps_of_other_ratios_never_end(ratio: float) -> None:
    position = af.build_position(f"irpe(method=quant, ratio={ratio})", SITE)
    far = torch.tensor([0, 1, 2, 3, 7, 50, 100_000])
    found = position.buckets(torch.stack([far, far * 0], dim=-1))[0].tolist()
    assert found == [g(t * t, ratio) for t in far.tolist()]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_vectors_on_queries_keys_and_values(method: str, shared: bool) -> None:
    position = drawn(f"irpe(method={method}, on=['q', 'k', 'v'], shared={shared})")
    q, k = torch.randn(2, 1, 2, 6, 4, dtype=torch.float64)
    q_pos, k_pos = torch.randint(0, 20, (1, 5, 2)), torch.randint(0, 20, (1, 6, 2))
    q = q[:, :, :5]
    weights = torch.rand(1, 2, 5, 6, dtype=torch.float64)
    score, value = torch.zeros(2, 5, 6, dtype=torch.float64), torch.zeros(2, 5, 4, dtype=torch.float64)
    for head in range(2):
        for i in range(5):
            for j in range(6):
                y, x = (q_pos[0, i] - k_pos[0, j]).tolist()
                for part, row in enumerate(rows(method, y, x)):
                    on_k, on_v = (position.entries[each][part] for each in "kv")
                    on_k, on_v = (on_k, on_v) if shared else (on_k[head], on_v[head])
                    score[head, i, j] += q[0, head, i] @ on_k[row] / 2
                    value[head, i] += weights[0, head, i, j] * on_v[row]
                for part, row in enumerate(rows(method, -y, -x)):
                    on_q = position.entries["q"][part] if shared else position.entries["q"][part][head]
                    score[head, i, j] += k[0, head, j] @ on_q[row] / 2
    torch.testing.assert_close(position.score(q, k, q_pos, k_pos)[0], score, rtol=0, atol=1e-12)
    torch.testing.assert_close(position.value(weights, q_pos, k_pos)[0], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_bias_is_a_vector_met_by_a_constant(method: str, shared: bool) -> None:
    """Where queries and keys are all 1, a table of vectors with the bias in one channel says the same."""
    knobs = f"method={method}, on=['k', 'q'], shared={shared}"
    numbers, vectors = drawn(f"irpe(kind=bias, {knobs})"), drawn(f"irpe({knobs})")
    for each in "kq":
        vectors.entries[each].data.zero_()
        vectors.entries[each].data[..., 1] = numbers.entries[each].data * 2  # the scale of 4 channels is 1/2
    ones = torch.ones(1, 2, 9, 4, dtype=torch.float64)
    places = torch.randint(0, 20, (1, 9, 2))
    found = numbers.bias(torch.arange(2)[:, None, None], places[:, None, :, None], places[:, None, None])
    torch.testing.assert_close(found, vectors.score(ones, ones, places, places), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["irpe(on=['q', 'k', 'v'])", "irpe(kind=bias, method=cross, shared=False)"])
def test_gradients(spec: str) -> None:
    layer = af.MultiHead(8, 2, position=spec).double()
    names, weights = zip(*layer.position.named_parameters(), strict=True)
    x = torch.randn(1, 5, 8, dtype=torch.float64, requires_grad=True)
    places = torch.tensor([[[0, 0], [0, 3], [1, 9], [2, 2], [7, 0]]])

    def run(x: Tensor, *values: Tensor) -> Tensor:
        named = {f"position.{name}": value for name, value in zip(names, values, strict=True)}
        return torch.func.functional_call(layer, named, (x,), {"positions": places})

    drawn_weights = [torch.randn_like(weight, requires_grad=True) for weight in weights]
    assert torch.autograd.gradcheck(run, (x, *drawn_weights), fast_mode=True)


def test_on_a_line_queries_and_keys_meet_one_table_as_in_bert() -> None:
    """BERT's relative_key_query: q_i . E[i - j] + k_j . E[i - j]. The bucket on queries is the key's view: E mirrored."""
    stored = load_file(GOLDEN / "bert_relative_key_query.safetensors")
    layer = af.MultiHead(32, 4, position="irpe(method=cross, on=['k', 'q'], ratio=15)")
    for name, peer in zip("qkv", ("query", "key", "value"), strict=True):
        getattr(layer, name).load_state_dict({part: stored[f"weight.{peer}.{part}"] for part in ("weight", "bias")})
    layer.o.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
    table = stored["weight.distance_embedding.weight"]  # of offsets -15 to 15
    with torch.no_grad():
        for each, rows in (("k", table), ("q", table.flip(0))):
            by_column = layer.position.entries[each][1]
            by_column[len(by_column) // 2 - 15 : len(by_column) // 2 + 16] = rows
    ours = layer(stored["input"], positions=af.grid(1, stored["input"].shape[1]))
    torch.testing.assert_close(ours, stored["output"], rtol=0, atol=2e-6 * float(stored["output"].abs().max()))


REFUSED = {
    "irpe(on=[])": "irpe: expected each of 'q', 'k' and 'v' at most once and one at least, got on=[]",
    "irpe(on=['k', 'k'])": "got on=['k', 'k']; for no position use \"none\"",
    "irpe(kind=bias, on=['v'])": "irpe: a bias acts on logits, not on values; leave 'v' out of on, or use kind=contextual",
    "irpe(ratio=0.3)": "irpe: expected a ratio of at least 0.5, got 0.3; below it all offsets are alike",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_refusals(spec: str) -> None:
    with pytest.raises(SpecError, match=re.escape(REFUSED[spec])):
        af.build_position(spec, SITE)
