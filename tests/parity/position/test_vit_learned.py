"""ViT's learned positions against transformers' ViT and against scipy's zoom, which the paper's code calls."""

import pytest
import scipy.ndimage
import torch
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position


def built(knobs: str, *, dim: int = 6, max_length: int = 64) -> Position:
    return af.build_position(f"vit_learned({knobs})", af.Site(dim, 2, max_length=max_length))


def theirs() -> ViTEmbeddings:
    module = ViTEmbeddings(ViTConfig(hidden_size=6, image_size=16, patch_size=4, num_attention_heads=2)).eval()
    torch.nn.init.normal_(module.position_embeddings)
    return module


@pytest.mark.parametrize(("height", "width"), [(4, 4), (7, 5), (3, 2), (8, 8)])
def test_bicubic_as_in_transformers(height: int, width: int) -> None:
    peer, ours = theirs(), built(f"rows=4, to_rows={height}, to_columns={width}")
    ours.table.data.copy_(peer.position_embeddings.detach()[0, 1:].unflatten(0, (4, 4)))
    patches, probe = torch.randn(1, height * width, 6), torch.randn(1, height * width, 6)
    mine = ours.embed(patches, af.grid(height, width), None)
    expected = (
        patches + peer.interpolate_pos_encoding(torch.zeros(1, 1 + height * width, 6), 4 * height, 4 * width)[:, 1:]
    )
    torch.testing.assert_close(mine, expected, rtol=0, atol=2e-6)
    (gradient,) = torch.autograd.grad((mine * probe).sum(), ours.table)
    (other,) = torch.autograd.grad((expected * probe).sum(), peer.position_embeddings)
    torch.testing.assert_close(gradient, other[0, 1:].unflatten(0, (4, 4)), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("height", "width"), [(7, 5), (3, 2), (9, 4)])
def test_bilinear_as_in_the_papers_code(height: int, width: int) -> None:
    ours = built(f"rows=4, columns=3, to_rows={height}, to_columns={width}, resample=bilinear").double()
    table = ours.table.detach().numpy()
    zoomed = scipy.ndimage.zoom(table, (height / 4, width / 3, 1), order=1)
    assert zoomed.shape == (height, width, 6)
    torch.testing.assert_close(ours.resampled().detach().numpy(), zoomed, rtol=0, atol=1e-12)


def test_its_own_grid_is_the_table_itself() -> None:
    for knobs in ("rows=4", "rows=4, to_rows=4, to_columns=4"):
        position = built(knobs)
        assert torch.equal(position.resampled(), position.table)
    assert built("").size == (8, 8)
    assert built("", max_length=65).size == (8, 8)
    assert built("rows=3, columns=5").resampled().shape == (3, 5, 6)


def test_weights_of_one_grid_serve_another() -> None:
    small = built("rows=4")
    large = built("rows=4, to_rows=6, to_columns=9")
    large.load_state_dict(small.state_dict())
    assert large.embed(torch.zeros(1, 54, 6), af.grid(6, 9), None).shape == (1, 54, 6)


def test_refusals() -> None:
    with pytest.raises(
        SpecError, match="expected to_rows and to_columns, or neither, got to_rows=3 and to_columns=None"
    ):
        built("to_rows=3")
    position = built("rows=4, columns=5")
    with pytest.raises(
        SpecError, match="vit_learned: row 4 and column 3 were read, the grid has 4 x 5; build it for a larger"
    ):
        position.embed(torch.zeros(1, 1, 6), torch.tensor([[[4, 3]]]), None)
    with pytest.raises(SpecError, match="vit_learned: expected positions from 0, got -1"):
        position.embed(torch.zeros(1, 1, 6), torch.tensor([[[0, -1]]]), None)
