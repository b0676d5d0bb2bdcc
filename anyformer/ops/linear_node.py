"""The pass of `linear_pass` as one node of a graph, with its gradient."""

import torch
from torch import Tensor

from anyformer.ops import linear_pass
from anyformer.ops.linear_composite import pass_composite
from anyformer.ops.linear_tiles import Operands, Rule, results
from anyformer.ops.node import expressed, node


def run_pass(x: Operands, s: Tensor, z: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out [b h n v], den [b h n] and the last states s [b g f v] and z [b g e], from the first states; see `linear_tiles`.

    In `torch.export` the composite, so that what is exported holds ordinary operators only.
    """
    if torch.compiler.is_exporting():
        return pass_composite(x, s, z, rule)
    out, den, s_all, z_all = linear_forward(*x, s, z, *rule)
    return out, den, s_all[:, :, -1], z_all[:, :, -1]


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_den: Tensor | None,
    k_den: Tensor | None,
    fade: Tensor | None,
    keep: Tensor | None,
    s: Tensor,
    z: Tensor,
    features: str,
    reverse: bool,
    denominator: str,
    eps: float,
    signed: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`linear_pass.forward`."""
    with torch.autocast(q.device.type, enabled=False):
        x, rule = Operands(q, k, v, q_den, k_den, fade, keep), Rule(features, reverse, denominator, eps, signed, chunk)
        return linear_pass.forward(x, s, z, rule)


def fake_forward(q, k, v, q_den, k_den, fade, keep, s, z, *rule):
    return results(Operands(q, k, v, q_den, k_den, fade, keep), Rule(*rule))


def run_backward(
    d_out: Tensor,
    d_den: Tensor | None,
    d_s: Tensor | None,
    d_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_den: Tensor | None,
    k_den: Tensor | None,
    fade: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    den: Tensor,
    s_all: Tensor,
    z_all: Tensor,
    features: str,
    reverse: bool,
    denominator: str,
    eps: float,
    signed: bool,
    chunk: int,
    fading: bool,
) -> list[Tensor]:
    """`linear_pass.backward`, with an empty tensor for each gradient that is None."""
    with torch.autocast(q.device.type, enabled=False):
        x, rule = Operands(q, k, v, q_den, k_den, fade, keep), Rule(features, reverse, denominator, eps, signed, chunk)
        d_s, d_z = (torch.zeros_like(y) if d is None else d for d, y in ((d_s, s_all), (d_z, z_all)))
        grads = linear_pass.backward(d_out, d_den, d_s, d_z, x, (out, den, s_all, z_all), rule, fading)
        return [q.new_empty(0) if grad is None else grad.contiguous() for grad in grads]


def fake_backward(d_out, d_den, d_s, d_z, q, k, v, q_den, k_den, fade, keep, out, den, s_all, z_all, *rule):
    fading = rule[-1]
    like = (q, k, v, q_den, k_den, fade if fading else None, s_all[:, :, 0], z_all[:, :, 0])
    return [q.new_empty(0) if y is None else y.new_empty(y.shape) for y in like]


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.rule = inputs[9:]


def _differentiate(ctx, d_out, d_den, d_s, d_z):
    *inputs, out, den, s_all, z_all = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    if torch.is_grad_enabled():
        made = pass_composite(Operands(*inputs[:7]), inputs[7], inputs[8], Rule(*ctx.rule))
        d_last = (None if d is None else d[:, :, -1] for d in (d_s, d_z))
        return (*expressed(made, (d_out, d_den, *d_last), inputs), *[None] * 6)
    fade, made = inputs[5], (out, den, s_all, z_all)
    fading = fade is not None and ctx.needs_input_grad[5]
    grads = linear_backward(d_out, d_den, d_s, d_z, *inputs[:7], *made, *ctx.rule, fading)
    d_q, d_k, d_v, d_q_den, d_k_den, d_fade, d_first_s, d_first_z = grads
    d_den_features = (None, None) if inputs[3] is None else (d_q_den, d_k_den)
    return d_q, d_k, d_v, *d_den_features, d_fade if fading else None, None, d_first_s, d_first_z, *[None] * 6


linear_forward = node("linear_forward", run_forward, fake_forward)
linear_backward = node("linear_backward", run_backward, fake_backward)
torch.library.register_autograd("anyformer::linear_forward", _differentiate, setup_context=_save)
