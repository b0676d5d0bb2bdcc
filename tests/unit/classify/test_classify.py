"""Complex classifiers against torch's complex numbers, their twins, padding, and what they refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyformer as af
from anyformer.classify.base import Classifier, as_real_matrix
from anyformer.errors import SpecError

VOCAB, DIM, OUTPUTS = 11, 8, 3
MODELS: dict[str, type[Classifier]] = {
    "fasttext": af.FastTextClassifier,
    "lstm": af.LSTMClassifier,
    "cnn": af.CNNClassifier,
    "transformer": af.TransformerClassifier,
}
KNOBS: dict[str, dict[str, Any]] = {"transformer": {"depth": 2, "heads": 2}, "cnn": {"widths": (2, 3)}}


def built(model: str, **given: object) -> Classifier:
    knobs: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "outputs": OUTPUTS, **KNOBS.get(model, {}), **given}
    made = MODELS[model](**knobs).double()
    for name, weight in made.named_parameters():
        if "norm" not in name:
            nn.init.normal_(weight, std=0.4)
    return made


def tokens(n: int = 7) -> Tensor:
    return torch.randint(VOCAB, (2, n))


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(*x.chunk(2, dim=-1))


def as_real(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], dim=-1)


def on_both(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    return torch.complex(function(z.real), function(z.imag))


def embedded(model: Classifier, ids: Tensor) -> Tensor:
    """Waves r exp(i om p) of the words."""
    z = as_complex(model.embedding.tokens.weight)[ids]
    angles = torch.arange(ids.shape[1])[:, None] * model.embedding.encodings[0].frequencies
    return z * torch.polar(torch.ones_like(angles), angles)


def fasttext(model: Classifier, z: Tensor) -> Tensor:
    mean = z.mean(dim=1)
    return mean.real + mean.imag


def lstm(model: Classifier, z: Tensor) -> Tensor:
    unit = model.unit
    weights = {name: torch.complex(unit.real[name], unit.imaginary[name]) for name in ("x", "h")}
    bias = torch.complex(*unit.bias.unflatten(0, (4, 2, -1)).unbind(1))
    hidden = cell = torch.zeros(len(z), unit.width // 2, dtype=torch.complex128)
    states = []
    for x in z.unbind(1):
        given = [x @ weights["x"][gate].mT + hidden @ weights["h"][gate].mT + bias[gate] for gate in range(4)]
        enter, forget, out = (on_both(torch.sigmoid, given[gate]) for gate in (0, 1, 3))
        new = on_both(torch.tanh, given[2])
        cell = torch.complex(
            forget.real * cell.real + enter.real * new.real, forget.imag * cell.imag + enter.imag * new.imag
        )
        shown = on_both(torch.tanh, cell)
        hidden = torch.complex(out.real * shown.real, out.imag * shown.imag)
        states.append(hidden)
    return as_real(torch.stack(states, dim=1).mean(dim=1))


def cnn(model: Classifier, z: Tensor) -> Tensor:
    found = []
    for convolution in model.convolutions:
        filters = torch.complex(*convolution.weights)  # o i w
        width = filters.shape[-1]
        padded = torch.cat([z, torch.zeros(len(z), width - 1, z.shape[2], dtype=z.dtype)], dim=1)
        windows = padded.unfold(1, width, 1)  # b n i w
        y = torch.einsum("bniw,oiw->bno", windows, filters)
        found.append(as_real(on_both(lambda part, own=convolution: torch.relu(part + own.bias), y)).amax(dim=1))
    return torch.cat(found, dim=-1)


def transformer(model: Classifier, z: Tensor) -> Tensor:
    for block in model.blocks:
        mixer, heads = block.mixer, block.mixer.site.heads
        normed = on_both(block.mixer_norm, z)
        q, k, v = (
            (normed @ getattr(mixer, name).weight.mT.to(z.dtype)).unflatten(-1, (heads, -1)).transpose(1, 2)
            for name in "qkv"
        )
        score = ((q.conj() if mixer.conjugate else q) @ k.mT).abs() / q.shape[-1] ** 0.5
        mixed = torch.softmax(score, dim=-1).to(z.dtype) @ v
        z = z + mixed.transpose(1, 2).flatten(2) @ mixer.o.weight.mT.to(z.dtype)
        z = z + on_both(block.feed_forward, on_both(block.feed_forward_norm, z))
    return as_real(on_both(model.norm, z).mean(dim=1))


BRUTE = {"fasttext": fasttext, "lstm": lstm, "cnn": cnn, "transformer": transformer}


@pytest.mark.parametrize(
    ("model", "knobs"), [*((model, {}) for model in MODELS), ("transformer", {"conjugate": False})]
)
def test_equals_complex_numbers(model: str, knobs: dict) -> None:
    made, ids, weights = built(model, **knobs), tokens(), torch.randn(2, OUTPUTS, dtype=torch.float64)
    got = made(ids)
    expected = made.out(BRUTE[model](made, embedded(made, ids)))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    found, wanted = (torch.autograd.grad((each * weights).sum(), list(made.parameters())) for each in (got, expected))
    for (name, _), one, two in zip(made.named_parameters(), found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_a_complex_matrix_as_a_real_one() -> None:
    a, b, z = torch.randn(5, 3), torch.randn(5, 3), torch.randn(4, 3, dtype=torch.complex64)
    torch.testing.assert_close(as_real(z) @ as_real_matrix(a, b).mT, as_real(z @ torch.complex(a, b).mT))


@pytest.mark.parametrize("number", ["real", "complex"])
@pytest.mark.parametrize("model", MODELS)
def test_padding_moves_nothing(model: str, number: str) -> None:
    made, ids = built(model, number=number), torch.randint(VOCAB, (3, 9))
    keep = torch.rand(3, 9) < 0.6
    keep[0], keep[1, :4] = False, True
    other = torch.where(keep, ids, 99)
    found = made(other, attention_mask=keep)
    torch.testing.assert_close(found, made(ids, attention_mask=keep.long()), rtol=0, atol=0)
    for row in range(3):
        torch.testing.assert_close(found[row], made(ids[row : row + 1, keep[row]])[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[0], made.out.bias, rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_only_complex_waves_show_a_mean_the_order(model: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    for number, differs in (("complex", True), ("real", model != "fasttext")):
        one, two = built(model, number=number)(ids)
        assert torch.allclose(one, two, rtol=0, atol=1e-9) != differs


@pytest.mark.parametrize("frequencies", ["dimension", "word", "both"])
def test_frequencies_of_words(frequencies: str) -> None:
    vocab = "" if frequencies == "dimension" else f", vocab={VOCAB}"
    made = built("fasttext", position=f"complex_order(frequencies={frequencies}, phase=False{vocab})")
    made(tokens()).sum().backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in made.parameters())


@pytest.mark.parametrize("number", ["real", "complex"])
@pytest.mark.parametrize("model", MODELS)
def test_starts_the_same_for_a_seed_and_moves_no_generator(model: str, number: str) -> None:
    state = torch.get_rng_state()
    knobs: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "outputs": OUTPUTS, "number": number, **KNOBS.get(model, {})}
    one, two, other = (MODELS[model](**knobs, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, two.state_dict()[name])
    assert not torch.equal(one.embedding.tokens.weight, other.embedding.tokens.weight)
    assert one(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, OUTPUTS)


def test_refusals() -> None:
    given: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "outputs": OUTPUTS}
    with pytest.raises(SpecError, match="expected dim to be a multiple of 2, of at least 2, got 7"):
        af.FastTextClassifier(**{**given, "dim": 7})
    with pytest.raises(SpecError, match="expected width to be a multiple of 2, of at least 2, got 5"):
        af.LSTMClassifier(**given, width=5)
    with pytest.raises(SpecError, match="expected filters to be a multiple of 2, of at least 2, got 3"):
        af.CNNClassifier(**given, filters=3)
    with pytest.raises(SpecError, match="expected dim to be a multiple of 6, of at least 6, got 8"):
        af.TransformerClassifier(**given, heads=3)
    for name in ("vocab", "dim", "outputs"):
        with pytest.raises(SpecError, match=f"expected {name} to be a whole number of at least 1, got 0"):
            af.FastTextClassifier(**{**given, name: 0})
    with pytest.raises(SpecError, match=r"vocab to be a whole number of at least 1, got -1; expected outputs .* got 0"):
        af.FastTextClassifier(**{**given, "vocab": -1, "outputs": 0})
    with pytest.raises(SpecError, match="expected filters to be a whole number of at least 1, got 0"):
        af.CNNClassifier(**given, filters=0)
    with pytest.raises(SpecError, match=r"expected widths\[1\] to be a whole number of at least 1, got 0"):
        af.CNNClassifier(**given, widths=(3, 0))
    with pytest.raises(SpecError, match=r"expected widths to be at least one number of tokens, .* got \(\)"):
        af.CNNClassifier(**given, widths=())
    with pytest.raises(SpecError, match="expected width to be a whole number of at least 1, got 0"):
        af.LSTMClassifier(**given, width=0)
    with pytest.raises(
        SpecError, match=r"expected depth .* got 0; expected heads to be a whole number of at least 1, got 0"
    ):
        af.TransformerClassifier(**given, depth=0, heads=0)
    with pytest.raises(SpecError, match=r"expected an encoding added at the embedding, .* got rope"):
        af.FastTextClassifier(**given, position="rope")
    model = af.FastTextClassifier(**given)
    with pytest.raises(SpecError, match="tokens: expected ids from 0 to 10"):
        model(torch.tensor([[VOCAB]]))


@pytest.mark.plain
def test_what_types_refuse_too() -> None:
    given: dict[str, Any] = {"vocab": VOCAB, "dim": DIM, "outputs": OUTPUTS}
    with pytest.raises(SpecError, match='expected number="real" or number="complex", got \'imaginary\''):
        af.FastTextClassifier(**given, number="imaginary")
    model = af.FastTextClassifier(**given)
    with pytest.raises(ValueError, match=r"tokens: expected shape \[b, n\], got \[3\]"):
        model(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \[2, 7\], got \[2, 5\]"):
        model(tokens(), attention_mask=torch.ones(2, 5, dtype=torch.bool))
