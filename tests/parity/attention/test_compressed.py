"""Compressed attention against torch's own convolution and attention, and the identities of a stride of one and of one-hot taps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from anyformer.attention.compressed import Compressed, shortened
from anyformer.context import Context
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.build import build_attention, build_mixer, check
from anyformer.model.config import ModelConfig
from anyformer.model.transformer import Transformer
from anyformer.side import side
from anyformer.site import Site

HEADS, WIDTH = 4, 3


def built(stride: int, *, causal: bool = False, kv_heads: int = HEADS) -> Compressed:
    site = Site(HEADS * WIDTH, HEADS, causal=causal, kv_heads=kv_heads)
    compressed = build_attention(f"compressed(stride={stride})", site).double()
    assert isinstance(compressed, Compressed)
    for weight in compressed.parameters():
        torch.nn.init.normal_(weight)
    return compressed


def parts(n: int, kv_heads: int = HEADS) -> list[Tensor]:
    return [torch.randn(2, heads, n, WIDTH, dtype=torch.float64) for heads in (HEADS, kv_heads, kv_heads)]


def facts(n: int, *, causal: bool = False) -> Context:
    tokens = side(n, torch.device("cpu"))
    return Context(causal=causal, queries=tokens, keys=tokens)


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """The slots by torch's grouped convolution; the last tokens are filled up with zeros."""
    (b, k, m, d), stride = x.shape, taps.shape[1]
    rows = F.pad(x.transpose(2, 3).reshape(b, k * d, m), (0, -m % stride))
    out = F.conv1d(rows, taps.permute(0, 3, 2, 1).reshape(k * d, d, stride), stride=stride, groups=k)
    return out.view(b, k, d, -1).transpose(2, 3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize(("n", "stride"), [(9, 3), (11, 4), (2, 5), (6, 1)])
def test_equals_torch_s_convolution_and_attention(n: int, stride: int, kv_heads: int, causal: bool) -> None:
    compressed = built(stride, causal=causal, kv_heads=kv_heads)
    mine, other = ([part.clone().requires_grad_() for part in parts(n, kv_heads)] for _ in range(2))
    for one, two in zip(mine, other, strict=True):
        two.data.copy_(one.data)
    taps = [each.detach().clone().requires_grad_() for each in (compressed.key_taps, compressed.value_taps)]
    k, v = (convolved(part, each) for part, each in zip(other[1:], taps, strict=True))
    mask = None
    if compressed.start is not None:
        start = compressed.start.detach()[None, :, None].expand(2, -1, -1, -1)
        k, v = torch.cat([torch.zeros_like(start), k], dim=2), torch.cat([start, v], dim=2)
        mask = torch.tensor([[c == 0 or c * stride - 1 <= i for c in range(k.shape[2])] for i in range(n)])
    expected = F.scaled_dot_product_attention(other[0], k, v, attn_mask=mask, enable_gqa=True)
    got = compressed(*mine, facts(n, causal=causal))
    weights = torch.randn_like(got)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected)
    for one, two in zip((*mine, compressed.key_taps, compressed.value_taps), (*other, *taps), strict=True):
        close(one.grad, two.grad)


def test_one_hot_taps_read_every_third_key_and_a_stride_of_one_every_key() -> None:
    q, k, v = parts(10)
    for stride in (3, 1):
        compressed = built(stride)
        for taps in (compressed.key_taps, compressed.value_taps):
            taps.data.zero_()
            taps.data[:, 0] = torch.eye(WIDTH, dtype=torch.float64)
        expected = F.scaled_dot_product_attention(q, k[:, :, ::stride], v[:, :, ::stride])
        close(compressed(q, k, v, facts(10)), expected)


def test_a_slot_stands_at_its_last_real_token() -> None:
    site = Site(HEADS * WIDTH, HEADS)
    mixer = build_mixer("compressed(stride=3)", "alibi", site).double().eval()
    x = torch.randn(2, 8, site.dim, dtype=torch.float64)
    q, k, v = (getattr(mixer, name)(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for name in "qkv")
    k, v = (convolved(part, mixer.get_parameter(f"attention.{name}_taps")) for part, name in ((k, "key"), (v, "value")))
    slopes = torch.tensor([2.0 ** -(8 * (h + 1) / HEADS) for h in range(HEADS)], dtype=torch.float64)
    distance = (torch.arange(8)[:, None] - torch.tensor([2, 5, 7])).abs()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=-slopes[:, None, None] * distance)
    close(mixer(x), mixer.get_submodule("o")(out.transpose(1, 2).flatten(2)))


def test_the_last_slot_reads_only_what_there_is() -> None:
    x, taps = torch.randn(1, 1, 4, WIDTH, dtype=torch.float64), torch.randn(1, 3, WIDTH, 2, dtype=torch.float64)
    close(shortened(x, taps)[0, 0, 1], x[0, 0, 3] @ taps[0, 0])
    assert shortened(x[:, :, :0], taps).shape == (1, 1, 0, 2)


def test_its_rows_can_be_explained_and_its_scores_have_no_terms() -> None:
    model = Transformer(
        ModelConfig(
            vocab=7,
            dim=8,
            depth=1,
            heads=2,
            attention="compressed(stride=3)",
            position="alibi",
            head="mlm",
            max_length=16,
        )
    )
    tokens = torch.randint(7, (1, 9))
    (found,) = model.explain(tokens, [4])
    assert torch.allclose(found.sum(dim=-1), torch.ones(1), atol=1e-5)
    with pytest.raises(IncompatibleError, match="compressed scores no pairs of query and key"):
        model.explain_terms(tokens, [4])


def test_what_it_refuses() -> None:
    with pytest.raises(SpecError, match="stride=0: expected"):
        build_attention("compressed(stride=0)", Site(12, 4))
    mixer, x = build_mixer("compressed", "none", Site(12, 4)), torch.randn(1, 4, 12)
    with pytest.raises(IncompatibleError, match="compressed cannot keep documents of one row apart"):
        mixer(x, document_ids=torch.zeros(1, 4, dtype=torch.int64))
    assert check("compressed", "alibi", causal=True).kind == "ok"


def close(got: Tensor | None, expected: Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert torch.allclose(got, expected, rtol=1e-10, atol=1e-12)
