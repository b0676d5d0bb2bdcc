"""DeBERTa against the attention of both its versions, and its buckets at every offset up to 20,000."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DebertaConfig, DebertaV2Config
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

import anyformer as af

N = 19


def spread(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.eval()


def compare(ours: nn.Module, theirs: Callable[[Tensor, Tensor], Tensor], table: Tensor, pairs: dict) -> None:
    """Outputs, and gradients of the input, of the table and of pairs of weights, which are named functions of theirs."""
    x, probe = torch.randn(2, 2, N, 32)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = ours(inputs[0]), theirs(inputs[1], table)
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6 * float(outputs[1].detach().abs().max()))
    for output in outputs:
        (output * probe).sum().backward()
    found = [(inputs[0].grad, inputs[1].grad), (ours.position.table.grad, table.grad)]
    for mine, other in [*found, *((mine.grad, other.grad) for mine, other in pairs.items())]:
        torch.testing.assert_close(mine, other, rtol=0, atol=4e-6 * max(1.0, float(other.abs().max())))


def layer(position: str, table: Tensor, **projections: nn.Linear | None) -> nn.Module:
    """Ours with the position's weights set; the output is not projected."""
    built = af.MultiHead(32, 4, position=position)
    with torch.no_grad():
        built.o.weight.copy_(torch.eye(32))
        built.o.bias.zero_()
        built.position.table.copy_(table)
        for name, peer in projections.items():
            if peer is not None:
                getattr(built.position, name).weight.copy_(peer.weight)
                getattr(built.position, name).bias.copy_(torch.zeros(32) if peer.bias is None else peer.bias)
    return built


@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
@pytest.mark.parametrize("span", [6, 64])
def test_a_layer_of_the_first_version(terms: list[str], span: int) -> None:
    config = DebertaConfig(
        hidden_size=32, num_attention_heads=4, relative_attention=True, pos_att_type=terms,
        max_relative_positions=span, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = spread(v1.DisentangledSelfAttention(config))
    table = (0.3 * torch.randn(2 * span, 32)).requires_grad_()
    key, query = getattr(theirs, "pos_proj", None), getattr(theirs, "pos_q_proj", None)
    ours = layer(f"deberta(span={span}, terms={terms})", table.detach(), key=key, query=query)
    packed = theirs.in_proj.weight.detach().view(4, 3, 8, 32)
    for index, (name, bias) in enumerate({"q": theirs.q_bias, "k": torch.zeros(32), "v": theirs.v_bias}.items()):
        getattr(ours, name).load_state_dict({"weight": packed[:, index].reshape(32, 32), "bias": bias})

    def attention(x: Tensor, table: Tensor) -> Tensor:
        positions = v1.build_relative_position(x, x)
        return theirs(x, torch.ones(2, 1, N, N), relative_pos=positions, rel_embeddings=table)[0]

    pairs = {} if key is None else {ours.position.key.weight: key.weight}
    pairs |= {} if query is None else {ours.position.query.weight: query.weight, ours.position.query.bias: query.bias}
    compare(ours, attention, table, pairs)


@pytest.mark.parametrize("terms", [["c2p", "p2c"], ["c2p"], ["p2c"]])
def test_a_layer_of_the_second_version_with_buckets(terms: list[str]) -> None:
    config = DebertaV2Config(
        hidden_size=32, num_attention_heads=4, relative_attention=True, pos_att_type=terms, share_att_key=False,
        position_buckets=8, max_relative_positions=14, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = spread(v2.DisentangledSelfAttention(config))
    table = (0.3 * torch.randn(16, 32)).requires_grad_()
    key, query = getattr(theirs, "pos_key_proj", None), getattr(theirs, "pos_query_proj", None)
    ours = layer(f"deberta(span=14, buckets=8, terms={terms})", table.detach(), key=key, query=query)
    for name, peer in zip("qkv", (theirs.query_proj, theirs.key_proj, theirs.value_proj), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())

    def attention(x: Tensor, table: Tensor) -> Tensor:
        return theirs(x, torch.ones(2, 1, N, N), rel_embeddings=table)[0]

    pairs = {} if key is None else {ours.position.key.weight: key.weight}
    compare(ours, attention, table, pairs | ({} if query is None else {ours.position.query.bias: query.bias}))


def test_keys_and_queries_shared_with_the_content() -> None:
    """The third version: W_k and W_q are the content's own, copied."""
    config = DebertaV2Config(
        hidden_size=32, num_attention_heads=4, relative_attention=True, pos_att_type=["c2p", "p2c"], share_att_key=True,
        position_buckets=8, max_relative_positions=14, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    theirs = spread(v2.DisentangledSelfAttention(config))
    table, x = 0.3 * torch.randn(16, 32), torch.randn(2, N, 32)
    ours = layer("deberta(span=14, buckets=8)", table, key=theirs.key_proj, query=theirs.query_proj)
    for name, peer in zip("qkv", (theirs.query_proj, theirs.key_proj, theirs.value_proj), strict=True):
        getattr(ours, name).load_state_dict(peer.state_dict())
    expected = theirs(x, torch.ones(2, 1, N, N), rel_embeddings=table)[0]
    torch.testing.assert_close(ours(x), expected, rtol=0, atol=2e-6 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("buckets, span", [(256, 512), (32, 128), (8, 20), (7, 30), (4, 10)])
def test_buckets(buckets: int, span: int) -> None:
    offsets = torch.arange(-20_000, 20_001)
    position = af.build_position(f"deberta(span={span}, buckets={buckets})", af.Site(8, 2))
    theirs = v2.make_log_bucket_position(-offsets, buckets, span).long()
    rows = [(each + buckets).clamp(0, 2 * buckets - 1) for each in (position.distance(offsets), theirs)]
    assert torch.equal(*rows)
    if (buckets, span) == (256, 512):
        known = {-127: 127, -128: 128, -129: 129, -511: 255, -10_000: 256, 511: -255, 512: -256}
        assert position.distance(torch.tensor(list(known))).tolist() == list(known.values())


TERMS = [["c2p"], ["p2c"], ["p2p"], ["c2p", "p2p"], ["p2c", "p2p"], ["c2p", "p2c", "p2p"]]


@pytest.mark.parametrize("index", ["code", "paper"])
@pytest.mark.parametrize("terms", TERMS)
def test_every_term_is_the_equation_pair_by_pair(terms: list[str], index: str) -> None:
    """The paper's sum, with one vector for every pair, in float64; and the same by offset."""
    position = af.build_position(f"deberta(span=3, terms={terms}, index={index})", af.Site(12, 3)).double()
    spread(position)
    q, k = torch.randn(2, 2, 3, 5, 4, dtype=torch.float64)
    q_pos, k_pos = torch.tensor([[7, 2, 3, 4, 0]]), torch.tensor([[1, 2, 3, 4, 9], [5, 4, 2, 1, 0]])
    ahead = q_pos[:, :, None] - k_pos[:, None, :]
    scale = (4 * (1 + len(terms))) ** -0.5

    def vectors(linear: nn.Linear | None, distance: Tensor) -> Tensor:
        if linear is None:
            return torch.zeros(2, 3, 5, 5, 4, dtype=torch.float64)
        return linear(position.table)[(distance + 3).clamp(0, 5)].unflatten(-1, (3, 4)).permute(0, 3, 1, 2, 4)

    key = vectors(position.key, ahead)  # [b h n m d]
    query = vectors(position.query, ahead if index == "code" else -ahead)
    parts = {
        "c2p": (q[:, :, :, None] * key).sum(-1),
        "p2c": (k[:, :, None] * query).sum(-1),
        "p2p": (key * query).sum(-1),
    }
    expected = scale * sum(parts[term] for term in terms)
    assert position.scale(4) == scale
    torch.testing.assert_close(position.score(q, k, q_pos, k_pos), expected, rtol=0, atol=1e-12)
    places = torch.arange(5)[None]
    tables, by_offset = position.tables(-4, 4), torch.arange(5) - torch.arange(5)[:, None] + 4
    looked_up = torch.zeros(2, 3, 5, 5, dtype=torch.float64)
    if tables.keys is not None:
        looked_up = looked_up + scale * torch.einsum("bhnd,hnmd->bhnm", q, tables.keys[:, by_offset])
    if tables.queries is not None:
        looked_up = looked_up + scale * torch.einsum("bhmd,hnmd->bhnm", k, tables.queries[:, by_offset])
    if tables.bias is not None:
        looked_up = looked_up + tables.bias[:, by_offset]
    torch.testing.assert_close(position.score(q, k, places, places), looked_up, rtol=0, atol=1e-12)
