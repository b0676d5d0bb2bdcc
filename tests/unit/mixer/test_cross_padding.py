"""Padding of either sequence moves nothing in cross-attention."""

import pytest
import torch

import anyformer as af

PAIRS = [
    ("softmax", "rope"),
    ("softmax", "alibi"),
    ("softmax", "shaw"),
    ("softmax", "t5"),
    ("local(2)", "none"),
    ("local(2)", "alibi"),
    ("bigbird(block=2)", "rope"),
    ("topk(3)", "rope"),
    ("entmax", "alibi"),
    ("compressed(stride=2)", "rope"),
    ("linear", "rope"),
    ("efficient", "rope"),
    ("performer", "rope"),
    ("taylor", "rope"),
    ("inducing(points=3)", "rope"),
    ("linformer(rank=4)", "rope"),
    ("routing(clusters=2)", "shaw"),
    ("cosformer", "none"),
]
CAUSAL = [
    ("softmax", "rope"),
    ("local(2)", "alibi"),
    ("topk(3)", "none"),
    ("linear", "rope"),
    ("performer", "none"),
]


@pytest.mark.parametrize("sides", ["right", "left"])
@pytest.mark.parametrize(
    ("attention", "position", "causal"), [(*pair, False) for pair in PAIRS] + [(*pair, True) for pair in CAUSAL]
)
def test_padding_of_either_sequence_moves_nothing(attention: str, position: str, causal: bool, sides: str) -> None:
    layer = af.MultiHead(32, 4, attention=attention, position=position, causal=causal, max_length=16).double().eval()
    for parameter in layer.position.parameters():
        torch.nn.init.normal_(parameter)
    x, source = (torch.randn(2, size, 32, dtype=torch.float64) for size in (4, 6))
    expected = layer(x, source=source)

    def padded(tensor: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
        garbage, real = (
            100 * torch.randn(2, by, 32, dtype=torch.float64),
            torch.ones(2, tensor.shape[1], dtype=torch.bool),
        )
        hidden = torch.zeros(2, by, dtype=torch.bool)
        parts = ([tensor, garbage], [real, hidden]) if sides == "right" else ([garbage, tensor], [hidden, real])
        return torch.cat(parts[0], 1), torch.cat(parts[1], 1)

    for by_x, by_source in ((0, 3), (4, 0), (2, 3)):
        (wide_x, keep), (wide_source, source_keep) = padded(x, by_x), padded(source, by_source)
        out = layer(wide_x, attention_mask=keep, source=wide_source, source_mask=source_keep)
        torch.testing.assert_close(out[keep].view_as(expected), expected, rtol=1e-9, atol=1e-9)
