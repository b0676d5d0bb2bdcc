"""Swin's bias against transformers' layer, and where offsets leave the table."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import SwinConfig
from transformers.models.swin.modeling_swin import SwinAttention

import anyformer as af
from anyformer.errors import SpecError


def test_a_layer_of_transformers() -> None:
    """Four windows of one image, folded into the batch."""
    theirs = SwinAttention(SwinConfig(attn_implementation="eager"), 16, 2, 3).eval()
    ours = af.MultiHead(16, 2, position="swin_bias(rows=3)")
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name in "qkvo":
        getattr(ours, name).load_state_dict(getattr(theirs, f"{name}_proj").state_dict())
    table = theirs.relative_position_bias.relative_position_bias_table
    ours.position.load_state_dict({"table": table.detach().unflatten(0, (5, 5))})
    x, probe = torch.randn(4, 9, 16, requires_grad=True), torch.randn(4, 9, 16)
    results = []
    for out, weight in ((ours(x, positions=af.grid(3, 3)), ours.position.table), (theirs(x)[0], table)):
        results.append((out, *(grad.flatten() for grad in torch.autograd.grad((out * probe).sum(), (x, weight)))))
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


def test_windows_are_a_pattern_over_tokens_in_window_order() -> None:
    """Two windows in one row equal the two in the batch."""
    layer = af.MultiHead(16, 2, position="swin_bias(rows=3, columns=2)", attention="block_local(6)").double()
    x = torch.randn(1, 12, 16, dtype=torch.float64)
    window = af.grid(3, 2)
    whole = layer(x, positions=torch.cat([window, window + torch.tensor([0, 2])], dim=1))
    each = layer(x.unflatten(1, (2, 6))[0], positions=window)
    torch.testing.assert_close(whole[0], each.flatten(0, 1), rtol=0, atol=1e-12)


def test_rows_and_columns_are_query_minus_key() -> None:
    position = af.build_position("swin_bias(rows=2, columns=3)", af.Site(8, 2))
    assert position.table.shape == (3, 5, 2)
    for query, key, head in (((0, 0), (1, 2), 0), ((1, 0), (0, 1), 1), ((1, 2), (1, 2), 0)):
        found = position.bias(torch.tensor(head), torch.tensor(query), torch.tensor(key))
        assert found == position.table[query[0] - key[0] + 1, query[1] - key[1] + 2, head]
    far = position.bias(torch.tensor(1), torch.tensor([100, -7]), torch.tensor([3, 50]))
    assert far == position.table[2, 0, 1]


def test_a_table_for_larger_windows() -> None:
    small = af.build_position("swin_bias(rows=3)", af.Site(8, 2))
    large = af.build_position("swin_bias(rows=3, to_rows=5, to_columns=4)", af.Site(8, 2))
    large.load_state_dict(small.state_dict())
    images = small.table.permute(2, 0, 1).reshape(1, 2, 5, 5)
    expected = F.interpolate(images, (9, 7), mode="bicubic", align_corners=False)[0]
    head, places = torch.arange(2)[:, None, None], af.grid(5, 4)[0]
    found = large.bias(head, places[:, None], places)
    pairs = [(0, 0), (3, 7), (19, 0), (0, 19), (11, 4)]
    for i, j in pairs:
        row, column = (places[i] - places[j] + torch.tensor([4, 3])).tolist()
        torch.testing.assert_close(found[:, i, j], expected[:, row, column])
    torch.testing.assert_close(small.resampled(), small.table, rtol=0, atol=0)


def test_gradients_through_the_resampling() -> None:
    position = af.build_position("swin_bias(rows=2, to_rows=3, to_columns=3)", af.Site(4, 2)).double()
    head, places = torch.arange(2)[:, None, None], af.grid(3, 3)[0]
    (own,) = torch.autograd.grad(position.bias(head, places[:, None], places).sin().sum(), position.table)
    table = position.table.detach().requires_grad_()
    image = F.interpolate(table.permute(2, 0, 1)[None], (5, 5), mode="bicubic")[0]
    row, column = (places[:, None] - places + 2).unbind(-1)
    (other,) = torch.autograd.grad(image[:, row, column].sin().sum(), table)
    torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(
        SpecError, match="expected to_rows and to_columns, or neither, got to_rows=None and to_columns=3"
    ):
        af.build_position("swin_bias(to_columns=3)", af.Site(8, 1))
    with pytest.raises(SpecError, match=r"swin_bias reads a row and a column for each token"):
        af.MultiHead(16, 2, position="swin_bias")(torch.zeros(1, 4, 16))
