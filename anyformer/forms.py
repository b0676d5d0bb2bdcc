"""The forms in which a position encoding can reach an attention, and the one place where a pair is judged.

A position encoding consists of terms (Shaw's has two: one on the keys, one on the values). For each term it offers equivalent
forms; an attention lists the forms it can use, best first. `judge` takes, for each term, the first form they share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from anyformer.errors import IncompatibleError
from anyformer.site import Site


class Form(Enum):
    """How positions enter. Each value says where in the equation, each but EMBED is one method of a Position."""

    EMBED = "changes the token vectors before the first layer"
    SHIFT = "adds vectors to the projected queries, keys and values by their own position, in each layer"
    ROTATE = "maps each query and each key by its own position"
    TURN = "maps each value by its own position, and each output back"
    BIAS = "adds b[h](pos_q, pos_k) to the scaled logits"
    TOEPLITZ = "adds t[h, pos_k - pos_q] to the scaled logits, given as a table over offsets"
    GRID = "adds t[h, pos_k - pos_q] for positions on a grid: its table over offsets is BIAS seen from the origin"
    BOXES = "the terms of SCORE and VALUE whose vectors are all alike in each of few rectangles of offsets on a grid"
    DECAY = "multiplies weights by exp(-rate[h] * distance), as a running state that fades"
    SCORE = "adds a term of query, key and both positions to the scaled logits"
    APART = "the term of SCORE where it reads both positions and nothing of query and key"
    TABLE = "adds vectors of the offset pos_k - pos_q to keys and values, given as tables over offsets"
    CLIPPED = "the terms of TABLE and VALUE whose vectors are all alike beyond a distance on each side"
    AUGMENT = "appends columns to queries and keys whose product is the term"
    GATES = "multiplies the weight of a pair by factors that the tokens between them set, as a running state that fades"
    ROW = "changes the scaled logits by a term that needs every key between query and key"
    PRODUCT = "replaces the product of query and key"
    VALUE = "adds to the output a sum over the attention weights and both positions"


@runtime_checkable
class ReadsForms(Protocol):
    """What `judge` needs to know of an attention or a mixer."""

    name: str
    forms: tuple[Form, ...]
    """Forms it can use, best first."""
    outside: tuple[Form, ...]
    """Forms that are dealt with before it sees queries, keys and values."""
    absolute: frozenset[Form]
    """Forms it can use, but that then lose the relative law."""
    refusal: str
    """Why it can use no other form, and what to use instead."""
    fixed_width: bool
    """Whether it was built for queries and keys as wide as the site says."""
    estimates: bool
    """Whether its weights are estimates from random features, which vary the more the longer queries and keys are."""
    causal: bool
    cross: bool
    causal_refusal: str
    """Why it cannot be causal, and what to use instead; empty where it can."""


@runtime_checkable
class OffersForms(Protocol):
    """What `judge` needs to know of a position encoding."""

    name: str
    forms: tuple[tuple[Form, ...], ...]
    """One entry a term: the equivalent forms of that term."""
    causal_only: bool
    widens: bool
    """Whether ROTATE gives wider queries and keys."""
    long_columns: bool
    """Whether what AUGMENT appends is so long that random features cannot estimate its products."""
    lacks: Mapping[Form, str]
    """Why it has no such form, said after its name where an attention could have used it."""


@dataclass(frozen=True)
class Verdict:
    """Whether a pair composes, and how.

    Args:
        kind: `ok`; `abs`, it runs but is no longer relative; `refused`, it cannot be.
        reason: one sentence a person can act on; empty for `ok`.
        forms: the form chosen for each term.
    """

    kind: Literal["ok", "abs", "refused"]
    reason: str = ""
    forms: tuple[Form, ...] = ()

    @property
    def runs(self) -> bool:
        return self.kind in ("ok", "abs")


def judge(attention: ReadsForms, position: OffersForms, site: Site) -> Verdict:
    """Whether `attention` and `position` compose at `site`. Never raises; see `check`."""
    if site.causal and not attention.causal:
        return Verdict("refused", f"{attention.name} cannot be causal: {attention.causal_refusal}")
    if position.causal_only and not site.causal:
        return Verdict(
            "refused",
            f"{position.name} is defined for causal attention only, and this site is bidirectional; "
            "use causal=True, or an encoding for both directions such as alibi, t5 or rope",
        )
    if position.widens and attention.fixed_width:
        return Verdict(
            "refused",
            f"{position.name} widens queries and keys, and {attention.name} was built for their width; "
            f"use rope, or linear or delta with {position.name}",
        )
    chosen: list[Form] = []
    for offered in position.forms:
        usable = next((form for form in (*attention.outside, *attention.forms) if form in offered), None)
        if usable is not None:
            chosen.append(usable)
            continue
        names = " or ".join(form.name.lower() for form in offered)
        why = next((f", which {position.lacks[form]}" for form in attention.forms if form in position.lacks), "")
        return Verdict("refused", f"{attention.name} cannot use {position.name} ({names}){why}: {attention.refusal}")
    if attention.estimates and position.long_columns and Form.AUGMENT in chosen:
        return Verdict(
            "refused",
            f"{attention.name} estimates weights from random features, and {position.name} appends columns so long that the "
            "estimates vary by orders of magnitude; use taylor(width=None), or vectors of clipped offsets such as shaw or "
            "xlnet(clamp=64)",
        )
    if any(form in attention.absolute for form in chosen):
        return Verdict(
            "abs",
            f"{attention.name} runs with {position.name}, but does not weigh pairs by the product of query and key alone, "
            "so the result is not a function of offsets",
            (*chosen,),
        )
    return Verdict("ok", "", (*chosen,))


def check(attention: ReadsForms, position: OffersForms, site: Site) -> Verdict:
    """`judge`, raising where the pair cannot run.

    Raises:
        IncompatibleError: the pair is refused.
    """
    verdict = judge(attention, position, site)
    if not verdict.runs:
        raise IncompatibleError(verdict.reason)
    return verdict
