"""Softmax through FlexAttention equals the dense reference: patterns, biases, padding, documents, grouped heads, n != m."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import anyformer as af
from anyformer.attention import _flex
from anyformer.errors import SpecError
from anyformer.functional import _context, _keys
from anyformer.pattern.base import Pattern
from anyformer.pattern.read import pattern_of
from anyformer.spec import parse

pytestmark = pytest.mark.plain
PATTERNS = (
    "Local(5)",
    "Local(4) | Global([0, 7])",
    "Local(2) | Flagged()",
    "Strided(5)",
    "bigbird(block=8, random=1)",
    "PerHead((Local(2), 1), (Strided(3) | Global([0]), 3))",
)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention without its kernel: the same masks and terms, read pair by pair."""
    monkeypatch.setattr(_flex, "_compiled", lambda: flex_attention)


def _qkv(n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, n, 16), torch.randn(2, 2, m, 16), torch.randn(2, 2, m, 16)


def _compare(q: Tensor, k: Tensor, v: Tensor, **facts: object) -> None:
    with torch.no_grad():
        found, expected = (af.attend(q, k, v, impl=impl, **facts) for impl in ("flex", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.usefixtures("eager")
class TestEager:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("text", PATTERNS)
    @pytest.mark.parametrize(("n", "m"), [(37, 37), (20, 150)])
    def test_every_pattern_with_padding_documents_and_flags(self, text: str, causal: bool, n: int, m: int) -> None:
        keep = torch.arange(m) < torch.tensor([[m], [m - 6]])
        flags = torch.zeros(2, m, dtype=torch.bool)
        flags[0, [0, m // 2]] = True
        facts = {"pattern": pattern_of(parse(text)), "causal": causal, "global_mask": flags}
        _compare(*_qkv(n, m), attention_mask=keep, **facts)
        _compare(*_qkv(n, m), document_ids=torch.arange(m).expand(2, m) // 13, **facts)

    @pytest.mark.parametrize("name", ["alibi", "t5", "rope"])
    @pytest.mark.parametrize("pattern", [None, af.Local(5), af.Strided(4)])
    def test_terms_by_offset(self, name: str, pattern: Pattern | None) -> None:
        causal = name == "rope"
        position = af.build_position(name, af.Site(64, 4, kv_heads=2, causal=causal))
        for n, m in ((140, 140), (3, 40)):
            _compare(*_qkv(n, m), pattern=pattern, causal=causal, position=position)

    def test_softcap_scale_and_a_query_without_keys(self) -> None:
        keep = torch.zeros(2, 40, dtype=torch.bool)
        keep[0] = True
        _compare(*_qkv(40, 40), pattern=af.Local(3), softcap=2.0, scale=0.7, attention_mask=keep)
        _compare(*_qkv(40, 30), causal=True)


def test_block_tables_hold_the_tiles_of_the_layout() -> None:
    pattern = af.Local(300) | af.Global([0])
    layout, mask = pattern.blocks(1000, 128, heads=4, reorder=False), pattern.block_mask(1000, heads=4)
    _, row, column = layout.tiles()
    tiles = torch.zeros(8, 8, dtype=torch.bool).index_put((row, column), torch.tensor(True))
    listed = torch.zeros_like(tiles)
    for counts, lists in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        for i, count in enumerate(counts[0, 0]):
            assert not listed[i, lists[0, 0, i, :count].long()].any()
            listed[i, lists[0, 0, i, :count].long()] = True
    assert torch.equal(listed, tiles)
    assert torch.equal(mask.q_num_blocks + mask.full_q_num_blocks, tiles.sum(0).to(torch.int32)[None, None])
    every = pattern.block_mask(1000, heads=4, also=lambda batch, head, q, kv: kv >= 0)
    assert not every.full_kv_num_blocks.any()  # tiles whose pairs all meet would not ask


def test_a_gradient_on_a_cpu_is_refused_before_the_kernel_is_touched() -> None:
    q = torch.randn(1, 1, 8, 16, requires_grad=True)
    with pytest.raises(SpecError, match=r'impl="flex" has no gradient on a CPU; call it under torch\.no_grad'):
        af.attend(q, q, q, pattern=af.Local(2), impl="flex")
    position = af.build_position("t5", af.Site(16, 1))
    with pytest.raises(SpecError, match="no gradient on a CPU"):
        af.attend(q.detach(), q.detach(), q.detach(), position=position, impl="flex")


@pytest.mark.parametrize(
    "facts",
    [
        {"dropout": 0.1},
        {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
        {"bias": torch.ones(1, 1, 8, 8)},
        {"position": "alibi", "k_positions": torch.arange(8)[None]},
    ],
)
def test_what_flex_cannot_do_is_refused(facts: dict) -> None:
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(SpecError, match='impl="flex" needs at least one token, terms that are a bias by offset'):
        af.attend(q, q, q, impl="flex", **facts)


def test_auto_takes_it_on_a_gpu_only() -> None:
    q = torch.randn(1, 1, 8, 16)
    context = _context(q, _keys(q, None, None, None, None), None, causal=True, pattern=af.Local(2))
    assert _flex.fits(q, q, context)
    assert not _flex.pays(q, q, q, context)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # in the compiler
def test_the_compiled_kernel_equals_the_reference() -> None:
    keep = torch.arange(300) < torch.tensor([[300], [280]])
    _compare(*_qkv(300, 300), pattern=af.Local(20) | af.Global([0]), attention_mask=keep, position="alibi", causal=True)


def test_the_script_for_a_gpu_checks_without_one() -> None:
    script = Path(__file__).parents[3] / "bench" / "gpu.py"
    ran = subprocess.run([sys.executable, script, "--cpu"], capture_output=True, text=True, timeout=300)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(lines) == 29
    assert all(line.startswith("PASS") for line in lines[:-1])
