"""FNet: what its equation says beyond the parity test."""

import pytest
import torch

from anyformer.errors import IncompatibleError
from anyformer.mixer.fnet import fourier
from anyformer.model.build import build_mixer, check
from anyformer.site import Site


@pytest.mark.parametrize("n", [1, 2, 7, 8])
@pytest.mark.parametrize("channels", [1, 5, 6])
def test_a_transform_in_half_precision_runs_in_single(n: int, channels: int) -> None:
    x = torch.randn(2, n, channels)
    for dtype in (torch.bfloat16, torch.float16):
        got = fourier(x.to(dtype))
        assert got.dtype == dtype
        assert torch.equal(got, fourier(x.to(dtype).float()).to(dtype))


def test_an_empty_sequence_stays_empty() -> None:
    mixer = build_mixer("fnet", "none", Site(8, 2))
    assert mixer(torch.randn(2, 0, 8)).shape == (2, 0, 8)
    assert mixer(torch.randn(0, 3, 8)).shape == (0, 3, 8)


def test_order_matters_and_rows_do_not_meet() -> None:
    mixer, x = build_mixer("fnet", "none", Site(8, 2)), torch.randn(3, 7, 8)
    assert mixer.ordered
    assert not torch.allclose(mixer(x.flip(1)), mixer(x).flip(1), atol=1e-3)
    assert torch.allclose(mixer(x)[:1], mixer(x[:1]), atol=1e-5)


def test_it_has_no_weights_and_drops_out_its_output() -> None:
    mixer, x = build_mixer("fnet", "none", Site(8, 2), dropout=0.5), torch.randn(2, 7, 8)
    assert not mixer.state_dict()
    assert (mixer(x) == 0).any()
    assert torch.equal(mixer.eval()(x), fourier(x))


def test_a_mask_is_refused_with_what_to_use() -> None:
    mixer = build_mixer("fnet", "none", Site(8, 2))
    text = "fnet cannot leave padding out: every output depends on the length .* or use linformer, conv or softmax"
    with pytest.raises(IncompatibleError, match=text):
        mixer(torch.randn(2, 4, 8), attention_mask=torch.ones(2, 4, dtype=torch.bool))


def test_causal_and_a_cache_are_refused_with_what_to_use() -> None:
    text = "fnet cannot be causal: its waves run over the whole sequence, the future too; use gru, conv or linear"
    with pytest.raises(IncompatibleError, match=text):
        build_mixer("fnet", "none", Site(8, 2, causal=True))
    with pytest.raises(IncompatibleError, match=text):
        check("fnet", "none", causal=True)
    with pytest.raises(IncompatibleError, match="fnet cannot continue a sequence from a cache"):
        build_mixer("fnet", "none", Site(8, 2)).new_cache(1)
