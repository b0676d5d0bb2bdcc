"""Decomposed relative positions against transformers' ViTDet, and where offsets leave the tables."""

import pytest
import torch
from torch import nn
from transformers import VitDetConfig
from transformers.models.vitdet.modeling_vitdet import VitDetAttention

import anyformer as af
from anyformer.errors import SpecError


@pytest.mark.parametrize("size", [(3, 4), (5, 2), (3, 2)], ids=["trained", "other", "smaller"])
def test_a_layer_of_transformers(size: tuple[int, int]) -> None:
    config = VitDetConfig(hidden_size=16, num_attention_heads=2, use_relative_position_embeddings=True)
    theirs = VitDetAttention(config, (3, 4)).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    resampled = "" if size == (3, 4) else f", to_rows={size[0]}, to_columns={size[1]}"
    ours = af.MultiHead(16, 2, position=f"decomposed_rel(rows=3, columns=4{resampled})")
    weights, biases = theirs.qkv.weight.detach().chunk(3), theirs.qkv.bias.detach().chunk(3)
    for name, weight, bias in zip("qkv", weights, biases, strict=True):
        getattr(ours, name).load_state_dict({"weight": weight, "bias": bias})
    ours.o.load_state_dict(theirs.proj.state_dict())
    tables = {"row_table": theirs.rel_pos_h.detach(), "column_table": theirs.rel_pos_w.detach()}
    ours.position.load_state_dict(tables)
    x, probe = torch.randn(2, 2, size[0] * size[1], 16)
    x.requires_grad_()
    results = []
    for out, rows, columns in (
        (ours(x, positions=af.grid(*size)), ours.position.row_table, ours.position.column_table),
        (theirs(x.unflatten(1, size))[0].flatten(1, 2), theirs.rel_pos_h, theirs.rel_pos_w),
    ):
        results.append((out, *torch.autograd.grad((out * probe).sum(), (x, rows, columns))))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6 * max(1.0, float(other.detach().abs().max())))


def test_every_pair_and_the_ends_of_the_tables() -> None:
    position = af.build_position("decomposed_rel(rows=2, columns=3)", af.Site(8, 2)).double()
    for table in position.parameters():
        nn.init.normal_(table)
    q, k = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.randn(1, 2, 4, 4, dtype=torch.float64)
    q_pos, k_pos = torch.randint(0, 9, (1, 5, 2)), torch.randint(0, 9, (1, 4, 2))
    found = position.score(q, k, q_pos, k_pos)
    for i in range(5):
        for j in range(4):
            row, column = (q_pos[0, i] - k_pos[0, j]).tolist()
            vector = position.row_table[max(-1, min(1, row)) + 1] + position.column_table[max(-2, min(2, column)) + 2]
            torch.testing.assert_close(found[0, :, i, j], q[0, :, i] @ vector, rtol=0, atol=1e-12)


def test_sizes_follow_the_longest_sequence() -> None:
    position = af.build_position("decomposed_rel", af.Site(8, 2, max_length=30))
    assert position.row_table.shape == position.column_table.shape == (9, 4)


def test_refusals() -> None:
    with pytest.raises(
        SpecError, match="expected to_rows and to_columns, or neither, got to_rows=3 and to_columns=None"
    ):
        af.build_position("decomposed_rel(to_rows=3)", af.Site(8, 1))
