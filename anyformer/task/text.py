"""Text, one byte a token: predict the next byte, or the masked ones.

    objective=lm:   bits/byte        = -1/|S| sum_{i in S} log2 p(x_i | x_{i-length} .. x_{i-1})
    objective=mlm:  masked bits/byte = -1/|M| sum_{i in M} log2 p(x_i | the bytes of the window that are not masked)

Evaluation scores the same last bytes S of a window at every length, while the context to the left grows. Masked: every
byte starts a masked span of `span` bytes with odds that leave `masked` of all bytes masked; each becomes the mask id,
none is replaced by a random byte or left visible.

Without `data` the text is the sources of the running interpreter's standard library, read in place.

Shannon 1951 (prediction of printed English); Devlin et al. 2018 (arXiv 1810.04805) for masking.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

import annotated_types as at
import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from anyformer.errors import TaskError
from anyformer.task._corpus import standard_library, user_files
from anyformer.task._ngram import compressed_bits, table_bits
from anyformer.task.base import SPLITS, Batch, Number, Reference, Split, Task, bits_per_target, digest_of, generator

_MASK = 256  # id of a masked byte
_COUNTED = 8 << 20  # training bytes that reference tables count
_TABLES = {
    "lm": [
        ("unigram", ()),
        ("bigram", (-1,)),
        ("trigram", (-2, -1)),
        ("4-gram", (-3, -2, -1)),
        ("5-gram", (-4, -3, -2, -1)),
    ],
    "mlm": [
        ("unigram", ()),
        ("right neighbour", (1,)),
        ("left neighbour", (-1,)),
        ("both neighbours", (-1, 1)),
        ("two on each side", (-2, -1, 1, 2)),
    ],
}


class Text(Task):
    """Bits a byte on text.

    A split is one ring of bytes, documents in order of their names, a zero byte after each. Training windows start
    anywhere. Evaluation items tile the ring: item k scores `score` bytes that no other item scores, and at every length
    sees what lies to the left of them in the ring.

    Args:
        objective: lm predicts the next byte from those before it, mlm the masked bytes from both sides.
        data: files and folders of text; None = the standard library. Folders are read with their subfolders.
        length: tokens of a training window; evaluation also takes 2, 4 and 8 times as many, where the text has them.
        score: bytes at the end of an evaluation window that are scored (with mlm: the masked ones of them).
        masked: share of masked bytes, for mlm.
        span: bytes masked together, for mlm.

    Raises:
        TaskError: a path that is missing, empty or binary; less text than one window in each split; score above length.

    Attributes:
        source: where the text comes from.
        rule: how it was split.
        sizes: bytes of each split.
        skipped: files left out, with the reason.
    """

    name = "text"
    summary = "bytes of real text: the next one, or masked ones"
    paper = "Shannon 1951; masking: Devlin et al. 2018 (arXiv 1810.04805)"
    family = ("language modelling",)

    def __init__(
        self,
        *,
        objective: Literal["lm", "mlm"] = "lm",
        data: str | tuple[str, ...] | None = None,
        length: Annotated[int, at.Ge(1)] = 256,
        score: Annotated[int, at.Ge(1)] = 128,
        masked: Annotated[float, at.Gt(0), at.Lt(1)] = 0.15,
        span: Annotated[int, at.Ge(1)] = 1,
    ) -> None:
        if score > length:
            raise TaskError(
                f"text: expected score <= length, got score={score} and length={length}; "
                f"type text(length={length}, score={length})"
            )
        corpus = standard_library() if data is None else user_files((data,) if isinstance(data, str) else data)
        self._streams = corpus.streams()
        self.source, self.rule, self.skipped = corpus.source, corpus.rule, corpus.skipped
        self.sizes = {split: len(self._streams[split]) for split in SPLITS}
        self.objective, self.scored, self.masked, self.span = objective, score, masked, span
        self.train_length = length
        self._check_sizes()
        self.vocab, self.outputs = (256, 256) if objective == "lm" else (_MASK + 1, 256)
        self.head = objective
        self.causal = objective == "lm"
        longest = min(self.sizes["valid"], self.sizes["test"]) - 1
        self.eval_lengths = tuple(times * length for times in (1, 2, 4, 8) if times * length <= longest)
        self.metric = "bits/byte" if objective == "lm" else "masked bits/byte"
        self.better, self.chance = "lower", 8.0
        masking = (float(masked), span) if objective == "mlm" else ()
        self.fingerprint = digest_of("text 1", corpus.fingerprint(), corpus.rule, objective, length, score, *masking)

    def items(self, split: Split) -> int | None:
        """Windows whose scored bytes tile the split; any number for training."""
        return None if split == "train" else self.sizes[split] // self.scored

    def draw(self, split: Split, numbers: range, *, length: int, seed: int) -> Batch:
        """Windows that end at random places (train) or at the items' fixed places (valid, test).

        Raises:
            TaskError: a length below `score` (valid, test) or above the split's bytes.
        """
        least, most = (1 if split == "train" else self.scored), self.sizes[split] - 1
        if not least <= length <= most:
            raise TaskError(
                f"text: expected a length of {least} to {most} for {split} (score={self.scored}, {self.sizes[split]} "
                f"bytes), got length={length}; use one of {', '.join(map(str, self.eval_lengths))}"
            )
        stream = self._streams[split]
        ends = self._ends(split, numbers, seed)
        window = stream[(ends[:, None] + np.arange(-length - 1, 0)) % len(stream)].astype(np.int64)  # [b, length + 1]
        targets = torch.from_numpy(window[:, 1:].copy())
        keep = np.zeros(targets.shape, dtype=bool)
        keep[:, 0 if split == "train" else length - self.scored :] = True
        if self.objective == "lm":
            return Batch(torch.from_numpy(window[:, :-1].copy()), targets, torch.from_numpy(keep))
        hidden = np.stack([self._mask(split, number, length, seed) for number in numbers])
        return Batch(torch.from_numpy(np.where(hidden, _MASK, window[:, 1:])), targets, torch.from_numpy(hidden & keep))

    def score(self, totals: Mapping[str, Number]) -> Number:
        """Bits a scored byte."""
        return bits_per_target(totals)

    def oracle(self, batch: Batch) -> Float[Tensor, "b n o"] | None:
        """None: nothing solves real text."""
        return None

    def reference_lines(self, items: int = 200) -> list[Reference]:
        """Count tables over the training text, scored on the very bytes that the first `items` test windows score, and
        for lm the compressor xz."""
        batch = self.batch("test", 0, size=items)
        line, column = (each.numpy() for each in batch.keep.nonzero(as_tuple=True))
        truth = batch.targets[batch.keep].numpy()
        rows = batch.tokens.numpy()
        if self.objective == "lm":  # put the bytes where mlm has them: a token is the byte before its target
            rows, column = np.concatenate([rows[:, :1], batch.targets.numpy()], axis=1), column + 1
        train = self._streams["train"][:_COUNTED]
        names, contexts = zip(*_TABLES[self.objective], strict=True)
        note = (
            f"counts of {len(train)} training bytes, each table falling back on the line above; {len(truth)} test bytes"
        )
        values = table_bits(train, rows, (line, column), truth, contexts)
        lines = [Reference(name, value, note) for name, value in zip(names, values, strict=True)]
        if self.objective == "lm":
            lines.append(Reference("xz", *compressed_bits(self._streams["train"], self._streams["test"])))
        return lines

    def _ends(self, split: Split, numbers: range, seed: int) -> np.ndarray:
        """Where windows end: the place after their last target."""
        size = self.sizes[split]
        if split == "train":
            return np.array(
                [int(generator("text", "end", seed, number).random() * size) for number in numbers], dtype=np.int64
            )
        order = np.argsort(generator("text", "order", split).random(size // self.scored), kind="stable")
        return (order[numbers.start : numbers.stop] + 1) * self.scored

    def _mask(self, split: Split, number: int, length: int, seed: int) -> np.ndarray:
        """Drawn from the end of the window leftwards, so that a longer window masks the same bytes at its end."""
        draws = generator("text", "mask", split, seed, number).random(length)
        starts = draws < 1 - (1 - self.masked) ** (1 / self.span)
        starts[np.argmin(draws[: self.scored])] = True  # a window without a masked byte would have no score
        hidden = np.zeros(length, dtype=bool)
        for shift in range(min(self.span, length)):
            hidden[shift:] |= starts[: length - shift]
        return hidden[::-1]

    def _check_sizes(self) -> None:
        needed = self.train_length + 1
        short = {split: size for split, size in self.sizes.items() if size < needed}
        if short:
            found = ", ".join(f"{split} has {size}" for split, size in self.sizes.items())
            shorter = min(self.sizes.values()) - 1
            hint = f", or type text(length={shorter}, score={min(self.scored, shorter)})" if shorter > 0 else ""
            raise TaskError(
                f"text: expected at least {needed} bytes in each split (one window of length={self.train_length}), but "
                f"{found}, split {self.rule}; give about {16 * needed} bytes of text or more{hint}"
            )
