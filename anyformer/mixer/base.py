"""The base of every mixer: whatever lets the tokens of a sequence reach each other."""

from dataclasses import replace
from functools import reduce
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.attention._shortening import Shortening
from anyformer.context import Context, Encoding, LayerCache, newest, sides, truths
from anyformer.cost import Cost
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.side import Side, left_order, right_order, side, take
from anyformer.site import Site


class Mixer(nn.Module):
    """Maps a sequence to a sequence of the same length (or to a shorter one, see `shortening`), mixing its tokens.

    A subclass is one file `mixer/<name>.py` with one class (`MultiHead` is the mixer that adapts an Attention). It sets `name`,
    `summary`, `paper`, `family` and the declarations below, takes `(self, site, *, knobs...)` and writes `mix`. A constructor that
    also declares `position` (an encoding that it binds itself), `bias`, `qk_norm` or `dropout` gets those of its layer.
    `forward` is final: it checks what comes with the call, derives places and positions, moves real tokens to the left where slots
    matter, and zeroes padding before and after.
    """

    kind: ClassVar[str] = "mixer"
    name: str
    summary: ClassVar[str]
    paper: ClassVar[str]
    family: ClassVar[tuple[str, ...]]

    forms: tuple[Form, ...] = (Form.EMBED,)
    outside: tuple[Form, ...] = ()
    absolute: frozenset[Form] = frozenset()
    refusal: str = (
        "it has no queries and keys to compare; use an encoding added at the embedding, such as sinusoidal or learned"
    )
    fixed_width: bool = False
    """Whether no encoding may widen queries and keys."""
    estimates: bool = False
    """Whether its weights are estimates from random features."""
    causal: bool = False
    causal_refusal: str = ""
    cross: bool = False
    documents: bool = False
    documents_refusal: str = ""
    """Why documents may not share a row, said after "cannot keep documents of one row apart"."""
    two_streams: bool = False
    """Whether queries may come from other vectors of the same tokens than keys and values."""
    streams_refusal: str = "it has no queries"
    """Why they may not."""
    takes_flags: bool = False
    flag_ids: tuple[int, ...] = ()
    """Token ids whose tokens are flagged beside those of global_mask."""
    takes_mask: bool = True
    """Whether it can leave padding out."""
    mask_refusal: str = ""
    """Why it cannot, and what to use instead."""
    decodes: Literal["cache", "state"] | None = None
    ordered: bool = False
    """Whether slots must be places."""
    unscored: str = "scores no pairs of query and key"
    """Why no score belongs to a pair, where none does; said after its name."""
    feed_forward: ClassVar[bool] = False
    """Whether it holds a feed-forward of its own, so that the block adds none."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        if site.causal and not self.causal:
            raise IncompatibleError(f"{self.name} cannot be causal: {self.causal_refusal}")
        self.site = site
        self.limit: int | None = None
        """Longest sequence in tokens; None: any."""

    def cost(self) -> Cost | None:
        """What a forward multiplies and makes, as formulas; None: it does not say."""
        return None

    @property
    def shortening(self) -> Shortening | None:
        """What its output is shortened by, and the stream has to be with it; None: it gives one vector for each token."""
        return None

    def mix(self, x: Float[Tensor, "b n c"], context: Context) -> Float[Tensor, "b r c"]:
        """The mixed sequence. `context.x` is what keys and values come from: the source, the content, or x itself."""
        raise NotImplementedError

    def pair_weights(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> Float[Tensor, "b h r m"] | None:
        """The weights w of `out_i = sum_j w_ij v_j`, before the output projection, for the asked slots i of what `mix` is given;
        rows of padding hold anything. None: what it gives is no such sum."""
        return None

    def pair_terms(
        self, x: Float[Tensor, "b n c"], context: Context, slots: Int[Tensor, "b r"]
    ) -> dict[str, Float[Tensor, "b h r m"]]:
        """The terms by name whose sum is the score of each pair, before any mask, for the asked slots of what `mix` is given.

        Raises:
            IncompatibleError: no score belongs to a pair.
        """
        raise IncompatibleError(f"{self.name} {self.unscored}; explain() shows what it takes from each token")

    def forward(
        self,
        x: Float[Tensor, "b n c"],
        *,
        content: Float[Tensor, "b n c"] | None = None,
        source: Float[Tensor, "b m c"] | None = None,
        source_mask: Bool[Tensor, "b m"] | Int[Tensor, "b m"] | None = None,
        source_positions: Int[Tensor, "#b m *a"] | None = None,
        attention_mask: Bool[Tensor, "b t"] | Int[Tensor, "b t"] | None = None,
        document_ids: Int[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "#b n *a"] | None = None,
        no_position: Bool[Tensor, "b n"] | None = None,
        global_mask: Bool[Tensor, "b n"] | None = None,
        tokens: Int[Tensor, "b n"] | None = None,
        drawn: Int[Tensor, "p"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "b r c"]:
        """Mix the tokens of `x`, or let them read `source`.

        Args:
            content: other vectors of the same tokens, which keys and values come from while queries come from x; None: x itself.
            source: the sequence that keys and values come from; None: x itself. The last query sees the last key.
            source_mask: which tokens of the source are real (True); None: all.
            source_positions: positions of the source; None: its places.
            attention_mask: which tokens are real (True or 1): of x, or with a cache `[b, seen + n]` of all tokens so far.
            document_ids: document of each token, as long as attention_mask; tokens of different documents never meet.
            positions: position of each token of x; None: its place, from 0 again in each document; with a source counted so that
                the last real token of x stands where the last real one of the source does.
            no_position: tokens of x without a position (class and register tokens).
            global_mask: tokens of x flagged as global.
            tokens: token ids, for encodings that read them and patterns that flag by them.
            drawn: what stands for each position from 0 on, for encodings that draw positions; None: they draw.
            cache: what earlier calls left (`new_cache`); it is extended in place.

        Returns:
            The mixed sequence, one vector for each token unless it is shortened; rows of padding are exactly 0.

        Raises:
            IncompatibleError: an argument this mixer cannot honour.
            ValueError: an argument whose shape does not fit.
        """
        self._refuse_content(x, content, source, cache)
        self._refuse(x, source, attention_mask, source_mask, document_ids, global_mask, cache)
        self._refuse_flags(global_mask, tokens)
        b, n = x.shape[:2]
        if not b:
            return x.clone()  # no rows: nothing to mix, and no largest or smallest number among them
        keep = truths("attention_mask", newest("attention_mask", attention_mask, b, n, cache))
        if keep is not None:
            x = blank(x, keep)
            content = None if content is None else blank(content, keep)
        parts = {
            "keep": keep,
            "positions": positions,
            "documents": newest("document_ids", document_ids, b, n, cache),
            "flags": self._flags(truths("global_mask", global_mask), tokens),
            "without": no_position,
        }
        order = self._order(keep, crossing=source is not None)
        if order is not None:
            x, tokens = take(x, order), None if tokens is None else take(tokens, order)
            content = None if content is None else take(content, order)
            parts = {name: None if part is None else take(part, order) for name, part in parts.items()}
        queries, keys = sides(n, x.device, parts, cache, keep)
        if source is not None:
            source, keys = self._source(source, source_mask, source_positions)
            there = keys.count
            later = there - queries.count  # the last query sees the last key
            if isinstance(there, Tensor):
                later = torch.where(there == 0, 0, later)  # nothing to see: any place will do
            shifted = queries.places + later
            queries = replace(queries, places=shifted, positions=shifted if queries.arithmetic else queries.positions)
        if drawn is not None:
            same = keys is queries
            queries = replace(queries, drawn=drawn)
            keys = queries if same else replace(keys, drawn=drawn)
        context = Context(
            causal=self.site.causal,
            queries=queries,
            keys=keys,
            tokens=tokens,
            x=source if source is not None else x if content is None else content,
            encoding=Encoding(),  # given, because torch.compile cannot call a field's factory
            cache=cache,
            layer=self.site.layer,
            aligned=source is None or (queries.keep is None and keys.keep is None) or self._ends_meet(crossing=True),
        )
        out = self.mix(x, context)
        kept = queries.keep if self.shortening is None else self.shortening.kept(queries.keep)
        out = out if kept is None else blank(out, kept)
        return out if order is None or self.shortening is not None else put_back(out, order)

    def new_cache(self, batch_size: int) -> LayerCache:
        """An empty cache for this layer.

        Raises:
            IncompatibleError: the layer cannot continue a sequence.
        """
        if self.decodes is None or not self.site.causal:
            why = (
                "it is not causal; build it with causal=True"
                if self.decodes
                else "it has no step form; use softmax or linear"
            )
            raise IncompatibleError(f"{self.name} cannot continue a sequence from a cache: {why}")
        return LayerCache(batch_size)

    def _ends_meet(self, *, crossing: bool) -> bool:
        """Whether real tokens are moved to the right, so that the last ones of both sequences stand in the last slots: what
        causal methods that count slots need."""
        return crossing and self.site.causal and not self.ordered

    def _order(self, keep: Tensor | None, *, crossing: bool) -> Tensor | None:
        """The order of slots that the method works in; None: as they came."""
        if keep is None:
            return None
        if self._ends_meet(crossing=crossing):
            return right_order(keep)
        return left_order(keep) if self.ordered else None

    def _flags(self, given: Tensor | None, tokens: Tensor | None) -> Tensor | None:
        """The tokens flagged by the call or by their ids."""
        if tokens is None or not self.flag_ids:
            return given
        found = reduce(torch.logical_or, [tokens == each for each in self.flag_ids])
        return found if given is None else found | given

    def _source(
        self, source: Tensor, source_mask: Tensor | None, source_positions: Tensor | None
    ) -> tuple[Tensor, Side]:
        keep = truths("source_mask", source_mask)
        if keep is not None:
            source = blank(source, keep)
        order = self._order(keep, crossing=True)
        if keep is not None and order is not None:
            source, keep = take(source, order), take(keep, order)
            source_positions = None if source_positions is None else take(source_positions, order)
        return source, side(source.shape[1], source.device, keep=keep, positions=source_positions)

    def _refuse_content(
        self, x: Tensor, content: Tensor | None, source: Tensor | None, cache: LayerCache | None
    ) -> None:
        if content is None:
            return
        if not self.two_streams:
            raise IncompatibleError(
                f"{self.name} takes no content beside x: {self.streams_refusal}; use softmax, local(...) or linear"
            )
        if content.shape != x.shape:
            raise ValueError(f"content: expected the shape of x, {list(x.shape)}, got {list(content.shape)}")
        if source is not None or cache is not None:
            raise IncompatibleError(
                "content stands beside x in one forward of one sequence; leave out source and cache"
            )

    def _refuse_flags(self, global_mask: Tensor | None, tokens: Tensor | None) -> None:
        if self.flag_ids and tokens is None and global_mask is None:
            ids = list(self.flag_ids)
            raise ValueError(
                f"{self.name} flags tokens of ids {ids} and was given no token ids: pass "
                f"global_mask=torch.isin(tokens, torch.tensor({ids})), or use Transformer, which knows them"
            )

    def _refuse(
        self,
        x: Tensor,
        source: Tensor | None,
        attention_mask: Tensor | None,
        source_mask: Tensor | None,
        document_ids: Tensor | None,
        global_mask: Tensor | None,
        cache: LayerCache | None,
    ) -> None:
        for name, part in (("x", x), ("source", source)):
            if part is not None and (part.dim() != 3 or part.shape[2] != self.site.dim or not part.is_floating_point()):
                got = f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
                raise ValueError(f"{name}: expected floating vectors [batch, tokens, {self.site.dim}], got {got}")
        b, n = x.shape[:2]
        if source is not None and not self.cross:
            raise IncompatibleError(
                f"{self.name} mixes one sequence with itself and takes no source; use softmax or linear"
            )
        if source is not None and (document_ids is not None or cache is not None or global_mask is not None):
            raise IncompatibleError(
                "document_ids, global_mask and cache belong to self-attention; leave them out where source is given"
            )
        if source is None and source_mask is not None:
            raise ValueError("source_mask was given without source; use attention_mask for the tokens of x")
        if not self.takes_mask and (attention_mask is not None or source_mask is not None):
            raise IncompatibleError(f"{self.name} cannot leave padding out: {self.mask_refusal}")
        if document_ids is not None and not self.documents:
            raise IncompatibleError(
                f"{self.name} cannot keep documents of one row apart{self.documents_refusal}; "
                "give each document a row of its own"
            )
        if global_mask is not None and not self.takes_flags:
            raise IncompatibleError(f"{self.name} reads no global_mask; use a pattern with Flagged() or longformer")
        if cache is not None and cache.batch_size != b:
            raise ValueError(
                f"the cache was made for a batch of {cache.batch_size}, x has a batch of {b}; use new_cache({b}) or select(rows)"
            )
        total = n + (0 if cache is None else cache.seen)
        if self.limit is not None and max(total, 0 if source is None else source.shape[1]) > self.limit:
            longest = max(total, 0 if source is None else source.shape[1])
            raise SpecError(
                f"{self.name} was built for at most {self.limit} tokens, got {longest}; "
                f"build with max_length={longest} or shorten the input"
            )


def blank(x: Float[Tensor, "b t c"], keep: Bool[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
    """The same with padding as zeros: 0 times NaN would reach outputs, and 0 times a gradient the weights."""
    return torch.where(keep[:, :, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def put_back(x: Float[Tensor, "b t c"], order: Int[Tensor, "b t"]) -> Float[Tensor, "b t c"]:
    """The inverse of `take`."""
    return torch.zeros_like(x).scatter(1, order[:, :, None].expand_as(x), x)
