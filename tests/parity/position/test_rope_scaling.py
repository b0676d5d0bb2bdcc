"""Scaled rotary frequencies against those of transformers, and against what each scaling says of itself."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

import anyformer as af
from anyformer.errors import SpecError
from anyformer.position.base import Position
from anyformer.testing import laws

DIM, ORIGINAL, LONGEST = 64, 512, 4096
SHORT, LONG = ([round(start + 0.25 * pair, 2) for pair in range(DIM // 2)] for start in (1.0, 2.0))
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": SHORT,
    "long_factor": LONG,
}
PEERS = {
    "linear(factor=8)": {"rope_type": "linear", "factor": 8.0},
    "yarn(factor=8)": YARN,
    "yarn(factor=8, original=512, beta_fast=20, beta_slow=2)": YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn(8, 512, truncate=False)": YARN | {"truncate": False},
    "yarn(8, 512, attention=1.5)": YARN | {"attention_factor": 1.5},
    f"longrope(factor=8, original=512, short={SHORT}, long={LONG})": LONGROPE,
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "llama3(factor=4, original=300, low=2, high=3)": {
        "rope_type": "llama3",
        "factor": 4.0,
        "original_max_position_embeddings": 300,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
    },
}


def built(scaling: str, max_length: int = LONGEST, knobs: str = "", dim: int = DIM) -> Position:
    return af.build_position(f"rope(scaling={scaling}{knobs})", af.Site(2 * dim, 2, max_length=max_length))


def config(parameters: dict, **more: int) -> LlamaConfig:
    sizes = {"hidden_size": 2 * DIM, "num_attention_heads": 2, "max_position_embeddings": LONGEST, **more}
    return LlamaConfig(**sizes, rope_parameters={"rope_theta": 10000.0, **parameters})


def peer(parameters: dict, length: int, **more: int) -> tuple[Tensor, float]:
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config(parameters, **more), "cpu", length)


@pytest.mark.parametrize("scaling", PEERS)
def test_frequencies_and_magnitude(scaling: str) -> None:
    speeds, magnitude = peer(PEERS[scaling], LONGEST)
    position = built(scaling)
    torch.testing.assert_close(position.speeds().float(), speeds, rtol=2e-6, atol=0)
    assert abs(position.magnitude - magnitude) < 1e-12
    assert abs(position.scale(DIM) - DIM**-0.5 * magnitude**2) < 1e-12


@pytest.mark.parametrize("scaling", ["linear(factor=8)", "yarn(factor=8)", "llama3"])
def test_frequencies_of_partly_rotated_heads(scaling: str) -> None:
    parameters = PEERS[scaling] | {"partial_rotary_factor": 0.25}
    position = built(scaling, knobs=", partial=0.25, base=5e5")
    speeds, magnitude = peer(parameters | {"rope_theta": 5e5}, LONGEST)
    assert speeds.shape == (8,)
    torch.testing.assert_close(position.speeds().float(), speeds, rtol=2e-6, atol=0)
    assert position.scale(DIM) == DIM**-0.5  # the channels that stay do not grow
    q = torch.ones(1, 2, 1, DIM)
    turned = position.rotate(q, q, torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))[0]
    torch.testing.assert_close(turned[0, 0, 0, [0, 15, 16, 63]], torch.tensor([magnitude, magnitude, 1.0, 1.0]))


@pytest.mark.parametrize("scaling", PEERS)
def test_scaled_logits_and_gradients_against_llama(scaling: str) -> None:
    # the peer takes longrope's long factors beyond 512 tokens only, where its float32 angles are too far off to compare
    position = built(scaling, max_length=ORIGINAL if "longrope" in scaling else LONGEST)
    parameters = PEERS[scaling]
    q, k, probe = torch.randn(1, 2, 40, DIM), torch.randn(1, 2, 40, DIM), torch.randn(1, 2, 40, 40)
    places = torch.arange(40)[None]
    waves = llama.LlamaRotaryEmbedding(config(parameters))(torch.zeros(1), places)
    outs = []
    for turn, scale in (
        (lambda q, k: position.rotate(q, k, places, places), position.scale(DIM)),
        (lambda q, k: llama.apply_rotary_pos_emb(q, k, *waves), DIM**-0.5),
    ):
        inputs = q.clone().requires_grad_(), k.clone().requires_grad_()
        turned_q, turned_k = turn(*inputs)
        logits = turned_q @ turned_k.mT * scale
        outs.append((logits, *torch.autograd.grad((logits * probe).sum(), inputs)))
    for ours, theirs in zip(*outs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * float(theirs.detach().abs().max()))


def test_within_the_trained_length_longrope_takes_the_short_factors() -> None:
    scaling = f"longrope(factor=8, original=512, short={SHORT}, long={LONG})"
    speeds, _ = peer(LONGROPE, ORIGINAL)
    torch.testing.assert_close(built(scaling, max_length=ORIGINAL).speeds().float(), speeds, rtol=2e-6, atol=0)


def test_pairs_that_stay_are_the_slow_ones() -> None:
    parameters = {"rope_type": "proportional", "partial_rotary_factor": 0.3}
    speeds, _ = peer(parameters, LONGEST)
    position = af.build_position("rope(kept=0.3)", af.Site(2 * DIM, 2))
    torch.testing.assert_close(position.speeds().float(), speeds, rtol=2e-6, atol=0)
    assert int((position.speeds() > 0).sum()) == 9


@pytest.mark.parametrize("dim", [2, 4, 64])
def test_ntk_is_another_base(dim: int) -> None:
    base = 10000.0 * 4.0 ** (dim / (dim - 2)) if dim > 2 else 10000.0
    other = af.build_position(f"rope(base={base})", af.Site(dim, 1))
    torch.testing.assert_close(built("ntk(factor=4)", dim=dim).speeds(), other.speeds(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 1000, LONGEST])
def test_dynamic_frequencies(length: int) -> None:
    parameters = {"rope_type": "dynamic", "factor": 4.0}
    speeds, _ = peer(parameters, length, max_position_embeddings=ORIGINAL)
    position = built("dynamic_ntk(factor=4, original=512)")
    found = position.dynamic.at(position.speeds(), torch.tensor([length]), LONGEST)[0]
    torch.testing.assert_close(found.float(), speeds, rtol=2e-6, atol=0)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("knobs", ["", ", partial=0.5"])
def test_dynamic_scores_are_those_of_text_written_token_by_token(pairing: str, knobs: str) -> None:
    """Row i, as a cache of unrotated keys gives it: everything rotated anew with the frequencies of i + 1 tokens."""
    dim, n, knobs = 8, 37, f", pairing={pairing}{knobs}"
    site = af.Site(dim, 1, max_length=64)
    position = af.build_position(f"rope(scaling=dynamic_ntk(factor=2, original=8){knobs})", site)
    q, k = torch.randn(2, 2, 1, n, dim, dtype=torch.float64)
    q.requires_grad_()
    places = torch.arange(n)[None]
    rows = []
    for at in range(n):
        width = position.width
        base = 10000.0 * (2.0 * max(at + 1, 8) / 8 - 1) ** (width / (width - 2))
        fixed = af.build_position(f"rope(base={base}{knobs})", site)
        turned = fixed.rotate(q[:, :, at : at + 1], k, places[:, at : at + 1], places)
        rows.append(turned[0] @ turned[1].mT * dim**-0.5)
    expected = torch.cat(rows, dim=2)
    found = q @ k.mT * dim**-0.5 + position.score(q, k, places, places)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), q, retain_graph=True)[0] for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    assert position.score(q[:, :, :0], k, places[:, :0], places).shape == (2, 1, 0, n)


def test_dynamic_is_a_rotation_within_the_trained_length() -> None:
    spec = "rope(scaling=dynamic_ntk(factor=2, original=64))"
    position = af.build_position(spec, af.Site(16, 2, max_length=64))
    assert [each[0].name for each in position.forms] == ["ROTATE"]
    q = torch.randn(1, 2, 9, 8)
    assert torch.equal(af.attend(q, q, q, position=position), af.attend(q, q, q, position="rope"))
    longer = "rope(scaling=dynamic_ntk(factor=2, original=32))"
    with pytest.raises(ValueError, match="linear cannot use rope"):
        af.check("linear", longer, max_length=64)


@pytest.mark.parametrize("spec", ["rope(scaling=dynamic_ntk(2.0, 6))", "rope(scaling=yarn(4.0, 6), partial=0.5)"])
def test_laws_of_decoding_padding_and_causality(spec: str) -> None:
    case = laws.Case("softmax", spec, causal=True)
    for law in laws.ALL:
        if law.name in ("D01", "D02", "D07", "D13"):
            result = laws.apply(law, case)
            assert result.status == "holds", result


def test_equal_and_learned_frequencies() -> None:
    equal = af.build_position("rope(frequencies=equal, base=100)", af.Site(8, 1)).speeds()
    torch.testing.assert_close(equal, torch.full((4,), 0.1, dtype=torch.float64))
    learned = af.build_position("rope(frequencies=learned)", af.Site(8, 1)).double()
    assert learned.learned.shape == (4,)
    q, k = torch.randn(2, 1, 1, 5, 8, dtype=torch.float64)
    places = torch.tensor([[0, 1, 5, 2, 9]])

    def logits(speeds: Tensor) -> Tensor:
        names = {"learned": speeds}
        turned = torch.func.functional_call(learned, names, (q, k, places, places))
        return turned[0] @ turned[1].mT

    learned.forward = learned.rotate
    speeds = torch.tensor([1.0, 0.3, 0.1, 0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(logits, speeds)
    plain = af.build_position("rope", af.Site(8, 1))
    start = af.build_position("rope(frequencies=learned)", af.Site(8, 1))
    ours, theirs = (each.rotate(q.float(), k.float(), places, places)[0] for each in (start, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


REFUSED = {
    "rope(scaling=linear(factor=0.5))": "factor=0.5: expected greater than or equal to 1",
    "rope(scaling=yarm(factor=4))": "there is no scaling of rope named 'yarm'; did you mean 'yarn'",
    "rope(scaling=yarn(orignal=4))": "unknown knob 'orignal'; did you mean 'original'",
    "rope(scaling=yarn(beta_fast=1, beta_slow=2))": r"yarn: expected beta_slow below beta_fast, got 2.0 and 1.0; 1 and 32",
    "rope(scaling=llama3(low=4))": "llama3: expected low below high, got 4.0 and 4.0; 1 and 4 are the authors'",
    "rope(scaling=longrope(long=[1.0, 2.0]))": "expected one short factor for each of the 4 rotated pairs of a head, got 0",
    "rope(scaling=longrope(short=[1, 1, 1, 1], long=[1.0]))": "expected one long factor for each of the 4 .*got 1; write long=",
    "rope(scaling=2.0)": r"expected a scaling such as yarn\(factor=4, original=2048\), got 2.0",
    "rope(frequencies=learned, scaling=ntk)": "a scaling stretches geometric frequencies, got frequencies='learned'",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=REFUSED[spec]):
        af.build_position(spec, af.Site(32, 4))


def test_a_scaling_is_written_the_one_way() -> None:
    read = af.ModelConfig(position="rope(scaling=yarn(4, 2048, beta_slow=1.0))")
    assert read.position == "rope(scaling=yarn(factor=4.0, original=2048))"
    assert af.ModelConfig.from_json(read.to_json()) == read
    assert af.ModelConfig(position="rope(scaling=linear)").position == "rope(scaling=linear)"


def test_without_the_trained_length_the_factor_tells_it() -> None:
    given = built("yarn(factor=8, original=512)").speeds()
    torch.testing.assert_close(built("yarn(factor=8)").speeds(), given, rtol=0, atol=0)
