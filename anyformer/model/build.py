"""From specs to modules: the only place where a spec's text meets a constructor."""

import torch

from anyformer.attention.base import Attention
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form, Verdict, judge
from anyformer.forms import check as check_parts
from anyformer.mixer import multihead
from anyformer.mixer.base import Mixer
from anyformer.pattern import leaves
from anyformer.pattern.read import reads_as_pattern
from anyformer.position.base import Position
from anyformer.registry import Method, bind, canonical, find, names, unknown
from anyformer.site import Site
from anyformer.spec import Spec, parse

AnySpec = str | Spec


def slot(spec: AnySpec) -> tuple[Method, Spec]:
    """The attention or mixer that a spec in the attention slot stands for, and its canonical spec.

    A pattern there means softmax over it: `local(128)` and `Local(128)` are `softmax(pattern=Local(128))`, `bigbird(block=64)` is
    `softmax(pattern=bigbird(block=64))`.

    Raises:
        SpecError: no attention, mixer or pattern has this name, or its knobs are wrong.
    """
    spec = parse(spec)
    if reads_as_pattern(spec):
        spec = Spec("softmax", (), (("pattern", spec),))
    for kind in ("attention", "mixer"):
        if spec.name in names(kind):
            method = find(kind, spec.name)
            return method, canonical(method, spec)
    known = names("attention") + names("mixer") + names("pattern") + list(leaves.SLOT_NAMES)
    raise SpecError(unknown("attention", spec.name, sorted(known)))


def short_name(spec: AnySpec) -> str:
    """What people call a spec of the attention slot: `Local(128)` for `softmax(pattern=Local(128))`."""
    spec = slot(spec)[1]
    match spec:
        case Spec(name="softmax", knobs=(("pattern", Spec() as pattern),)):
            return str(pattern)
    return str(spec)


def family_of(spec: AnySpec) -> tuple[str, ...]:
    """The place of a spec of the attention slot in the surveys' tree; a pattern's own where softmax runs over one."""
    method, spec = slot(spec)
    pattern = dict(spec.knobs).get("pattern")
    if not isinstance(pattern, Spec):
        return method.family
    if pattern.name in names("pattern"):
        return find("pattern", pattern.name).family
    leaf = pattern.name.lower() if pattern.name.isalpha() else "combined"
    return "human-made pattern", leaf


def position_slot(spec: AnySpec) -> tuple[Method, Spec]:
    """The position encoding of this spec, and its canonical spec."""
    spec = parse(spec)
    method = find("position", spec.name)
    return method, canonical(method, spec)


def build_attention(spec: AnySpec, site: Site) -> Attention:
    """The attention of this spec, built for `site`.

    Raises:
        SpecError: the spec is wrong, or names a mixer (which `build_mixer` builds).
    """
    method, spec = slot(spec)
    if method.kind != "attention":
        raise SpecError(
            f"{spec.name} is a mixer, with no queries and keys of its own to hand over; use build_mixer({str(spec)!r}, ...)"
        )
    return method.target(site, **bind(method, spec))


def build_position(spec: AnySpec, site: Site) -> Position:
    """The position encoding of this spec, built for `site`.

    Raises:
        SpecError: the spec is wrong.
    """
    method, spec = position_slot(spec)
    return method.target(site, **bind(method, spec))


def build_mixer(
    attention: AnySpec,
    position: AnySpec | Position,
    site: Site,
    *,
    bias: bool = True,
    qk_norm: bool = False,
    dropout: float = 0.0,
) -> Mixer:
    """The mixer of an attention spec with a position encoding: `MultiHead` around an attention, or the mixer itself.

    An encoding that is added at the embedding stays outside: the mixer then gets no position.

    Args:
        position: a spec, or a built encoding that several layers share.

    Raises:
        SpecError: a spec is wrong.
        IncompatibleError: the pair cannot compose.
    """
    method, spec = slot(attention)
    placed = position if isinstance(position, Position) else build_position(position, site)
    inside = build_position("none", site) if added_at_embedding(placed) else placed
    if method.kind == "mixer":
        offered = {"position": inside, "bias": bias, "qk_norm": qk_norm, "dropout": dropout}
        mixer = method.target(site, **{name: offered[name] for name in method.supplied}, **bind(method, spec))
        check_parts(mixer, placed, site)
        return mixer
    return multihead.MultiHead(site, build_attention(spec, site), inside, bias=bias, qk_norm=qk_norm, dropout=dropout)


def added_at_embedding(position: Position) -> bool:
    """Whether an encoding enters at the embedding and nowhere else."""
    return position.forms == ((Form.EMBED,),)


def MultiHead(  # noqa: N802  # a public constructor: it returns a module
    dim: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    attention: AnySpec = "softmax",
    position: AnySpec = "none",
    causal: bool = False,
    max_length: int = 2048,
    bias: bool = True,
    qk_norm: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
) -> multihead.MultiHead:
    """One layer of multi-head attention, `layer(x[b n c]) -> [b n c]`; see `anyformer.mixer.multihead.MultiHead`.

    Args:
        dim: width of x.  heads: query heads.  kv_heads: key and value heads, a divisor of heads.  head_dim: width of a head.
        attention: spec of an attention or a pattern.  position: spec of an encoding that acts inside attention.
        causal: whether a token may look at earlier tokens only.  max_length: longest sequence in tokens.
        bias: whether projections have a bias.  qk_norm: whether queries and keys are RMS-normalised.
        dropout: probability of dropping an attention weight in training.  seed: root of every random structure.

    Raises:
        SpecError: a spec or a size is wrong, or the attention is a mixer.
        IncompatibleError: the pair cannot compose, or the encoding is one that is added at the embedding.
    """
    site = Site(
        dim,
        heads,
        causal=causal,
        max_length=max_length,
        kv_heads=kv_heads,
        head_dim=head_dim,
        seed=seed,
    )
    return multihead.MultiHead(
        site,
        build_attention(attention, site),
        build_position(position, site),
        bias=bias,
        qk_norm=qk_norm,
        dropout=dropout,
    )


def verdict(attention: AnySpec, position: AnySpec, site: Site) -> Verdict:
    """Whether two specs compose at `site`; nothing is allocated, and a refusal is an answer.

    Raises:
        SpecError: a spec is wrong.
    """
    method, spec = slot(attention)
    with torch.device("meta"):
        # a mixer that holds its encoding checks it when built; built without one, a refusal keeps its kind
        supplied = {"position": build_position("none", site)} if "position" in method.supplied else {}
        try:
            placed = build_position(position, site)
            mixing: Attention | Mixer = method.target(site, **supplied, **bind(method, spec))
        except IncompatibleError as error:
            return Verdict("refused", str(error))
    return judge(mixing, placed, site)


def with_head(attention: AnySpec, found: Verdict, head: str, site: Site) -> Verdict:
    """The verdict of a pair at `site` in a model with this head."""
    if not found.runs or head == "classifier":
        return found
    with torch.device("meta"):
        shortens = build_mixer(attention, "none", site).shortening is not None
    if not shortens:
        return found
    why = f"{slot(attention)[1]} gives no output for each token, and head={head} scores each; leave out queries=..."
    return Verdict("refused", why)


def check(
    attention: AnySpec,
    position: AnySpec,
    *,
    causal: bool = False,
    dim: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    max_length: int = 2048,
) -> Verdict:
    """Whether two specs compose; see `Verdict`.

    Raises:
        SpecError: a spec is wrong.
        IncompatibleError: the pair is refused, or its exact form is not written yet.
    """
    found = verdict(attention, position, Site(dim, heads, causal=causal, kv_heads=kv_heads, max_length=max_length))
    if not found.runs:
        raise IncompatibleError(found.reason)
    return found


def matrix(*, causal: bool) -> dict[tuple[str, str], Verdict]:
    """The verdict of every pair of attention-slot name and position, each with its default knobs.

    Patterns are one column, since they differ in nothing that a position can see.
    """
    site = Site(32, 4, causal=causal, max_length=64)
    columns = {name: name for kind in ("attention", "mixer") for name in names(kind)} | {"patterns": "local(8)"}
    return {
        (name, position): verdict(spec, position, site)
        for name, spec in columns.items()
        for position in names("position")
    }
