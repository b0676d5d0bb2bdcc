"""Global tokens by their token ids: what a model knows and a call need not say."""

import re
from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.vit import Vit
from anyformer.model.vit_config import VitConfig
from anyformer.pattern.read import pattern_of

torch.set_num_threads(1)
IDS = [3, 5]


def model(attention: str | tuple[str, ...], *, causal: bool, depth: int = 2, head: str = "lm") -> af.Transformer:
    config = af.ModelConfig(
        vocab=9, dim=16, depth=depth, heads=2, attention=attention, position="rope", causal=causal, head=head, outputs=9
    )
    return af.Transformer(config).double().eval()


def sample(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with and without such tokens, and padding."""
    tokens = torch.randint(0, 9, (3, n), generator=torch.Generator().manual_seed(0))
    tokens[0, [2, 7]] = torch.tensor(IDS)
    tokens[1] = torch.where((tokens[1] == 3) | (tokens[1] == 5), 4, tokens[1])
    keep = torch.ones(3, n, dtype=torch.bool)
    keep[2, :4] = False
    return tokens, keep


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "by_ids, by_flags",
    [
        ("Local(1) | Flagged([5, 3])", "Local(1) | Flagged()"),
        (
            "PerHead((Local(1) | Flagged([3, 5]), 1), (Flagged([3, 5]), 1))",
            "PerHead((Local(1) | Flagged(), 1), (Flagged(), 1))",
        ),
        ("longformer(window=1, ids=[3, 5])", "longformer(window=1)"),
        (
            "complex(attention=softmax(pattern=Local(1) | Flagged([3, 5])))",
            "complex(attention=softmax(pattern=Local(1) | Flagged()))",
        ),
    ],
)
def test_ids_flag_their_tokens(by_ids: str, by_flags: str, causal: bool) -> None:
    tokens, keep = sample()
    flags = torch.isin(tokens, torch.tensor(IDS))
    assert flags.any(dim=1).tolist() == [True, False, True]
    one, other = model(by_ids, causal=causal), model(by_flags, causal=causal)
    want = other(tokens, attention_mask=keep, global_mask=flags)
    got = one(tokens, attention_mask=keep)
    assert torch.equal(got, want)
    assert not torch.equal(got, other(tokens, attention_mask=keep))
    got.square().sum().backward()
    want.square().sum().backward()
    for (name, each), (_, its) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        if its.grad is not None:
            assert torch.equal(each.grad, its.grad), name


def test_a_call_flags_more() -> None:
    tokens, _ = sample()
    more = torch.zeros_like(tokens, dtype=torch.bool)
    more[:, 1] = True
    got = model("Local(1) | Flagged([3, 5])", causal=False)(tokens, global_mask=more)
    flags = more | torch.isin(tokens, torch.tensor(IDS))
    assert torch.equal(got, model("Local(1) | Flagged()", causal=False)(tokens, global_mask=flags))


@pytest.mark.parametrize("attention", ["Local(1) | Flagged([3, 5])", "longformer(window=1, ids=[3, 5])"])
def test_a_cache_remembers_them(attention: str) -> None:
    tokens, _ = sample()
    built = model(attention, causal=True)
    whole, cache = built(tokens), built.new_cache(3)
    steps = [built(part, cache=cache) for part in tokens.split([4, 1, 1, 3, 3], dim=1)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-10, atol=1e-12)
    start = tokens[:, :4]
    fast, slow = (built.generate(start, max_new_tokens=5, use_cache=use) for use in (True, False))
    assert torch.equal(fast, slow)


def test_weights_of_rows_show_them() -> None:
    tokens, _ = sample()
    seen = model("Local(0) | Flagged([3, 5])", causal=False).explain(tokens, rows=[0, 2])[0]
    flags = torch.isin(tokens, torch.tensor(IDS))
    want = flags.clone()
    want[:, 0] = True
    assert torch.equal((seen[:, :, 0] > 0).all(dim=1), torch.where(flags[:, :1], True, want))
    assert (seen[0, :, 1] > 0).all()  # token 2 of row 0 is global


def test_the_first_token_and_punctuation(tmp_path: Path) -> None:
    built = model("global_tokens(ids=[3, 5])", causal=False)
    assert built.config.attention == "softmax(pattern=Global([0]) | Flagged([3, 5]))"
    tokens, _ = sample()
    flags = torch.isin(tokens, torch.tensor(IDS))
    flags[:, 0] = True
    assert torch.equal(built(tokens), model("Flagged()", causal=False)(tokens, global_mask=flags))
    built.save_pretrained(tmp_path)
    assert torch.equal(af.Transformer.from_pretrained(tmp_path)(tokens), built(tokens))
    assert pattern_of("global_tokens([], ids=[4])") == af.Flagged([4])


def test_where_ids_are_not_known() -> None:
    x, flags = torch.randn(1, 4, 8), torch.tensor([[False, True, False, False]])
    layer = af.MultiHead(8, 2, attention="Local(0) | Flagged([3])")
    with pytest.raises(
        ValueError, match=re.escape("global_mask=torch.isin(tokens, torch.tensor([3])), or use Transformer")
    ):
        layer(x)
    assert torch.equal(layer(x, global_mask=flags), layer(x, tokens=torch.tensor([[1, 3, 1, 1]])))
    heads, pattern = x.unflatten(2, (2, 4)).transpose(1, 2), af.Local(0) | af.Flagged([3])
    with pytest.raises(
        ValueError, match=re.escape("the pattern flags tokens of ids [3], which attend does not know: pass")
    ):
        af.attend(heads, heads, heads, pattern=pattern)
    given = af.attend(heads, heads, heads, pattern=pattern, global_mask=flags)
    assert torch.equal(given, af.attend(heads, heads, heads, pattern=af.Local(0) | af.Flagged(), global_mask=flags))


def test_what_has_no_ids_is_refused_when_built() -> None:
    flagged = "Local(1) | Flagged([3])"
    with pytest.raises(IncompatibleError, match=r"flags tokens of ids \[3\], and images have no token ids; use Global"):
        Vit(VitConfig(image=8, patch=4, dim=8, depth=1, heads=2, attention=flagged, classes=3))
    with pytest.raises(
        IncompatibleError, match="an earlier block has shortened them to averages; put it into an earlier"
    ):
        model(("linformer(rank=4, queries=4)", flagged), causal=False, head="classifier")
    with pytest.raises(SpecError, match=r"expected ids from 0 to 8 \(vocab=9\), got 9"):
        model("Local(1) | Flagged([3, 9])", causal=False)
    with pytest.raises(
        SpecError, match=r"expected one list of token ids in all of it, got \[\] and \[3\]; .* Flagged\(\[3\]\)"
    ):
        model("Flagged() | Flagged([3])", causal=False)
    with pytest.raises(SpecError, match=r"ids=\[3\] flag tokens, and max_globals=0 leaves no room"):
        model("longformer(max_globals=0, ids=[3])", causal=False)
    with pytest.raises(
        SpecError,
        match=r"at most 1 global tokens a row, got 2; flag fewer in global_mask or use longformer\(max_globals=2\)",
    ):
        model("longformer(max_globals=1, ids=[3, 5])", causal=False)(sample()[0])
    with pytest.raises(IncompatibleError, match="takes no source"):
        af.MultiHead(8, 2, attention=flagged)(torch.randn(1, 3, 8), source=torch.randn(1, 4, 8))
