"""What linformer, fnet, gru, conv and longformer have in common: lengths, padding, causality and caches."""

from itertools import pairwise

import pytest
import torch

from anyformer.errors import IncompatibleError
from anyformer.mixer.base import Mixer
from anyformer.model.build import build_mixer, verdict
from anyformer.site import Site

LONGFORMER = "longformer(window=2, max_globals=3)"
MASKED = ["linformer(rank=5)", "linformer(rank=5, sharing=kv)", "gru(width=6)", "conv(width=4)", LONGFORMER]
CAUSAL = [
    "gru(width=6)",
    "conv(width=1)",
    "conv(width=4)",
    LONGFORMER,
    "longformer(window=2, max_globals=0, dilation=2)",
]
KEEPS = {
    "right": [[1] * 11, [1] * 7 + [0] * 4, [1] + [0] * 10],
    "left": [[1] * 11, [0] * 4 + [1] * 7, [0] * 10 + [1]],
    "interior": [[1] * 11, [0, 1, 1, 0, 0, 1, 1, 1, 0, 1, 1], [0] * 5 + [1] + [0] * 5],
    "nothing": [[1] * 11, [0] * 11, [1] * 2 + [0] * 9],
}


def layer(spec: str, *, causal: bool = False, position: str = "none") -> Mixer:
    """A float64 layer with weights large enough to show a leak."""
    mixer = build_mixer(spec, position, Site(8, 2, causal=causal, max_length=32)).double()
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return mixer.eval()


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 2, 13])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [*MASKED, "fnet"])
def test_any_length_runs_forward_and_backward(spec: str, causal: bool, n: int) -> None:
    if not verdict(spec, "none", Site(8, 2, causal=causal)).runs:
        assert causal
        return
    x = torch.randn(2, n, 8, dtype=torch.float64, requires_grad=True)
    out = layer(spec, causal=causal)(x)
    out.square().sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("where", KEEPS)
@pytest.mark.parametrize(("spec", "causal"), [(spec, False) for spec in MASKED] + [(spec, True) for spec in CAUSAL])
def test_each_row_equals_itself_without_padding(spec: str, causal: bool, where: str) -> None:
    mixer, keep = layer(spec, causal=causal), torch.tensor(KEEPS[where])
    x = torch.randn(3, 11, 8, dtype=torch.float64)
    x[keep == 0] = 1e4 * torch.randn(int((keep == 0).sum()), 8, dtype=torch.float64)
    x = x.requires_grad_()
    out = mixer(x, attention_mask=keep)
    for row in range(3):
        real = keep[row].bool()
        assert close(out[row, real], mixer(x[row : row + 1, real])[0])
    assert (out[keep == 0] == 0).all()
    out.square().sum().backward()
    assert x.grad is not None
    assert (x.grad[keep == 0] == 0).all()


@pytest.mark.parametrize(("spec", "causal"), [(spec, False) for spec in MASKED] + [(spec, True) for spec in CAUSAL])
def test_not_a_number_in_padding_reaches_nothing(spec: str, causal: bool) -> None:
    mixer, keep = layer(spec, causal=causal), torch.tensor(KEEPS["interior"])
    x = torch.randn(3, 11, 8, dtype=torch.float64)
    clean = mixer(x.masked_fill(keep[:, :, None] == 0, 0.0), attention_mask=keep)
    out = mixer(x.masked_fill(keep[:, :, None] == 0, torch.nan), attention_mask=keep)
    assert torch.equal(out, clean)
    out.square().sum().backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in mixer.parameters())


@pytest.mark.parametrize("spec", CAUSAL)
def test_no_gradient_reaches_a_later_token(spec: str) -> None:
    mixer = layer(spec, causal=True)
    for t in (0, 3, 8):
        x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
        mixer(x)[:, t].square().sum().backward()
        assert x.grad is not None
        assert (x.grad[:, t + 1 :] == 0).all()
        assert (x.grad[:, t] != 0).any()


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("prefill", [0, 1, 5])
@pytest.mark.parametrize("spec", CAUSAL)
def test_chunks_through_a_cache_equal_all_at_once(spec: str, prefill: int, chunk: int) -> None:
    mixer, n = layer(spec, causal=True), 11
    x = torch.randn(3, n, 8, dtype=torch.float64)
    cuts = [0, prefill, *range(prefill + chunk, n, chunk), n]
    for where in (None, *KEEPS):
        keep = None if where is None else torch.tensor(KEEPS[where])
        cache = mixer.new_cache(3)
        parts = [
            mixer(x[:, start:stop], attention_mask=None if keep is None else keep[:, :stop], cache=cache)
            for start, stop in pairwise(cuts)
        ]
        assert close(torch.cat(parts, dim=1), mixer(x, attention_mask=keep)), where


@pytest.mark.parametrize("spec", CAUSAL)
def test_a_cache_copies_and_selects_rows(spec: str) -> None:
    mixer = layer(spec, causal=True)
    x, keep = torch.randn(3, 9, 8, dtype=torch.float64), torch.tensor(KEEPS["interior"])[:, :9]
    full, cache = mixer(x, attention_mask=keep), mixer.new_cache(3)
    mixer(x[:, :6], attention_mask=keep[:, :6], cache=cache)
    for rows in ([0, 1, 2], [2, 0]):
        branch = cache.select(torch.tensor(rows)).copy()
        assert close(mixer(x[rows, 6:], attention_mask=keep[rows], cache=branch), full[rows, 6:])


@pytest.mark.parametrize("spec", ["gru", "conv", "longformer(window=2, max_globals=0)"])
def test_a_cache_does_not_grow_with_the_text(spec: str) -> None:
    mixer, sizes = layer(spec, causal=True), []
    cache = mixer.new_cache(1)
    for _ in range(12):
        mixer(torch.randn(1, 1, 8, dtype=torch.float64), cache=cache)
        assert cache.side is not None
        kept = [*cache.state.values(), *cache.slots.values(), cache.side.places]
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept))
    assert len(set(sizes[6:])) == 1


@pytest.mark.parametrize("spec", ["gru", "conv", LONGFORMER])
def test_a_layer_of_both_directions_has_no_cache(spec: str) -> None:
    with pytest.raises(
        IncompatibleError, match="cannot continue a sequence from a cache: it is not causal; build it with causal=True"
    ):
        layer(spec).new_cache(1)


@pytest.mark.parametrize("spec", ["gru", "conv", LONGFORMER, "linformer"])
def test_dropout_acts_in_training_only(spec: str) -> None:
    site, x = Site(8, 2, max_length=32), torch.randn(2, 9, 8)
    mixer = build_mixer(spec, "none", site, dropout=0.5)
    assert not torch.equal(mixer(x), mixer(x))
    state = torch.get_rng_state()
    assert torch.equal(mixer.eval()(x), mixer(x))
    assert torch.equal(torch.get_rng_state(), state)
    plain = build_mixer(spec, "none", site).eval()
    plain.load_state_dict(mixer.state_dict())
    assert torch.equal(mixer(x), plain(x))


@pytest.mark.parametrize("spec", ["fnet", "gru", "conv"])
def test_only_an_encoding_at_the_embedding_fits(spec: str) -> None:
    with pytest.raises(
        IncompatibleError,
        match=r"cannot use rope \(rotate\): it has no queries and keys to compare; use an encoding added",
    ):
        build_mixer(spec, "rope", Site(8, 2))
    assert build_mixer(spec, "sinusoidal", Site(8, 2)).name == spec


@pytest.mark.parametrize("spec", ["gru", "conv", "linformer"])
def test_documents_need_rows_of_their_own(spec: str) -> None:
    with pytest.raises(
        IncompatibleError, match="cannot keep documents of one row apart; give each document a row of its own"
    ):
        layer(spec)(torch.randn(1, 4, 8, dtype=torch.float64), document_ids=torch.tensor([[0, 0, 1, 1]]))


@pytest.mark.parametrize("spec", ["fnet", "gru", "conv", LONGFORMER])
def test_a_source_is_refused(spec: str) -> None:
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    with pytest.raises(
        IncompatibleError, match="mixes one sequence with itself and takes no source; use softmax or linear"
    ):
        layer(spec)(x, source=x)
