"""Positions on a grid: a row and a column for each token, tokens without a position, and what is refused."""

import pytest
import torch

import anyformer as af
from anyformer.errors import SpecError
from anyformer.testing import laws

TINY = {"vocab": 17, "dim": 16, "depth": 2, "heads": 2, "head": "mlm", "max_length": 64}


def model(position: str, **changes: object) -> af.Transformer:
    return af.Transformer(af.ModelConfig(position=position, **{**TINY, **changes})).eval()


def test_a_grid_is_read_row_by_row() -> None:
    assert af.grid(2, 3)[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert af.grid(0, 3).shape == af.grid(3, 0).shape == (1, 0, 2)


def test_an_encoding_on_a_grid_needs_one() -> None:
    message = r"sinusoidal_2d reads a row and a column for each token.* give positions\[b n 2\].*af.grid"
    with pytest.raises(SpecError, match=message):
        model("sinusoidal_2d")(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("position", ["rope", "learned", "alibi"])
def test_an_encoding_of_a_sequence_takes_no_grid(position: str) -> None:
    with pytest.raises(SpecError, match=f"{position} reads one number for each token, and these positions have 2"):
        model(position)(torch.zeros(1, 4, dtype=torch.int64), positions=af.grid(2, 2))


def test_no_position_leaves_a_token_as_it_is() -> None:
    """Two class tokens that differ in nothing but what `positions` says of them are alike."""
    tokens, without = torch.tensor([[3, 3, 5, 6, 7, 8]]), torch.tensor([[True, True, False, False, False, False]])
    positions = torch.cat([torch.tensor([[[1, 1], [0, 1]]]), af.grid(2, 2)], dim=1)
    built = model("sinusoidal_2d")
    out = built(tokens, positions=positions, no_position=without)
    torch.testing.assert_close(out[:, 0], out[:, 1], rtol=0, atol=1e-6)
    assert not torch.allclose(out, built(tokens, positions=positions), rtol=0, atol=1e-3)


def test_padding_moves_the_grid_along() -> None:
    """A padded row is the row alone, on either side, for an attention that moves real tokens left too."""
    tokens, places = torch.randint(17, (1, 6)), af.grid(2, 3)
    for attention in ("softmax", "linformer(rank=4)"):
        built = model("sinusoidal_2d", attention=attention)
        alone = built(tokens, positions=places)
        for left, right in ((3, 0), (0, 3), (1, 2)):
            keep = torch.nn.functional.pad(torch.ones(1, 6, dtype=torch.bool), (left, right))
            padded = torch.nn.functional.pad(tokens, (left, right))
            given = torch.nn.functional.pad(places, (0, 0, left, right))
            out = built(padded, positions=given, attention_mask=keep)
            torch.testing.assert_close(out[keep], alone[0], rtol=0, atol=1e-5)


def test_a_cache_remembers_the_grid() -> None:
    built = model("sinusoidal_2d", head="lm")
    tokens, places = torch.randint(17, (1, 6)), af.grid(2, 3)
    cache = built.new_cache(1)
    steps = [built(tokens[:, t : t + 1], positions=places[:, t : t + 1], cache=cache) for t in range(6)]
    torch.testing.assert_close(torch.cat(steps, dim=1), built(tokens, positions=places), rtol=0, atol=1e-5)


def test_a_case_on_a_grid_feeds_one_and_keeps_what_is_given() -> None:
    case = laws.Case("softmax", "sinusoidal_2d")
    fed, tokens = case.model(), torch.randint(17, (1, 7))
    positions = case.at(torch.arange(7)[None])
    assert positions[0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [1, 0], [1, 1]]
    assert torch.equal(fed(tokens), fed(tokens, positions=positions))
    assert not torch.equal(fed(tokens), fed(tokens, positions=positions + 1))
