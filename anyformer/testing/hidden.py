"""Laws about what a token may not see: the future, padding, nothing at all, and keys outside a pattern."""

from typing import Any

import torch
from torch import Tensor, nn

from anyformer.errors import IncompatibleError
from anyformer.functional import attend
from anyformer.mixer.multihead import MultiHead
from anyformer.pattern.leaves import Flagged, Local
from anyformer.testing.case import VOCAB, WIDTH, Case, gap, padding, random, token_ids, told
from anyformer.testing.finding import Finding, Law


def nobody_sees_the_future(case: Case) -> list[Finding] | str:
    """Change all later tokens, and once multiply the later inputs by 50: nothing before moves, and no gradient flows back."""
    if not case.causal:
        return "both directions"
    found = []
    for dropout in (0.0, 0.3):
        model, layer = case.model(dropout=dropout), case.layer(dropout=dropout)
        model.train(dropout > 0)
        layer.train(dropout > 0)
        tokens = token_ids(2, 24)
        for t in (0, 1, 11, 22):
            other = tokens.clone()
            other[:, t + 1 :] = (tokens[:, t + 1 :] + 1 + token_ids(2, 23 - t, seed=1) % (VOCAB - 1)) % VOCAB
            outs = [_seeded(model, each)[:, : t + 1] for each in (tokens, other)]
            found.append(Finding(gap(outs[1], outs[0]), 1e-6, f"tokens after {t} changed, dropout {dropout}"))
            x = random(2, 24, WIDTH, seed=2).requires_grad_()
            y = torch.cat([x[:, : t + 1], 50 * x[:, t + 1 :]], dim=1)
            outs = [_seeded(layer, each)[:, : t + 1] for each in (x, y)]
            found.append(Finding(gap(outs[1], outs[0]), 1e-6, f"inputs after {t} times 50, dropout {dropout}"))
            (grad,) = torch.autograd.grad(_seeded(layer, x)[:, t].sum(), x)
            found.append(Finding(_size(grad[:, t + 1 :]), 0.0, f"gradient of output {t} in the future"))
    return found


def hidden_tokens_have_no_influence(case: Case) -> list[Finding] | str:
    """Padding of 1e4 or of another kind moves nothing, each row equals itself alone, and hidden inputs get no gradient."""
    layer = case.layer()
    if not layer.takes_mask:
        return _refuses_mask(layer)
    found = []
    for batch, lengths in ((1, [8]), (3, [13, 8, 1])):
        for side in ("right", "left", "interior"):
            note = f"{batch} rows padded {side}"
            keep = padding(lengths, 13, side)
            x = random(batch, 13, WIDTH)
            garbage = torch.where(keep[..., None], x, 1e4 * random(batch, 13, WIDTH, seed=1)).requires_grad_()
            out = layer(x, attention_mask=keep)
            moved = layer(garbage, attention_mask=keep)
            real = told(layer, keep)
            found.append(Finding(gap(moved[real], out[real]), 1e-9, note))
            found.append(Finding(_size(moved[~real]), 0.0, f"{note}: padded outputs"))
            for row in range(batch):
                alone = layer(x[row : row + 1, keep[row]])
                found.append(Finding(gap(out[row : row + 1, real[row]], alone), 1e-9, f"{note}: row {row} alone"))
            (grad,) = torch.autograd.grad(moved[real].square().sum(), garbage)
            found.append(Finding(_size(grad[~keep]), 0.0, f"{note}: gradient"))
    return found


def a_query_that_may_look_nowhere(case: Case) -> list[Finding] | str:
    """A row without a key gives exactly 0 before the output projection, finite gradients, and hears nothing."""
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        layer = case.layer(dtype)
        if not layer.takes_mask:
            return _refuses_mask(layer)
        x = random(2, 7, WIDTH, dtype=dtype).requires_grad_()
        keep = padding([7, 0], 7, "right")
        out = layer(x, attention_mask=keep)
        found.append(Finding(_size(out[1]), 0.0, f"a row of padding, {dtype}"))
        (grad,) = torch.autograd.grad(out.float().square().sum(), x)
        found.append(Finding(_size(grad[1]), 0.0, f"gradient of a row of padding, {dtype}"))
        found.append(
            Finding(0.0 if bool(torch.isfinite(grad).all()) else float("inf"), 0.0, f"finite gradients, {dtype}")
        )
        if layer.cross and isinstance(layer, MultiHead):
            setattr(layer, "o", nn.Identity())  # noqa: B010  # the attention's own output is what must be 0
            source = random(2, 4, WIDTH, seed=1, dtype=dtype).requires_grad_()
            out = layer(x[:, :4], source=source, source_mask=padding([4, 0], 4, "right"))
            found.append(Finding(_size(out[1]), 0.0, f"a source of padding, {dtype}"))
            (grad,) = torch.autograd.grad(out.float().square().sum(), source)
            found.append(Finding(_size(grad[1]), 0.0, f"gradient of a source of padding, {dtype}"))
            found.append(Finding(0.0 if bool(torch.isfinite(grad).all()) else float("inf"), 0.0, f"finite, {dtype}"))
    return found


def the_last_query_sees_the_last_key(case: Case) -> list[Finding] | str:
    """Causal with more keys than queries: the newest queries alone equal the last rows of the whole."""
    layer = case.layer()
    if not case.causal or not layer.cross:
        return "both directions" if not case.causal else "takes no source"
    x = random(2, 9, WIDTH)
    whole = layer(x)
    return [
        Finding(gap(layer(x[:, 9 - n :], source=x), whole[:, 9 - n :]), 1e-9, f"{n} of 9 queries") for n in (1, 2, 5, 9)
    ]


def a_window_is_what_it_says(case: Case) -> list[Finding] | str:
    """Equal scores and identity values show the weights: a window of left and right keys has just those, self included."""
    if not _reads_patterns(case):
        return "takes no pattern"
    found = []
    n = 8
    for left, right in ((0, 0), (2, 2), (2, 0), (49, 49), (1, 3)):
        out = _probe(n, pattern=Local(left, right), causal=case.causal)
        reach = 0 if case.causal else right
        right_count = torch.tensor([min(i, left) + 1 + min(n - 1 - i, reach) for i in range(n)])
        found.append(Finding(float(((out > 0).sum(-1) - right_count).abs().max()), 0.0, f"Local({left}, {right})"))
        uniform = (out > 0).double() / right_count[:, None]
        found.append(Finding(gap(out, uniform), 1e-12, f"weights of Local({left}, {right})"))
    return found


def global_tokens_differ_by_row(case: Case) -> list[Finding] | str:
    """Flags of each row count for that row only, and a flag on padding counts for nothing."""
    if not _reads_patterns(case) or case.causal:
        return (
            "takes no pattern" if not case.causal else "a causal query sees no later key, so a global one sees no other"
        )
    n = 10
    keep = padding([10, 7], n, "right")
    flags = torch.zeros(2, n, dtype=torch.bool)
    flags[0, [0, 6]] = True
    flags[1, 9] = True
    pattern = Local(1) | Flagged()
    out = _probe(n, batch=2, pattern=pattern, attention_mask=keep, global_mask=flags)
    counts = (out > 0).sum(-1)
    expected = (torch.tensor([10, 4, 5, 5, 5, 4, 10, 4, 5, 4]), torch.tensor([2, 3, 3, 3, 3, 3, 2]))
    without = _probe(n, batch=2, pattern=pattern, attention_mask=keep, global_mask=flags & keep)
    return [
        Finding(float((counts[0] - expected[0]).abs().max()), 0.0, "two globals"),
        Finding(float((counts[1, :7] - expected[1]).abs().max()), 0.0, "a flag on padding"),
        Finding(gap(out, without), 0.0, "the flag on padding cleared"),
    ]


def _size(x: Tensor) -> float:
    """Largest absolute value; 0 of nothing."""
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _seeded(module: nn.Module, x: Tensor) -> Tensor:
    """One call with dropout drawn from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return module(x)


def _refuses_mask(layer: nn.Module) -> list[Finding]:
    try:
        layer(random(1, 4, WIDTH), attention_mask=padding([3], 4, "right"))
    except IncompatibleError as error:
        return [Finding(0.0, 0.0, f"refuses a mask: {error}")]
    return [Finding(float("inf"), 0.0, "declares that it takes no mask, and takes one")]


def _reads_patterns(case: Case) -> bool:
    layer = case.mixer
    return isinstance(layer, MultiHead) and layer.attention.takes_pattern


def _probe(n: int, *, batch: int = 1, **facts: Any) -> Tensor:
    q = torch.zeros(batch, 1, n, 4, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64).expand(batch, 1, n, n)
    return attend(q, q, v, **facts)[:, 0].squeeze(0)


LAWS = (
    Law("D01", "nobody sees the future", nobody_sees_the_future),
    Law("D02", "hidden tokens have no influence", hidden_tokens_have_no_influence),
    Law("D03", "a query that may look nowhere gives 0", a_query_that_may_look_nowhere),
    Law("D04", "the last query sees the last key", the_last_query_sees_the_last_key),
    Law("D05", "a window is what it says", a_window_is_what_it_says),
    Law("D06", "global tokens differ by row", global_tokens_differ_by_row),
)
