"""Linformer with fewer queries: a sequence goes in, and a few averages come out, for heads that score whole sequences."""

import pytest
import torch
from torch import Tensor

import anyformer as af
from anyformer.attention._shortening import Shortening
from anyformer.compare.costing import costing
from anyformer.compare.counted import counted
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import verdict, with_head
from anyformer.model.vit import Vit
from anyformer.model.vit_config import VitConfig
from anyformer.spec import parse
from anyformer.testing import laws

SPEC = "linformer(rank=8, queries=6)"
KEEP = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0, 0, 1, 0], [0] * 9]).bool()


def _model(attention: object = SPEC, position: str = "sinusoidal", **changes: object) -> af.Transformer:
    sizes = {"vocab": 11, "dim": 16, "depth": 2, "heads": 2, "max_length": 32, "head": "classifier", "outputs": 3}
    return af.Transformer(af.ModelConfig(attention=attention, position=position, **sizes | changes)).double().eval()  # type: ignore[arg-type]


def test_averages_are_those_of_the_real_tokens_by_place() -> None:
    shortening = Shortening(af.Site(8, 2, max_length=12), 4).double()
    x = torch.randn(3, 9, 8, dtype=torch.float64, requires_grad=True)
    found = shortening(x.masked_fill(~KEEP[..., None], torch.nan), KEEP)
    for row, keep in enumerate(KEEP):
        real = x[row, keep]
        expected = shortening.scores[:, : len(real)].exp()
        expected = expected / expected.sum(dim=1, keepdim=True).clamp(min=1e-300) @ real
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)
        leaves = (x, shortening.scores)
        probe = torch.randn_like(expected)
        ours = torch.autograd.grad(found[row], leaves, probe, retain_graph=True)
        theirs = torch.autograd.grad(expected, leaves, probe, materialize_grads=True, allow_unused=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert torch.equal(shortening.kept(KEEP), torch.tensor([[True] * 4, [True] * 4, [False] * 4]))


@pytest.mark.parametrize("position", ["none", "sinusoidal", "rope"])
def test_the_laws_hold(position: str) -> None:
    for result in laws.examine(laws.Case(SPEC, position)):
        assert result.status != "broken", f"{result.law.name} {result.law.title}: {result.note}"


@pytest.mark.parametrize("n", [0, 1, 3, 9, 32])
def test_any_length_gives_as_many_vectors(n: int) -> None:
    layer = af.MultiHead(16, 2, attention=SPEC, max_length=32)
    assert layer(torch.randn(2, n, 16)).shape == (2, 6, 16)


@pytest.mark.parametrize("attention", [SPEC, (SPEC, "local(2)"), ("softmax", SPEC), (SPEC, "linear")])
@pytest.mark.parametrize("position", ["sinusoidal", "randomized"])
def test_a_model_reads_rows_of_any_length_side_by_side(attention: object, position: str) -> None:
    model = _model(attention, position)
    tokens = torch.randint(11, KEEP.shape)
    out = model(tokens, attention_mask=KEEP)
    for row, keep in enumerate(KEEP[:2]):
        torch.testing.assert_close(out[row : row + 1], model(tokens[row : row + 1, keep]), rtol=1e-9, atol=1e-9)
    assert torch.equal(out[2], model.head.out.bias)
    model.train()
    model(tokens[:, :3]).sum().backward()


def test_the_stream_is_shortened_as_the_queries_are() -> None:
    block = _model(depth=1).blocks[0]
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    shorter = block.mixer.shortening(x, None)
    mixed = shorter + block.mixer(block.mixer_norm(x))
    expected = mixed + block.feed_forward(block.feed_forward_norm(mixed))
    torch.testing.assert_close(block(x), expected, rtol=1e-12, atol=1e-12)


def test_computing_blocks_again_changes_nothing() -> None:
    tokens, found = torch.randint(11, KEEP.shape), []
    for checkpointing in (False, True):
        model = _model((SPEC, "local(2)"), checkpointing=checkpointing)
        out = model(tokens, attention_mask=KEEP)
        found.append([out, *torch.autograd.grad(out.sin().sum(), tuple(model.parameters()), allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


def test_the_declared_cost_is_what_is_counted() -> None:
    for spec in ("linformer(rank=32, queries=64)", "linformer(rank=16, queries=16)"):
        told = costing(parse(spec), 256, 2, causal=False)
        assert told.counted == pytest.approx(told.operations, rel=0.05)
    layer = af.MultiHead(64, 2, attention="linformer(rank=16, queries=32)", max_length=256)
    declared = 2 * layer.cost().multiply_adds(256)
    assert counted(lambda: layer(torch.randn(1, 256, 64))) == pytest.approx(declared, rel=0.05)


def test_explained_rows_are_averages() -> None:
    model = _model()
    told = model.explain(torch.randint(11, (1, 9)), rows=[0, 5])
    assert [each.shape for each in told] == [(1, 2, 2, 9), (1, 2, 2, 6)]
    with pytest.raises(SpecError, match="explain: expected rows from 0 to 5, got 6"):
        model.explain(torch.randint(11, (1, 9)), rows=[6])


@pytest.mark.parametrize("head", ["mlm", "enhanced_mlm"])
def test_heads_that_score_every_token_refuse_it(head: str) -> None:
    message = f'to 6 averages of tokens, and head="{head}" scores every token; use head="classifier"; or leave out'
    with pytest.raises(IncompatibleError, match=message):
        _model(head=head, outputs=None)
    site = af.Site(16, 2, max_length=32)
    judged = with_head(SPEC, verdict(SPEC, "none", site), head, site)
    assert judged.kind == "refused"
    assert judged.reason.endswith(f"gives no output for each token, and head={head} scores each; leave out queries=...")
    for spec, where in ((SPEC, "classifier"), ("linformer(rank=8)", head), ("fnet", head)):
        assert with_head(spec, verdict(spec, "none", site), where, site).runs


def test_what_belongs_to_tokens_is_refused_after_it() -> None:
    with pytest.raises(
        IncompatibleError, match="averages of tokens, which have no row and no column for rope_2d in the"
    ):
        _model(position=("none", "rope_2d"))
    flags = _model((SPEC, "longformer"))
    with pytest.raises(IncompatibleError, match="global_mask flags tokens, and an earlier block has shortened them"):
        flags(torch.randint(11, KEEP.shape), global_mask=KEEP)
    with pytest.raises(
        SpecError, match="queries can be shortened from at most 32 tokens here, got 33; build with max_length=33"
    ):
        af.MultiHead(16, 2, attention=SPEC, max_length=32)(torch.randn(1, 33, 16), source=torch.randn(1, 4, 16))
    with pytest.raises(IncompatibleError, match="what it gives are averages of queries, which stand nowhere"):
        af.check(SPEC, "rope_value")
    with pytest.raises(IncompatibleError, match="linformer cannot be causal"):
        af.check(SPEC, "none", causal=True)


def test_an_image_is_shortened_where_no_token_is_told_by_its_place() -> None:
    sizes = {"image": 8, "patch": 2, "dim": 16, "depth": 2, "heads": 2, "classes": 3, "attention": SPEC}
    vit = Vit(VitConfig(**sizes, position="vit_learned", pool="mean"))
    images: Tensor = torch.randn(2, vit.config.channels, 8, 8)
    assert vit(images).shape == (2, 3)
    with pytest.raises(IncompatibleError, match=r"class and register tokens \(1 here\) are told by their place"):
        Vit(VitConfig(**sizes, position="vit_learned", pool="class"))
