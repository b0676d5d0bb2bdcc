"""A Transformer, encoder or decoder, from a ModelConfig."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from anyformer.context import LayerCache, newest, sides, truths
from anyformer.errors import IncompatibleError, SpecError
from anyformer.forms import Form
from anyformer.mixer.base import Mixer
from anyformer.model import storage
from anyformer.model.arguments import check_ids, check_loading, check_prompt, check_shapes
from anyformer.model.block import Block, build_norm
from anyformer.model.cache import Cache
from anyformer.model.config import ModelConfig
from anyformer.model.embedding import Embedding
from anyformer.model.explain import calls_of, evaluating, terms, weights
from anyformer.model.generate import Chooser, extend
from anyformer.model.head import build_head
from anyformer.model.initial import draw_shared, query_gain, seeded
from anyformer.model.parts import (
    admit_flag_ids,
    admit_shortening,
    build_block,
    build_positions,
    draw_positions,
    kept,
    share_parts,
    steps,
)
from anyformer.model.registers import build_registers
from anyformer.position.base import Position


class Transformer(nn.Module):
    """Embedding, blocks, norm, head: token ids to logits.

    Building it moves no global generator. Two models of the same sizes and seed start with the same embedding, projections,
    feed-forwards and head, whatever their attention and position encoding.

    Args:
        config: sizes and methods.

    Raises:
        SpecError: `config` is no ModelConfig.
        IncompatibleError: an attention and a position encoding that cannot compose.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise SpecError(f"Transformer: expected a ModelConfig, got {config!r}; write Transformer(ModelConfig(...))")
        self.config = config
        device = torch.get_default_device()
        # drawn on the CPU: the same weights on every device
        with torch.device(device if device.type == "meta" else "cpu"), seeded(config.seed, "model"):
            positions = build_positions(config)
            embedded = {id(each): each for each in positions if (Form.EMBED,) in each.forms}
            self.embedding = Embedding(config.vocab, config.dim, embedded.values(), config.dropout)
            self.blocks = nn.ModuleList(build_block(config, layer, each) for layer, each in enumerate(positions))
            share_parts(config, self._mixers())
            self.norm = build_norm(config.norm, config.dim)
            self.head = build_head(config.head, config.dim, config.width, config.norm, config.site())
            self.registers = build_registers(config, self.head)
            needing = None if self.head.pools else f'head="{config.head}" scores every token; use head="classifier"'
            if self.registers is not None:
                needing = f"registers ({config.registers} here) are told by their place; use registers=0"
            admit_shortening(self._mixers(), positions, needing)
            admit_flag_ids(self._mixers(), config.vocab)
            if self.head.decoder is not None:
                self.head.decoder.admit(self._mixers()[-1])
        draw_shared(
            self, config.seed, [query_gain(each.scale(each.site.head_dim), each.site.head_dim) for each in positions]
        )
        self.to(device)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.config.changed().items())

    def forward(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        attention_mask: Bool[Tensor, "b t"] | Int[Tensor, "b t"] | None = None,
        document_ids: Int[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "#b n *a"] | None = None,
        no_position: Bool[Tensor, "b n"] | None = None,
        global_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b *n o"]:
        """Logits of every token `[b n o]`, or of every row `[b o]` for a classifier.

        Args:
            tokens: token ids; those of padding are not looked at.
            attention_mask: which tokens are real (True or 1): of `tokens`, or with a cache `[b, length + n]` of all so far.
            document_ids: document of each token, as long as attention_mask; tokens of different documents never meet.
            positions: position of each token, on a grid `[b n 2]` its row and column; None: the number of real tokens before
                it, from 0 again in each document.
            no_position: tokens without a position (class and register tokens), whatever `positions` says of them.
            global_mask: tokens flagged as global, for the blocks whose attention reads flags, beside those it flags by their ids.
            cache: what earlier calls left (`new_cache`); it is extended in place, or left alone where this call raises.

        Raises:
            SpecError: a token id beyond the vocabulary, or a sequence longer than a method was built for.
            IncompatibleError: an argument that a method cannot honour.
            ValueError: an argument whose shape does not fit.
        """
        x = self.encode(
            tokens,
            attention_mask=attention_mask,
            document_ids=document_ids,
            positions=positions,
            no_position=no_position,
            global_mask=global_mask,
            cache=cache,
        )
        keep = None if attention_mask is None else attention_mask[:, attention_mask.shape[1] - tokens.shape[1] :].bool()
        return self.head(x, kept(self._mixers(), keep))

    def encode(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        attention_mask: Bool[Tensor, "b t"] | Int[Tensor, "b t"] | None = None,
        document_ids: Int[Tensor, "b t"] | None = None,
        positions: Int[Tensor, "#b n *a"] | None = None,
        no_position: Bool[Tensor, "b n"] | None = None,
        global_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b r c"]:
        """The normalised vectors that the head reads, one a token unless a block shortens; see `forward`."""
        check_shapes(
            tokens,
            positions=positions,
            global_mask=global_mask,
            reads_flags=any(mixer.takes_flags for mixer in self._mixers()),
            cache=cache,
            depth=len(self.blocks),
        )
        b, n = tokens.shape
        past = None if cache is None else cache.share()
        remembered = None if past is None else past.tokens
        keep = truths("attention_mask", newest("attention_mask", attention_mask, b, n, remembered))
        parts = {
            "keep": keep,
            "positions": positions,
            "documents": newest("document_ids", document_ids, b, n, remembered),
            "without": no_position,
        }
        if parts["keep"] is not None:
            tokens = tokens.masked_fill(~parts["keep"], 0)
        check_ids(tokens, self.config.vocab)
        tokens = tokens.to(torch.int64)
        queries, _ = sides(n, tokens.device, parts, remembered, parts["keep"])
        x = self.embedding(tokens, queries, remembered)
        first = past is None or not past.layers[0].seen
        drawn = draw_positions(self._mixers(), queries)
        again = self.config.checkpointing and torch.is_grad_enabled() and past is None
        facts = {
            "tokens": tokens,
            "attention_mask": attention_mask,
            "document_ids": document_ids,
            "positions": positions,
            "no_position": no_position,
            "global_mask": truths("global_mask", global_mask),
        }
        if self.registers is not None:
            x, facts = self.registers(x) if first else x, self.registers.facts(facts, queries, first=first)
        *earlier, last = steps(self.blocks, drawn, None if past is None else past.layers, facts, again=again)
        for step in earlier:
            x = step(x)
        x = self.head.finish(x, queries, last)
        x = x[:, self.config.registers :] if first and self.registers is not None else x
        if cache is not None and past is not None:
            cache.adopt(past)
        return self.norm(x)

    def new_cache(self, batch_size: int) -> Cache:
        """An empty cache for `batch_size` rows.

        Raises:
            SpecError: `batch_size` is not a whole number of at least 1.
            IncompatibleError: the model is not causal, a block has no step form, or the head pools over the whole sequence.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise SpecError(f"new_cache: expected a batch size of at least 1, got {batch_size!r}")
        if self.head.cacheless:
            raise IncompatibleError(
                f"{self.head.cacheless} and cannot continue one from a cache; call the model without one"
            )
        layers = [mixer.new_cache(batch_size) for mixer in self._mixers()]
        return Cache(LayerCache(batch_size), layers, self.config.registers)

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "b n"],
        *,
        max_new_tokens: int,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | None = None,
        seed: int | None = None,
        pad: int = 0,
        use_cache: bool = True,
    ) -> Int[Tensor, "b t"]:
        """The prompts followed by up to `max_new_tokens` new tokens a row; it runs as in eval and moves no global generator.

        Args:
            tokens: the prompts; shorter ones padded on the left.
            attention_mask: which tokens of the prompts are real; None: all.
            temperature: 0 takes the largest logit, above 0 draws from softmax(logits / temperature).
            top_k, top_p: draw from the `top_k` largest only, and of these from the smallest set with a total probability of at
                least `top_p`.
            eos: the token that ends a row; None: none does. It is part of the output, `pad` follows it.
            seed: of the draws; None: a fresh one each time.
            use_cache: False computes the whole sequence again for every token, for methods without a step form.

        Raises:
            IncompatibleError: the model is not causal or has another head than "lm", or a block has no step form.
            SpecError: a setting out of range, or a sequence longer than a position encoding was built for.
            ValueError: an empty prompt, or padding at the end of one.
        """
        check_prompt(tokens, attention_mask, max_new_tokens, {"eos": eos, "pad": pad}, self.config)
        self._admit_positions(tokens, attention_mask, max_new_tokens)
        choose = Chooser(temperature, top_k, top_p, seed, tokens.device)
        cache = self.new_cache(len(tokens)) if use_cache else None

        def score(tokens: Tensor, keep: Tensor | None) -> Tensor:
            past = 0 if cache is None else cache.length
            x = self.encode(tokens[:, past:], attention_mask=keep, cache=cache)
            return self.head(x[:, -1:], None)[:, 0]

        keep = truths("attention_mask", attention_mask)
        with evaluating(self):
            return extend(tokens, keep, max_new_tokens, score=score, choose=choose, eos=eos, pad=pad)

    def explain(
        self,
        tokens: Int[Tensor, "b n"],
        rows: Sequence[int],
        heads: Sequence[int] | None = None,
        *,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "#b n *a"] | None = None,
        no_position: Bool[Tensor, "b n"] | None = None,
        global_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
    ) -> list[Float[Tensor, "b h r _"]]:
        """For each layer, what the asked rows take from each token; nothing of the size n x n is made. With the head enhanced_mlm
        the last block comes once a pass, so that the list has depth - 1 + passes entries, those of the passes at its end.

        These are the weights of the values by head, explicit or implied; where there are none (a mixer without values, or
        channels weighted differently) the influence |d out_i / d x_j|, as one head, each row scaled to the sum 1. From a block on
        that shortens, rows are its averages, and so are tokens in the blocks after it.

        Args:
            tokens: token ids.  rows: tokens asked for, from 0, registers first.  heads: heads asked for; None: all.
            attention_mask, document_ids, positions, no_position, global_mask: as for `forward`.

        Raises:
            SpecError: a row or head that does not exist.
        """
        facts = {"attention_mask": attention_mask, "document_ids": document_ids, "positions": positions}
        facts |= {"no_position": no_position, "global_mask": global_mask}
        return [weights(call, rows, heads) for call in calls_of(self, partial(self.encode, tokens, **facts))]

    def explain_terms(
        self,
        tokens: Int[Tensor, "b n"],
        rows: Sequence[int],
        heads: Sequence[int] | None = None,
        *,
        attention_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
        document_ids: Int[Tensor, "b n"] | None = None,
        positions: Int[Tensor, "#b n *a"] | None = None,
        no_position: Bool[Tensor, "b n"] | None = None,
        global_mask: Bool[Tensor, "b n"] | Int[Tensor, "b n"] | None = None,
    ) -> list[dict[str, Float[Tensor, "b h r _"]]]:
        """For each layer, the terms that the scores of the asked rows are the sum of: "content", and of the position encoding
        "rotation", "bias" and "row", where there are such; of a synthesizer "dense", "random" and "content".

        Arguments, errors and the order of layers are those of `explain`.

        Raises:
            IncompatibleError: no score of a layer belongs to a pair.
        """
        facts = {"attention_mask": attention_mask, "document_ids": document_ids, "positions": positions}
        facts |= {"no_position": no_position, "global_mask": global_mask}
        return [terms(call, rows, heads) for call in calls_of(self, partial(self.encode, tokens, **facts))]

    def count_parameters(self) -> dict[str, int]:
        """How many parameters there are in `total`, in the token `embedding`, and in the `position` encodings."""
        placed = {id(each): each for part in self.modules() if isinstance(part, Position) for each in part.parameters()}
        return {
            "total": sum(each.numel() for each in self.parameters()),
            "embedding": self.embedding.tokens.weight.numel(),
            "position": sum(each.numel() for each in placed.values()),
        }

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder, which is made where it is missing.

        Raises:
            SpecError: the path is a file or cannot be written to, the folder holds a config.json of something else, or the model
                has no weights.
        """
        storage.write(Path(folder), self.config.to_json(), self, ModelConfig.reads)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> "Transformer":
        """The model that `save_pretrained` wrote, in eval mode.

        Args:
            device: where its weights go.
            dtype: of its floating weights; None: as they were saved.

        Raises:
            FileNotFoundError: the folder or one of its two files is missing.
            SpecError: a file is of another version or damaged, or the two do not fit; or a device or dtype that cannot be.
        """
        check_loading(device, dtype)
        return storage.load(Path(folder), lambda config: cls(ModelConfig.from_json(config)), device, dtype)

    def _mixers(self) -> list[Mixer]:
        return [cast(Block, block).mixer for block in self.blocks]

    def _admit_positions(self, tokens: Tensor, attention_mask: Tensor | None, new: int) -> None:
        """Refuse a generation that would end beyond what an encoding has, before it starts."""
        longest = tokens.shape[1] if attention_mask is None else int(attention_mask.bool().sum(dim=1).max())
        last = torch.tensor([[longest + max(new - 1, 0) - 1]], device=tokens.device)  # the last new token is not read
        for part in self.modules():
            if isinstance(part, Position):
                part.admit(last)
