"""Relative encodings see offsets only, with their direction; absolute ones do not hide where a token is."""

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.mixer.multihead import MultiHead
from anyformer.position.base import Position

RELATIVE = [
    "rope",
    "rope(pairing=interleaved, partial=0.5)",
    "alibi",
    "t5",
    "t5(scaled=True)",
    "shaw(left=3)",
    "shaw(left=2, right=5, keys=False)",
    "transformer_xl",
    "nezha(span=3)",
    "nezha(span=4, phase=paper)",
    "xlnet",
    "xlnet(clamp=3)",
    "deberta(span=4)",
    "deberta(span=30, buckets=6, terms=['p2c', 'p2p'], index=paper)",
    "kerple",
    "kerple(kind=power)",
    "sandwich",
    "rope_value(inverse=True)",
]
ABSOLUTE = ["sinusoidal", "sinusoidal(layout=concat)", "sinusoidal(layout=t2t)", "learned(std=1)"]
DIRECTED = ["rope", "t5", "shaw(left=3, values=False)", "transformer_xl", "xlnet"]
N = 16


def layer(spec: str, *, causal: bool = False, heads: int = 4) -> MultiHead:
    built = af.MultiHead(32, heads, position=spec, causal=causal, max_length=64).double()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    return built


@pytest.mark.parametrize("shift", [1, 1000, 1_000_000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", RELATIVE)
def test_a_common_shift_changes_nothing(spec: str, causal: bool, shift: int) -> None:
    attention, x = layer(spec, causal=causal), torch.randn(2, N, 32, dtype=torch.float64)
    places = torch.arange(N)[None]
    assert attention.position.relative
    torch.testing.assert_close(
        attention(x, positions=places + shift), attention(x, positions=places), rtol=0, atol=1e-9
    )


@torch.no_grad()
@pytest.mark.parametrize("spec", RELATIVE)
def test_a_shift_of_one_side_changes_the_output(spec: str) -> None:
    attention, x = layer(spec), torch.randn(2, N, 32, dtype=torch.float64)
    places = torch.arange(N)[None]
    moved = attention(x, source=x, positions=places + 1, source_positions=places)
    assert float((moved - attention(x)).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("spec", ABSOLUTE)
def test_absolute_encodings_fail_the_shift_law(spec: str) -> None:
    position = af.build_position(spec, af.Site(32, 4, max_length=64)).double()
    attention, x, places = layer("none"), torch.randn(2, N, 32, dtype=torch.float64), torch.arange(N)[None]
    plain, shifted = (attention(position.embed(x, places + shift, None)) for shift in (0, 7))
    assert not position.relative
    assert float((plain - shifted).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("spec", DIRECTED)
def test_past_and_future_differ(spec: str) -> None:
    """All queries alike, all keys alike, values the identity: the output is the weights, and A[0, 1] is not A[1, 0]."""
    position = af.build_position(spec, af.Site(32, 1)).double()
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64).expand(2, 1, 1, 2, 32)
    weights = af.attend(q, k, torch.eye(2, dtype=torch.float64)[None, None], position=position)[0, 0]
    assert abs(float(weights[0, 1] - weights[1, 0])) > 1e-3


@pytest.mark.parametrize("spec", ["t5(buckets=4, max_distance=2)", "shaw(left=1, values=False)", "transformer_xl"])
def test_the_later_key_reads_the_later_row(spec: str) -> None:
    """The direction itself: one large entry at offset +1 raises the logit of pair (0, 1), not of (1, 0)."""
    position = af.build_position(spec, af.Site(2, 1)).double()
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.zero_()
        if position.name == "t5":
            position.table[3] = 1.0
        elif position.name == "shaw":
            position.key_table[2] = 1.0
        else:  # sin(i - j) is negative for a later key
            position.w.weight[:, 0] = -1.0
    upper, lower = logit(position, 0, 1), logit(position, 1, 0)
    assert upper > 0.5
    assert lower < 1e-9


@torch.no_grad()
def logit(position: Position, query: int, key: int) -> float:
    q_pos, k_pos = torch.tensor([[query]]), torch.tensor([[key]])
    if position.name == "t5":
        return float(position.bias(torch.tensor(0), q_pos, k_pos))
    ones = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    return float(position.score(ones, ones, q_pos, k_pos))


@pytest.mark.parametrize("spec", RELATIVE)
@pytest.mark.parametrize("causal", [False, True])
def test_each_row_of_positions_is_read_for_its_own_sample(spec: str, causal: bool) -> None:
    attention, x = layer(spec, causal=causal), torch.randn(3, 9, 32, dtype=torch.float64)
    positions = torch.stack([torch.arange(9), torch.arange(9) * 3 + 5, torch.randperm(2_000_000)[:9].sort().values])
    together = attention(x, positions=positions)
    alone = torch.cat([attention(x[i : i + 1], positions=positions[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", RELATIVE)
@pytest.mark.parametrize("left", [True, False])
def test_a_padded_row_equals_the_row_alone(spec: str, left: bool) -> None:
    attention, x = layer(spec, causal=True), torch.randn(3, 10, 32, dtype=torch.float64)
    keep = torch.zeros(3, 10, dtype=torch.bool)
    for row, length in enumerate((6, 10, 3)):
        keep[row, 10 - length :] = left
        keep[row, :length] |= not left
    out = attention(x, attention_mask=keep)
    for row in range(3):
        alone = attention(x[row : row + 1, keep[row]])[0]
        torch.testing.assert_close(out[row, keep[row]], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", RELATIVE)
def test_step_by_step_equals_all_at_once(spec: str) -> None:
    attention, x = layer(spec, causal=True), torch.randn(2, 20, 32, dtype=torch.float64)
    cache = attention.new_cache(2)
    chunks = [attention(part, cache=cache) for part in x.split([12, 1, 3, 4], dim=1)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), attention(x), rtol=0, atol=1e-10)


def embedded(position: Position, x: Tensor, keep: Tensor) -> Tensor:
    places = (keep.cumsum(1) - keep.long()).clamp(max=63)
    return position.embed(x, places, None)


@pytest.mark.parametrize("spec", ABSOLUTE)
def test_embeddings_follow_places_not_slots(spec: str) -> None:
    position = af.build_position(spec, af.Site(32, 4, max_length=64)).double()
    x, keep = torch.randn(1, 10, 32, dtype=torch.float64), torch.arange(10)[None] >= 4
    alone = position.embed(x[:, 4:], torch.arange(6)[None], None)
    torch.testing.assert_close(embedded(position, x, keep)[:, 4:], alone, rtol=0, atol=0)
