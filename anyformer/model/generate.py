"""Continuing token sequences: how the next token is chosen, and the loop around it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from anyformer.errors import SpecError


class Chooser:
    """Chooses one token a row from logits.

    At temperature 0 the largest logit wins. Otherwise a token is drawn from softmax(logits / temperature) over the `top_k` largest,
    of which the smallest set with a total probability of at least `top_p` stays; the draws come from a generator of its own.

    Args:
        temperature: 0 or more.
        top_k: how many of the largest logits stay; None: all.
        top_p: total probability that stays, above 0 and at most 1; None: 1.
        seed: of the draws; None: a fresh one each time.
        device: of the logits.

    Raises:
        SpecError: whatever is out of range, or top_k and top_p without a temperature; all faults in one message.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, device: torch.device
    ) -> None:
        faults = []
        if not 0 <= temperature < float("inf"):
            faults.append(f"temperature={temperature!r}: expected 0 (greedy) or more")
        if top_k is not None and top_k < 1:
            faults.append(f"top_k={top_k!r}: expected at least 1, or None")
        if top_p is not None and not 0 < top_p <= 1:
            faults.append(f"top_p={top_p!r}: expected above 0 and at most 1, or None")
        if temperature == 0 and (top_k, top_p) != (None, None):
            faults.append("top_k and top_p choose among draws, and temperature=0 draws nothing; give temperature=1.0")
        if faults:
            raise SpecError("generate: " + "; ".join(faults))
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = torch.Generator(device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits: Float[Tensor, "b o"]) -> Int[Tensor, " b"]:
        """The chosen token of every row."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        wide = logits.to(torch.promote_types(torch.float32, logits.dtype))
        scaled = (wide - wide.amax(dim=-1, keepdim=True)) / self.temperature  # the difference first: no overflow
        probabilities = narrow(scaled, self.top_k, self.top_p).softmax(dim=-1)
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]


def narrow(logits: Float[Tensor, "b o"], top_k: int | None, top_p: float | None) -> Float[Tensor, "b o"]:
    """The logits with all but the `top_k` largest, and of these all beyond a total probability of `top_p`, at -inf.

    The largest one always stays.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        largest = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, largest.indices, largest.values)
    if top_p is not None and top_p < 1:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = values.softmax(dim=-1)
        above = probabilities.cumsum(dim=-1) - probabilities
        logits = torch.empty_like(logits).scatter(-1, order, values.masked_fill(above >= top_p, -torch.inf))
    return logits


def extend(
    tokens: Int[Tensor, "b n"],
    keep: Bool[Tensor, "b n"] | None,
    max_new_tokens: int,
    *,
    score: Callable[[Tensor, Tensor | None], Tensor],
    choose: Callable[[Tensor], Tensor],
    eos: int | None,
    pad: int,
) -> Int[Tensor, "b t"]:
    """The tokens followed by up to `max_new_tokens` more; it ends early when every row has chosen `eos`.

    Args:
        keep: which tokens are real; None: all.
        score: `(tokens[b t], keep[b t]) -> [b o]`, the logits of the token after the last.
        choose: `logits[b o] -> [b]`.
        eos: the token that ends a row; `pad` fills the row from there on.
    """
    done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for _ in range(max_new_tokens):
        chosen = choose(score(tokens, keep)).to(tokens.dtype).masked_fill(done, pad)
        tokens = torch.cat([tokens, chosen[:, None]], dim=1)
        keep = None if keep is None else F.pad(keep, (0, 1), value=True)
        if eos is not None:
            done = done | (chosen == eos)
            if bool(done.all()):
                break
    return tokens
