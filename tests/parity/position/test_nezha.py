"""NEZHA against a stored layer, and against the equation written out pair by pair."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import anyformer as af

GOLDEN = Path(__file__).parents[2] / "golden" / "nezha.safetensors"


def test_a_stored_layer() -> None:
    stored = load_file(GOLDEN)
    layer = af.MultiHead(32, 4, position="nezha(span=4)")
    for name, peer in zip("qkv", ("query", "key", "value"), strict=True):
        getattr(layer, name).load_state_dict({part: stored[f"weight.{peer}.{part}"] for part in ("weight", "bias")})
    layer.o.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
    torch.testing.assert_close(layer(stored["input"]), stored["output"], rtol=0, atol=2e-6)
    paper = af.build_position("nezha(span=4, phase=paper)", af.Site(32, 4))
    layer.position = paper
    assert float((layer(stored["input"]).detach() - stored["output"]).abs().max()) > 0.1


def wave(time: int, channel: int, width: int) -> float:
    angle = time * 10000.0 ** (-2 * (channel // 2) / width)
    return math.cos(angle) if channel % 2 else math.sin(angle)


@pytest.mark.parametrize("phase", ["code", "paper"])
@pytest.mark.parametrize("width", [1, 5, 6])
def test_outputs_and_gradients_are_the_equations(phase: str, width: int) -> None:
    n, m, span = 4, 7, 2
    q_pos, k_pos = torch.tensor([9, 3, 0, 5]), torch.tensor([4, 1, 8, 2, 3, 100, 6])
    start = 0 if phase == "code" else -span
    rows = [[wave(start + row, channel, width) for channel in range(width)] for row in range(2 * span + 1)]
    vectors = torch.tensor(rows, dtype=torch.float64)[(k_pos - q_pos[:, None]).clamp(-span, span) + span]  # [n m d]
    inputs = [torch.randn(2, 3, size, width, dtype=torch.float64, requires_grad=True) for size in (n, m, m)]
    probe = torch.randn(2, 3, n, width, dtype=torch.float64)

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = torch.einsum("bhnd,bhnmd->bhnm", q, k[:, :, None] + vectors) / math.sqrt(width)
        return torch.einsum("bhnm,bhnmd->bhnd", logits.softmax(-1), v[:, :, None] + vectors)

    position = af.build_position(f"nezha(span={span}, phase={phase})", af.Site(3 * width, 3))
    results = []
    for out in (
        af.attend(*inputs, position=position, q_positions=q_pos[None], k_positions=k_pos[None]),
        written_out(*inputs),
    ):
        results.append((out, *torch.autograd.grad((out * probe).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_the_papers_waves_start_at_the_query_itself() -> None:
    paper, code = (af.build_position(f"nezha(span=3, phase={phase})", af.Site(4, 1)) for phase in ("paper", "code"))
    assert paper.table()[3].tolist() == code.table()[0].tolist() == [0.0, 1.0, 0.0, 1.0]
    torch.testing.assert_close(paper.table()[3:], code.table()[:4], rtol=0, atol=0)
    torch.testing.assert_close(
        paper.table(), paper.table().flip(0) * torch.tensor([-1.0, 1.0, -1.0, 1.0]), rtol=0, atol=0
    )


def test_tables_by_offset_are_the_score_and_the_value() -> None:
    position = af.build_position("nezha(span=2)", af.Site(8, 2))
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.float64)
    places, offsets = torch.arange(5)[None], torch.arange(5) - torch.arange(5)[:, None]
    tables = position.tables(-4, 4)
    score = torch.einsum("bhnd,hnmd->bhnm", q, tables.keys[:, offsets + 4]) / 2
    torch.testing.assert_close(position.score(q, k, places, places), score, rtol=0, atol=1e-12)
    weights = torch.rand(1, 2, 5, 5, dtype=torch.float64)
    value = torch.einsum("bhnm,hnmd->bhnd", weights, tables.values[:, offsets + 4])
    torch.testing.assert_close(position.value(weights, places, places), value, rtol=0, atol=1e-12)
