"""Position encodings in attentions whose weights are products of features: each weight times exp of the encoding's terms."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import anyformer as af
from anyformer.attention import _by_offset
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.mixer.multihead import MultiHead
from anyformer.side import grid, side

BY_OFFSET = ("alibi", "t5", "kerple", "sandwich(width=8)", "shaw(left=2, right=1)", "nezha(span=2)", "xlnet(clamp=2)")
SCORED = "deberta(span=3, terms=['c2p', 'p2c', 'p2p'])"
ON_GRID = (
    "swin_bias(rows=2)",
    "swinv2_log_cpb(hidden=8)",
    "irpe(ratio=1)",
    "irpe(ratio=1, method=cross, on=['q', 'k'])",
    "irpe(ratio=1, on=['v'])",
    "irpe(ratio=1, method=cross, on=['q', 'k', 'v'])",
    "irpe(kind=bias)",
)


def built(attention: str, position: str, *, dim: int = 16, **facts: object) -> MultiHead:
    layer = af.build_mixer(attention, position, af.Site(dim, 4, **facts)).double().eval()
    assert isinstance(layer, MultiHead)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.randn(each.shape, generator=generator, dtype=torch.float64) * 0.4)
    return layer


def tokens(n: int, dim: int = 16) -> Tensor:
    return torch.randn(2, n, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()


def placed(layer: MultiHead, n: int, columns: int = 3) -> Tensor:
    return grid(-(-n // columns), columns)[:, :n] if layer.position.axes == 2 else torch.arange(n)[None]


def terms(layer: MultiHead, q: Tensor, k: Tensor, at: Tensor) -> Tensor:
    """The encoding's terms of every pair, as it writes them out itself."""
    offered = {form for term in layer.position.forms for form in term}
    total = q.new_zeros(1, 1, 1, 1)
    if Form.BIAS in offered:
        heads = torch.arange(4)[:, None, None]
        total = total + layer.position.bias(heads, at[:, None, :, None], at[:, None, None, :])
    if Form.SCORE in offered:
        total = total + layer.position.score(q, k, at, at)
    return total


def linear(layer: MultiHead, x: Tensor, at: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Linear attention with every weight written out."""
    heads = layer.site.heads
    q, k, v = (each(x).unflatten(-1, (-1, layer.site.head_dim)).transpose(1, 2) for each in (layer.q, layer.k, layer.v))
    k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT) * terms(layer, q, k, at).exp()
    weights = weights if not layer.site.causal else weights.tril()
    weights = weights if hidden is None else weights.masked_fill(hidden, 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    out = weights @ v
    if Form.VALUE in {form for term in layer.position.forms for form in term}:
        out = out + layer.position.value(weights, at, at)
    return layer.o(out.transpose(1, 2).flatten(2))


def agree(ours: Tensor, right: Tensor, layer: MultiHead, x: Tensor, tight: float = 1e-10) -> None:
    torch.testing.assert_close(ours, right, rtol=tight, atol=tight)
    upstream = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(3))
    wanted = [x, *layer.parameters()]
    grads = (torch.autograd.grad(out, wanted, upstream, materialize_grads=True) for out in (ours, right))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=tight, atol=10 * tight)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", [*BY_OFFSET, SCORED, *ON_GRID])
def test_linear_equals_every_weight_written_out(position: str, causal: bool) -> None:
    layer, x = built("linear", position, causal=causal, kv_heads=2), tokens(17)
    at = placed(layer, 17)
    ours = layer(x, positions=at) if layer.position.axes == 2 else layer(x)
    agree(ours, linear(layer, x, at), layer, x)


KERNELS = ("linear", "performer(8)", "taylor", "rfa(8)", "cosformer", "retention")
FAST = (
    "t5",
    "shaw(left=2, right=1)",
    SCORED,
    "swin_bias(rows=2)",
    "irpe(ratio=0.5)",
    "irpe(ratio=0.5, on=['v'])",
    "irpe(ratio=0.5, on=['k', 'v'])",
)
PAIRS = [(a, p) for a in KERNELS for p in FAST if a != "retention" or p in FAST[:3]]  # it fades along one line


@pytest.mark.parametrize(("attention", "position"), PAIRS)
@pytest.mark.parametrize("causal", [False, True])
def test_sums_equal_pairs_with_padding_anywhere(
    attention: str, position: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = built(attention, position, dim=8, causal=causal, kv_heads=2), tokens(37, 8)
    keep = torch.ones(2, 37, dtype=torch.bool)
    keep[0, 5:9], keep[1, :7] = False, False
    facts = {"attention_mask": keep} | ({"positions": placed(layer, 37, 6)} if layer.position.axes == 2 else {})
    found, line = [], _by_offset.line

    def seen(*arguments: object, **named: object) -> object:
        found.append(line(*arguments, **named))
        return found[-1]

    monkeypatch.setattr(_by_offset, "line", seen)
    fast = layer(x, **facts)
    assert found
    assert all(each is not None for each in found)
    monkeypatch.setattr(_by_offset, "line", lambda *arguments, **named: None)
    agree(fast, layer(x, **facts), layer, x)


@pytest.mark.parametrize("position", ["alibi", "t5", "shaw(left=2, right=1)"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", [[3, 4, 6, 7, 11, 12, 13, 20], [5, 3, 9, 0, 7, 8, 2, 4], [0, 0, 1, 1, 2, 2, 3, 3]])
def test_positions_of_the_users_own(given: list[int], causal: bool, position: str) -> None:
    layer, x, at = built("linear", position, causal=causal), tokens(8), torch.tensor([given])
    agree(layer(x, positions=at), linear(layer, x, at), layer, x)


@pytest.mark.parametrize("position", ["alibi", "t5", SCORED])
def test_a_class_token_without_a_position(position: str) -> None:
    layer, x, at = built("linear", position), tokens(8), torch.arange(8)[None]
    without = torch.zeros(2, 8, dtype=torch.bool)
    without[:, 0] = True
    out = layer(x, no_position=without)
    q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (layer.q, layer.k, layer.v))
    bias = terms(layer, q, k, at).expand(2, -1, -1, -1).clone()
    bias[:, :, 0], bias[:, :, :, 0] = 0.0, 0.0
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT) * bias.exp()
    right = layer.o((weights @ v / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("attention", "position"),
    [
        *(
            (attention, position)
            for attention in ("linear", "retention")
            for position in ("t5", "shaw(left=2, right=1)")
        ),
        *((attention, "alibi") for attention in ("linear", "retention", "gated_linear")),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_of_one_row_stay_apart(position: str, causal: bool, attention: str) -> None:
    layer, x = built(attention, position, causal=causal), tokens(11)
    documents = torch.tensor([[3] * 4 + [1] * 7, [0] * 9 + [5] * 2])
    out = layer(x, document_ids=documents)
    for row, cut in ((0, 4), (1, 9)):
        alone = torch.cat([layer(x[row : row + 1, :cut]), layer(x[row : row + 1, cut:])], dim=1)
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ["linear", "retention"])
@pytest.mark.parametrize(
    ("position", "decodes"), [("alibi", "state"), ("t5", "cache"), ("shaw", "cache"), ("none", "state")]
)
def test_what_continues_a_sequence(position: str, decodes: str, attention: str) -> None:
    layer, x = built(attention, position, causal=True), tokens(9)
    assert layer.decodes == decodes
    cache = layer.new_cache(2)
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x), rtol=1e-10, atol=1e-10)
    assert set(cache.slots) == (set() if decodes == "state" else {"k", "v"})


@pytest.mark.parametrize("attention", ["linear", "retention(norm=False, gate=False)"])
def test_halves_of_the_heads_read_one_direction_each(attention: str) -> None:
    layer, x, at = built(attention, "alibi(both=halves)", kv_heads=2), tokens(17), torch.arange(17)[None]
    if attention == "linear":
        agree(layer(x), linear(layer, x, at), layer, x)
    layer.o = torch.nn.Identity()
    for heads, hidden in ((slice(0, 8), 16), (slice(8, 16), 0)):
        (grad,) = torch.autograd.grad(layer(x)[:, 16 - hidden, heads].sum(), x)
        assert float(grad[:, hidden].abs().max()) < 1e-12
        assert float(grad[:, 16 - hidden].abs().max()) > 1e-3


def test_a_fading_sum_goes_on_from_the_last_position() -> None:
    layer, x = built("linear", "alibi", causal=True), tokens(6)
    at = torch.tensor([[2, 3, 7, 8, 8, 20]])
    cache = layer.new_cache(2)
    parts = [layer(x[:, a:b], positions=at[:, a:b], cache=cache) for a, b in ((0, 2), (2, 5), (5, 6))]
    torch.testing.assert_close(torch.cat(parts, dim=1), linear(layer, x, at), rtol=1e-10, atol=1e-10)
    with pytest.raises(SpecError, match="needs a position for every token, none smaller than the one before it"):
        layer(x[:, :1], positions=torch.tensor([[19]]), cache=cache)


def test_cross_attention_by_distance() -> None:
    for position in ("alibi", "t5"):
        layer, x, source = built("linear", position), tokens(5), tokens(9)
        out = layer(x[:, :5], source=source, source_mask=torch.ones(2, 9, dtype=torch.bool))
        torch.testing.assert_close(out, layer(x, source=source), rtol=1e-10, atol=1e-10)


def test_fading_of_two_kinds_multiplies() -> None:
    """retention's own rate and ALiBi's slope are one rate: their product."""
    layer, x = built("retention(norm=False, gate=False)", "alibi", causal=True), tokens(9)
    q, k, v = (each(x).unflatten(-1, (4, 4)).transpose(1, 2) for each in (layer.q, layer.k, layer.v))
    index = torch.arange(9)
    distance = index[:, None] - index
    gamma = (1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64)))[:, None, None]
    slopes = layer.position.rates()[:, None, None]
    weights = (q @ k.mT / 2) * gamma**distance * torch.exp(-slopes * distance)
    agree(layer(x), layer.o((weights.tril() @ v).transpose(1, 2).flatten(2)), layer, x)


@pytest.mark.parametrize("position", ["alibi", "fox"])
def test_gated_channels_fade_with_positions_too(position: str) -> None:
    layer, x = built("gated_linear(norm=False, gate=False)", position, causal=True, kv_heads=2), tokens(7)
    q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (layer.q, layer.k, layer.v))
    rates = F.logsigmoid(layer.attention.get_submodule("rate")(x)).unflatten(-1, (2, 4)).transpose(1, 2) / 16
    if position == "fox":
        own = layer.position.prepare(x, side(7, x.device), None).mT
    else:
        own = -layer.position.rates()[None, :, None].expand(2, -1, 7)
    k, v, rates = (each.repeat_interleave(2, dim=1) for each in (k, v, rates))
    state, outs = torch.zeros(2, 4, 4, 4, dtype=torch.float64), []
    for t in range(7):
        faded = (rates[:, :, t] + own[:, :, t, None]).exp()[..., None] * state
        state = faded + k[:, :, t, :, None] * v[:, :, t, None]
        outs.append((q[:, :, t, None] / 2) @ state)
    agree(layer(x), layer.o(torch.cat(outs, dim=2).transpose(1, 2).flatten(2)), layer, x)


def test_gated_channels_need_positions_that_go_on() -> None:
    layer = built("gated_linear", "alibi")
    with pytest.raises(
        SpecError, match="gated_linear fades from token to token, so each token needs a position that is not smaller"
    ):
        layer(tokens(3), positions=torch.tensor([[2, 1, 0]]))


def test_performer_estimates_softmax_with_columns() -> None:
    exact, x, errors = built("softmax", "tupe", dim=16), tokens(12), []
    weights = {name: part.clone() for name, part in exact.state_dict().items()}
    exact.load_state_dict({name: 0.4 * part for name, part in weights.items()})
    for features in (64, 4096):
        layer = af.build_mixer(f"performer({features})", "tupe", af.Site(16, 4)).double().eval()
        layer.load_state_dict({name: 0.4 * part for name, part in weights.items()}, strict=False)
        with torch.no_grad():
            errors.append(float((layer(x) - exact(x)).norm() / exact(x).norm()))
        torch.testing.assert_close(layer(x), layer(x), rtol=0, atol=0)
    assert errors[1] < 0.1
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("attention", "position", "message"),
    [
        (
            "performer",
            "transformer_xl",
            "performer estimates weights from random features, and transformer_xl appends columns so long",
        ),
        (
            "performer",
            "xlnet",
            r"use taylor\(width=None\), or vectors of clipped offsets such as shaw or xlnet\(clamp=64\)",
        ),
        ("linear", "tupe", "must fall apart into few factors of query, key and offset"),
        ("linear", "irpe(method=euclidean)", "which has rings for buckets.*must fall apart into few factors"),
        ("linear", "irpe(method=quant, on=['v'])", r"\(value\), which has rings for buckets"),
        ("linear", "decomposed_rel", "which has a factor of its own for every row and every column"),
        ("linear", "fire", r"fire \(bias\), which is not Toeplitz: past the first L tokens, L learned"),
        ("linformer(rank=8)", "fire", r"fire \(bias\): it compresses the key axis"),
        ("gated_linear", "alibi(both=halves)", "which with both=halves fades in another direction in each half"),
        ("retention", "swin_bias", "must be a factor by token or by offset along the sequence"),
        ("gated_linear", "t5", "fades with every token in between, as that token asks"),
        ("delta", "alibi", "no factor belongs to a pair, and a state that fades is another model"),
    ],
)
def test_what_has_no_form_says_why(attention: str, position: str, message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        af.check(attention, position)


def test_taylor_with_a_map_says_what_columns_need() -> None:
    with pytest.raises(IncompatibleError, match="columns of queries and keys need width=None"):
        af.build_mixer("taylor(4)", "tupe", af.Site(32, 4))


@pytest.mark.parametrize("position", ["alibi", "t5", "shaw", "swin_bias"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_has_a_number_for_each_pair(position: str, causal: bool) -> None:
    n, made = 4096, [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            results = out if isinstance(out, (tuple, list)) else (out,)
            made.extend(x.untyped_storage().nbytes() for x in results if isinstance(x, Tensor))
            return out

    layer = af.build_mixer("linear", position, af.Site(16, 2, causal=causal, max_length=n))
    facts = {"positions": grid(64, 64)} if position == "swin_bias" else {}
    with Watch():
        layer(torch.randn(1, n, 16, requires_grad=True), **facts).sum().backward()
    assert max(made) < 2 * n * n * 4
