"""What comes with a call of a Transformer is refused before anything runs."""

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from anyformer.errors import IncompatibleError, SpecError
from anyformer.model.cache import Cache
from anyformer.model.config import ModelConfig


def check_shapes(
    tokens: Tensor,
    *,
    positions: Tensor | None,
    global_mask: Tensor | None,
    reads_flags: bool,
    cache: Cache | None,
    depth: int,
) -> None:
    """Refuse what does not fit `tokens[b n]` or the model.

    Raises:
        IncompatibleError: a global_mask that no block reads.
        ValueError: a shape or dtype that does not fit, or a cache made for another model or batch.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens: expected shape [b, n], got {list(tokens.shape)}; tokens[None] adds a batch axis")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens: expected whole numbers, got {tokens.dtype}")
    b, n = tokens.shape
    if positions is not None and (positions.dim() < 2 or positions.shape[0] not in (1, b) or positions.shape[1] != n):
        raise ValueError(
            f"positions: expected shape [{b}, {n}] or [1, {n}], or these with an axis of coordinates, "
            f"got {list(positions.shape)}"
        )
    if global_mask is not None and global_mask.shape != (b, n):
        raise ValueError(f"global_mask: expected shape [{b}, {n}], got {list(global_mask.shape)}")
    if global_mask is not None and not reads_flags:
        raise IncompatibleError("no attention here reads global_mask; use a pattern with Flagged(), or longformer")
    if cache is not None and len(cache.layers) != depth:
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model {depth}; use the model's new_cache({b})")
    if cache is not None and cache.batch_size != b:
        raise ValueError(f"the cache has {cache.batch_size} rows, tokens {b}; use new_cache({b}) or select(rows)")


def check_ids(tokens: Tensor, vocab: int) -> None:
    """Refuse ids that the table does not have, before they are looked up; not while compiling, where values are unknown.

    Raises:
        SpecError: an id below 0 or at or beyond `vocab`.
    """
    if torch.compiler.is_compiling() or tokens.is_meta or tokens.numel() == 0:
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= vocab:
        wrong = least if least < 0 else most
        raise SpecError(f"tokens: expected ids from 0 to {vocab - 1} (vocab={vocab}), got {wrong}")


def check_prompt(
    tokens: Tensor,
    attention_mask: Tensor | None,
    max_new_tokens: int,
    ids: Mapping[str, int | None],
    config: ModelConfig,
) -> None:
    """Refuse what `generate` cannot continue.

    Args:
        ids: token ids given by name; None: not given.

    Raises:
        IncompatibleError: the model does not score the next token.
        SpecError: a setting out of range.
        ValueError: an empty prompt, padding at the end of one, or a mask of another shape.
    """
    if not config.is_causal or config.head != "lm":
        raise IncompatibleError(
            f"generate needs a causal model that scores the next token, this one has head={config.head!r} and "
            f'causal={config.is_causal}; build it with head="lm" and causal=None'
        )
    if not _whole(max_new_tokens) or max_new_tokens < 0:
        raise SpecError(f"generate: expected max_new_tokens as a whole number of at least 0, got {max_new_tokens!r}")
    for name, each in ids.items():
        if each is not None and not (_whole(each) and 0 <= each < config.vocab):
            raise SpecError(
                f"generate: expected {name} from 0 to {config.vocab - 1} (vocab={config.vocab}), got {each!r}"
            )
    if tokens.dim() != 2 or tokens.shape[1] == 0:
        raise ValueError(f"generate: expected prompts [b, n] of at least one token, got shape {list(tokens.shape)}")
    if attention_mask is not None and attention_mask.shape != tokens.shape:
        raise ValueError(f"attention_mask: expected shape {list(tokens.shape)}, got {list(attention_mask.shape)}")
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError("generate continues every row after its last slot; pad prompts on the left")


def check_loading(device: torch.device | str, dtype: torch.dtype | None) -> None:
    """Refuse what weights cannot be loaded to, before a file is read.

    Raises:
        SpecError: a dtype that is not floating, or a device that this machine does not have.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SpecError(
            f"from_pretrained: expected dtype as a floating one such as torch.float32 or torch.bfloat16, got {dtype!r}"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:  # an AssertionError where torch is built without it
        why = str(error).splitlines()[0].split(". ")[0]
        raise SpecError(
            f"from_pretrained: expected a device of this machine, {_devices()}, got {device!r}: {why}"
        ) from None


def _devices() -> str:
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return " or ".join(["'cpu'", *(repr(name) for name, there in present.items() if there)])


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
