"""Blocks in an exported program: equal to the dense reference at any length, and no tensor of all pairs."""

import pytest
import torch

import anyformer as af
from anyformer.attention._squares import Squares, squares, with_full_rows
from anyformer.context import Context
from anyformer.forms import Form
from anyformer.pattern.base import Pattern
from anyformer.pattern.read import pattern_of
from anyformer.position.bind import bind
from anyformer.side import side
from anyformer.testing.largest import Largest

PATTERNS = (
    "bigbird(block=4, random=2)",
    "bigbird(block=8, random=1, window=5, globals=3)",
    "bigbird(block=4, random=3, globals=0, plan='google')",
    "bigbird(block=64)",
    "Block(7)",
)
ANY = torch.export.Dim.DYNAMIC


def _path(text: str) -> tuple[Pattern, Squares]:
    pattern = pattern_of(text)
    assert pattern.side is not None
    return pattern, Squares(pattern, pattern.side)


@pytest.mark.parametrize("n", [1, 3, 17, 61, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("text", PATTERNS)
def test_it_equals_the_reference(text: str, causal: bool, n: int) -> None:
    pattern, path = _path(text)
    shapes = ((2, 4, n, 6), (2, 2, n, 6), (2, 2, n, 5))
    q, k, v = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    keep, documents = torch.arange(n) < torch.tensor([[n], [(n + 1) // 2]]), torch.zeros(2, n, dtype=torch.int64)
    documents[:, n // 3 :] = 1
    position = af.build_position("t5", af.Site(24, 4, kv_heads=2, causal=causal)).double()
    torch.nn.init.normal_(next(position.parameters()))
    facts = {"causal": causal, "pattern": pattern, "softcap": 2.0}
    for known in ({"keep": keep}, {"documents": documents}):
        tokens = side(n, q.device, positions=torch.arange(n)[None], **known)
        encoding = bind(position, (Form.TOEPLITZ,), tokens, tokens)
        context = Context(queries=tokens, keys=tokens, encoding=encoding, **facts)
        clean = (x.masked_fill(~keep[:, None, :, None], 0.0) for x in (k, v)) if "keep" in known else (k, v)
        k_clean, v_clean = clean
        out = with_full_rows(
            path, squares(path, q, k_clean, v_clean, context, 0.4)[0], q, k_clean, v_clean, context, 0.4
        )
        names = {"attention_mask": known.get("keep"), "document_ids": known.get("documents")}
        expected = af.attend(q, k, v, position=position, scale=0.4, impl="reference", **names, **facts)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        probe, leaves = torch.randn_like(out), (q, k, v, *position.parameters())
        for ours, theirs in zip(*(torch.autograd.grad(x, leaves, probe) for x in (out, expected)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.plain
@pytest.mark.parametrize(
    "text", ["bigbird(block=8, random=1)", "softmax(pattern=bigbird(block=16), sink=True)", "Block(9)"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_an_exported_layer_makes_no_tensor_of_all_pairs(text: str, causal: bool) -> None:
    layer = af.MultiHead(8, 1, attention=text, position="alibi", causal=causal, max_length=4000)
    layer = layer.eval().requires_grad_(False)
    exported = torch.export.export(layer, (torch.randn(2, 96, 8),), dynamic_shapes={"x": {1: ANY}})
    for n in (5, 96, 333, 2500):
        x = torch.randn(2, n, 8)
        with Largest() as largest:
            out = exported.module()(x)
        torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=2e-6)
    assert largest.most < n * n / 4


@pytest.mark.plain
def test_an_exported_model_with_padding_equals_the_model() -> None:
    config = {"vocab": 30, "dim": 16, "depth": 1, "heads": 2, "attention": "bigbird(block=4, random=1)", "head": "mlm"}
    model = af.Transformer(af.ModelConfig(**config)).eval().requires_grad_(False)
    tokens, keep = torch.randint(30, (3, 96)), torch.arange(96) < torch.tensor([[96], [50], [1]])
    free = {0: ANY, 1: ANY}
    shapes = {"tokens": free, "attention_mask": free}
    exported = torch.export.export(model, (tokens,), {"attention_mask": keep}, dynamic_shapes=shapes)
    for n in (7, 250):
        tokens, keep = torch.randint(30, (2, n)), torch.arange(n) < torch.tensor([[n], [n // 2]])
        expected = model(tokens, attention_mask=keep)
        torch.testing.assert_close(exported.module()(tokens, attention_mask=keep), expected, rtol=1e-5, atol=1e-5)
