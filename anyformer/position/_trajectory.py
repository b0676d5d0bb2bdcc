"""Paths whose slope has one hidden layer, by a fourth-order method on an even grid: only what must go step by step does.

    dp / dt = A relu(B p + e t + a) + d t + b

The method (the 3/8 rule) evaluates the slope at four stages of a step. A stage's hidden units need no point p, but its image B p,
and that moves by C relu(...) with C = B A and by what t alone decides. So the steps, one after the other, are one product with C a
stage; the points, and the gradients of all weights, are products over all steps at once.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from anyformer.ops.node import expressed, node

_PLACES = (0.0, 1 / 3, 2 / 3, 1.0)  # of the stages in a step
_COUPLINGS = ((), (1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0))  # of a stage to the slopes at those before it
_WEIGHTS = (1 / 8, 3 / 8, 3 / 8, 1 / 8)  # of the slopes in a step


def points(
    start: Float[Tensor, "r w"],
    times: Float[Tensor, "t"],
    step: float,
    inner: tuple[Float[Tensor, "w u"], Float[Tensor, "w"]],
    outer: tuple[Float[Tensor, "w u"], Float[Tensor, "w"]],
) -> Float[Tensor, "t r w"]:
    """The points of r paths at these times, `step` apart, the first at `start`.

    Args:
        inner: (B with e as its last column, a).  outer: (A with d as its last column, b). All in the dtype of `start`.
    """
    (images, over_time), (slopes, drift_over_time) = ((each[:, :-1], each[:, -1]) for each, _ in (inner, outer))
    drift = (
        drift_over_time * ((times**2 - times[0] ** 2) / 2)[:, None] + outer[1] * (times - times[0])[:, None]
    )  # [t w]
    couplings, weights, stages = _tableau(times)
    within = step * (couplings.sum(dim=1)[:, None] * outer[1] + (stages @ couplings.T)[..., None] * drift_over_time)
    given = (drift[:-1, None] + within) @ images.T + over_time * stages[..., None] + inner[1]  # [s 4 w]
    if 4 * len(given) * len(start) < len(images):  # as in decoding, where C costs more than the steps
        hidden = _composite(start @ images.T, given, slopes, step * images)
    else:
        hidden = _hidden(start @ images.T, given, step * (images @ slopes))  # [s 4 r w]
    moved = torch.einsum("i, s i r w -> s r w", step * weights, hidden) @ slopes.T
    return start + torch.cat([torch.zeros_like(start)[None], moved.cumsum(dim=0)]) + drift[:, None]


def _tableau(times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Couplings [4 4], weights [4] and times of the stages [s 4]."""
    rows = [(*row, *(0.0,) * (4 - len(row))) for row in _COUPLINGS]
    couplings, weights, places = (times.new_tensor(each) for each in (rows, _WEIGHTS, _PLACES))
    return couplings, weights, times[:-1, None] + torch.diff(times)[:, None] * places


def _forward(start: Tensor, given: Tensor, coupling: Tensor) -> Tensor:
    """The hidden units relu(z + given + sum_j a_ij m_j) of each stage; m_j = coupling relu_j, and z moves by sum_j b_j m_j."""
    (s, _, w), r = given.shape, len(start)
    hidden = start.new_empty(s, 4, r, w)
    state = torch.cat([start.reshape(1, -1), start.new_empty(4, r * w)])  # z and the four m
    mixed, products = state.T, state[1:].view(4, r, w).unbind(0)
    rows = [start.new_tensor((1.0, *row)) for row in (*_COUPLINGS, _WEIGHTS)]
    inputs = given[:, :, None].expand(s, 4, r, w).reshape(4 * s, r * w).unbind(0)
    units, z = hidden.view(4 * s, r * w).unbind(0), start.new_empty(r * w)
    turned = coupling.T.contiguous()  # few rows times a matrix: half the time of its transpose
    for number, (put, unit) in enumerate(zip(inputs, units, strict=True)):
        stage = number % 4
        torch.addmv(put, mixed[:, : stage + 1], rows[stage], out=z)
        torch.clamp_min(z, 0, out=unit)
        torch.mm(unit.view(r, w), turned, out=products[stage])
        if stage == 3:
            torch.mv(mixed, rows[4], out=z)
            state[0] = z
    return hidden


def _backward(d_hidden: Tensor, hidden: Tensor, coupling: Tensor) -> list[Tensor]:
    """Gradients of the start, of what is given to each stage and of the coupling."""
    s, _, r, w = hidden.shape
    d_input, d_product = torch.empty_like(hidden), torch.empty_like(hidden)
    d_state = hidden.new_zeros(r, w)
    for step in reversed(range(s)):
        d_products = d_product[step]
        for stage, weight in enumerate(_WEIGHTS):
            torch.mul(d_state, weight, out=d_products[stage])
        for stage in reversed(range(4)):
            d_unit = torch.addmm(d_hidden[step, stage], d_products[stage], coupling)
            d_stage = torch.mul(d_unit, hidden[step, stage] > 0, out=d_input[step, stage])
            d_state = d_state + d_stage
            for earlier, by in enumerate(_COUPLINGS[stage]):
                d_products[earlier].add_(d_stage, alpha=by)
    return [d_state, d_input.sum(dim=2), d_product.reshape(-1, w).T @ hidden.reshape(-1, w)]


def _composite(start: Tensor, given: Tensor, *couplings: Tensor) -> Tensor:
    """`_forward` out of ordinary operators, its coupling by one matrix after the other."""
    found, z = [], start
    for put in given:
        products: list[Tensor] = []
        for stage, row in enumerate(_COUPLINGS):
            moved = z + sum(by * product for by, product in zip(row, products, strict=True))
            found.append((moved + put[stage]).relu())
            products.append(reduce(F.linear, couplings, found[-1]))
        z = z + sum(by * product for by, product in zip(_WEIGHTS, products, strict=True))
    return torch.stack(found).view(len(given), 4, *start.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs, output)


def _differentiate(ctx, d_hidden):
    start, given, coupling, hidden = ctx.saved_tensors
    if torch.is_grad_enabled():
        return tuple(expressed((_composite(start, given, coupling),), (d_hidden,), (start, given, coupling)))
    return tuple(_run_backward(d_hidden, hidden, coupling))


def _fake_backward(d_hidden, hidden, coupling):
    return [hidden.new_empty(hidden.shape[2:]), hidden.new_empty(hidden[:, :, 0].shape), torch.empty_like(coupling)]


_hidden = node("path_forward", _forward, lambda start, given, coupling: given.new_empty(len(given), 4, *start.shape))
_run_backward = node("path_backward", _backward, _fake_backward)
torch.library.register_autograd("anyformer::path_forward", _differentiate, setup_context=_save)
