"""Shaw's relative positions against VITS, Wav2Vec2-BERT (keys, clip) and stored NEZHA and BERT layers."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import VitsConfig, Wav2Vec2BertConfig
from transformers.models.vits.modeling_vits import VitsAttention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

import anyformer as af

GOLDEN = Path(__file__).parents[2] / "golden"
N = 13


def agree(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * max(1.0, float(theirs.detach().abs().max())))


def compare(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], pairs: dict[Tensor, Tensor]) -> None:
    """Outputs, gradients of the input, and gradients of pairs of parameters."""
    x, probe = torch.randn(2, 2, N, 32)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = ours(inputs[0]), theirs(inputs[1])
    agree(*outputs)
    for output in outputs:
        (output * probe).sum().backward()
    agree(inputs[0].grad, inputs[1].grad)
    for mine, other in pairs.items():
        agree(mine.grad, other.grad.view_as(mine.grad))


def test_keys_and_values_equal_vits() -> None:
    """VITS has no vector outside its window: here the outermost rows, which all further offsets share, are zero."""
    config = VitsConfig(hidden_size=32, num_attention_heads=4, window_size=4, attention_dropout=0.0)
    theirs = VitsAttention(config).eval()
    ours = af.MultiHead(32, 4, position="shaw(left=5)")
    for name, peer in zip("qkvo", (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.out_proj), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())
    tables = {"key_table": theirs.emb_rel_k, "value_table": theirs.emb_rel_v}
    ours.position.load_state_dict({name: nn.functional.pad(table[0], (0, 0, 1, 1)) for name, table in tables.items()})
    compare(ours, lambda x: theirs(x)[0], {ours.q.weight: theirs.q_proj.weight, ours.v.weight: theirs.v_proj.weight})
    for name, table in tables.items():
        agree(getattr(ours.position, name).grad[1:-1], table.grad[0])


def test_clipped_keys_equal_wav2vec2_bert() -> None:
    config = Wav2Vec2BertConfig(
        hidden_size=32, num_attention_heads=4, position_embeddings_type="relative_key", attention_dropout=0.0,
        left_max_position_embeddings=5, right_max_position_embeddings=2, attn_implementation="eager",
    )  # fmt: skip
    theirs = Wav2Vec2BertSelfAttention(config).eval()
    ours = af.MultiHead(32, 4, position="shaw(left=5, right=2, values=False)")
    for name, peer in zip("qkvo", (theirs.linear_q, theirs.linear_k, theirs.linear_v, theirs.linear_out), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())
    ours.position.load_state_dict({"key_table": theirs.distance_embedding.weight})
    compare(ours, lambda x: theirs(x)[0], {ours.position.key_table: theirs.distance_embedding.weight})


def golden_layer(file: str, position: str, **tables: Tensor) -> tuple[Tensor, Tensor]:
    stored = load_file(GOLDEN / f"{file}.safetensors")
    layer = af.MultiHead(32, 4, position=position)
    for name, peer in zip("qkv", ("query", "key", "value"), strict=True):
        getattr(layer, name).load_state_dict({part: stored[f"weight.{peer}.{part}"] for part in ("weight", "bias")})
    layer.o.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
    layer.position.load_state_dict(tables)
    return layer(stored["input"]), stored["output"]


def test_clipped_keys_and_values_equal_nezha() -> None:
    """NEZHA is Shaw with one fixed table for both: sinusoids of the row, not of the offset."""
    angles = torch.arange(9)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
    agree(*golden_layer("nezha", "shaw(left=4)", key_table=table, value_table=table))


def test_unclipped_keys_equal_bert() -> None:
    """BERT's rows go by query minus key, ours by key minus query."""
    table = load_file(GOLDEN / "bert_relative_key.safetensors")["weight.distance_embedding.weight"]
    agree(*golden_layer("bert_relative_key", "shaw(left=15, values=False)", key_table=table.flip(0)))
