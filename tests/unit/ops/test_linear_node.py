"""Linear attention as a node of a graph: what it keeps, how often it can be differentiated, how it is exported."""

import pytest
import torch
from linear_truth import TIGHT, decay_of, made

from anyformer.ops.linear import LinearState, linear_attention, linear_attention_with_state
from anyformer.ops.linear_node import linear_forward


def kept_bytes(n, **facts):
    q, k, v = (torch.rand(1, 2, n, 16, requires_grad=True) for _ in range(3))
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_attention(q, k, v, causal=True, **facts)
    return sum(kept.values()) / (q.nbytes + k.nbytes + v.nbytes)


def test_training_keeps_inputs_output_and_little_else():
    assert kept_bytes(2048, features="elu1") < 1.45
    assert kept_bytes(8192, features="elu1") < 1.45
    assert kept_bytes(8192, log_decay=-torch.rand(2)) < 1.45


def test_gradients_twice():
    q, k, v = made(7, 7, heads=2, groups=2, width=3, values=2)
    q_den, k_den, _ = made(7, 7, heads=2, groups=2, width=2)
    decay = decay_of("token", 7, heads=2)
    state = LinearState(torch.rand(2, 2, 3, 2, dtype=torch.float64), torch.rand(2, 2, 2, dtype=torch.float64))
    state = LinearState(*(x.requires_grad_() for x in state))

    def ahead(q, k, v, decay, q_den, k_den, s, z):
        facts = {"log_decay": decay, "q_den": q_den, "k_den": k_den, "state": LinearState(s, z)}
        out, last = linear_attention_with_state(q, k, v, **facts, chunk=3)
        return out, *last

    def both(q, k, v, decay):
        return linear_attention(q - 0.5, k - 0.5, v, causal=False, log_decay=decay, features="elu1", chunk=3)

    for function, inputs in ((ahead, (q, k, v, decay, q_den, k_den, *state)), (both, (q, k, v, decay))):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        value = function(*inputs)
        total = sum(y.square().sum() for y in (value if isinstance(value, tuple) else (value,)))
        once = torch.autograd.grad(total, inputs, retain_graph=True)
        for one, other in zip(once, torch.autograd.grad(total, inputs, create_graph=True), strict=True):
            torch.testing.assert_close(one, other.detach(), **TIGHT)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("denominator, features, own", [("divide", "elu1", False), ("apart", "given", True)])
def test_the_node_is_a_proper_operator(denominator, features, own):
    q, k, v = made(9, 9, heads=2, groups=2, dtype=torch.float32)
    q_den, k_den, _ = made(9, 9, heads=2, groups=2, width=2, dtype=torch.float32) if own else (None, None, None)
    decay, keep = (
        (None, torch.rand(2, 9) > 0.3) if not own else (decay_of("token", 9, heads=2, dtype=torch.float32), None)
    )
    s, z = torch.rand(2, 2, 5, 3, requires_grad=True), torch.rand(2, 2, 2 if own else 5, requires_grad=True)
    torch.library.opcheck(
        linear_forward, (q, k, v, q_den, k_den, decay, keep, s, z, features, False, denominator, 1e-6, False, 4)
    )


@pytest.mark.plain
def test_exports_with_any_length_and_without_own_operators():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, keep):
            return linear_attention(
                q, k, v, causal=True, keep=keep, log_decay=torch.tensor([-0.1, -0.2]), features="elu1"
            )

    def inputs(n):
        return *(torch.randn(2, 2, n, 4) for _ in range(3)), torch.rand(2, n) > 0.2

    n = torch.export.Dim("n", min=2, max=100_000)
    exported = torch.export.export(Layer(), inputs(130), dynamic_shapes=({2: n}, {2: n}, {2: n}, {1: n}))
    assert not [node for node in exported.graph.nodes if "anyformer" in str(node.target)]
    for length in (2, 64, 130, 333):
        given = inputs(length)
        torch.testing.assert_close(exported.module()(*given), Layer()(*given), rtol=1e-5, atol=1e-6)
