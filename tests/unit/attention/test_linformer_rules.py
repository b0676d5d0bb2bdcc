"""Linformer: what its equation says beyond the parity test."""

from pathlib import Path

import pytest
import torch

from anyformer.attention.linformer import Linformer, compress
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, check, verdict
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.side import side
from anyformer.site import Site


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, linformer: Linformer, keep: torch.Tensor | None
) -> torch.Tensor:
    """Head by head, slot by slot, from the paper."""
    out = []
    for b in range(len(q)):
        heads = []
        for h in range(q.shape[1]):
            shared = h // (q.shape[1] // k.shape[1])
            keys, values = (mix if mix.dim() == 2 else mix[shared] for mix in (linformer.mixes[0], linformer.mixes[-1]))
            real = range(k.shape[2]) if keep is None else keep[b].nonzero()[:, 0].tolist()
            zero = torch.zeros(keys.shape[1], k.shape[3], dtype=q.dtype)
            compressed = sum((torch.outer(keys[j], k[b, shared, j]) for j in real), zero)
            mixed = sum((torch.outer(values[j], v[b, shared, j]) for j in real), zero)
            heads.append(torch.softmax(q[b, h] @ compressed.T * k.shape[3] ** -0.5, dim=-1) @ mixed)
        out.append(torch.stack(heads))
    return torch.stack(out)


def facts(m: int, keep: torch.Tensor | None = None, n: int | None = None) -> Context:
    keys = side(m, torch.device("cpu"), keep=keep)
    return Context(causal=False, queries=keys if n is None else side(n, torch.device("cpu")), keys=keys)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sharing", ["none", "heads", "kv", "layers"])
def test_equals_the_equation_written_out(sharing: str, kv_heads: int) -> None:
    site = Site(12, 4, kv_heads=kv_heads, max_length=9)
    linformer = build_attention(f"linformer(rank=5, sharing={sharing})", site).double()
    assert isinstance(linformer, Linformer)
    keep = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [0] * 7]).bool()
    q = torch.randn(2, 4, 6, 3, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, 7, 3, dtype=torch.float64).unbind(0)
    for mask in (None, keep):
        got = linformer(q, k, v, facts(7, mask, 6))
        assert torch.allclose(got, written_out(q, k, v, linformer, mask), rtol=1e-10, atol=1e-12)


def test_weights_are_counted_as_the_sharing_says() -> None:
    counts = {}
    for sharing in ("none", "heads", "kv", "layers"):
        built = build_attention(f"linformer(rank=5, sharing={sharing})", Site(12, 4, kv_heads=2, max_length=9))
        counts[sharing] = sum(weight.numel() for weight in built.parameters())
    assert counts == {"none": 2 * 2 * 9 * 5, "heads": 2 * 9 * 5, "kv": 9 * 5, "layers": 9 * 5}


def test_a_sample_without_keys_gives_zero_and_no_gradient() -> None:
    linformer = build_attention("linformer(rank=5)", Site(12, 4, max_length=9)).double()
    keep = torch.tensor([[1] * 4, [0] * 4]).bool()
    q, k, v = (torch.randn(2, 4, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = linformer(q, k, v, facts(4, keep))
    out.square().sum().backward()
    assert (out[1] == 0).all()
    assert (out[0] != 0).all()
    for part in (q, k, v):
        assert part.grad is not None
        assert (part.grad[1] == 0).all()
        assert part.grad.isfinite().all()


def test_a_source_may_be_of_another_length_and_padded_anywhere() -> None:
    mixer = build_mixer("linformer(rank=5)", "none", Site(12, 4, max_length=9)).double().eval()
    x, source = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 8, 12, dtype=torch.float64)
    keep = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1, 0, 0]]).bool()
    out = mixer(x, source=source.masked_fill(~keep[:, :, None], 1e4), source_mask=keep)
    for row in range(2):
        alone = mixer(x[row : row + 1], source=source[row : row + 1, keep[row]])
        assert torch.allclose(out[row], alone[0], rtol=1e-10, atol=1e-12)


def test_half_precision_stays_near() -> None:
    linformer = build_attention("linformer(rank=5)", Site(12, 4, max_length=9))
    q, k, v = torch.randn(3, 2, 4, 9, 3).unbind(0)
    expected = linformer(q, k, v, facts(9))
    got = linformer.bfloat16()(q.bfloat16(), k.bfloat16(), v.bfloat16(), facts(9))
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.float(), expected, rtol=0.05, atol=0.05)


def test_more_tokens_than_it_was_built_for_are_refused() -> None:
    text = "linformer was built for at most 9 tokens, got 10; build with max_length=10 or shorten the input"
    linformer = build_attention("linformer(rank=5)", Site(12, 4, max_length=9))
    part = torch.randn(1, 4, 10, 3)
    with pytest.raises(SpecError, match=text):
        linformer(part, part, part, facts(10))
    mixer = build_mixer("linformer(rank=5)", "none", Site(12, 4, max_length=9))
    with pytest.raises(SpecError, match=text):
        mixer(torch.randn(1, 10, 12))
    with pytest.raises(SpecError, match=text):
        mixer(torch.randn(1, 3, 12), source=torch.randn(1, 10, 12))


def test_causal_is_refused_with_what_to_use() -> None:
    text = r"linformer cannot be causal: each of its mixtures holds every place.*use linear, local\(128\) or softmax"
    with pytest.raises(IncompatibleError, match=text):
        build_attention("linformer", Site(12, 4, causal=True))
    with pytest.raises(IncompatibleError, match=text):
        check("linformer", "none", causal=True)


def test_what_composes() -> None:
    site = Site(16, 4, max_length=9)
    cells = {name: verdict("linformer(rank=5)", name, site).kind for name in ("none", "learned", "sinusoidal", "rope")}
    assert cells == {"none": "ok", "learned": "ok", "sinusoidal": "ok", "rope": "abs"}
    for name in ("alibi", "t5", "shaw"):
        with pytest.raises(IncompatibleError, match="it compresses the key axis, so no score belongs to one pair"):
            check("linformer", name)
    assert check("linformer", "transformer_xl").kind == "abs"


def test_keys_are_rotated_before_they_are_compressed() -> None:
    mixer = build_mixer("linformer(rank=5)", "rope", Site(16, 4, max_length=9)).double().eval()
    x, gaps = torch.randn(1, 7, 16, dtype=torch.float64), torch.tensor([[0, 1, 2, 5, 6, 9, 11]])
    assert not torch.allclose(mixer(x), mixer(x, positions=gaps), atol=1e-3)
    assert torch.allclose(mixer(x, positions=gaps), mixer(x, positions=gaps + 4))


@pytest.mark.parametrize("spec", ["linformer(rank=0)", "linformer(sharing=rows)"])
def test_wrong_knobs_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="expected"):
        build_attention(spec, Site(12, 4))


def test_layers_may_hold_one_matrix_that_is_saved_once_and_trained_by_all(tmp_path: Path) -> None:
    def model(attention: str | tuple[str, ...], depth: int = 3) -> Transformer:
        config = ModelConfig(
            vocab=7, dim=8, depth=depth, heads=2, attention=attention, position="none", head="mlm", max_length=9
        )
        return Transformer(config)

    def mixes(made: Transformer) -> list[torch.Tensor]:
        return [weight for name, weight in made.named_parameters(remove_duplicate=False) if "mixes" in name]

    made, tokens = model("linformer(rank=4, sharing=layers)"), torch.randint(7, (2, 9))
    assert len({id(weight) for weight in mixes(made)}) == 1
    assert len({id(weight) for weight in mixes(model("linformer(rank=4, sharing=kv)"))}) == 3
    two = model(("linformer(rank=4, sharing=layers)", "linformer(rank=5, sharing=layers)"), depth=4)
    assert [tuple(weight.shape) for weight in mixes(two)] == [(9, 4), (9, 5), (9, 4), (9, 5)]
    assert len({id(weight) for weight in mixes(two)}) == 2

    apart = model("linformer(rank=4, sharing=kv)")
    apart.load_state_dict(made.state_dict())
    for each in (made, apart):
        each(tokens).square().sum().backward()
    (shared,) = {id(weight): weight for weight in mixes(made)}.values()
    assert shared.grad is not None
    torch.testing.assert_close(shared.grad, sum(weight.grad for weight in mixes(apart) if weight.grad is not None))

    made.save_pretrained(tmp_path / "model")
    again = Transformer.from_pretrained(tmp_path / "model")
    assert torch.equal(again(tokens), made(tokens))
    assert len({id(weight) for weight in mixes(again)}) == 1


def test_compress_reads_the_first_rows() -> None:
    x, mix = torch.randn(2, 3, 4, 5), torch.randn(6, 7)
    assert torch.allclose(compress(x, mix), compress(x, mix[:4]))
