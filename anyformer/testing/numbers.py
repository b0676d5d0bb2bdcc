"""Laws about numbers: precision of positions, strides, lengths around a block, order, and shifts."""

import torch
from torch import Tensor

from anyformer.errors import SpecError
from anyformer.forms import Form
from anyformer.mixer.base import Mixer
from anyformer.position.base import Position
from anyformer.side import side
from anyformer.testing.case import MAX_LENGTH, WIDTH, Case, gap, random, token_ids
from anyformer.testing.finding import Finding, Law

_FAR = (0, 1, 255, 257, 2049, 4097, 32767)
_SHIFT = 7
_FAR_SHIFT = 4096
_GRID_SHIFT = (4, 3)


def positions_keep_their_precision(case: Case) -> list[Finding] | str:
    """In bfloat16 and far out, a position is as exact as its table allows, and rotated products depend on the offset only."""
    exact, half = case.encoding().double(), case.encoding().to(torch.bfloat16)
    for right, rounded in zip(exact.parameters(), half.parameters(), strict=True):
        right.data.copy_(rounded.data)  # weights are rounded alike: what is measured is the positions
    limit = exact.limit if isinstance(exact.limit, int) else min(exact.limit or (_FAR[-1] + 1,))
    places = torch.tensor([[p for p in _FAR if p < limit]])
    positions = places[..., None].expand(-1, -1, 2) if exact.axes == 2 else places
    n, found = places.shape[1], []
    for name, draw in (("random", random(1, n, WIDTH)), ("ones", torch.ones(1, n, WIDTH, dtype=torch.float64))):
        x = draw.to(torch.bfloat16)
        pairs = [
            _placed(encoding, x.to(dtype), positions)
            for encoding, dtype in ((exact, torch.float64), (half, torch.bfloat16))
        ]
        for right, out in zip(*pairs, strict=True):
            found.append(Finding(gap(out, right), 0.05, f"{name} inputs in bfloat16 to position {int(places[0, -1])}"))
    if any(Form.ROTATE in offered for offered in exact.forms) and exact.relative:
        found += [_offset_only(case, shift) for shift in (1000, 30000)]
    return found or "acts neither on embeddings nor on queries and keys"


def strides_do_not_matter(case: Case) -> list[Finding] | str:
    """Transposed, sliced and expanded inputs give what contiguous copies give, and are not written to."""
    layer, found = case.layer(), []
    whole = random(7, 2, 2 * WIDTH)
    views = {
        "transposed": whole[..., :WIDTH].transpose(0, 1),
        "every second channel": whole[..., ::2].transpose(0, 1),
        "expanded over the batch": whole[:, :1, :WIDTH].transpose(0, 1).expand(3, 7, WIDTH),
    }
    for name, view in views.items():
        before = view.clone()
        out = layer(view)
        found.append(Finding(gap(out, layer(view.contiguous())), 1e-12, name))
        found.append(Finding(gap(view, before), 0.0, f"{name}: written to"))
    base = random(1, 7, WIDTH).requires_grad_()
    (grad,) = torch.autograd.grad(layer(base.expand(3, 7, WIDTH)).square().sum(), base)
    (once,) = torch.autograd.grad(layer(base).square().sum(), base)
    found.append(Finding(gap(grad, 3 * once), 1e-9, "gradient of an expanded input"))
    return found


def any_length_works(case: Case) -> list[Finding] | str:
    """0, 1, 2, lengths around every small block: right shapes, finite gradients, and the gradient is the slope."""
    layer, found = case.layer(), []
    for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 33):
        x = random(2, n, WIDTH).requires_grad_()
        out = layer(x)
        fits = out.shape == (2, n if layer.shortening is None else layer.shortening.count, WIDTH) and bool(
            torch.isfinite(out).all()
        )
        found.append(Finding(0.0 if fits else float("inf"), 0.0, f"output at {n} tokens"))
        if not n:
            continue
        (grad,) = torch.autograd.grad(_energy(out), x)
        direction = random(2, n, WIDTH, seed=1)
        along = (grad * direction).sum()
        # a method that chooses keys may jump inside one step; a wrong gradient misses at both steps
        error = min(gap(along, _slope(layer, x, direction, step)) for step in (1e-5, 1e-6))
        found.append(Finding(error, 1e-5, f"gradient against slope at {n} tokens"))
    if layer.limit is not None:
        found.append(_refuses_too_long(case, layer.limit))
    return found


def order_does_not_matter_without_positions(case: Case) -> list[Finding] | str:
    """Without positions a permutation of the tokens permutes the outputs; with any encoding it must not."""
    if case.causal or case.mixer.ordered:
        return "reads the order of tokens by itself"
    model, tokens = case.model(), token_ids(2, 13)
    permutation = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    moved, plain = model(tokens[:, permutation]), model(tokens)[:, permutation]
    error = gap(moved, plain)
    if case.position == "none":
        return [Finding(error, 1e-12, "permuted outputs")]
    return [Finding(0.0 if error > 1e-6 else 1.0, 0.0, "the encoding changes nothing")]


def only_offsets_matter(case: Case) -> list[Finding] | str:
    """A relative encoding is blind to a common shift of all positions; an absolute one must see it."""
    model, tokens = case.model(), token_ids(2, 16)
    encoding = case.encoding()
    if not encoding.forms:
        return "no position"
    if case.verdict.kind == "abs":
        return "declared to lose this law"
    positions, by = case.at(torch.arange(16)[None]), torch.tensor(_SHIFT if encoding.axes == 1 else _GRID_SHIFT)
    plain, shifted = (model(tokens, positions=each) for each in (positions, positions + by))
    error = gap(shifted, plain)
    if encoding.relative:
        return [Finding(error, 1e-9, f"all positions shifted by {by.tolist()}")]
    if error <= 1e-6 and encoding.limit is None:  # some see offsets only near the start
        error = gap(model(tokens, positions=positions + _FAR_SHIFT), plain)
    return [Finding(0.0 if error > 1e-6 else 1.0, 0.0, "an absolute encoding is blind to a shift")]


def _placed(encoding: Position, x: Tensor, positions: Tensor) -> list[Tensor]:
    encoding = encoding.drawn_for() if encoding.draws else encoding
    offered = {form for term in encoding.forms for form in term}
    outs = []
    if Form.EMBED in offered:
        outs.append(_embedded(encoding, x, positions))
    if Form.ROTATE in offered:
        heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
        outs += list(encoding.rotate(heads, heads, positions, positions))
    return outs


def _embedded(encoding: Position, x: Tensor, positions: Tensor) -> Tensor:
    if encoding.reads_neighbours:
        return encoding.read(x, side(x.shape[1], x.device, positions=positions), None)
    return encoding.embed(x, positions, token_ids(*x.shape[:2]))


def _offset_only(case: Case, shift: int) -> Finding:
    encoding = case.encoding().to(torch.bfloat16)
    q, k = (random(1, 4, 16, 8, seed=seed).to(torch.bfloat16) for seed in (1, 2))
    positions = case.at(torch.arange(16)[None])
    products = []
    for by in (0, shift):
        placed = encoding.rotate(q, k, positions + by, positions + by)
        products.append(torch.einsum("bhnd,bhmd->bhnm", *(each.detach().double() for each in placed)))
    lengths = q.double().norm(dim=-1)[..., None] * k.double().norm(dim=-1)[..., None, :]
    return Finding(
        float(((products[1] - products[0]).abs() / lengths).max()), 0.01, f"products after a shift of {shift}"
    )


def _refuses_too_long(case: Case, limit: int) -> Finding:
    try:
        case.layer()(random(1, limit + 1, WIDTH))
    except SpecError:
        return Finding(0.0, 0.0, f"refuses {limit + 1} tokens")
    return Finding(float("inf"), 0.0, f"takes {limit + 1} tokens, declares at most {limit} (max_length {MAX_LENGTH})")


@torch.no_grad()
def _slope(layer: Mixer, x: Tensor, direction: Tensor, step: float) -> Tensor:
    return (_energy(layer(x + step * direction)) - _energy(layer(x - step * direction))) / (2 * step)


def _energy(out: Tensor) -> Tensor:
    return out.square().sum()


LAWS = (
    Law("D08", "positions keep their precision", positions_keep_their_precision, about="encoding"),
    Law("D11", "strides do not matter", strides_do_not_matter),
    Law("D12", "any length works", any_length_works),
    Law("D16", "without positions order does not matter", order_does_not_matter_without_positions),
    Law("P01", "only offsets matter", only_offsets_matter),
)
