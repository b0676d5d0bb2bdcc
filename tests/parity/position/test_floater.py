"""FLOATER against matrix exponentials, the code of sines, torchdiffeq, gradients by another way, and paths that go on."""

import sys

import pytest
import torch
import torchdiffeq
from torch import Tensor, nn

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.position._trajectory import points
from anyformer.position.base import Position


def built(knobs: str = "step=0.1, inner=4", **site: int) -> Position:
    return af.build_position(f"floater({knobs})", af.Site(6, 3, **{"max_length": 90, "depth": 2, **site})).double()


def linear(position: Position, matrix: Tensor) -> None:
    """Make the slope dp / dt = M p, whose path is exp(t M) p(0): every unit is far above zero, and what that adds is taken off."""
    far = 1000.0
    for layer in (position.flow.inner, position.flow.outer):
        nn.init.zeros_(layer.weight)
    nn.init.eye_(position.flow.inner.weight[:, :-1])
    nn.init.constant_(position.flow.inner.bias, far)
    position.flow.outer.weight[:, :-1] = matrix
    position.flow.outer.bias.copy_(-far * matrix.sum(dim=1))


def waves(width: int) -> Tensor:
    """The generator of the sinusoidal code: each pair turns at its own frequency."""
    matrix = torch.zeros(width, width, dtype=torch.float64)
    for pair in range(width // 2):
        speed = 10000.0 ** (-2 * pair / width)
        matrix[2 * pair, 2 * pair + 1], matrix[2 * pair + 1, 2 * pair] = speed, -speed
    return matrix


@torch.no_grad()
def test_a_turning_flow_is_the_sinusoidal_code() -> None:
    position = built("step=1.0, inner=100")
    linear(position, waves(6))
    position.starts.copy_(torch.tensor([0.0, 1.0] * 3))
    code = af.build_position("sinusoidal", af.Site(6, 3)).code(torch.arange(20)[None])[0]
    torch.testing.assert_close(position.path(20)[:, 0], code, rtol=0, atol=2e-9)


@pytest.mark.parametrize("adjoint", [False, True])
def test_points_and_gradients_against_matrix_exponentials(adjoint: bool) -> None:
    position = built(f"step=0.1, inner=10, adjoint={adjoint}")
    matrix = torch.randn(6, 6, dtype=torch.float64) * 0.4
    with torch.no_grad():
        linear(position, matrix)
    exact = matrix.clone().requires_grad_()
    places, others = torch.tensor([[0, 3, 7, 29]]), torch.tensor([[2, 29, 1]])
    shifts = position.shift(places, others, 1, None)
    for shift, start, where in zip(shifts, position.starts[1], (places, others, others), strict=True):
        expected = torch.stack([torch.linalg.matrix_exp(exact * 0.1 * float(at)) @ start for at in where[0]])[None]
        torch.testing.assert_close(shift, expected, rtol=1e-9, atol=1e-9)
        probe = torch.randn_like(expected)
        wanted = [position.starts, position.flow.inner.weight]
        starts, ours = torch.autograd.grad((shift * probe).sum(), wanted, retain_graph=True)
        theirs = torch.autograd.grad((expected * probe).sum(), [position.starts, exact], retain_graph=True)
        torch.testing.assert_close(starts, theirs[0], rtol=1e-7, atol=1e-7)
        # M is a product with the identity, so that its gradient is that of B, before M
        torch.testing.assert_close(matrix.T @ theirs[1], ours[:, :-1], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("count", [2, 90, 1100])
def test_points_and_all_gradients_against_torchdiffeq(count: int) -> None:
    position = built("step=0.02, inner=2", max_length=1200)
    for layer in (position.flow.inner, position.flow.outer):
        nn.init.normal_(layer.bias)
    times = torch.arange(2 * count - 1, dtype=torch.float64) * 0.01
    theirs = torchdiffeq.odeint(position.flow, position.starts[1], times, method="rk4")[::2]
    ours = position.path(count, layer=1)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    probe, weights = torch.randn_like(theirs), list(position.parameters())
    found, expected = (torch.autograd.grad((path * probe).sum(), weights) for path in (ours, theirs))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10 * float(other.abs().max()))


def test_the_gradient_can_be_differentiated_again() -> None:
    times = torch.arange(4, dtype=torch.float64) * 0.1
    shapes = ((2, 3), (3, 4), (3,), (3, 4), (3,))
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def path(start: Tensor, inner: Tensor, a: Tensor, outer: Tensor, b: Tensor) -> Tensor:
        return points(start, times, 0.1, (inner, a), (outer, b))

    assert torch.autograd.gradcheck(path, given)
    assert torch.autograd.gradgradcheck(path, given)


def test_the_learned_slope_and_both_ways_to_its_gradient() -> None:
    position, twin = built(), built("step=0.1, inner=4, adjoint=True")
    twin.load_state_dict(position.state_dict())
    p, t = torch.randn(3, 6, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    inner, outer = position.flow.inner, position.flow.outer
    hidden = (p @ inner.weight[:, :6].T + t * inner.weight[:, 6] + inner.bias).relu()
    expected = hidden @ outer.weight[:, :6].T + t * outer.weight[:, 6] + outer.bias
    torch.testing.assert_close(position.flow(t, p), expected, rtol=0, atol=1e-13)
    probe = torch.randn(80, 3, 6, dtype=torch.float64)
    for each in (position, twin):
        (each.path(80, layer=1) * probe).sum().backward()
    for ours, theirs in zip(position.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert float(position.starts.grad[0].abs().max()) == 0.0


def test_a_path_goes_on_from_where_it_is() -> None:
    position = built(
        "step=0.02, inner=4"
    )  # with longer steps it goes far, where numbers are rounded by more than is asked
    whole = position.path(90)
    known = position.path(30)
    torch.testing.assert_close(position.path(90, known=known), whole, rtol=0, atol=1e-12)
    assert position.path(10, known=known) is known
    torch.testing.assert_close(known, whole[:30], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["softmax", "linear", "local(3)", "longformer(window=3)"])
def test_it_is_a_bias_of_the_projections(attention: str) -> None:
    site = af.Site(12, 4, kv_heads=2, max_length=90)
    layer = af.build_mixer(attention, "floater", site).double().eval()
    plain = af.build_mixer(attention, "none", site).double().eval()
    plain.load_state_dict({name: each for name, each in layer.state_dict().items() if "position" not in name})
    places = torch.full((2, 7), 5)  # everywhere the same point: a bias that a linear layer can hold
    q, k, v = (each[0, 0].detach() for each in layer.position.shift(places[:1], places[:1], 0, None))
    with torch.no_grad():
        for name, by in zip("qkv", (q, k, v), strict=True):
            getattr(plain, name).bias.add_(by)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    out = layer(x, positions=places)
    torch.testing.assert_close(out, plain(x), rtol=0, atol=1e-12)
    assert float((layer(x) - out).detach().abs().max()) > 1e-3


def test_without_a_slope_order_does_not_matter() -> None:
    layer = af.MultiHead(12, 3, position="floater", max_length=90).double()
    for weight in layer.position.flow.parameters():
        nn.init.zeros_(weight)
    x, order = torch.randn(1, 9, 12, dtype=torch.float64), torch.randperm(9)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-13)


def test_tokens_without_a_position_are_left_alone() -> None:
    layer = af.MultiHead(12, 3, position="floater", max_length=90).double()
    x, without = torch.randn(1, 5, 12, dtype=torch.float64), torch.tensor([[True, False, False, False, False]])
    kept = layer(x, no_position=without)
    nn.init.constant_(layer.position.starts, 9.0)
    with torch.no_grad():
        alone = layer(x, no_position=torch.ones_like(without))
    plain = af.MultiHead(12, 3).double()
    plain.load_state_dict({name: each for name, each in layer.state_dict().items() if "position" not in name})
    torch.testing.assert_close(alone, plain(x), rtol=0, atol=1e-13)
    assert not torch.allclose(kept, plain(x))


def test_a_cache_keeps_the_path_and_not_the_module() -> None:
    config = af.ModelConfig(
        vocab=9, dim=12, depth=2, heads=3, kv_heads=1, position="floater", max_length=40, causal=True
    )
    model = af.Transformer(config).double().eval()
    before = set(vars(model.blocks[0].mixer.position)) | set(model.state_dict())
    tokens, cache = torch.randint(9, (2, 20)), model.new_cache(2)
    parts = [model(part, cache=cache) for part in tokens.split([7, 1, 12], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=0, atol=1e-12)
    assert [len(layer.tables["path"]) for layer in cache.layers] == [20, 20]
    assert before == set(vars(model.blocks[0].mixer.position)) | set(model.state_dict())
    again = cache.select([1]).copy().detach()
    assert not again.layers[0].tables["path"].requires_grad
    torch.testing.assert_close(model(tokens[1:, :3], cache=again), model(tokens[1:, :3], cache=cache.select([1])))


def test_one_slope_serves_all_layers() -> None:
    model = af.Transformer(af.ModelConfig(vocab=9, dim=12, depth=3, heads=3, position="floater", max_length=40))
    positions = [block.mixer.position for block in model.blocks]
    assert all(each is positions[0] for each in positions)
    assert positions[0].starts.shape == (3, 3, 12)
    assert model.count_parameters()["position"] == 2 * 12 * 14 + 3 * 3 * 12


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = af.MultiHead(12, 3, position="floater", max_length=8)
    with pytest.raises(
        SpecError, match=r"floater: position 8 needs a table of at least 9 rows.*build with max_length=9"
    ):
        layer(torch.randn(1, 9, 12))
    q = torch.randn(1, 3, 4, 4)
    with pytest.raises(
        IncompatibleError, match=r"floater is added to the projections of a layer.*use MultiHead or Transf"
    ):
        af.attend(q, q, q, position=layer.position)
    with pytest.raises(IncompatibleError, match="gru cannot use floater"):
        af.check("gru", "floater")
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    af.MultiHead(12, 3, position="floater")
    with pytest.raises(
        IncompatibleError, match=r"torchdiffeq, which is not installed; pip install 'anyformer\[ode\]', or leave"
    ):
        af.MultiHead(12, 3, position="floater(adjoint=True)")
    with pytest.raises(IncompatibleError, match="torchdiffeq"):
        af.check("softmax", "floater(adjoint=True)")
