"""Every relative scheme as the expansion of absolute positions into four terms, some of them replaced and some left out.

    (x_i + p_i) Q . (x_j + p_j) K = x_i Q . x_j K  +  x_i Q . p_j K  +  p_i Q . x_j K  +  p_i Q . p_j K
                                    content_content   content_position   position_content   position_position

The weights of a layer are the softmax of what is written here, pair by pair.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.mixer.multihead import MultiHead
from anyformer.model.explain import calls_of, weights

torch.set_num_threads(1)

N, DIM, HEADS, WIDTH = 7, 12, 3, 4
Terms = dict[str, Tensor]
NAMES = ("content_content", "content_position", "position_content", "position_position")


def ahead(limit: int = N) -> Tensor:
    """Query minus key, `[n n]`, clipped."""
    places = torch.arange(N)
    return (places[:, None] - places).clamp(-limit, limit)


def waves(angles: Tensor, *, pairs: bool) -> Tensor:
    """Sines and cosines `[... 2f]` of angles `[... f]`, in turn or one after the other."""
    return (
        torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
        if pairs
        else torch.cat([angles.sin(), angles.cos()], -1)
    )


def speeds(width: int) -> Tensor:
    return 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def split(rows: Tensor) -> Tensor:
    """`[... h d]`."""
    return rows.unflatten(-1, (HEADS, WIDTH))


def every(one: Tensor) -> Tensor:
    return one.expand(HEADS, N, N)


def shaw(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """The key's position becomes a vector of the offset; the query has none."""
    rows = layer.position.key_table[(-ahead()).clamp(-2, 3) + 2]  # [n n d]
    return {"content_position": torch.einsum("ihd,ijd->hij", q, rows)}


def nezha(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """As Shaw's, and the vector is a fixed sinusoid."""
    rows = waves((-ahead(3))[..., None] * speeds(WIDTH), pairs=True)
    return {"content_position": torch.einsum("ihd,ijd->hij", q, rows)}


def transformer_xl(layer: MultiHead, q: Tensor, k: Tensor, limit: int = N) -> Terms:
    """The key's position becomes a projected sinusoid of the offset, the query's one vector for words, one for places."""
    position = layer.position
    rows = split(waves(ahead(limit)[..., None] * speeds(DIM), pairs=False) @ position.w.weight.T)  # [n n h d]
    return {
        "content_position": torch.einsum("ihd,ijhd->hij", q, rows),
        "position_content": every(torch.einsum("hd,jhd->hj", position.u, k)[:, None]),
        "position_position": torch.einsum("hd,ijhd->hij", position.v, rows),
    }


def xlnet(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """As Transformer-XL's, with distances that are bounded."""
    return transformer_xl(layer, q, k, 2)


def t5(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """Only positions meet positions, and what comes of it is a number of the offset."""
    near = torch.tensor([0, 1, 2, 2, 3, 3, 3])  # buckets of distances
    return {"position_position": layer.position.table[near[ahead().abs()] + 4 * (ahead() < 0)].movedim(-1, 0)}


def tupe(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """Only positions meet positions, through projections of their own; the class token is untied from both."""
    position = layer.position
    rows = position.norm(position.table)
    asking, asked = split(position.query(rows)), split(position.key(rows))
    if not position.cls:
        return {"position_position": torch.einsum("ihd,jhd->hij", asking[:N], asked[:N])}
    met = torch.einsum("ihd,jhd->hij", asking, asked)
    of_class, to_class = met[:, 0, 0, None], met[:, 1, 1, None]
    met = met[:, 1 : N + 1, 1 : N + 1].clone()
    met[:, 1:, 0], met[:, 0] = to_class, of_class
    return {"position_position": met}


def tupe_relative(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """As TUPE's with a number of the offset, which the scale leaves alone."""
    row = ahead().abs() + 16 * (ahead() < 0)
    row[:, 0], row[0] = 32, 33  # the class token's
    (met,) = tupe(layer, q, k).values()
    return {"position_position": met + layer.position.by_bucket[row].movedim(-1, 0) * math.sqrt(2 * WIDTH)}


def deberta(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """Positions of keys and of queries become projected vectors of the offset, and do not meet each other."""
    position = layer.position
    of_query = ahead() if position.index == "code" else -ahead()
    asked, asking = (split(each(position.table)) for each in (position.key, position.query))
    return {
        "content_position": torch.einsum("ihd,ijhd->hij", q, asked[(ahead() + 4).clamp(0, 7)]),
        "position_content": torch.einsum("jhd,ijhd->hij", k, asking[(of_query + 4).clamp(0, 7)]),
    }


def deberta_all(layer: MultiHead, q: Tensor, k: Tensor) -> Terms:
    """As DeBERTa's, and its vectors do meet each other."""
    position, row = layer.position, (ahead() + 4).clamp(0, 7)
    asked, asking = (split(each(position.table))[row] for each in (position.key, position.query))
    return {**deberta(layer, q, k), "position_position": torch.einsum("ijhd,ijhd->hij", asking, asked)}


SCHEMES: dict[str, tuple[Callable[[MultiHead, Tensor, Tensor], Terms], float]] = {
    "shaw(left=2, right=3)": (shaw, WIDTH),
    "nezha(span=3, phase=paper)": (nezha, WIDTH),
    "transformer_xl": (transformer_xl, WIDTH),
    "xlnet": (transformer_xl, WIDTH),
    "xlnet(clamp=2)": (xlnet, WIDTH),
    "t5(buckets=8, max_distance=5)": (t5, 1),
    "tupe(cls=False)": (tupe, 2 * WIDTH),
    "tupe": (tupe, 2 * WIDTH),
    "tupe(relative=True)": (tupe_relative, 2 * WIDTH),
    "deberta(span=4)": (deberta, 3 * WIDTH),
    "deberta(span=4, index=paper)": (deberta, 3 * WIDTH),
    "deberta(span=4, terms=[c2p, p2c, p2p])": (deberta_all, 4 * WIDTH),
}
"""How each replaces them, and by the root of what the sum is divided."""


def taken(layer: MultiHead, x: Tensor) -> Tensor:
    (call,) = calls_of(layer, lambda: layer(x))
    return weights(call, range(N), None)[0]


def built(position: str) -> MultiHead:
    layer = af.MultiHead(DIM, HEADS, position=position, bias=False, max_length=16).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def asked_and_asking(layer: MultiHead, x: Tensor) -> tuple[Tensor, Tensor]:
    return split(layer.q(x)), split(layer.k(x))


@torch.no_grad()
def test_an_absolute_code_makes_four_terms() -> None:
    layer, x = built("none"), torch.randn(N, DIM, dtype=torch.float64)
    p = waves(torch.arange(N)[:, None] * speeds(DIM), pairs=True)
    (content_q, content_k), (place_q, place_k) = (asked_and_asking(layer, each) for each in (x, p))
    pairs = ((content_q, content_k), (content_q, place_k), (place_q, content_k), (place_q, place_k))
    terms = [torch.einsum("ihd,jhd->hij", *pair) for pair in pairs]
    torch.testing.assert_close(taken(layer, (x + p)[None]), (sum(terms) * WIDTH**-0.5).softmax(-1), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("position", SCHEMES)
def test_a_relative_scheme_replaces_some_of_them(position: str) -> None:
    layer, x = built(position), torch.randn(N, DIM, dtype=torch.float64)
    replace, width = SCHEMES[position]
    q, k = asked_and_asking(layer, x)
    terms = {"content_content": torch.einsum("ihd,jhd->hij", q, k), **replace(layer, q, k)}
    assert set(terms) <= set(NAMES)
    found = taken(layer, x[None])
    torch.testing.assert_close(found, written(terms, width), rtol=0, atol=1e-12)
    for left_out in terms:
        rest = {name: term for name, term in terms.items() if name != left_out}
        assert float((found - written(rest, width)).abs().max()) > 1e-3, left_out


def written(terms: Terms, width: float) -> Tensor:
    return (sum(terms.values()) * width**-0.5).softmax(-1)
