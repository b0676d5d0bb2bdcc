"""Deploying layers and models: compiled over several lengths, exported with any batch and length, run by onnxruntime."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import anyformer as af

pytestmark = pytest.mark.plain
LENGTHS = (96, 33, 400, 64, 250)  # around 240, where Local(16) begins to pay
ANY = torch.export.Dim.DYNAMIC
COMPILED = [
    ("softmax", "none", True),
    ("Local(16)", "t5", False),
    ("Local(16) | Global([0])", "alibi", False),
    ("linear", "none", False),
    ("bigbird(block=8, random=1)", "none", False),
]
EXPORTED = [
    ("softmax", "alibi", True),
    ("Local(16)", "none", False),
    ("Local(16) | Global([0])", "alibi", False),
    ("linear", "rope", True),
    ("softmax(sink=True)", "rope", True),
    ("bigbird(block=8, random=1)", "alibi", False),
    ("softmax(pattern=Local(16) | Global([0]), sink=True)", "alibi", False),
    ("linformer(rank=8, queries=6)", "none", False),
]


@pytest.fixture(autouse=True)
def _one_thread():
    torch._dynamo.reset()


def _layer(attention: str, position: str, causal: bool) -> nn.Module:
    return af.MultiHead(32, 4, kv_heads=2, attention=attention, position=position, causal=causal, seed=0)


def _model(attention: str, position: str, **settings: object) -> af.Transformer:
    config = {"vocab": 30, "dim": 32, "depth": 1, "heads": 4, "attention": attention, "position": position}
    return af.Transformer(af.ModelConfig(**config, **settings)).eval()


def _padded(n: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    keep = torch.arange(n) < torch.tensor([n, n - n // 3])[torch.arange(batch) % 2, None]
    return torch.randint(30, (batch, n)), keep


def _results(function: nn.Module, layer: nn.Module, *inputs: Tensor) -> list[Tensor]:
    out = function(*inputs)
    asked = [part for part in (*inputs, *layer.parameters()) if part.requires_grad]
    return [out, *torch.autograd.grad(out.sin().sum(), asked, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(("attention", "position", "causal"), COMPILED)
def test_a_layer_compiles_at_most_twice_for_five_lengths(attention: str, position: str, causal: bool) -> None:
    layer, counter = _layer(attention, position, causal).double(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for n in LENGTHS:
        x = torch.randn(2, n, 32, dtype=torch.float64, requires_grad=True)
        expected, found = (_results(function, layer, x) for function in (layer, compiled))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert counter.frame_count <= 2


def test_a_padded_model_compiles_at_most_twice_for_five_lengths() -> None:
    model, counter = _model("local(16)", "rope"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda tokens, keep: model(tokens, attention_mask=keep), backend=counter, fullgraph=True)
    for n in LENGTHS:
        tokens, keep = _padded(n)
        expected = _results(lambda tokens, keep: model(tokens, attention_mask=keep), model, tokens, keep)
        found = _results(compiled, model, tokens, keep)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_a_pattern_held_by_the_caller_compiles_whole() -> None:
    pattern = af.Local(3) | af.Global([0])
    compiled = torch.compile(lambda q: af.attend(q, q, q, pattern=pattern), backend="aot_eager", fullgraph=True)
    for n in (300, 500):
        q = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(compiled(q), af.attend(q, q, q, pattern=pattern, impl="reference"))


@pytest.mark.parametrize(("attention", "position", "causal"), EXPORTED)
def test_a_layer_exports_with_any_batch_and_length_and_runs_in_onnxruntime(
    attention: str, position: str, causal: bool
) -> None:
    layer = _layer(attention, position, causal).eval().requires_grad_(False)
    exported = torch.export.export(layer, (torch.randn(3, 96, 32),), dynamic_shapes={"x": {0: ANY, 1: ANY}})
    assert not any("anyformer" in str(node.target) for node in exported.graph.nodes)
    session = _onnx(exported)
    for batch, n in ((2, 7), (4, 96), (2, 400)):
        x = torch.randn(batch, n, 32)
        expected = layer(x)
        torch.testing.assert_close(exported.module()(x), expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(session(x), expected, rtol=0, atol=2e-6)


def test_a_padded_model_exports_with_any_batch_and_length_and_runs_in_onnxruntime() -> None:
    model = _model("local(16)", "rope").requires_grad_(False)
    tokens, keep = _padded(96, batch=3)
    free = {0: ANY, 1: ANY}
    exported = torch.export.export(
        model, (tokens,), {"attention_mask": keep}, dynamic_shapes={"tokens": free, "attention_mask": free}
    )
    session = _onnx(exported)
    for n in (7, 250):
        tokens, keep = _padded(n)
        expected = model(tokens, attention_mask=keep)
        torch.testing.assert_close(exported.module()(tokens, attention_mask=keep), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(session(tokens, keep), expected, rtol=1e-5, atol=1e-5)


def test_exporting_leaves_the_layer_as_it_was() -> None:
    layer, x = _layer("bigbird(block=8, random=1)", "none", False).eval(), torch.randn(2, 300, 32)
    before = layer(x)
    exported = torch.export.export(layer, (x[:, :96].contiguous(),), dynamic_shapes={"x": {1: ANY}})
    assert torch.equal(layer(x), before)
    torch.testing.assert_close(exported.module()(x), before, rtol=0, atol=2e-6)


def _onnx(exported: torch.export.ExportedProgram):
    import onnxruntime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about its own parts
        program = torch.onnx.export(exported, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        feed = {given.name: each.numpy() for given, each in zip(session.get_inputs(), inputs, strict=True)}
        return torch.from_numpy(session.run(None, feed)[0])

    return run
