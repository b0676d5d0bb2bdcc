"""Rotary positions on a grid against DINOv3, Pixtral and rotary-embedding-torch, and against complex numbers, pair by pair."""

import cmath

import pytest
import torch
from rotary_embedding_torch.rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
from torch import Tensor
from transformers import DINOv3ViTConfig, PixtralVisionConfig
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTRopePositionEmbedding, apply_rotary_pos_emb
from transformers.models.pixtral import modeling_pixtral as pixtral

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position

ROWS, COLUMNS = 3, 5


def built(spec: str, *, heads: int = 2, width: int = 8, kv_heads: int | None = None) -> Position:
    return af.build_position(spec, af.Site(heads * width, heads, kv_heads=kv_heads))


def states(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 2, n, 8, dtype=dtype, requires_grad=True) for _ in range(2))


def agree(ours: tuple, theirs: tuple, inputs: tuple) -> None:
    """Rotated queries and keys, and the gradients that flow back through them."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    probes = [torch.randn_like(each) for each in theirs]
    grads = [
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(outs, probes, strict=True)), inputs)
        for outs in (ours, theirs)
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=2e-6)


def test_dinov3_with_its_class_and_register_tokens() -> None:
    config = DINOv3ViTConfig(
        hidden_size=16, num_attention_heads=2, image_size=16, patch_size=4, num_register_tokens=2, rope_theta=100.0
    )
    cos, sin = DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 4 * ROWS, 4 * COLUMNS))
    q, k = states(3 + ROWS * COLUMNS)
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    position = built(f"rope_2d(first=row, rows={ROWS}, columns={COLUMNS})")
    turned = position.rotate(q[:, :, 3:], k[:, :, 3:], *[af.grid(ROWS, COLUMNS)] * 2)
    ours = tuple(torch.cat([plain[:, :, :3], new], dim=2) for plain, new in zip((q, k), turned, strict=True))
    agree(ours, theirs, (q, k))


def test_pixtral_whose_columns_turn_slower_than_its_rows() -> None:
    """Rows have every second wave of rope and columns those between: waves that only `mixed` holds, as weights."""
    config = PixtralVisionConfig(
        hidden_size=16, num_attention_heads=2, rope_parameters={"rope_type": "axial", "rope_theta": 10000.0}
    )
    places = af.grid(ROWS, COLUMNS)
    cos, sin = pixtral.PixtralVisionRotaryEmbedding(config)(torch.zeros(1), places[0])
    q, k = states(ROWS * COLUMNS)
    theirs = pixtral.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=0)
    position = built("rope_2d(kind=mixed)")
    waves = 10000.0 ** (-torch.arange(4) / 4)
    of_rows, of_columns = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    frequencies = torch.cat([waves[0::2, None] * of_rows, waves[1::2, None] * of_columns])
    position.load_state_dict({"frequencies": frequencies.expand(2, -1, -1)})
    agree(position.rotate(q, k, places, places), theirs, (q, k))


def test_rotary_embedding_torch() -> None:
    theirs = RotaryEmbedding(dim=4, freqs_for="lang", theta=100)
    freqs = theirs.get_axial_freqs(ROWS, COLUMNS).flatten(0, 1)
    q, k = states(ROWS * COLUMNS)
    position = built("rope_2d(first=row, pairing=interleaved)")
    ours = position.rotate(q, k, *[af.grid(ROWS, COLUMNS)] * 2)
    agree(ours, tuple(apply_rotary_emb(freqs, each) for each in (q, k)), (q, k))


def by_complex(x: Tensor, angles: list[list[float]]) -> Tensor:
    """One row of interleaved pairs for each token, turned as complex numbers."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.tensor([[cmath.exp(1j * angle) for angle in row] for row in angles], dtype=torch.complex128)
    return torch.view_as_real(pairs * turns).flatten(-2)


def test_axial_turns_by_the_column_first() -> None:
    places = [(0, 0), (2, 1), (1, 30), (500, 7)]
    angles = [[x, x * 100**-0.5, y, y * 100**-0.5] for y, x in places]
    q, k = states(4, torch.float64)
    positions = torch.tensor([places])
    ours = built("rope_2d(pairing=interleaved)").rotate(q, k, positions, positions)
    for mine, plain in zip(ours, (q, k), strict=True):
        torch.testing.assert_close(mine, by_complex(plain, angles), rtol=0, atol=1e-12)


def test_mixed_turns_by_both_with_weights_of_each_head() -> None:
    places = [(0, 0), (2, 1), (1, 30), (500, 7)]
    positions = torch.tensor([places])
    position = built("rope_2d(kind=mixed, pairing=interleaved)").double()
    q, k = states(4, torch.float64)
    ours = position.rotate(q, k, positions, positions)
    for head in range(2):
        waves = position.frequencies[head].tolist()
        angles = [[y * by_row + x * by_column for by_row, by_column in waves] for y, x in places]
        for mine, plain in zip(ours, (q, k), strict=True):
            torch.testing.assert_close(mine[:, head], by_complex(plain[:, head], angles), rtol=0, atol=1e-12)


def test_gradients_of_the_frequencies() -> None:
    position = built("rope_2d(kind=mixed)", width=4, kv_heads=1).double()
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    places = torch.tensor([[[0, 0], [2, 1], [1, 3]]])

    def scores(frequencies: Tensor) -> Tensor:
        call = torch.func.functional_call
        turned = call(Rotated(position), {"position.frequencies": frequencies}, (q, places))
        return turned[0] @ turned[1].mT

    assert torch.autograd.gradcheck(scores, position.frequencies.detach().clone().requires_grad_())


class Rotated(torch.nn.Module):
    def __init__(self, position: torch.nn.Module) -> None:
        super().__init__()
        self.position = position

    def forward(self, q: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.position.rotate(q, q[:, :1], places, places)


def test_mixed_starts_with_waves_of_the_axial_lengths_in_two_directions() -> None:
    waves = built("rope_2d(kind=mixed)", width=16).frequencies
    lengths = torch.tensor([10.0 ** (-t / 4) for t in range(4)])
    torch.testing.assert_close(waves.norm(dim=-1), lengths.repeat(2).expand(2, -1), rtol=1e-6, atol=0)
    crossed = (waves[:, :4] * waves[:, 4:]).sum(-1)
    torch.testing.assert_close(crossed, torch.zeros(2, 4), rtol=0, atol=1e-6)
    assert not torch.allclose(waves[0], waves[1])


@pytest.mark.parametrize("spec", ["rope_2d", "rope_2d(kind=mixed)", "rope_2d(rows=9, columns=4)"])
def test_products_see_the_offset_only(spec: str) -> None:
    position = af.build_position(spec, af.Site(16, 4, kv_heads=2)).double()
    q, k = torch.randn(1, 4, 6, 4, dtype=torch.float64), torch.randn(1, 2, 6, 4, dtype=torch.float64)
    places = torch.randint(0, 50, (1, 6, 2))

    def scores(shift: tuple[int, int]) -> Tensor:
        moved = places + torch.tensor(shift)
        turned_q, turned_k = position.rotate(q, k, moved, moved)
        return turned_q @ turned_k.repeat_interleave(2, dim=1).mT

    torch.testing.assert_close(scores((0, 0)), scores((31, -17)), rtol=0, atol=1e-9)


def test_a_row_of_pixels_is_rope() -> None:
    """With all rows 0 the first half of the pairs is rope of half the width."""
    q, k = states(9, torch.float64)
    places = torch.stack([torch.zeros(9, dtype=torch.int64), torch.arange(9)], dim=-1)[None]
    ours = built("rope_2d(pairing=interleaved)").rotate(q, k, places, places)[0]
    rope = af.build_position("rope(base=100, pairing=interleaved)", af.Site(8, 2))
    theirs = rope.rotate(q[..., :4], k[..., :4], torch.arange(9)[None], torch.arange(9)[None])[0]
    torch.testing.assert_close(ours, torch.cat([theirs, q[..., 4:]], dim=-1), rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(SpecError, match="rope_2d: axial turns need a head_dim that is a multiple of 4, got 6"):
        built("rope_2d", width=6)
    with pytest.raises(SpecError, match="rope_2d: mixed turns need a head_dim that is a multiple of 2, got 5"):
        built("rope_2d(kind=mixed)", width=5)
    with pytest.raises(SpecError, match="expected rows and columns, or neither, got rows=None and columns=4"):
        built("rope_2d(columns=4)")
