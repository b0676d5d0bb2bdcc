"""Linear attention with terms by rectangles of offsets on a grid, against every weight written out."""

import pytest
import torch

from anyformer.ops import linear_boxes
from anyformer.ops.linear_boxes import box_sums

FAR = 1 << 31
STEPS = [(-FAR, -3), (-2, -1), (0, 0), (1, 1), (2, FAR)]
EDGES = torch.tensor([(*rows, *columns) for rows in STEPS for columns in STEPS])


def made(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)

    def normal(width: int) -> torch.Tensor:
        return torch.randn(2, 3, rows, columns, width, generator=generator, dtype=torch.float64)

    count = len(EDGES)
    made = {
        "q": normal(4),
        "k": normal(4),
        "v": normal(5),
        "of_query": normal(count).exp(),
        "of_key": normal(count).exp(),
        "values": torch.randn(3, count, 5, generator=generator, dtype=torch.float64),
    }
    return {name: x.requires_grad_() for name, x in made.items()}


def dense(x: dict[str, torch.Tensor], causal: bool, named: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x["q"].shape[2:4]
    index = torch.arange(rows * columns)
    place = torch.stack([index // columns, index % columns], dim=-1)
    offset = place[None] - place[:, None]
    first, last, left, right = EDGES.unbind(1)
    row, column = offset[..., :1], offset[..., 1:]
    box = ((row >= first) & (row <= last) & (column >= left) & (column <= right)).int().argmax(-1)
    q, k, v = (x[name].flatten(2, 3) for name in ("q", "k", "v"))
    weights = q @ k.mT
    if "of_query" in named:
        weights = weights * x["of_query"].flatten(2, 3).gather(-1, box.expand(2, 3, -1, -1))
    if "of_key" in named:
        weights = weights * x["of_key"].flatten(2, 3).gather(-1, box.T.expand(2, 3, -1, -1)).mT
    weights = weights.tril() if causal else weights
    out = weights @ v
    if "values" in named:
        out = out + torch.einsum("bhij,hijv->bhiv", weights, x["values"][:, box])
    return out.unflatten(2, (rows, columns)), weights.sum(-1).unflatten(2, (rows, columns))


NAMED = [(), ("of_query",), ("of_key",), ("of_query", "of_key"), ("values",), ("of_query", "of_key", "values")]


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (4, 1), (5, 7)])
def test_equals_every_weight_written_out(rows: int, columns: int, causal: bool, named: tuple[str, ...]) -> None:
    x, results = made(rows, columns), []
    tables = (x[name] if name in named else None for name in ("of_query", "of_key", "values"))
    ours = box_sums(x["q"], x["k"], x["v"], EDGES, *tables, causal=causal)
    for num, den in (ours, dense(x, causal, named)):
        loss = (num * num.detach().cos()).sum() + den.square().sum()
        results.append([num, den, *torch.autograd.grad(loss, list(x.values()), materialize_grads=True)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)


def test_nothing_flows_from_the_future() -> None:
    x = made(4, 5)
    num, _ = box_sums(*(x[name] for name in ("q", "k", "v")), EDGES, x["of_query"], x["of_key"], causal=True)
    for grad in torch.autograd.grad(num[:, :, 1, 3].sum(), [x[name] for name in ("k", "v", "of_key")]):
        assert not grad.flatten(2, 3)[:, :, 9:].any()


def test_channels_one_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, results = made(4, 5), []
    for numbers in (linear_boxes.NUMBERS, 1):
        monkeypatch.setattr(linear_boxes, "NUMBERS", numbers)
        tables = (x[name] for name in ("of_query", "of_key", "values"))
        num, den = box_sums(*(x[name] for name in ("q", "k", "v")), EDGES, *tables, causal=False)
        results.append([num, den, *torch.autograd.grad(num.sum() + den.sum(), list(x.values()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-9)
