"""Longformer against Hugging Face's LongformerSelfAttention and against its equation, with ragged global tokens."""

import pytest
import torch
from torch import Tensor
from transformers import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from anyformer.mixer.longformer import Longformer
from anyformer.model.build import build_mixer
from anyformer.site import Site

DIM, HEADS, WINDOW, LENGTH = 12, 3, 2, 16  # the peer counts both sides: 4; lengths are multiples of that
GLOBALS = {"none": [[], [], []], "ragged": [[0], [0, 5, 9], []], "on padding": [[0, 15], [13], [2, 11, 14]]}


def ours(causal: bool) -> Longformer:
    """Without an output projection: the peer has none."""
    spec = f"longformer(window={WINDOW}, max_globals=3)"
    mixer = build_mixer(spec, "none", Site(DIM, HEADS, causal=causal)).double()
    assert isinstance(mixer, Longformer)
    for weight in mixer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    torch.nn.init.eye_(mixer.o.weight)
    torch.nn.init.zeros_(mixer.o.bias)
    return mixer


def matched(mixer: Longformer, peer: LongformerSelfAttention) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Projections of ours beside those of the peer."""
    names = {"q": "query", "k": "key", "v": "value"}
    local = [(mixer.get_submodule(ours), peer.get_submodule(theirs)) for ours, theirs in names.items()]
    return local + [
        (mixer.get_submodule(f"for_globals.{ours}"), peer.get_submodule(f"{theirs}_global"))
        for ours, theirs in names.items()
    ]


def pair() -> tuple[Longformer, LongformerSelfAttention]:
    """Ours, and the peer with the same weights, in float32: the peer masks with numbers that only fit there."""
    mixer = ours(False).float()
    config = LongformerConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        attention_window=[2 * WINDOW],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )
    peer = LongformerSelfAttention(config, 0).eval()
    for mine, theirs in matched(mixer, peer):
        theirs.load_state_dict(mine.state_dict())
    return mixer, peer


def facts(where: str, lengths: list[int]) -> tuple[Tensor, Tensor]:
    keep = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    flags = torch.zeros(3, LENGTH, dtype=torch.bool)
    for row, tokens in enumerate(GLOBALS[where]):
        flags[row, tokens] = True
    return keep, flags


def heads(linear: torch.nn.Module, x: Tensor) -> Tensor:
    return linear(x).unflatten(-1, (HEADS, -1)).transpose(0, 1)  # [h n d]


def written_out(mixer: Longformer, x: Tensor, flags: Tensor) -> Tensor:
    """One row without padding, each token's keys listed from the definition."""
    q, k, v = (heads(mixer.get_submodule(letter), x) for letter in "qkv")
    out, causal = [], mixer.site.causal
    for i in range(len(x)):
        read = [
            j
            for j in range(i + 1 if causal else len(x))
            if abs(i - j) <= WINDOW or flags[j] or (flags[i] and not causal)
        ]
        own = (q, k, v)
        if flags[i] and not causal:
            own = tuple(heads(mixer.get_submodule(f"for_globals.{letter}"), x) for letter in "qkv")
        scores = torch.einsum("hd,hmd->hm", own[0][:, i], own[1][:, read]) / (DIM // HEADS) ** 0.5
        out.append(torch.einsum("hm,hmd->hd", torch.softmax(scores, dim=-1), own[2][:, read]).flatten())
    return torch.stack(out)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("where", GLOBALS)
def test_equals_the_equation_row_by_row(where: str, causal: bool) -> None:
    mixer, lengths = ours(causal), [16, 13, 5]
    keep, flags = facts(where, lengths)
    x, weights = torch.randn(2, 3, LENGTH, DIM, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = mixer(mine, attention_mask=keep, global_mask=flags)
    (got * weights).sum().backward()
    for row, length in enumerate(lengths):
        expected = written_out(mixer, other[row, :length], flags[row, :length])
        (expected * weights[row, :length]).sum().backward()
        close(got[row, :length], expected, 1e-10)
    close(mine.grad, other.grad, 1e-10)


@pytest.mark.parametrize("lengths", [[16, 16, 16], [16, 13, 5]])
@pytest.mark.parametrize("where", GLOBALS)
def test_equals_hugging_face(where: str, lengths: list[int]) -> None:
    mixer, peer = pair()
    keep, flags = facts(where, lengths)
    x, weights = torch.randn(2, 3, LENGTH, DIM)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    got = mixer(mine, attention_mask=keep, global_mask=flags)
    signs = torch.where(keep, (flags & keep).float(), -1.0)  # the peer: negative padding, zero local, positive global
    read = peer(
        other,
        attention_mask=1e4 * signs,
        is_index_masked=signs < 0,
        is_index_global_attn=signs > 0,
        is_global_attn=bool((signs > 0).any()),
    )[0]
    expected = torch.where(keep[:, :, None], read, 0.0)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    close(got, expected, 2e-6)
    close(mine.grad, other.grad, 2e-6)
    for ours_part, theirs_part in matched(mixer, peer):
        close(gradient(ours_part), gradient(theirs_part), 2e-6)


def gradient(linear: torch.nn.Module) -> Tensor:
    """Of weight and bias together: a key's bias has 0 but for rounding; where nothing is global, there is none."""
    parts = [torch.zeros_like(part) if part.grad is None else part.grad for part in linear.parameters()]
    return torch.cat([part.flatten() for part in parts])


def close(got: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert got is not None
    assert expected is not None
    largest = float(expected.detach().abs().max())
    assert torch.allclose(got, expected, rtol=0.0, atol=tolerance * max(1.0, largest))
