"""Learned tokens before every row: seen by all tokens, no part of the text."""

from pathlib import Path

import pytest
import torch

import anyformer as af
from anyformer.errors import IncompatibleError, SpecError

torch.set_num_threads(1)


def model(
    count: int = 2, *, causal: bool = False, attention: str = "Local(1) | Global([0, 1])", **knobs: object
) -> af.Transformer:
    given = {"depth": 2, "position": "rope", "head": "lm"} | knobs
    config = af.ModelConfig(vocab=9, dim=16, heads=2, attention=attention, causal=causal, registers=count, **given)
    built = af.Transformer(config).double().eval()
    with torch.no_grad():
        if built.registers is not None:
            built.registers.vectors.mul_(4)
    return built


def sample(b: int = 2, n: int = 9) -> torch.Tensor:
    return torch.randint(0, 9, (b, n), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "position, causal",
    [(each, causal) for each in ("none", "rope", "alibi", "t5", "shaw", "sinusoidal") for causal in (False, True)]
    + [("fox", True)],
)
def test_they_are_tokens_of_ids_that_no_text_has(position: str, causal: bool) -> None:
    """The same model with two more ids, whose vectors are the registers, in front of each row."""
    one = model(causal=causal, position=position)
    more = af.ModelConfig(
        vocab=11,
        dim=16,
        depth=2,
        heads=2,
        attention="Local(1) | Global([0, 1])",
        position=position,
        causal=causal,
        outputs=9,
    )
    other = af.Transformer(more).double().eval()
    state = one.state_dict()
    state["embedding.tokens.weight"] = torch.cat([state["embedding.tokens.weight"], state.pop("registers.vectors")])
    other.load_state_dict(state)
    tokens = sample()
    longer = torch.cat([torch.tensor([[9, 10]]).expand(2, -1), tokens], dim=1)
    places = torch.cat([torch.zeros(2, dtype=torch.long), torch.arange(9)])[None]
    without = (torch.arange(11) < 2).expand(2, -1)
    want = other(longer, positions=places, no_position=without)[:, 2:]
    torch.testing.assert_close(one(tokens), want, rtol=1e-11, atol=1e-12)


def test_all_tokens_meet_in_them() -> None:
    built, tokens = model(), sample()
    other = tokens.clone()
    other[:, -1] = (other[:, -1] + 1) % 9
    assert ((built(tokens) - built(other)).abs().amax(dim=2) > 1e-6).all()  # two blocks: token -> register -> token
    without = model(0, attention="Local(1)")
    assert torch.equal(without(tokens)[:, :5], without(other)[:, :5])
    assert without.registers is None
    built(tokens).sum().backward()
    assert built.registers is not None
    assert (built.registers.vectors.grad.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(causal: bool) -> None:
    built, tokens = model(causal=causal), sample()
    padded = torch.cat([torch.full((2, 3), 7), tokens[:, :4], torch.full((2, 1), 7), tokens[:, 4:]], dim=1)
    keep = torch.ones(2, 13, dtype=torch.bool)
    keep[:, [0, 1, 2, 7]] = False
    torch.testing.assert_close(built(padded, attention_mask=keep)[:, keep[0]], built(tokens), rtol=1e-11, atol=1e-12)
    pooled = model(head="classifier", outputs=3)
    torch.testing.assert_close(pooled(padded, attention_mask=keep), pooled(tokens), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("attention", ["Local(1) | Global([0, 1])", "softmax", "linear", "longformer(window=1)"])
def test_a_cache_holds_them_once(attention: str) -> None:
    built, tokens = model(causal=True, attention=attention), sample()
    whole, cache = built(tokens), built.new_cache(2)
    parts = [built(part, cache=cache) for part in tokens.split([3, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)
    assert cache.length == 9
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :2] = False
    cache, parts = built.new_cache(2), []
    for end, part in zip((3, 4, 9), tokens.split([3, 1, 5], dim=1), strict=True):
        parts.append(built(part, cache=cache, attention_mask=keep[:, :end]))
    whole = built(tokens, attention_mask=keep)
    torch.testing.assert_close(torch.cat(parts, dim=1)[keep], whole[keep], rtol=1e-10, atol=1e-12)
    fast, slow = (built.generate(tokens[:, :4], max_new_tokens=4, use_cache=use) for use in (True, False))
    assert torch.equal(fast, slow)


def test_a_cache_goes_back() -> None:
    built, tokens = model(causal=True), sample()
    cache = built.new_cache(2)
    built(tokens, cache=cache)
    for length in (5, 0):
        again = cache.select([1, 0]).copy().detach()
        again.crop(length)
        assert again.length == length
        got = built(tokens.flip(0)[:, length:], cache=again)
        torch.testing.assert_close(got, built(tokens).flip(0)[:, length:], rtol=1e-10, atol=1e-12)


def test_saved_counted_explained(tmp_path: Path) -> None:
    built, tokens = model(), sample()
    assert built.count_parameters()["total"] == model(0, attention="Local(1)").count_parameters()["total"] + 2 * 16
    built.save_pretrained(tmp_path)
    assert torch.equal(af.Transformer.from_pretrained(tmp_path)(tokens), built(tokens))
    seen = built.explain(tokens, rows=[0, 5])[0]  # the first register, the fourth token
    assert seen.shape == (2, 2, 2, 11)
    assert (seen[:, :, 0] > 0).all()
    assert (seen[0, 0, 1] > 0).tolist() == [True, True, False, False, True, True, True, False, False, False, False]


def test_one_that_is_checkpointed_has_the_same_gradients() -> None:
    one, other = model().train(), model(checkpointing=True).train()
    for each in (one, other):
        each(sample()).square().sum().backward()
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad)


def test_what_registers_cannot_be_with() -> None:
    tokens = sample()
    with pytest.raises(IncompatibleError, match="documents in one row would meet in them; give each document a row"):
        model(attention="Local(1)")(tokens, document_ids=torch.zeros_like(tokens))
    with pytest.raises(IncompatibleError, match=r"registers \(2 here\) are told by their place; use registers=0"):
        model(attention="linformer(rank=4, queries=4)", head="classifier", outputs=3)
    with pytest.raises(IncompatibleError, match='registers have none; use head="mlm", or registers=0'):
        model(attention="softmax", head="enhanced_mlm")
    with pytest.raises(SpecError, match=r"registers=-1: expected greater than or equal to 0"):
        model(-1)


@pytest.mark.plain
def test_one_with_registers_exports_for_any_batch_and_length() -> None:
    built, free = model(depth=1), torch.export.Dim.AUTO
    exported = torch.export.export(built, (sample(),), dynamic_shapes=({0: free, 1: free},)).module()
    longer = sample(3, 17)
    torch.testing.assert_close(exported(longer), built(longer), rtol=1e-10, atol=1e-12)
