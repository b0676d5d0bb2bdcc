import pytest
import torch
from tiny_models import VOCAB, ids, mask, model

from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.generate import Chooser, narrow

CPU = torch.device("cpu")


def greedy_by_hand(built, tokens, new):
    """The largest logit of the whole sequence, computed again for every token."""
    for _ in range(new):
        tokens = torch.cat([tokens, built(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return tokens


@pytest.mark.parametrize(
    ("attention", "position"), [("softmax", "learned"), ("softmax", "t5"), ("local(3)", "rope"), ("gru", "none")]
)
def test_greedy_equals_the_largest_logit_each_time(attention, position):
    built, tokens = model(attention=attention, position=position), ids(3, 5)
    expected = greedy_by_hand(built, tokens, 5)
    assert torch.equal(built.generate(tokens, max_new_tokens=5), expected)
    assert torch.equal(built.generate(tokens, max_new_tokens=5, use_cache=False), expected)
    assert len({tuple(row[5:].tolist()) for row in expected}) > 1


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "rope", "alibi", "shaw"])
def test_prompts_padded_on_the_left_continue_as_alone(position):
    built, tokens, keep = model(position=position), ids(3, 6), mask([6, 2, 4], 6, "left")
    together = built.generate(tokens, max_new_tokens=4, attention_mask=keep.long())
    assert torch.equal(together[:, :6], tokens)
    for row, real in enumerate(keep):
        assert torch.equal(
            together[row, 6:], built.generate(tokens[row, real][None], max_new_tokens=4)[0, int(real.sum()) :]
        )


def test_a_row_stops_at_its_end_and_the_loop_when_all_have():
    built, tokens = model(position="learned"), ids(3, 4)
    free = built.generate(tokens, max_new_tokens=10)
    eos = int(free[0, 6])
    stopped = built.generate(tokens, max_new_tokens=10, eos=eos, pad=1)
    ends = [(row[4:] == eos).nonzero()[:1, 0].tolist() for row in free]
    lengths = [end[0] + 1 if end else 10 for end in ends]
    assert min(lengths) < max(lengths)
    assert stopped.shape[1] == 4 + max(lengths)
    for row, length in enumerate(lengths):
        assert torch.equal(stopped[row, : 4 + length], free[row, : 4 + length])
        assert bool((stopped[row, 4 + length :] == 1).all())
    alone = built.generate(tokens[:1], max_new_tokens=10, eos=eos)
    assert torch.equal(alone[0], free[0, : 4 + lengths[0]])


def test_the_end_of_one_row_leaves_padded_rows_as_they_are():
    built, tokens, keep = model(position="t5"), ids(2, 4), mask([2, 4], 4, "left")
    free = built.generate(tokens, max_new_tokens=8, attention_mask=keep)
    eos = int(free[0, 5])
    stopped = built.generate(tokens, max_new_tokens=8, attention_mask=keep, eos=eos)
    until = next((place for place, token in enumerate(free[1, 4:].tolist()) if token == eos), 7)
    assert torch.equal(stopped[1, : 4 + until + 1], free[1, : 4 + until + 1])


def test_draws_depend_on_the_seed_and_on_no_global_generator():
    built, tokens = model(), ids(2, 4)
    before = torch.get_rng_state()
    first, again, other = (built.generate(tokens, max_new_tokens=5, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    fresh = [built.generate(tokens, max_new_tokens=5, temperature=3.0) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(*fresh)


def test_generation_runs_as_in_eval_and_leaves_the_mode_alone():
    built, tokens = model(dropout=0.5), ids(2, 4)
    expected = built.generate(tokens, max_new_tokens=6)
    built.train()
    built.blocks[0].eval()
    assert torch.equal(built.generate(tokens, max_new_tokens=6), expected)
    assert built.training
    assert not built.blocks[0].training
    assert built.blocks[1].mixer.training


def test_no_new_tokens_give_the_prompt():
    tokens = ids(2, 4)
    assert torch.equal(model().generate(tokens, max_new_tokens=0), tokens)


def test_draws_follow_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, 4)
    drawn = Chooser(2.0, None, None, 0, CPU)(logits)
    shares = torch.bincount(drawn, minlength=4) / 20000
    expected = (logits[0] / 2).softmax(dim=0)
    assert (shares - expected).abs().max() < 4 * (0.25 / 20000) ** 0.5


def test_a_tiny_temperature_is_greedy_and_does_not_overflow():
    logits = torch.randn(50, VOCAB) * 1e4
    assert torch.equal(Chooser(1e-30, None, None, 0, CPU)(logits), logits.argmax(dim=-1))


def test_the_k_largest_stay_and_no_more():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    kept = narrow(logits, 2, None)
    assert kept.isfinite().sum(dim=1).tolist() == [2, 2]
    assert torch.equal(kept[1].isfinite(), torch.tensor([True, True, False, False, False]))
    assert torch.equal(kept[kept.isfinite()], torch.tensor([3.0, 3.0, 5.0, 4.0]))
    assert torch.equal(narrow(logits, 9, None), logits)
    drawn = Chooser(5.0, 2, None, 0, CPU)(logits[1].expand(500, 5))
    assert set(drawn.tolist()) == {0, 1}


@pytest.mark.parametrize(("top_p", "expected"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 4)])
def test_the_smallest_set_of_enough_probability_stays(top_p, expected):
    probabilities = torch.tensor([[0.05, 0.3, 0.5, 0.15]], dtype=torch.float64)
    kept = narrow(probabilities.log(), None, top_p).isfinite()
    assert int(kept.sum()) == expected
    assert bool(kept[0, 2])


def test_top_p_counts_among_the_top_k():
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    assert narrow(probabilities.log(), 2, 0.55).isfinite().tolist() == [[True, False, False, False]]
    assert narrow(probabilities.log(), None, 0.55).isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("position", ["learned"])
def test_a_generation_that_would_not_fit_is_refused_before_it_starts(position):
    built = model(position=position)
    assert built.generate(ids(1, 30), max_new_tokens=3).shape == (1, 33)
    calls = []
    built.register_forward_pre_hook(lambda *_: calls.append(1))
    built.embedding.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(SpecError, match="learned: position 32 needs a table of at least 33 rows"):
        built.generate(ids(1, 30), max_new_tokens=4)
    assert not calls
    padded = mask([28], 30, "left")
    assert built.generate(ids(1, 30), max_new_tokens=5, attention_mask=padded).shape == (1, 35)


def test_settings_out_of_range_are_refused_together():
    with pytest.raises(SpecError) as error:
        model().generate(ids(1, 2), max_new_tokens=1, temperature=-1.0, top_k=0, top_p=1.5)
    for part in (
        "temperature=-1.0: expected 0 (greedy) or more",
        "top_k=0: expected at least 1, or None",
        "top_p=1.5: expected above 0 and at most 1, or None",
    ):
        assert part in str(error.value)
    with pytest.raises(SpecError, match="top_k and top_p choose among draws, and temperature=0 draws nothing"):
        model().generate(ids(1, 2), max_new_tokens=1, top_k=3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"max_new_tokens": -1},
            SpecError,
            "generate: expected max_new_tokens as a whole number of at least 0, got -1",
        ),
        ({"eos": VOCAB}, SpecError, r"generate: expected eos from 0 to 22 \(vocab=23\), got 23"),
        ({"pad": -1}, SpecError, r"generate: expected pad from 0 to 22 \(vocab=23\), got -1"),
        (
            {"tokens": ids(2, 0)},
            ValueError,
            r"generate: expected prompts \[b, n\] of at least one token, got shape \[2, 0\]",
        ),
        ({"attention_mask": mask([2, 4], 4, "right")}, ValueError, "after its last slot; pad prompts on the left"),
    ],
)
def test_what_cannot_be_continued_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        model().generate(**{"tokens": ids(2, 4), "max_new_tokens": 3, **arguments})


@pytest.mark.plain
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 1.5}, "generate: expected max_new_tokens as a whole number of at least 0, got 1.5"),
        ({"max_new_tokens": True}, "generate: expected max_new_tokens as a whole number of at least 0, got True"),
        ({"eos": 1.5}, r"generate: expected eos from 0 to 22 \(vocab=23\), got 1.5"),
    ],
)
def test_what_is_no_whole_number_is_refused(arguments, message):
    with pytest.raises(SpecError, match=message):
        model().generate(**{"tokens": ids(2, 4), "max_new_tokens": 3, **arguments})


@pytest.mark.plain
def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 4\], got \[2, 3\]"):
        model().generate(ids(2, 4), max_new_tokens=3, attention_mask=mask([2, 3], 3, "left"))


@pytest.mark.parametrize("changes", [{"head": "mlm"}, {"head": "classifier", "outputs": 2}, {"causal": False}])
def test_models_that_do_not_score_the_next_token_are_refused(changes):
    with pytest.raises(
        IncompatibleError, match="generate needs a causal model that scores the next token, this one has"
    ):
        model(**changes).generate(ids(1, 3), max_new_tokens=1)
